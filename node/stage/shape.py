"""The shape of a model, from its preset and what the run file has of its own; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from planaria.node.run_file import ModelSection


class Preset(NamedTuple):
    dim: int
    heads: int
    layers: int
    stages: int
    context: int
    learning_rate: float


PRESETS = {
    "tiny": Preset(64, 4, 4, 4, 64, 1e-3),
    "mini": Preset(128, 4, 8, 4, 128, 1e-3),
    "midi": Preset(256, 8, 8, 4, 256, 6e-4),
    # CheckFree, Table 4. It gives neither vocabulary nor hidden width: with the width of LLaMA's
    # rule the parameters it counts (124M, 500M, 1.5B) take vocabularies of 81k, 94k and 65k; with
    # GPT-2's 50,257 they are 92M, 411M and 1.44B.
    "small": Preset(512, 8, 12, 4, 512, 6e-4),
    "medium": Preset(1024, 16, 24, 6, 1024, 3e-4),
    "large": Preset(2048, 16, 24, 6, 4096, 3e-4),
}


SEAT_BYTES = 1.5 * 16
"""That a seat takes for each parameter: weight, gradient and moments in float32, and half as much
again for what is computed of them."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the whole model. Raises ValueError if it can't be built."""

    vocabulary: int
    dim: int
    heads: int
    kv_heads: int
    layers: int  # blocks in the whole model
    stages: int  # body stages, L
    context: int  # tokens a sample
    hidden: int  # width of the SwiGLU
    rope_theta: float
    norm_eps: float
    learning_rate: float  # peak

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"model: {name} = {value} must be greater than 0")
        for whole, part in (("layers", "stages"), ("dim", "heads"), ("heads", "kv_heads")):
            a, b = getattr(self, whole), getattr(self, part)
            if a % b:
                raise ValueError(f"model: {whole} = {a} must be a multiple of {part} = {b}")
        if self.head_dim % 2:
            raise ValueError(
                f"model: dim / heads = {self.head_dim} must be even: RoPE turns pairs of features"
            )

    @property
    def layers_per_stage(self) -> int:
        return self.layers // self.stages

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def parameters(self) -> tuple[int, int]:
        """Of stage 0, and of a body stage."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        layer = attention + 3 * self.dim * self.hidden + 2 * self.dim
        return 2 * self.vocabulary * self.dim + self.dim, self.layers_per_stage * layer


def model_config(section: ModelSection, vocabulary: int) -> ModelConfig:
    """The preset with the section's overrides, for data with `vocabulary` token ids.

    What follows from an overridden figure follows it: `layers` keeps the preset's layers a stage,
    `kv_heads` the number of heads, `hidden` is 8/3 dim rounded up to 256s (LLaMA's rule).
    Raises ValueError.
    """
    if section.preset not in PRESETS:
        raise ValueError(
            f"model: no preset {section.preset!r}; there are {', '.join(sorted(PRESETS))}"
        )
    if section.vocabulary is not None and section.vocabulary < vocabulary:
        raise ValueError(
            f"model: vocabulary = {section.vocabulary} is less than the {vocabulary} of the data"
        )
    preset = PRESETS[section.preset]
    dim = section.dim or preset.dim
    heads = section.heads or preset.heads
    stages = section.stages or preset.stages
    return ModelConfig(
        vocabulary=section.vocabulary or vocabulary,
        dim=dim,
        heads=heads,
        kv_heads=section.kv_heads or heads,
        layers=section.layers or stages * (preset.layers // preset.stages),
        stages=stages,
        context=section.context or preset.context,
        hidden=section.hidden or -(-8 * dim // (3 * 256)) * 256,
        rope_theta=section.rope_theta,
        norm_eps=1e-5,
        learning_rate=preset.learning_rate,
    )

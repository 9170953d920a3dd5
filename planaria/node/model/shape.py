"""The shape of a model, from its preset and the run file; without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from planaria.node.run_file import LoraSection, ModelSection


class Preset(NamedTuple):
    dim: int
    heads: int
    layers: int
    stages: int
    context: int
    hidden: int
    learning_rate: float


PRESETS = {
    "tiny": Preset(64, 4, 4, 4, 64, 256, 1e-3),
    "mini": Preset(128, 4, 8, 4, 128, 512, 1e-3),
    "midi": Preset(256, 8, 8, 4, 256, 768, 6e-4),
    # CheckFree, Table 4; the hidden widths are its published code's. With that code's 32,000
    # tokens they have 83M, 468M and 1.74B parameters, where the paper says 124M, 500M and 1.5B.
    "small": Preset(512, 8, 12, 4, 512, 2048, 6e-4),
    "medium": Preset(1024, 16, 24, 6, 1024, 4096, 3e-4),
    "large": Preset(2048, 16, 24, 6, 4096, 8192, 3e-4),
}

BETAS = (0.9, 0.999)
"""Adam's default decay rates of the first and second moments."""

VALUE = 4
"""Bytes of a float32: of a weight, a gradient's element, a moment's, a frozen parameter."""
ADAM_BYTES = 4 * VALUE
"""Bytes of a parameter that AdamW trains: weight, gradient and two moments."""
Base = Literal["nf4", "int8", "bf16"]
"""Form of a frozen base's matrices (quantized.py)."""
NF4_BLOCK: Final = 64
"""Values of a scale."""
BYTES_OF_BASE: Final[dict[Base | None, float]] = {
    None: VALUE,
    "bf16": 2,
    "int8": 1,
    "nf4": 1 / 2 + 4 / NF4_BLOCK,
}
"""Bytes of a parameter in a body stage's base."""
COMPUTED: Final = 1.5
"""Memory of a seat in relation to its stage's, computation included."""

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
"""Hugging Face's `model_type`. qwen2's q, k and v have biases, qwen3's q and k norms."""
AttentionMask = Literal["causal", "block_causal"]
"""What a token attends to: all earlier ones in its sample, or in its document. The name is
torchtitan's."""
BESIDE_MUON: Final = 2e-3
"""Rate of embedding and head where Muon trains the blocks (lab/results/muon-at-size/rates)."""
FINE_TUNING: Final = 2e-5
"""Default peak learning rate of a run from a pretrained model."""
FOR_ADAPTERS: Final = 1e-3
"""The same for adapters (lab/results/fine-tuning-defaults)."""
PROJECTIONS: Final = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
"""Matrices of a layer, as Hugging Face's LLaMA names them."""

DIGITS: Final = 3
"""Number of values that encode a token's id at a boundary, in a subspace."""
MOST_TOKENS: Final = 256**DIGITS

BIASES: Final[dict[Family, tuple[str, ...]]] = {
    "llama": ("attention_bias", "mlp_bias"),
    "mistral": (),
    "qwen2": (),
    "qwen3": ("attention_bias",),
}
"""Optional biases of a family's models, as config.json names them."""

RopeType = Literal["linear", "dynamic", "yarn", "llama3"]


class RopeScaling(NamedTuple):
    """Scaling of RoPE to more positions (modules.rope_speeds), under the names of Hugging Face's
    config.json. None: the type has no such figure, or it follows from others."""

    rope_type: RopeType
    factor: float
    original_max_position_embeddings: int | None = None  # yarn, llama3; None: all positions
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None
    beta_fast: float | None = None  # yarn; None: 32
    beta_slow: float | None = None  # None: 1
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None  # None: true

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of RoPE's scaling that aren't None."""
        return {name: value for name, value in self._asdict().items() if value is not None}


Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Shapes of parameters, by name, in their order."""


class Own(NamedTuple):
    """The shapes of a run's own architecture (architecture.py), without its code. Until the code
    was inspected it has no parameters."""

    module: str  # package.module:build, or the class in transformers
    source: str = ""  # digest of its code, or transformers' version
    ends: Shapes = ()  # of stage 0
    block: Shapes = ()  # of each layer
    decoder: str = ""  # config.json, where the code is transformers'
    layers: str = "layers"  # name of the list of layers
    others: tuple[Shapes, ...] = ()  # of layers whose shapes differ from the block's
    kinds: tuple[int, ...] = ()  # of each layer: 0 is the block's, 1 the first of the others
    not_linear: tuple[str, ...] = ()  # modules of a layer with a matrix, that are no nn.Linear

    def of_layer(self, layer: int) -> Shapes:
        return (self.block, *self.others)[self.kinds[layer] if self.kinds else 0]


class Lora(NamedTuple):
    """The figures of low-rank adapters (Hu et al. 2021, arXiv 2106.09685), trained in place of the
    weights. A matrix W of the body [out, in] computes as W + alpha / rank B A, with A [rank, in]
    and B [out, rank]."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # last name components of the adapted modules
    base: Base | None = None  # form of the body's frozen matrices; None: float32

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def divisors(whole: int) -> list[int]:
    """All divisors of a number, in ascending order."""
    small = [part for part in range(1, math.isqrt(whole) + 1) if whole % part == 0]
    return sorted({*small, *(whole // part for part in small)})


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
    family: Family = "llama"
    tied: bool = False  # the head's weights are the embedding's
    width_of_head: int | None = None  # None: dim / heads
    positions: int | None = None  # positions that the model supports; None: the context
    window: int | None = None  # attention window in tokens; None: all
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False  # of q, k, v and o
    mlp_bias: bool = False  # of gate, up and down
    own: Own | None = None  # replaces LLaMA
    lora: Lora | None = None  # trained in place of all weights
    muon: bool = False  # trains the body, with one moment in place of AdamW's two
    attn_mask_type: AttentionMask = "causal"
    subspace: int | None = None  # rank of the boundary's features; None: all of the stream
    sizes: tuple[int, ...] = ()  # layers of each body stage; (): as even as possible

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ValueError(f"model: {name} = {value} must be greater than 0")
        self._check_cut()
        has_width = self.width_of_head is not None
        wholes = [("heads", "kv_heads"), *([] if has_width else [("dim", "heads")])]
        for whole, part in wholes if self.own is None else []:
            a, b = getattr(self, whole), getattr(self, part)
            if a % b:
                fit = ", ".join(map(str, divisors(a)))
                raise ValueError(
                    f"model: {whole} = {a} must be a multiple of {part} = {b}: choose {part} out "
                    f"of {fit}, or other {whole}"
                )
        if self.own is None and self.head_dim % 2:
            name_of_width = "head_dim" if has_width else "dim / heads"
            raise ValueError(
                f"model: {name_of_width} = {self.head_dim} must be even: RoPE rotates pairs"
            )
        for name in ("attention_bias", "mlp_bias"):
            if getattr(self, name) and name not in BIASES[self.family]:
                raise ValueError(f"model: {name}: models of family {self.family} have no such bias")
        if self.own is not None and self.block_causal and not self.own.decoder:
            raise ValueError(
                f"model: attn_mask_type = block_causal is not supported by "
                f"{self.own.module}, whose samples are one document each: leave it out"
            )
        if self.subspace is not None:
            self._check_subspace(self.subspace)
        if self.rope_scaling is not None:
            self._check_rope(self.rope_scaling)
        longest = min(self.window or self.context, self.reach or self.context)
        if self.context > longest:
            raise ValueError(
                f"model: context = {self.context}, and the model looks back over {longest} tokens: "
                f"give context = {longest} or less"
            )

    def _check_cut(self) -> None:
        if self.stages > self.layers:
            raise ValueError(
                f"model: stages = {self.stages} is more than layers = {self.layers}: choose fewer "
                "stages, or more layers"
            )
        if (len(self.cut), sum(self.cut)) != (self.stages, self.layers) or min(self.cut) < 1:
            raise ValueError(
                f"model: stages = {list(self.cut)} has {sum(self.cut)} layers, and the model "
                f"layers = {self.layers}: give numbers of layers with that sum"
            )

    def _check_subspace(self, rank: int) -> None:
        if rank > self.dim:
            raise ValueError(
                f"model: subspace = {rank} is more than dim = {self.dim}: give less, or leave it "
                "out"
            )
        conflicts = {
            f"module = {self.own and self.own.module}": self.own is not None,
            "tied = true": self.tied,
            "attention_bias or mlp_bias": self.attention_bias or self.mlp_bias,
            "training.lora": self.lora is not None,
            f"vocabulary = {self.vocabulary}": self.vocabulary > MOST_TOKENS,
        }
        for setting, is_set in conflicts.items():
            if is_set:
                raise ValueError(f"model: subspace can't be combined with {setting}: remove one")

    def _check_rope(self, rope: RopeScaling) -> None:
        if rope.rope_type == "dynamic" and self.head_dim == 2:
            raise ValueError("model: rope_scaling: dynamic needs heads wider than 2: choose linear")
        if rope.rope_type == "yarn" and self.rope_theta == 1:
            raise ValueError("model: rope_scaling: yarn needs rope_theta above 1")

    @property
    def reach(self) -> int | None:
        """Number of positions that RoPE and its scaling support; None: as many as the context."""
        rope, positions = self.rope_scaling, self.positions
        if positions is None or rope is None or rope.rope_type == "llama3":
            return positions
        return max(
            positions, int(rope.factor * (rope.original_max_position_embeddings or positions))
        )

    @property
    def cut(self) -> tuple[int, ...]:
        """The number of layers of each body stage. By default they differ by at most one, and the
        last stages have more, since they keep the fewest microbatches."""
        each = ((self.layers + number) // self.stages for number in range(self.stages))
        return self.sizes or tuple(each)

    def layers_of(self, stage: int) -> range:
        """The numbers of a stage's layers; stage 0 has none."""
        first = sum(self.cut[: max(0, stage - 1)])
        return range(first, first + (self.cut[stage - 1] if stage else 0))

    @property
    def head_dim(self) -> int:
        return self.width_of_head or self.dim // self.heads

    @property
    def block_causal(self) -> bool:
        """Whether a token attends only to its own document."""
        return self.attn_mask_type == "block_causal"

    @property
    def written(self) -> int:
        """Number of features that embedding and projections write into the residual stream."""
        return self.subspace or self.dim

    @property
    def beside(self) -> int:
        """Number of a token's integer features (up to 255) between two stages. In a subspace these
        are the digits of its id (subspace.py). With block-causal attention the last one is 1 where
        a document begins, else 0."""
        return (DIGITS if self.subspace else 0) + self.block_causal

    @property
    def crossing(self) -> int:
        """Number of a token's features between two stages: `written` and `beside`."""
        return self.written + self.beside

    @property
    def qkv_biases(self) -> bool:
        return self.family == "qwen2" or self.attention_bias

    @property
    def qk_norms(self) -> bool:
        return self.family == "qwen3"

    @property
    def parameters(self) -> tuple[int, int]:
        """Number of parameters of stage 0, and of the largest body stage."""
        return self._ends_and_body(self.values_in)

    @property
    def trained(self) -> tuple[int, int]:
        """Number of trained parameters of stage 0, and of the largest body stage."""
        return self._ends_and_body(self.trained_in)

    def trained_in(self, stage: int) -> int:
        """Number of trained parameters of a stage, whose layers may be unlike other stages'."""
        return _count_values(trained_shapes, self, stage)

    @property
    def alike(self) -> bool:
        """Whether all body stages have as many layers, with parameters of the same shapes."""
        return (self.own is None or not self.own.others) and len({*self.cut}) == 1

    def _ends_and_body(self, figure: Callable[[int], int]) -> tuple[int, int]:
        """A figure of stage 0, and that of the largest body stage."""
        first, *bodies = map(figure, range(2 if self.alike else self.stages + 1))
        return first, max(bodies)

    def bytes_of(self, stage: int) -> int:
        """Bytes of a stage's weights, gradients and moments."""
        trained = self.state_bytes(stage) + VALUE * self.trained_in(stage)
        if self.lora is None:
            return trained
        base, values = self.base_of(stage), self.values_in(stage)
        packed = self.packed_in(stage)
        return trained + VALUE * (values - packed) + int(BYTES_OF_BASE[base] * packed)

    def tensors_in(self, stage: int) -> int:
        """Number of flat tensors of a stage's state: weights, and one or two moments."""
        return 2 if self.muon and stage else 3

    def state_bytes(self, stage: int) -> int:
        """Bytes of a stage's trained weights and moments: of a save, or of a whole copy."""
        return VALUE * self.tensors_in(stage) * self.trained_in(stage)

    def values_in(self, stage: int) -> int:
        """Number of parameters of a stage without adapters."""
        return _count_values(named_shapes, self, stage)

    @property
    def values(self) -> int:
        """Number of parameters of all stages, without adapters."""
        return sum(map(self.values_in, range(self.stages + 1)))

    def packed_in(self, stage: int) -> int:
        """Number of a stage's parameters that are in packed matrices (quantized.py)."""
        if self.base_of(stage) is None:
            return 0
        return _count_values(matrices, self, stage)

    def base_of(self, stage: int) -> Base | None:
        """Form of a stage's frozen matrices; None: float32."""
        return None if self.lora is None or stage == 0 else self.lora.base

    @property
    def seat_bytes(self) -> float:
        """Bytes of memory of a node that serves the largest stage."""
        return COMPUTED * max(self._ends_and_body(self.bytes_of))


@lru_cache(maxsize=1024)
def _count_values(
    shapes_of: Callable[[ModelConfig, int], Mapping[str, tuple[int, ...]]],
    config: ModelConfig,
    stage: int,
) -> int:
    """Number of values in a stage's tensors. A plan asks the same some 100,000 times."""
    return sum(map(math.prod, shapes_of(config, stage).values()))


def trained_shapes(config: ModelConfig, stage: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a stage's trained parameters, in the order of its flat tensors: all of
    the stage's, or its adapters, with peft's names."""
    all_shapes, lora = named_shapes(config, stage), config.lora
    if lora is None:
        return all_shapes
    shapes: dict[str, tuple[int, ...]] = {}
    for module, (rows, columns) in adapted(config, stage).items():
        shapes[f"{module}.lora_A.weight"] = (lora.rank, columns)
        shapes[f"{module}.lora_B.weight"] = (rows, lora.rank)
    return shapes


def adapted(config: ModelConfig, stage: int) -> dict[str, tuple[int, int]]:
    """A stage's modules with adapters, and their weights' shapes. Embedding and head have none."""
    targets = config.lora.targets if config.lora is not None and stage > 0 else ()
    return {
        module: shape
        for module, shape in matrices(config, stage).items()
        if _last_name(module) in targets
    }


def matrices(config: ModelConfig, stage: int) -> dict[str, tuple[int, int]]:
    """The linear modules of a body stage that may have adapters or be packed, and their shapes."""
    shapes: dict[str, tuple[int, int]] = {}
    others: set[str] = set()
    if (own := config.own) is not None:
        layers = config.layers_of(stage)
        others = {f"{own.layers}.{layer}.{name}" for layer in layers for name in own.not_linear}
    for name, shape in named_shapes(config, stage).items():
        module, _, parameter = name.rpartition(".")
        if parameter == "weight" and len(shape) == 2 and module not in others:
            rows, columns = shape
            shapes[module] = rows, columns
    return shapes


def packed_as(config: ModelConfig, stage: int, name: str) -> Base | None:
    """Form of a tensor in its stage's frozen base; None: float32."""
    is_matrix = name.removesuffix(".weight") in matrices(config, stage)
    return config.base_of(stage) if is_matrix else None


def matrix_names(config: ModelConfig) -> list[str]:
    """Names of the modules that adapters can be trained for, as in `Lora.targets`."""
    modules = (
        module for stage in range(1, config.stages + 1) for module in matrices(config, stage)
    )
    return list(dict.fromkeys(map(_last_name, modules)))


def _last_name(module: str) -> str:
    return module.rpartition(".")[2]


def named_shapes(config: ModelConfig, stage: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a stage's parameters, in the order of its module (modules.py). The names
    are Hugging Face's; an own architecture's are its code's, with `layers.N.` before a block's."""
    layers = config.layers_of(stage)
    if config.own is not None:
        return dict(config.own.ends if not stage else ()) | {
            f"{config.own.layers}.{layer}.{name}": shape
            for layer in layers
            for name, shape in config.own.of_layer(layer)
        }
    dim, hidden, width = config.dim, config.hidden, config.head_dim
    if stage == 0:
        table = (config.vocabulary, config.written)
        ends: dict[str, tuple[int, ...]] = {"embed_tokens.weight": table, "norm.weight": (dim,)}
        head = {} if config.tied else {"lm_head.weight": (config.vocabulary, dim)}
        return {f"model.{name}": shape for name, shape in ends.items()} | head
    block: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (dim,)}
    for name, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)):
        block[f"self_attn.{name}_proj.weight"] = (heads * width, dim)
        if config.qkv_biases:
            block[f"self_attn.{name}_proj.bias"] = (heads * width,)
    block["self_attn.o_proj.weight"] = (config.written, config.heads * width)
    if config.attention_bias:
        block["self_attn.o_proj.bias"] = (config.written,)
    if config.qk_norms:
        block |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
    block["post_attention_layernorm.weight"] = (dim,)
    mlp = {"gate": (hidden, dim), "up": (hidden, dim), "down": (config.written, hidden)}
    for name, shape in mlp.items():
        block[f"mlp.{name}_proj.weight"] = shape
        if config.mlp_bias:
            block[f"mlp.{name}_proj.bias"] = shape[:1]
    return {
        f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in block.items()
    }


def model_config(
    section: ModelSection, vocabulary: int, lora: LoraSection | None = None, muon: bool = False
) -> ModelConfig:
    """The shape of a run's model: the preset with the section's overrides, for data with
    `vocabulary` token ids; `lora`: the adapters; `muon`: the body's optimizer.

    Dependent figures follow overridden ones: `kv_heads` is the number of heads. With another `dim`
    than the preset's, `hidden` is 8/3 of it, rounded up to 256s (LLaMA's rule). Other `stages`
    divide the same layers. Raises ValueError.
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
    layers = section.layers or preset.layers
    sizes = section.stages if isinstance(section.stages, tuple) else ()
    stages = section.body_stages or preset.stages
    if (section.origin or section.blueprint) and section.layers is None:
        layers = sum(sizes) or stages  # until the checkpoint says its number
    rate = BESIDE_MUON if muon else preset.learning_rate
    if section.origin:
        rate = FINE_TUNING if lora is None else FOR_ADAPTERS
    return ModelConfig(
        vocabulary=section.vocabulary or vocabulary,
        dim=dim,
        heads=heads,
        kv_heads=section.kv_heads or heads,
        layers=layers,
        stages=stages,
        context=section.context or preset.context,
        hidden=section.hidden
        or (preset.hidden if dim == preset.dim else -(-8 * dim // (3 * 256)) * 256),
        rope_theta=section.rope_theta,
        norm_eps=section.norm_eps or 1e-5,
        learning_rate=rate,
        family=section.family or "llama",
        tied=section.tied or False,
        width_of_head=section.head_dim,
        positions=section.positions,
        window=section.window,
        rope_scaling=RopeScaling(**dict(section.rope_scaling)) if section.rope_scaling else None,
        attention_bias=section.attention_bias,
        mlp_bias=section.mlp_bias,
        own=section.own,
        lora=None if lora is None else Lora(lora.rank, lora.alpha, lora.targets, lora.base),
        muon=muon,
        attn_mask_type=section.attn_mask_type,
        subspace=section.subspace,
        sizes=sizes,
    )

"""Where each tensor of a Hugging Face checkpoint lies in the flat weights of our stages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from planaria.node.stage.shape import ModelConfig, named_shapes


class Weight(NamedTuple):
    """A tensor of `LlamaForCausalLM` or its kin, which is `size` values of a stage's flat weights,
    from the `first` one on, in row-major order."""

    name: str  # as transformers has it
    stage: int
    first: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def weights(config: ModelConfig) -> list[Weight]:
    """All of them, each once, from the embedding to the head."""
    embedding, *head = _of_stage(0, config)
    layers = [weight for stage in range(config.stages) for weight in _of_stage(stage + 1, config)]
    return [embedding, *layers, *head]


def _of_stage(stage: int, config: ModelConfig) -> Iterator[Weight]:
    at = 0
    for name, shape in named_shapes(config, stage).items():
        weight = Weight(name, stage, at, shape)
        yield weight
        at += weight.size

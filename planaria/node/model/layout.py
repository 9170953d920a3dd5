"""Positions of the tensors of a Hugging Face checkpoint in the flat weights of stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from planaria.node.model.shape import ModelConfig, named_shapes, trained_shapes


class Weight(NamedTuple):
    """A tensor of `LlamaForCausalLM` or its kin, or of an adapter. It is `size` values of a stage's
    flat weights, from the `first` one on, in row-major order."""

    name: str  # in transformers or peft
    stage: int
    first: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def weights(config: ModelConfig) -> list[Weight]:
    """All tensors of the model, each once, from the embedding to the head."""
    stages = range(1, config.stages + 1)
    embedding, *head = _laid(0, named_shapes(config, 0))
    layers = [weight for stage in stages for weight in _laid(stage, named_shapes(config, stage))]
    return [embedding, *layers, *head]


def adapters(config: ModelConfig) -> list[Weight]:
    """All adapters' tensors, from the first layer's to the last's."""
    stages = range(1, config.stages + 1)
    return [weight for stage in stages for weight in _laid(stage, trained_shapes(config, stage))]


def counterparts(config: ModelConfig, stage: int, other: int) -> list[tuple[Weight, Weight | None]]:
    """Each trained tensor of the body stage, and that at its place in the other one; None: it has
    another shape there, or is missing."""

    def placed(of: int) -> dict[str, Weight]:
        first, names = (of - 1) * config.layers_per_stage, {}
        for weight in _laid(of, trained_shapes(config, of)):
            start, _, rest = weight.name.partition(f"{_list_name(config)}.")
            number, _, name = rest.partition(".")
            names[f"{start}{int(number) - first}.{name}"] = weight
        return names

    there = placed(other)
    pairs = ((weight, there.get(name)) for name, weight in placed(stage).items())
    return [(w, found if found and found.shape == w.shape else None) for w, found in pairs]


def _list_name(config: ModelConfig) -> str:
    return "model.layers" if config.own is None else config.own.layers


def _laid(stage: int, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Weight]:
    offset = 0
    for name, shape in shapes.items():
        weight = Weight(name, stage, offset, shape)
        yield weight
        offset += weight.size

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


def model_weights(config: ModelConfig) -> list[Weight]:
    """All tensors of the model with their places, each once, from the embedding to the head."""
    stages = range(1, config.stages + 1)
    embedding, *head = _located(0, named_shapes(config, 0))
    layers = [weight for stage in stages for weight in _located(stage, named_shapes(config, stage))]
    return [embedding, *layers, *head]


def lora_weights(config: ModelConfig) -> list[Weight]:
    """All adapters' tensors with their places, from the first layer's to the last's."""
    stages = range(1, config.stages + 1)
    return [weight for stage in stages for weight in _located(stage, trained_shapes(config, stage))]


def counterparts(config: ModelConfig, stage: int, other: int) -> list[tuple[Weight, Weight | None]]:
    """Each trained tensor of a body stage, and that of the layer at the same relative depth in the
    other one; None: it has another shape there, or is missing."""
    own, layers = config.layers_of(stage), config.layers_of(other)
    list_name = "model.layers" if config.own is None else config.own.layers
    of_other = {weight.name: weight for weight in _located(other, trained_shapes(config, other))}

    def counterpart(weight: Weight) -> Weight | None:
        start, _, rest = weight.name.partition(f"{list_name}.")
        number, _, name = rest.partition(".")
        middle = 2 * own.index(int(number)) + 1  # the layer's middle, in half layers
        layer = layers[middle * len(layers) // (2 * len(own))]
        match = of_other.get(f"{start}{list_name}.{layer}.{name}")
        return match if match and match.shape == weight.shape else None

    laid = _located(stage, trained_shapes(config, stage))
    return [(weight, counterpart(weight)) for weight in laid]


def _located(stage: int, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Weight]:
    offset = 0
    for name, shape in shapes.items():
        weight = Weight(name, stage, offset, shape)
        yield weight
        offset += weight.size

"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv 2106.09685), in any stage: they replace its linear
modules, by name, and are all of it that is trained."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

from planaria.node.model.modules import Stage
from planaria.node.model.quantized import (
    AT_ONCE,
    QuantizedLinear,
    Words,
    put_words,
    size_of,
    slots,
    words_of,
)
from planaria.node.model.shape import ModelConfig, adapted, trained_shapes


class AdaptedLinear(nn.Module):
    """A linear module with an adapter: the output of `base`, plus scale B A x."""

    def __init__(self, base: nn.Linear | QuantizedLinear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Map float [.., in] to [.., out] by the base and its adapter."""
        flat = x.flatten(0, -2)
        low = self.scale * F.linear(flat, self.lora_A)
        out: Tensor = self.base(flat)
        out.addmm_(low, self.lora_B.t().to(out.dtype))  # in place; `low` is scaled already
        return out.view(*x.shape[:-1], -1)


def add_adapters(module: Stage, config: ModelConfig, stage: int, weights: Tensor) -> Stage:
    """Add adapters to a stage, as views of these flat weights, float32 [n], and freeze the rest."""
    lora = config.lora
    assert lora is not None
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    places = adapted(config, stage)
    kinds = nn.Linear | QuantizedLinear
    linear = [name for name, submodule in module.named_modules() if isinstance(submodule, kinds)]
    names = [name for name in linear if name.rpartition(".")[2] in lora.targets and stage > 0]
    assert len(names) == len(places), "the shape's names are the module's"
    for name in names:
        parent, _, local = name.rpartition(".")
        owner, base = module.get_submodule(parent), module.get_submodule(name)
        assert isinstance(base, kinds)
        setattr(owner, local, AdaptedLinear(base, lora.rank, lora.scale))
    offset = 0
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = weights[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
    return module


def initial_adapters(config: ModelConfig, stage: int, seed: int) -> Tensor:
    """A stage's initial adapters, flat, float32 [n] on the CPU, from (seed, stage). B = 0 keeps the
    model's output; A is uniform in ± 1 / sqrt(in), as in peft."""
    key = struct.pack("<4sQQ", b"lora", seed, stage)
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(key))
    parts = [torch.empty(0)]
    for name, (rows, columns) in trained_shapes(config, stage).items():
        part = torch.zeros(rows, columns)
        if name.endswith(".lora_A.weight"):
            drawn = torch.empty(rows, columns, dtype=torch.float64)  # see modules.build_stage
            part.copy_(drawn.uniform_(-1, 1, generator=generator) / columns**0.5)
        parts.append(part.flatten())
    return torch.cat(parts)


class Frozen:
    """The frozen base of a stage with adapters: parameters and packed matrices. Parameters are
    float32 or, where the run computes in `bf16`, matrices in bf16 if that is exact: autocast would
    otherwise cast them at each use."""

    def __init__(self, module: nn.Module, bf16: bool) -> None:
        self._slots = [
            slot
            for slot in slots(module)
            if isinstance(slot, QuantizedLinear) or not slot.requires_grad
        ]
        self._bf16 = bf16
        self.size = sum(map(size_of, self._slots))
        self._shrink()

    def put(self, words: Tensor) -> None:
        """Make the frozen base a view of these `words`."""
        parts = torch.split(words, [size_of(slot) for slot in self._slots])
        for slot, part in zip(self._slots, parts, strict=True):
            put_words(slot, part)
        self._shrink()

    def _shrink(self) -> None:
        parameters = [slot for slot in self._slots if isinstance(slot, nn.Parameter)]
        if self._bf16 and all(map(_fits_bf16, parameters)):
            for parameter in parameters:  # none keeps the float32 values of `put`
                small = parameter.bfloat16() if parameter.dim() > 1 else parameter.clone()
                parameter.data = small.detach()

    def words(self) -> Words:
        """The frozen base: parameters by their values, packed matrices by their bits."""
        slots = self._slots

        def read(number: int, words: Tensor) -> Iterator[int]:
            yield len(words.copy_(words_of(slots[number])))

        return Words(list(map(size_of, slots)), read)


def _fits_bf16(part: Tensor) -> bool:
    """Whether bf16 represents a parameter exactly; True for vectors, which stay float32."""
    some = torch.split(part.flatten(), AT_ONCE)
    return part.dim() < 2 or all(torch.equal(values.bfloat16().float(), values) for values in some)


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """A matrix with its adapter merged: float32 [out, in]."""
    return weight + scale * (b @ a)

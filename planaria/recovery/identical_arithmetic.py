"""Arithmetic whose bits replicas share, on devices of any kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 1 << 19
"""Elements per block: scratch stays small, and in a CPU's cache. A power of two."""


@cache
def is_exact(device: torch.device) -> bool:
    """Whether the device has float64 and int64 sums, and rounds single operations as IEEE 754 does,
    subnormal numbers too. It is tried: MPS has no float64, for example."""
    if device.type == "cpu":
        return True
    drawn = torch.rand(4, 1 << 10, generator=torch.Generator().manual_seed(0))
    a, b, small = drawn[0], drawn[1] + 0.1, drawn[2] * 1e-20
    given = a, b, small, (drawn[3] * 2**52).double() * 2**10
    try:
        on_device = [of.to(device) for of in given]
        return all(map(torch.equal, _trial(*given), (of.cpu() for of in _trial(*on_device))))
    except (RuntimeError, TypeError):
        return False


def _trial(a: Tensor, b: Tensor, small: Tensor, large: Tensor) -> list[Tensor]:
    results = [a / b, a.sqrt(), a * 0.1 + b, small * small, large.square(), large.long().sum(0)]
    fine = a.mul(2**13).round().div(2**12).reshape(32, 32)  # 13 bits: TF32 has 11
    return [*results, fine @ fine]


def exact(tensor: Tensor) -> Tensor:
    """The tensor for exact arithmetic: itself, or a copy on the CPU if its device isn't exact."""
    return tensor if is_exact(tensor.device) else tensor.cpu()


@contextmanager
def exactly(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """The tensors for exact arithmetic in this block; changed copies are copied back."""
    copies = [exact(tensor) for tensor in tensors]
    yield copies
    for tensor, changed in zip(tensors, copies, strict=True):
        if changed is not tensor:
            tensor.copy_(changed)


def squared_norm(flat: Tensor) -> float:
    """Squared norm of float32 [n], in float64; inf or nan if any element is. The order of additions
    depends on n alone."""
    size = min(BLOCK, 1 << (len(flat) - 1).bit_length())
    total = exact(flat[:0]).new_zeros(size, dtype=torch.float64)
    for part in torch.split(flat, size):
        total[: len(part)].add_(exact(part).double().square_())  # these squares are exact
    while len(total) > 1:
        first, second = total.chunk(2)
        total = first + second
    return total.item()

"""CheckFree: a lost body stage as the weighted average of its two neighbours (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1 << 20  # elements per float64 block


class GuessSource(NamedTuple):
    """A stage left, from whose weights a lost stage is guessed."""

    stage: int
    weights: Tensor  # flat, float32
    omega: float  # squared norm of its last gradient


def guess(stage: int, method: str, sources: Sequence[GuessSource]) -> tuple[Tensor, float]:
    """The guessed weights and ω of the lost `stage`. One source is copied. Two are averaged: by ω
    if `method` is checkfree, else by distance."""
    if len(sources) == 1:
        return sources[0].weights, sources[0].omega
    before, after = sources
    shares = before.omega, after.omega
    if method != "checkfree":
        shares = float(after.stage - stage), float(stage - before.stage)
    return average(before.weights, after.weights, *shares), (before.omega + after.omega) / 2


def neighbour_shares(before: float, after: float) -> tuple[float, float]:
    """The neighbours' shares in a lost stage's average, which sum to 1, by the squared norms of
    their last gradients.

    Without any gradient yet (both 0) the shares are equal.
    """
    largest = max(before, after)
    if largest == 0:
        return 0.5, 0.5
    before, after = before / largest, after / largest  # keeps the sum from overflowing
    return before / (before + after), after / (before + after)


@torch.no_grad()
def average(before: Tensor, after: Tensor, omega_before: float, omega_after: float) -> Tensor:
    """The average of the neighbours' weights, Algorithm 1, line 3:
    W = (ω_before W_before + ω_after W_after) / (ω_before + ω_after).

    The printed line gives both neighbours ω_{i-1}; the text of section 4.2 is correct. The flat
    weights are float32 of equal shape and device; the ω are shares (`neighbour_shares`) or squared
    norms. Computed in float64 and rounded once: equal neighbours give exactly their weights, and
    each element lies between its two sources.
    """
    share_before, share_after = neighbour_shares(omega_before, omega_after)
    out = torch.empty_like(before)
    blocks = (torch.split(flat.view(-1), BLOCK) for flat in (out, before, after))
    for o, b, a in zip(*blocks, strict=True):
        o.copy_(b.double().mul_(share_before).add_(a.double().mul_(share_after)))
    return out

"""Ways to choose the rows of a running snapshot that are sent next: the nodes' way, and others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from planaria.recovery.snapshot import Codec, Layout, SentSnapshot

Choice = Literal["priority", "round", "random"]


def rank_of(choice: Choice, distances: Tensor, taken: Tensor, seed: Sequence[int]) -> Tensor:
    """Return the rank of each block; the lowest is sent first. `priority`: the farthest from its
    copy first, as nodes do; `round`: the longest unsent; `random`: an order drawn from `seed`."""
    match choice:
        case "priority":
            return -distances
        case "round":
            return taken.double()
        case "random":
            drawn = np.random.default_rng(list(seed)).permutation(len(taken))
            return torch.from_numpy(drawn).double()


class ChosenSnapshot(SentSnapshot):
    """A running snapshot whose next blocks are chosen by `choice`."""

    def __init__(
        self,
        layout: Layout,
        choice: Choice,
        fraction: float,
        codec: Codec,
        moments: bool,
        seed: Sequence[int],
        at_first: float = 0.0,
    ) -> None:
        super().__init__(layout, fraction, codec, moments, at_first)
        self._choice, self._seed = choice, tuple(seed)

    def rank(self, distances: Tensor, step: int) -> Tensor:
        return rank_of(self._choice, distances, self.taken, (*self._seed, step))

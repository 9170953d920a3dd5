"""Which rows of a running snapshot go next: as nodes choose them, and in other ways to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from planaria.recovery.snapshot import Codec, Layout, SentSnapshot

Choice = Literal["priority", "round", "random"]


def rank_of(choice: Choice, distances: Tensor, taken: Tensor, seed: Sequence[int]) -> Tensor:
    """The order of blocks: `priority` takes the farthest, as nodes do, `round` the longest unsent,
    `random` a draw from `seed` alone."""
    match choice:
        case "priority":
            return -distances
        case "round":
            return taken.double()
        case "random":
            drawn = np.random.default_rng(list(seed)).permutation(len(taken))
            return torch.from_numpy(drawn).double()


class ChosenSnapshot(SentSnapshot):
    """A running snapshot with a choice of its blocks."""

    def __init__(
        self,
        layout: Layout,
        choice: Choice,
        fraction: float,
        codec: Codec,
        moments: bool,
        seed: Sequence[int],
    ) -> None:
        super().__init__(layout, fraction, codec, moments)
        self._choice, self._seed = choice, tuple(seed)

    def rank(self, distances: Tensor, step: int) -> Tensor:
        return rank_of(self._choice, distances, self.taken, (*self._seed, step))

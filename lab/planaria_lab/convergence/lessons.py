"""Relearning of stages, at once or in the background of later steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planaria.recovery import relearning
from planaria.recovery.learner import Learner, learn, residual_error, squared_distance
from planaria.recovery.relearning import decayed_rate, shuffled, updates_per_check

MEASURING = 1 / 3
"""Cost of a forward pass, as a share of an update's forward and backward pass."""


class BlockSamples(NamedTuple):
    """Samples of one update: inputs `x` and outputs `y` of a chain of lost stages in one step."""

    step: int
    stages: tuple[int, ...]
    x: Tensor  # on the CPU, as is y
    y: Tensor

    @property
    def stage_tokens(self) -> int:
        return self.x.shape[0] * self.x.shape[1] * len(self.stages)

    def pair(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return x and y on the device, float32."""
        return self.x.to(device).float(), self.y.to(device).float()


class LessonState(NamedTuple):
    """The state of a lesson, without the weights of its stages."""

    block: tuple[int, ...]
    pieces: Sequence[BlockSamples]
    passes: int
    lr: float
    done: int
    steps: int
    line: dict[str, Any]
    of_updates: list[list[Tensor]]  # for each stage, the tensors of its update rule


@dataclass
class Lesson:
    """Relearning of a block of stages from `pieces`, the oldest step's first. `line` is its entry
    in the results, which each update changes."""

    learners: Mapping[int, Learner]
    pieces: Sequence[BlockSamples]
    passes: int
    lr: float  # of the first update
    in_order: bool
    constant: bool
    within: int  # most steps that it may continue beside
    device: torch.device
    done: int = 0
    steps: int = 0
    line: dict[str, Any] = field(default_factory=dict)
    _turns: tuple[int, Sequence[int]] = (-1, ())  # number of a pass, its order of the pieces

    @property
    def updates(self) -> int:
        return self.passes * len(self.pieces)

    @property
    def over(self) -> bool:
        return self.done >= self.updates or self.steps >= self.within

    @property
    def looks(self) -> bool:
        """Whether the residual must be measured now."""
        return self.done % updates_per_check(len(self.pieces)) == 0

    def update(self) -> None:
        """Train the stages on the next piece."""
        piece = self.pieces[self._place()]
        if not self.constant:
            for learner in self.learners.values():
                learner.lr = decayed_rate(
                    self.lr, self.done / self.updates, self.steps / self.within
                )
        learn([self.learners[stage] for stage in piece.stages], *piece.pair(self.device))
        self.done += 1
        self.line["updates"] = self.done
        self.line["stage_tokens"] += piece.stage_tokens
        self.line["stage_updates"] += len(piece.stages)

    def state(self) -> LessonState:
        own = [learner.update.tensors for learner in self.learners.values()]
        block = tuple(self.learners)
        counters = self.passes, self.lr, self.done, self.steps, self.line
        return LessonState(block, self.pieces, *counters, own)

    def put(self, state: LessonState) -> None:
        """Load the state of a lesson with the same stages, pieces and passes."""
        self.done, self.steps, self.line = state.done, state.steps, state.line
        for learner, tensors in zip(self.learners.values(), state.of_updates, strict=True):
            for own, tensor in zip(learner.update.tensors, tensors, strict=True):
                own.copy_(tensor)

    def _place(self) -> int:
        a_pass, place = divmod(self.done, len(self.pieces))
        if self.in_order:
            return place
        if self._turns[0] != a_pass:
            self._turns = a_pass, shuffled(len(self.pieces), a_pass)
        return self._turns[1][place]

    def in_background(self, updates: int) -> None:
        """Make at most so many updates, and count them as of the background of one step."""
        before = {name: self.line[name] for name in ("stage_tokens", "stage_updates")}
        for _ in range(min(updates, self.updates - self.done)):
            self.update()
        for name, amount in before.items():
            self.line[f"background_{name}"] += self.line[name] - amount
        self.steps += 1

    def look(self) -> float:
        """Return the residual over the newest step's pairs; count its computing."""
        self.line["stage_tokens"] += MEASURING * sum(piece.stage_tokens for piece in self.measured)
        return self.residual()

    @property
    def measured(self) -> list[BlockSamples]:
        """The pieces of the newest step."""
        return [piece for piece in self.pieces if piece.step == self.pieces[-1].step]

    def residual(self) -> float:
        """Return the residual over all pairs of the newest step, for all chains of stages."""
        return residual(self.learners, self.measured, self.device)


def residual(
    learners: Mapping[int, Learner], pieces: Iterable[BlockSamples], device: torch.device
) -> float:
    """Return the residual of the stages over these pairs, weighted over their chains."""
    chains: dict[tuple[int, ...], list[BlockSamples]] = {}
    for piece in pieces:
        chains.setdefault(piece.stages, []).append(piece)
    error = norm = 0.0
    for visited, of_chain_pieces in chains.items():
        wide = [piece.pair(device) for piece in of_chain_pieces]
        of_chain = math.fsum(squared_distance(y, x) for x, y in wide)
        error += (
            residual_error([learners[visited_stage] for visited_stage in visited], wide) * of_chain
        )
        norm += of_chain
    return relearning.ratio(error, norm)

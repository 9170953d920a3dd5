"""How machines come and go, drawn from a seed: equal for all policies that are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.node.local.loss_schedule import TraceRow
from planaria_lab.convergence.schedule import Losses, schedule
from planaria_lab.simulator.swarm import SwarmFiguresError

HOUR: Final = 3600.0


class LostPlace(NamedTuple):
    """A node's, or its replacement's; `number` None: all of the stage."""

    stage: int
    number: int | None


@dataclass(frozen=True)
class Churn:
    """Losses and replacements of nodes. Times in seconds. Raises SwarmFiguresError."""

    hourly: float = 0.0  # probability to be lost within an hour from the start
    shape: float = 1.0  # of the Weibull distribution of lives; 1: exponential
    of: Literal["node", "stage"] = "node"  # what is lost at that rate
    stages: tuple[int, ...] | None = None  # whose nodes may be; None: all
    at: Mapping[int, tuple[LostPlace, ...]] = field(default_factory=dict)
    """Losses besides: while this iteration, counted from 1, is under way."""
    phase: float = 0.5  # of an iteration, when those come
    trace: tuple[TraceRow, ...] = ()  # instead of all nodes there from the start, and of any rate
    silent: bool = False  # lost nodes fall silent; else their connections are reset
    notice: float = 0.0  # that a node is given
    replacement: float = 30.0  # until a machine is there in place of a lost one; inf: none comes
    start: float = 5.0  # until the node on it, or on an added one, asks the registry to join
    warm_up: float = 0.0  # by which its first step takes longer

    def __post_init__(self) -> None:
        if not 0 <= self.hourly < 1:
            raise SwarmFiguresError(f"hourly = {self.hourly:g} must be 0 or more and less than 1")
        if not self.shape > 0:
            raise SwarmFiguresError(
                f"shape = {self.shape:g} of the Weibull distribution must be above 0"
            )
        if not 0 <= self.phase < 1:
            raise SwarmFiguresError(f"phase = {self.phase:g} must be 0 or more and less than 1")
        waits = ("notice", "replacement", "start", "warm_up")
        if short := [name for name in waits if not getattr(self, name) >= 0]:
            raise SwarmFiguresError(f"{short[0]} = {getattr(self, short[0])} must be 0 s or more")
        if self.trace and (self.hourly or self.at):
            raise SwarmFiguresError("losses come from a trace or else from a rate and a list")
        if any(iteration < 1 for iteration in self.at):
            raise SwarmFiguresError(
                f"iteration {min(self.at)} has no loss: they are counted from 1"
            )

    @property
    def scale(self) -> float:
        """The scale of the Weibull distribution in seconds: after an hour `hourly` of all are
        lost."""
        if not self.hourly:
            return math.inf
        return HOUR / math.pow(-math.log1p(-self.hourly), 1 / self.shape)

    def may_lose(self, stage: int) -> bool:
        return self.hourly > 0 and (self.stages is None or stage in self.stages)


class Lives:
    """Seconds from joining to being lost. Each follows from (seed, stage, number, how many have
    been in this place before), whatever else happens."""

    def __init__(self, churn: Churn, seed: int) -> None:
        self.churn, self.seed = churn, seed
        self._drawn = cache(self._draw)

    def life(self, place: LostPlace, before: int) -> float:
        number = place.number or 0
        size = 64
        while size <= number:
            size *= 2
        return float(self._drawn(place.stage, before, size)[number])

    def _draw(self, stage: int, before: int, size: int) -> NDArray[np.float64]:
        """The first draws are the same for every size."""
        random = np.random.default_rng([self.seed, stage, before])
        lives: NDArray[np.float64] = self.churn.scale * random.weibull(self.churn.shape, size)
        return lives


def per_step(
    losses: Losses, seed: int, iterations: int, stages: int
) -> dict[int, tuple[LostPlace, ...]]:
    """Whole stages, as the lab's runs lose them: for `Churn.at`. Raises ScheduleError."""
    listed = schedule(losses, seed, iterations, stages)
    return {at: tuple(LostPlace(stage, None) for stage in lost) for at, lost in listed.items()}

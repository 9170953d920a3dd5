"""Draws the losses and replacements of nodes from a seed. They are equal for all policies that are
compared."""

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
    """The place of a node in a stage, kept by its replacements. `number` None: the whole stage."""

    stage: int
    number: int | None


@dataclass(frozen=True)
class Churn:
    """Losses and replacements of nodes. Times in seconds. Raises SwarmFiguresError."""

    hourly: float = 0.0  # probability that a node is lost within an hour of its start
    shape: float = 1.0  # of the Weibull distribution of lifetimes; 1: exponential
    of: Literal["node", "stage"] = "node"  # whether nodes or whole stages are lost at that rate
    stages: tuple[int, ...] | None = None  # stages that lose nodes at that rate; None: all
    at: Mapping[int, tuple[LostPlace, ...]] = field(default_factory=dict)
    """Additional losses, by the iteration in which they happen, counted from 1."""
    phase: float = 0.5  # share of the iteration that is over when these losses happen
    trace: tuple[TraceRow, ...] = ()  # all comings and goings; replaces the initial nodes and rates
    silent: bool = False  # lost nodes fall silent; else their connections are reset
    notice: float = 0.0  # time between a node's notice and its loss
    replacement: float = 30.0  # from a loss until there is a new machine; inf: there is none
    start: float = 5.0  # until a node on a new machine asks the registry to join
    warm_up: float = 0.0  # additional duration of a newcomer's first step

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
            raise SwarmFiguresError(
                "a trace can't be combined with other losses: leave out the trace, or the rate and "
                "the list of losses"
            )
        if any(iteration < 1 for iteration in self.at):
            raise SwarmFiguresError(
                f"a loss in iteration {min(self.at)}: iterations are counted from 1"
            )

    @property
    def scale(self) -> float:
        """Scale of the Weibull distribution in seconds, from `hourly` and `shape`."""
        if not self.hourly:
            return math.inf
        return HOUR / math.pow(-math.log1p(-self.hourly), 1 / self.shape)

    def may_lose(self, stage: int) -> bool:
        """Whether this stage has losses at a rate."""
        return self.hourly > 0 and (self.stages is None or stage in self.stages)


class Lives:
    """Lifetimes of nodes, in seconds. Each depends only on the seed, the place, and the number of
    nodes that were in this place before."""

    def __init__(self, churn: Churn, seed: int) -> None:
        self.churn, self.seed = churn, seed
        self._drawn = cache(self._draw)

    def life(self, place: LostPlace, before: int) -> float:
        """Seconds from the start to the loss of a node after `before` others in this place."""
        number = place.number or 0
        size = 64
        while size <= number:
            size *= 2
        return float(self._drawn(place.stage, before, size)[number])

    def _draw(self, stage: int, before: int, size: int) -> NDArray[np.float64]:
        """Draws lifetimes for the numbers 0 to `size` - 1. A larger `size` keeps the first ones."""
        random = np.random.default_rng([self.seed, stage, before])
        lives: NDArray[np.float64] = self.churn.scale * random.weibull(self.churn.shape, size)
        return lives


def per_step(
    losses: Losses, seed: int, iterations: int, stages: int
) -> dict[int, tuple[LostPlace, ...]]:
    """Losses of whole stages by iteration, as in the lab's runs, for `Churn.at`. Raises
    ScheduleError."""
    listed = schedule(losses, seed, iterations, stages)
    return {at: tuple(LostPlace(stage, None) for stage in lost) for at, lost in listed.items()}

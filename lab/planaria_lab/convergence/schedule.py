"""Schedules of lost stages by iteration; specification and seed determine them.

An iteration is a step that was trained, even if a roll back has undone it later.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import xxhash
from pydantic import Field, model_validator

from planaria.node.local.loss_schedule import TraceError, TraceRow, read_trace
from planaria.node.run_file import Section

Schedule = Mapping[int, tuple[int, ...]]
"""Iteration -> the stages that are lost after it."""


class ScheduleError(ValueError):
    """A specification of losses is invalid; the message says why."""


class Losses(Section):
    """A specification of losses of whole stages: at a rate, as listed, or from a spot trace."""

    rate: float = Field(default=0.0, ge=0, le=1, description="probability per iteration and stage")
    at: list[str] = Field(default_factory=list, description="STAGE@ITERATION")
    trace: str = Field(default="", description="CSV: milliseconds, add or remove, node")
    iteration_seconds: float = Field(default=0.0, ge=0, description="for a trace")
    stages: Literal["inner", "body", "ends", "all"] | list[int] = Field(
        default="body", description="lost at a rate; inner: neither first nor last body stage"
    )
    apart: bool = Field(default=True, description="at a rate: no two neighbours are lost at once")
    after: int = Field(default=0, ge=0, description="at a rate: none is lost up to this iteration")

    @model_validator(mode="after")
    def one_source(self) -> Losses:
        if bool(self.rate) + bool(self.at) + bool(self.trace) > 1:
            raise ValueError("losses come from one of rate, at and trace")
        if self.trace and not self.iteration_seconds:
            raise ValueError("a trace needs iteration_seconds, the duration of an iteration")
        return self


def schedule(losses: Losses, seed: int, iterations: int, stages: int) -> Schedule:
    """Return the losses of a run whose model has body stages 1..`stages`. Raises ScheduleError."""
    if losses.at:
        return _listed(losses.at, stages)
    if losses.trace:
        try:
            rows = read_trace(Path(losses.trace))
        except TraceError as error:
            raise ScheduleError(str(error)) from error
        return from_trace(rows, losses.iteration_seconds, iterations, stages)
    return _at_rate(losses, seed, iterations, stages)


def _listed(entries: Iterable[str], stages: int) -> Schedule:
    losses: dict[int, list[int]] = {}
    for entry in entries:
        stage, _, iteration = entry.partition("@")
        if not (stage.isdecimal() and iteration.isdecimal() and int(iteration) > 0):
            raise ScheduleError(f"{entry!r} is not STAGE@ITERATION, for example 2@100")
        if int(stage) > stages:
            raise ScheduleError(f"{entry!r}: the model has stages 0 to {stages}")
        losses.setdefault(int(iteration), []).append(int(stage))
    return {iteration: tuple(sorted(set(lost))) for iteration, lost in losses.items()}


def stages_of(losses: Losses, stages: int) -> Sequence[int]:
    """Return the stages that may be lost at a rate."""
    named = {
        "inner": range(2, stages),
        "body": range(1, stages + 1),
        "ends": sorted({1, stages}),
        "all": range(stages + 1),
    }
    return losses.stages if isinstance(losses.stages, list) else named[losses.stages]


def _at_rate(losses: Losses, seed: int, iterations: int, stages: int) -> Schedule:
    """Return losses drawn at a rate. The random number of an iteration and stage depends only on
    these and the seed."""
    losses_at: dict[int, tuple[int, ...]] = {}
    for iteration in range(losses.after + 1, iterations + 1):
        lost: list[int] = []
        for stage in stages_of(losses, stages):
            drawn = xxhash.xxh3_64_intdigest(struct.pack("<QQQ", seed, iteration, stage)) / 2**64
            if drawn < losses.rate and not (losses.apart and stage - 1 in lost):
                lost.append(stage)
        if lost:
            losses_at[iteration] = tuple(lost)
    return losses_at


def from_trace(
    rows: Iterable[TraceRow], iteration_seconds: float, iterations: int, stages: int
) -> Schedule:
    """Return the losses of stages that a spot trace causes.

    An added node serves the stage with the fewest nodes, the first of equals. A stage is lost when
    its last node is removed. It is rebuilt at once if another stage can spare a node, else when the
    next node is added. While a stage is vacant no iteration passes. Nothing is lost before every
    stage has had a node.
    """
    serves: dict[str, int] = {}
    losses_at: dict[int, list[int]] = {}
    trained, since, running = 0.0, 0.0, False  # iterations; time until which they are counted

    def fewest() -> int:
        counts = [sum(served == stage for served in serves.values()) for stage in range(stages + 1)]
        return counts.index(min(counts))

    for at, added, node in rows:
        if running:
            trained += (at - since) / iteration_seconds
        since = at
        if added:
            serves[node] = fewest()
        elif (stage := serves.pop(node, None)) is not None:
            spared = _spare(serves, stage, stages)
            if running and stage not in serves.values():
                losses_at.setdefault(int(trained), []).append(stage)
            if stage not in serves.values() and spared is not None:
                serves[spared] = stage
        running = len(set(serves.values())) == stages + 1
    return {
        iteration: tuple(sorted(set(lost)))
        for iteration, lost in losses_at.items()
        if 0 < iteration <= iterations
    }


def _spare(serves: Mapping[str, int], wanted: int, stages: int) -> str | None:
    """Return a node of the stage with the most nodes, if it has two or more and isn't `wanted`."""
    fullest = max(range(stages + 1), key=lambda stage: sum(s == stage for s in serves.values()))
    nodes = sorted(node for node, stage in serves.items() if stage == fullest)
    return nodes[-1] if len(nodes) > 1 and fullest != wanted else None

"""Which stages are lost after which iteration: it follows from the specification and a seed.

An iteration is a step that was trained, whether or not a roll back has undone it later.
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
"""After which iteration, which stages."""


class ScheduleError(ValueError):
    """Losses that are impossible; the message says why."""


class Losses(Section):
    """The schedule of losses of whole stages: at a rate, as listed, or as in a spot trace."""

    rate: float = Field(default=0.0, ge=0, le=1, description="probability per iteration and stage")
    at: list[str] = Field(default_factory=list, description="STAGE@ITERATION")
    trace: str = Field(default="", description="CSV: milliseconds, add or remove, node")
    iteration_seconds: float = Field(default=0.0, ge=0, description="with a trace")
    stages: Literal["inner", "body", "ends", "all"] | list[int] = Field(
        default="body", description="at a rate; inner: without the first and the last body stage"
    )
    apart: bool = Field(default=True, description="at a rate: no two in a row at once")
    after: int = Field(default=0, ge=0, description="at a rate: none up to this iteration")

    @model_validator(mode="after")
    def one_source(self) -> Losses:
        if bool(self.rate) + bool(self.at) + bool(self.trace) > 1:
            raise ValueError("losses come from one of rate, at and trace")
        if self.trace and not self.iteration_seconds:
            raise ValueError("a trace needs iteration_seconds, how long an iteration takes")
        return self


def schedule(losses: Losses, seed: int, iterations: int, stages: int) -> Schedule:
    """The losses that a run of a model with body stages 1..`stages` will have. Raises
    ScheduleError."""
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
            raise ScheduleError(f"{entry!r} is not STAGE@ITERATION, as 2@100")
        if int(stage) > stages:
            raise ScheduleError(f"{entry!r}: the model has stages 0 to {stages}")
        losses.setdefault(int(iteration), []).append(int(stage))
    return {iteration: tuple(sorted(set(lost))) for iteration, lost in losses.items()}


def stages_of(losses: Losses, stages: int) -> Sequence[int]:
    """The stages that may be lost at a rate."""
    named = {
        "inner": range(2, stages),
        "body": range(1, stages + 1),
        "ends": sorted({1, stages}),
        "all": range(stages + 1),
    }
    return losses.stages if isinstance(losses.stages, list) else named[losses.stages]


def _at_rate(losses: Losses, seed: int, iterations: int, stages: int) -> Schedule:
    """Losses drawn at a rate: each iteration and stage has its own random number, whatever the
    others are."""
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
    """Losses of stages that a spot trace brings about.

    A node that is added serves the stage with the fewest, of equals the first. A stage is lost when
    its last node is removed; it is rebuilt at once if some other stage can spare a node, else when
    the next node comes, and while it is vacant no iteration passes. Before every stage has had a
    node, nothing is lost.
    """
    serves: dict[str, int] = {}
    losses_at: dict[int, list[int]] = {}
    trained, since, running = 0.0, 0.0, False  # iterations, and since when more of them pass

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
    """A node of the best served stage, if that has two."""
    fullest = max(range(stages + 1), key=lambda stage: sum(s == stage for s in serves.values()))
    nodes = sorted(node for node, stage in serves.items() if stage == fullest)
    return nodes[-1] if len(nodes) > 1 and fullest != wanted else None

"""Schedules of losses and replacements in a local swarm: by a rate, or by a spot trace.

A place, STAGE.REPLICA, is for one process at a time. Times are arguments, in seconds of this
machine; market time is `speedup` times as fast.
"""

from __future__ import annotations

import csv
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from planaria.node.launch.errors import SwarmError
from planaria.node.run_file import RunFile

HOUR: Final = 3600.0


class TraceError(ValueError):
    """Error of an unusable spot trace; the message says why."""


class TraceRow(NamedTuple):
    """A line of a spot trace."""

    time: float  # seconds
    added: bool  # else removed
    node: str


class Change(NamedTuple):
    """A place of the local swarm that is lost, or taken."""

    place: str
    taken: bool


class Losses(Protocol):
    """Schedule of lost and replaced nodes, besides the losses of `--kill`."""

    at_large: bool = False
    """Whether the registry places a new process; else it serves the stage of its place."""

    def first(self) -> list[str]:
        """The places that nodes take at the start."""

    def begin(self, now: float) -> None:
        """Start market time: training has begun."""

    def started(self, place: str, now: float) -> None:
        """Note a process started at a place."""
        return

    def due_changes(self, now: float) -> list[Change]:
        """Losses and replacements since the last call, in order."""

    def more_to_come(self) -> bool:
        """Whether the schedule will take further places."""
        return False


def places(stages: int, replicas: int) -> list[str]:
    """Places of nodes in stages 0..`stages`: one of each, then the next one of each."""
    return [f"{stage}.{replica}" for replica in range(replicas) for stage in range(stages + 1)]


def stage_of(place: str) -> int:
    return int(place.partition(".")[0])


class DrawnLosses(Losses):
    """Schedule of random losses: each process is lost within an hour of market time with the
    probability `hourly`, at any age, and replaced at once. Lifetimes follow from (seed, place,
    number of predecessors)."""

    def __init__(self, places: Sequence[str], hourly: float, speedup: float, seed: int) -> None:
        self._places, self._seed = places, seed
        self._rate = -math.log1p(-hourly) / HOUR * speedup
        self._before: Counter[str] = Counter()
        self._ends: dict[str, float] = {}  # by place
        self._begun = False

    def first(self) -> list[str]:
        return list(self._places)

    def begin(self, now: float) -> None:
        self._begun = True
        for place in self._places:
            self.started(place, now)

    def started(self, place: str, now: float) -> None:
        if not self._begun:
            return
        drawn = random.Random(f"{self._seed} {place} {self._before[place]}")
        self._before[place] += 1
        self._ends[place] = now + (drawn.expovariate(self._rate) if self._rate else math.inf)

    def due_changes(self, now: float) -> list[Change]:
        ended = sorted((end, place) for place, end in self._ends.items() if end <= now)
        for _, place in ended:
            del self._ends[place]
        return [Change(place, taken) for taken in (False, True) for _, place in ended]


class TracedLosses(Losses):
    """Schedule of the losses in a spot trace. A node that the trace adds gets a free place at the
    stage with the fewest nodes, of equals the first. It keeps the place until the trace removes it.
    The trace begins where it has a node for each stage. Later nodes are placed by the registry,
    since nodes may have moved. Raises TraceError if the trace never has enough nodes."""

    at_large = True

    def __init__(self, places: Sequence[str], rows: Sequence[TraceRow], speedup: float) -> None:
        self._places, self._rows, self._speedup = places, list(rows), speedup
        self._places_of: dict[str, str] = {}  # node of the trace -> place
        self._next, self._start, self._began = 0, 0.0, math.inf
        stages = {stage_of(place) for place in places}
        while {stage_of(place) for place in self._places_of.values()} != stages:
            if self._next == len(rows):
                raise TraceError(
                    f"the trace never has {len(stages)} nodes at a time, one for each stage: take "
                    "another one, or fewer stages"
                )
            self._start = rows[self._next].time
            self._play(self._start)

    def first(self) -> list[str]:
        return sorted(self._places_of.values(), key=self._places.index)

    def begin(self, now: float) -> None:
        self._began = now

    def due_changes(self, now: float) -> list[Change]:
        return self._play(self._start + max(0.0, now - self._began) * self._speedup)

    def more_to_come(self) -> bool:
        return any(row.added for row in self._rows[self._next :])

    def _play(self, until: float) -> list[Change]:
        """Apply trace rows until that second of the trace."""
        changes = []
        while self._next < len(self._rows) and self._rows[self._next].time <= until:
            row = self._rows[self._next]
            self._next += 1
            if not row.added:
                if (place := self._places_of.pop(row.node, None)) is not None:
                    changes.append(Change(place, False))
            elif row.node not in self._places_of and (place := self._free_place()) is not None:
                self._places_of[row.node] = place
                changes.append(Change(place, True))
        return changes

    def _free_place(self) -> str | None:
        taken = set(self._places_of.values())
        counts = Counter(stage_of(place) for place in taken)
        free = [place for place in self._places if place not in taken]
        return min(free, key=lambda place: (counts[stage_of(place)], stage_of(place)), default=None)


def parse_rate(text: str) -> float:
    """Parse `10%/h`, the probability that a node is lost within an hour. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%/h", text)
    hourly = float(match[1]) / 100 if match else math.nan
    if not 0 <= hourly < 1:
        raise ValueError(
            f"{text!r} is not a rate of losses: give the percentage of nodes lost per hour, as in "
            "10%/h, below 100%"
        )
    return hourly


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """Read a spot trace: milliseconds, add or remove, node, by time. Raises TraceError."""
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"can't read the trace {path}: {error}") from error
    trace: list[TraceRow] = []
    for line, row in enumerate(rows, 1):
        if len(row) != 3 or row[1] not in ("add", "remove") or not row[0].isdecimal():
            raise TraceError(
                f"{path}, line {line}: {','.join(row)!r} is not MILLISECONDS,add|remove,NODE"
            )
        trace.append(TraceRow(int(row[0]) / 1000, row[1] == "add", row[2]))
        if len(trace) > 1 and trace[-1].time < trace[-2].time:
            raise TraceError(f"{path}, line {line}: its time is before that of the previous line")
    if not any(row.added for row in trace):
        raise TraceError(f"{path} adds no node: choose another trace")
    return tuple(trace)


@dataclass(frozen=True)
class Kill:
    """SIGKILL for every node of a stage, or for one replica of it, during `step`."""

    stage: int
    replica: int | None
    step: int

    def slots(self, replicas: int) -> list[str]:
        replica_numbers = range(replicas) if self.replica is None else [self.replica]
        return [f"{self.stage}.{replica}" for replica in replica_numbers]


def parse_kill(text: str, run: RunFile) -> Kill:
    """Parse --kill, STAGE@STEP or STAGE.REPLICA@STEP, for a resolved run. Raises SwarmError."""
    place, _, step = text.partition("@")
    stage, dot, replica = place.partition(".")
    figures = [stage, step, *([replica] if dot else [])]
    if not all(figure.isascii() and figure.isdigit() for figure in figures):
        raise SwarmError(
            f"--kill {text}: write STAGE@STEP or STAGE.REPLICA@STEP, as in --kill 2@15 or "
            "--kill 3.1@25"
        )
    kill = Kill(int(stage), int(replica) if dot else None, int(step))
    stages, replicas = run.model.body_stages, run.swarm.replicas
    _check_range(text, "stage", kill.stage, 0, stages)
    _check_range(text, "replica", kill.replica or 0, 0, replicas - 1)
    _check_range(text, "step", kill.step, 1, run.steps)
    return kill


def _check_range(kill: str, noun: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise SwarmError(f"--kill {kill}: there is no {noun} {value}, choose {low} to {high}")


def choose_losses(
    run: RunFile, rate: str | None = None, trace: Path | None = None, speedup: float | None = None
) -> Losses:
    """Loss schedule of a resolved run: `speedup` times as fast as `rate` (10%/h) or the spot trace;
    with neither no losses. Raises SwarmError."""
    if rate is not None and trace is not None:
        raise SwarmError("--loss-rate and --trace are two sources of losses: choose one")
    if speedup is not None and ((rate is None and trace is None) or not 0 < speedup < math.inf):
        raise SwarmError(
            f"--speedup {speedup:g}: give a positive factor, as in --speedup 100, together with "
            "--loss-rate or --trace"
        )
    all_places, factor = places(run.model.body_stages, run.swarm.replicas), speedup or 1.0
    try:
        if trace is not None:
            return TracedLosses(all_places, read_trace(trace), factor)
        return DrawnLosses(all_places, parse_rate(rate) if rate else 0.0, factor, run.seed)
    except TraceError as error:
        raise SwarmError(f"--trace {trace}: {error}") from error
    except ValueError as error:
        raise SwarmError(f"--loss-rate {error}") from error

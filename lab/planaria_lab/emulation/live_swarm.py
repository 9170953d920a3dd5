"""Measures a real swarm behind emulated links: seconds of its steps, bytes sent, stalls by losses.

emulation.py emulates the machines; the processes are those of `planaria up`. Nodes share this
machine's cores, so a swarm measures its links only if there is little to compute.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from rich.console import Console

from planaria.bootstrap.errors import UserError
from planaria.node.local.loss_schedule import Kill
from planaria.node.local.plan import SwarmPlan
from planaria.node.local.swarm import up
from planaria.node.report.event_log import LineReader
from planaria.node.report.events import Committed, Entry, Killed, StageRebuilt, entries
from planaria.node.run_file import RunFile
from planaria_lab.emulation.emulation import Emulation

FIRST: Final = 10
"""First step whose seconds and bytes count. Before, TCP adapts to its links, and the first
snapshots are sent whole."""
LOOK: Final = 0.05
"""Seconds between two readings of a swarm's ledgers and of its links' traffic."""

OnStep = Callable[[int], None]


class LiveError(UserError):
    """The measurement can't begin or go on. The message has the reason and the remedy."""


def machines(run: RunFile) -> list[str]:
    """Names of the machines for a resolved run's swarm: the registry's, then the nodes' as
    STAGE.REPLICA, replica by replica."""
    stages, replicas = run.model.body_stages, run.swarm.replicas
    nodes = [f"{stage}.{replica}" for replica in range(replicas) for stage in range(stages + 1)]
    return ["registry", *nodes]


class Carried(NamedTuple):
    """The traffic of all links together since the emulation began, at a time (Unix seconds)."""

    time: float
    packets: int = 0
    bytes: int = 0
    dropped: int = 0
    late: float = 0.0


async def train(
    plan: SwarmPlan, kills: Sequence[Kill], links: Emulation, on_step: OnStep
) -> list[Carried]:
    """Runs a swarm whose plan has its homes in `links`. The caller must be inside the registry's
    machine. Returns readings of the links' traffic in the order of time. Raises LiveError if the
    run fails, and EmulationError."""
    carried = [_carried(links)]
    plan.out.mkdir(parents=True)
    with (plan.out / "up.log").open("w", encoding="utf-8") as log:
        training = asyncio.create_task(up(plan, kills, Console(file=log, width=100)))
        ledgers: dict[Path, LineReader] = {}
        while not training.done():
            await asyncio.wait([training], timeout=LOOK)
            carried.append(_carried(links))
            for path in (plan.out / "logs").glob("ledger-*.jsonl"):
                ledgers.setdefault(path, LineReader(path))
            for line in (line for tail in ledgers.values() for line in tail.lines()):
                on_step(line.get("step", 0))
        status, why = training.result()
    if status >= 128:
        raise LiveError("stopped: the same command continues from here")
    if status:
        raise LiveError(f"a swarm in {plan.out} failed: {why}")
    return carried


def _carried(links: Emulation) -> Carried:
    """The traffic of all links now."""
    ways = list(links.traffic().values())
    return Carried(
        time=time.time(),
        packets=sum(traffic.packets for traffic in ways),
        bytes=sum(traffic.bytes for traffic in ways),
        dropped=sum(traffic.dropped for traffic in ways),
        late=sum(traffic.late for traffic in ways),
    )


@dataclass(frozen=True)
class KilledStage:
    """A stage of which all nodes were killed, and its rebuild. Seconds count from the SIGKILL."""

    stage: int
    method: str  # of the rebuild
    stall: float  # until the next commit after the rebuild
    caught_up: float  # until the next commit of a step that was never committed before
    fetched_bytes: int  # fetched for the rebuild


@dataclass(frozen=True)
class MeasuredSwarm:
    """The measurements of a swarm."""

    step_seconds: list[float]  # between commits in the ledgers, before the first kill
    step_bytes: float  # mean bytes of a step on all links, before the first kill
    losses: list[KilledStage]
    dropped: int  # packets dropped by full queues in the whole run
    late: float  # mean seconds by which the relay delivered packets too late


def measure(out: Path, kills: Sequence[Kill], carried: Sequence[Carried]) -> MeasuredSwarm:
    """The measurements from what a swarm has written to `out`, and from the traffic of its links.
    Raises LiveError as `losses`."""
    times = commit_times(
        line for path in (out / "logs").glob("ledger-*.jsonl") for line in LineReader(path).lines()
    )
    events = entries(LineReader(out / "events.jsonl").lines())
    last = min((kill.step for kill in kills), default=max(times) + 1) - 1
    begin, end = carried[0], carried[-1]
    return MeasuredSwarm(
        step_seconds=[times[step] - times[step - 1] for step in range(FIRST, last + 1)],
        step_bytes=bytes_between(carried, times[FIRST - 1], times[last]) / (last - FIRST + 1),
        losses=losses(events),
        dropped=end.dropped - begin.dropped,
        late=(end.late - begin.late) / max(1, end.packets - begin.packets),
    )


def commit_times(ledgers: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Step -> Unix seconds of its first commit, from lines of ledgers. Headers are skipped. A step
    may be there several times, after a roll back."""
    times: dict[int, float] = {}
    for line in ledgers:
        if "step" in line:
            times[line["step"]] = min(line["time"], times.get(line["step"], math.inf))
    return times


def bytes_between(carried: Sequence[Carried], since: float, to: float) -> float:
    """Bytes carried between two times; interpolated linearly between readings."""
    at = np.interp([since, to], [look.time for look in carried], [look.bytes for look in carried])
    return float(at[1] - at[0])


def losses(events: Sequence[Entry]) -> list[KilledStage]:
    """The outcome of each kill, from a swarm's events in the order of time. Nodes of a stage that
    were killed in the same step are one loss. Raises LiveError if the swarm didn't recover."""
    first: dict[tuple[int, int], float] = {}  # (stage, step) -> time of the first kill
    commits: list[tuple[float, int]] = []
    rebuilds: list[tuple[float, StageRebuilt]] = []
    for entry in events:
        match entry.event:
            case Killed(stage=stage, step=step):
                first.setdefault((stage, step), entry.time)
            case Committed(step=step):
                commits.append((entry.time, step))
            case StageRebuilt() as rebuild:
                rebuilds.append((entry.time, rebuild))
    stages = []
    for (stage, step), killed in sorted(first.items(), key=lambda item: item[1]):
        done = next(
            (timed for timed in rebuilds if timed[1].stage == stage and timed[0] > killed),
            None,
        )
        if done is None:
            raise LiveError(f"stage {stage}, killed at step {step}, was never rebuilt")
        at, rebuilt = done
        newest = max((step for time, step in commits if time < at), default=0)
        after = [commit for commit in commits if commit[0] > at]
        new = next((time for time, step in after if step > newest), None)
        if new is None:
            raise LiveError(f"no step was committed after stage {stage} had been rebuilt")
        stall, caught_up = after[0][0] - killed, new - killed
        stages.append(KilledStage(stage, rebuilt.method, stall, caught_up, rebuilt.bytes))
    return stages

"""Seconds from the loss of a stage's only node to the next commit, while no node joins, until one
node is left.

The swarm has a node for each stage; one of them has seats for all stages. The others get SIGKILL in
the middle of a step, one after the other, under each policy. For each loss, the method of the
rebuild is printed, and the seconds from the kill to the next commit. They are given in all, by
part, and in usual steps (the median of the steps since the last loss).

Then nodes of a new swarm get a notice of 30 s (SIGTERM), one after the other. The stall is the time
of the steps from the notice to the first step without the node, less as many usual steps. It is
divided by the time of one step and the transfer of the state.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import run_planaria
from planaria.node.run_file import RunFile, loads, override
from planaria_lab.bench.pipeline import CPU, one_each
from planaria_lab.bench.rows import keep
from planaria_lab.bench.swarm import LOOK, Lines, Watched, swarm

POLICIES = ("checkfree", "checkfree+", "snapshot", "redundant", "checkpoint")
STAGES = 4
STAYS = 1  # the stage of the node that stays
LOST = (2, 3, 4, 0)
BETWEEN = 12  # steps between two losses; the usual step is without the first two
GOAL = 5.0  # seconds
NOTICE = 30.0  # seconds
RELEARNING = "relearning"
RUN = f"""
name = "left"
steps = 100000
[model]
preset = "tiny"
stages = {STAGES}
[training]
optimizer = "adamw"
batch = 16
microbatch = 2
validation_microbatches = 0
[recovery.checkpoint]
every = 5
"""


class Loss(NamedTuple):
    stage: int
    method: str
    seconds: float  # from the kill to the next commit
    usual: float  # seconds of a step
    parts: dict[str, float]  # seconds of the parts, in order

    def __str__(self) -> str:
        parts = ", ".join(f"{seconds:.2f} {name}" for name, seconds in self.parts.items())
        return (
            f"stage {self.stage} by {self.method}: {self.seconds:.2f} s to the next commit "
            f"({parts}); {self.seconds / self.usual:.1f} usual steps, {self.seconds / GOAL:.2f} of "
            f"the goal of {GOAL:.0f} s"
        )


class Handover(NamedTuple):
    stage: int
    method: str
    stall: float  # seconds of its steps, less those of as many usual steps
    usual: float  # seconds of a step
    transfer: float  # seconds of the transfer of the state

    @property
    def ratio(self) -> float:
        return self.stall / (self.usual + self.transfer)

    def __str__(self) -> str:
        return (
            f"stage {self.stage} {NOTICE:.0f} s ahead by {self.method}: stalled {self.stall:.2f} "
            f"s; ratio to one step of {self.usual:.2f} s and its transfer in {self.transfer:.2f} "
            f"s: {self.ratio:.2f}"
        )


@contextmanager
def training(run: RunFile, out: Path, device: torch.device = CPU) -> Iterator[Watched]:
    nodes = {
        slot: [
            *arguments,
            *("--seats", str(run.model.body_stages + 1 if slot == str(STAYS) else 1)),
            *("--save-dir", "none", "--grace", str(NOTICE)),
        ]
        for slot, arguments in one_each(run, device).items()
    }
    with swarm(run, run_planaria, out, nodes, nodes.keys() - {str(STAYS)}) as look:
        yield Watched(look, out / "logs")


def usual_step(lines: Lines) -> float:
    """Return the median seconds of steps in a row, without the first two."""
    times = [float(line["time"]) for line in lines]
    return statistics.median(after - before for before, after in pairwise(times[2:]))


def lose(watched: Watched, stage: int) -> Loss:
    lines = watched.train(BETWEEN)
    usual, (node, process) = usual_step(lines), watched.serving(stage)
    time.sleep(usual / 2)
    killed = time.time()
    os.kill(process, signal.SIGKILL)
    commit = watched.next_view(lines[-1]["view"])
    events = [
        event
        for event in watched.events("link lost", "serving", "rebuilding", "rolled back", "rebuilt")
        if killed < event["time"] <= commit["time"]
    ]
    (rebuilt,) = [e for e in events if e["kind"] == "rebuilt" and e["stage"] == stage]
    noticed = next(e["time"] for e in events if e.get("peer") == node)
    seated = next(e["time"] for e in events if e["node"] == rebuilt["node"])
    ordered = next(e["time"] for e in events if e["kind"] in ("rebuilding", "rolled back"))
    relearned = rebuilt.get("relearned", {}).get("seconds", 0.0)
    parts = {
        "until it is noticed": noticed - killed,
        "until the seat is built": max(0.0, seated - noticed),
        "until all have answered": max(0.0, ordered - max(seated, noticed)),
        RELEARNING: relearned,
        "for the rest of the rebuild": rebuilt["time"] - ordered - relearned,
        "for the step": commit["time"] - rebuilt["time"],
    }
    return Loss(stage, rebuilt["method"], commit["time"] - killed, usual, parts)


def measure_losses(run: RunFile, out: Path) -> None:
    policy, losses = run.recovery.policy, []
    with training(run, out) as watched:
        for stage in LOST:
            losses.append(loss := lose(watched, stage))
            print(f"{policy}, {loss}", flush=True)
            keep("left", policy=policy, **loss._asdict())
        watched.train(BETWEEN)
    seconds = [loss.seconds for loss in losses]
    relearned = sum(loss.parts[RELEARNING] for loss in losses)
    print(
        f"{policy}, ratio longest / goal: {max(seconds) / GOAL:.2f}; relearning is "
        f"{relearned / sum(seconds):.0%} of all seconds",
        flush=True,
    )


def hand_over(watched: Watched, stage: int) -> Handover:
    """Give the stage's only node a notice (SIGTERM), and measure its handover."""
    before = watched.train(BETWEEN)
    _, process = watched.serving(stage)
    time.sleep(usual_step(before) / 2)
    notified = time.time()
    os.kill(process, signal.SIGTERM)

    def since(kind: str) -> list[dict[str, Any]]:
        return [event for event in watched.events(kind) if event["time"] > notified]

    while not since("handed over"):
        time.sleep(LOOK)
    after = watched.train(BETWEEN)
    (rebuilt,), lines = since("rebuilt"), watched.committed()
    first = next(number for number, line in enumerate(lines) if line["time"] > notified)
    last = next(n for n, line in enumerate(lines) if line["view"] == after[-1]["view"])
    usual = max(usual_step(before), usual_step(after))
    took = lines[last]["time"] - lines[first - 1]["time"]
    stall = took - (last - first + 1) * usual
    return Handover(stage, rebuilt["method"], stall, usual, rebuilt["fetch_seconds"])


def measure_handovers(run: RunFile, out: Path) -> None:
    policy, ratios = run.recovery.policy, []
    with training(run, out) as watched:
        for stage in LOST[:-1]:  # the last one is stage 0, whose node is the driver
            handover = hand_over(watched, stage)
            print(f"{policy}, {handover}", flush=True)
            keep("left", policy=policy, **handover._asdict())
            ratios.append(handover.ratio)
    middle = statistics.median(ratios)
    print(f"{policy}, {NOTICE:.0f} s ahead: median ratio {middle:.2f} (goal 1)", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        prepare(Recipe([str(SHIPPED)]), data)
        for policy in POLICIES:
            run = override(loads(RUN), data__path=str(data), recovery__policy=policy)
            for measure in (measure_losses, measure_handovers):
                out = Path(directory) / policy / measure.__name__
                checkpoints = str(out / "checkpoints")
                measure(resolve(override(run, recovery__checkpoint__dir=checkpoints)), out)


if __name__ == "__main__":
    main()

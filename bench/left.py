"""From the loss of a stage's only node to the next commit, while nobody joins, down to one node.

In a swarm of a node for each stage, one of them with room for all, the others get SIGKILL in the
middle of a step, one after the other, under each policy. What is told of a loss is by which method
the stage came back, and the seconds from the kill to the next commit: in all, in usual steps (the
median of the steps since the loss before), and where they went. Then such a node is told 30 s ahead
(SIGTERM). What that costs is the time of the steps from the notice to the first without the node,
above that of as many usual steps; it is held against one step and the transfer of the state.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench.rows import keep
from bench.swarm import Lines, swarm
from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.local.processes import run_planaria
from planaria.node.naming import node_of
from planaria.node.resolve import resolve
from planaria.node.run_file import RunFile, loads, override

TEXT = Path(__file__).parent.parent / "corpus" / "austen"
POLICIES = ("checkfree", "checkfree+", "snapshot", "redundant", "checkpoint")
STAGES = 4
STAYS = 1
LOST = (2, 3, 4, 0)
BETWEEN = 12  # steps between two losses; the first two don't count
GOAL = 5.0  # seconds
NOTICE = 30.0  # seconds
LOOK = 0.05  # seconds between two at the ledgers
RELEARNING = "relearning"
RUN = f"""
name = "left"
steps = 100000
[model]
preset = "tiny"
stages = {STAGES}
[training]
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
    parts: dict[str, float]  # seconds, one after the other

    def __str__(self) -> str:
        parts = ", ".join(f"{seconds:.2f} {name}" for name, seconds in self.parts.items())
        return (
            f"stage {self.stage} by {self.method}: {self.seconds:.2f} s to the next commit "
            f"({parts}); {self.seconds / self.usual:.1f} usual steps, {self.seconds / GOAL:.2f} of "
            f"the goal of {GOAL:.0f} s"
        )


class Watched:
    """A swarm that trains."""

    def __init__(self, look: Callable[[], Lines], logs: Path) -> None:
        self._look, self._logs = look, logs

    def committed(self) -> Lines:
        """In the order of time."""
        return sorted(self._look(), key=lambda line: float(line["time"]))

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        files = [path.read_text() for path in self._logs.glob("events-*.jsonl")]
        texts = [line for file in files for line in file.rpartition("\n")[0].splitlines()]
        found = [event for event in map(json.loads, texts) if event["kind"] in kinds]
        return sorted(found, key=lambda event: float(event["time"]))

    def train(self, steps: int) -> Lines:
        """So many more; returns them. Their last one is under way when this returns."""
        after = time.time()
        while len(trained := [o for o in self.committed() if o["time"] > after]) <= steps:
            time.sleep(LOOK)
        return trained

    def next_view(self, than: int) -> dict[str, Any]:
        """The first commit in a newer one."""
        while not (newer := [one for one in self.committed() if one["view"] > than]):
            time.sleep(LOOK)
        return newer[0]

    def serving(self, stage: int) -> tuple[str, int]:
        """Node and process of the only one there."""
        node = node_of(next(e for e in self.events("serving") if e["stage"] == stage)["node"])
        return node, next(e["pid"] for e in self.events("joined") if e["node"] == node)


@contextmanager
def training(run: RunFile, out: Path) -> Iterator[Watched]:
    nodes = {
        str(stage): [
            *("node", "--stage", str(stage), "--threads", "1", "--cloud", "none"),
            *("--seats", str(STAGES + 1 if stage == STAYS else 1), "--save-dir", "none"),
            *("--grace", str(NOTICE)),
        ]
        for stage in range(STAGES + 1)
    }
    with swarm(run, run_planaria, out, nodes, nodes.keys() - {str(STAYS)}) as look:
        yield Watched(look, out / "logs")


def usual_step(lines: Lines) -> float:
    """Seconds; of steps in a row."""
    times = [float(line["time"]) for line in lines]
    return statistics.median(after - before for before, after in pairwise(times[2:]))


def lose(watched: Watched, stage: int) -> Loss:
    lines = watched.train(BETWEEN)
    usual, (node, process) = usual_step(lines), watched.serving(stage)
    time.sleep(usual / 2)
    killed = time.time()
    os.kill(process, signal.SIGKILL)
    commit = watched.next_view(lines[-1]["view"])
    told = [
        event
        for event in watched.events("link lost", "serving", "rebuilding", "rolled back", "rebuilt")
        if killed < event["time"] <= commit["time"]
    ]
    (rebuilt,) = [e for e in told if e["kind"] == "rebuilt" and e["stage"] == stage]
    noticed = next(e["time"] for e in told if e.get("peer") == node)
    seated = next(e["time"] for e in told if e["node"] == rebuilt["node"])
    ordered = next(e["time"] for e in told if e["kind"] in ("rebuilding", "rolled back"))
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


def measure_handover(run: RunFile, out: Path) -> None:
    with training(run, out) as watched:
        before = watched.train(2 * BETWEEN)
        _, process = watched.serving(LOST[0])
        time.sleep(usual_step(before) / 2)
        told = time.time()
        os.kill(process, signal.SIGTERM)
        while not (over := watched.events("handed over")):
            time.sleep(LOOK)
        after = watched.train(2 * BETWEEN)
        (rebuilt,) = watched.events("rebuilt")
        lines = watched.committed()
    view = after[-1]["view"]
    until = next(number for number, line in enumerate(lines) if line["view"] == view)
    since = next(number for number, line in enumerate(lines) if line["time"] > told)
    usual = max(usual_step(before), usual_step(after))
    took = lines[until]["time"] - lines[since - 1]["time"]
    stall = took - (until - since + 1) * usual
    transfer = rebuilt["fetch_seconds"]
    ratio = stall / (usual + transfer)
    print(
        f"{run.recovery.policy}, stage {LOST[0]} {NOTICE:.0f} s ahead by {rebuilt['method']}: over "
        f"after {over[0]['time'] - told:.2f} s, in which it stalled {stall:.2f} s; ratio stall / "
        f"one step of {usual:.2f} s and its transfer in {transfer:.2f} s: {ratio:.2f} (goal 1)",
        flush=True,
    )
    keep(
        "left",
        policy=run.recovery.policy,
        method=rebuilt["method"],
        stall=stall,
        usual=usual,
        transfer=transfer,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        prepare(Recipe([str(TEXT)]), data)
        for policy in POLICIES:
            run = override(loads(RUN), data__path=str(data), recovery__policy=policy)
            for measure in (measure_losses, measure_handover):
                out = Path(directory) / policy / measure.__name__
                checkpoints = str(out / "checkpoints")
                measure(resolve(override(run, recovery__checkpoint__dir=checkpoints)), out)


if __name__ == "__main__":
    main()

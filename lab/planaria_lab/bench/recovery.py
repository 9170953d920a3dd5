"""Tokens per second while a swarm is ready for losses, over those of plain training.

A swarm of processes, started as `planaria up` starts them, switches its readiness off and on every
five steps. Readiness is the boundary tensors for relearning and the snapshots of stages 0 and 1,
and with checkfree+ also the swapped orders. Off is plain training, in which nothing is kept for
other nodes. Each block of steps is compared with the block before it, so that changes of the
machine's load cancel out.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import run_planaria
from planaria.node.run_file import loads, override
from planaria_lab.bench.rows import keep
from planaria_lab.bench.swarm import train

GOALS = {"checkfree": 0.99, "checkfree+": 0.97}
STAGES = 4
BLOCK = 5  # steps; the first is not counted, since work of the last block may end in it
RUN = f"""
name = "bench"
steps = {40 * BLOCK}
[model]
preset = "mini"
stages = {STAGES}
context = 256
[training]
optimizer = "adamw"
batch = 16
microbatch = 4
validation_microbatches = 0
"""


def is_ready(step: int) -> bool:
    """Return whether this step is trained with all that its policy needs for losses."""
    return step // BLOCK % 2 == 1


def run_alternating(arguments: list[str]) -> None:
    """Run `planaria ARGUMENTS...`, with readiness by `is_ready`."""
    from planaria.node.driver.driver import Driver
    from planaria.node.state.holdings import Holdings
    from planaria.node.transaction.attempt import Attempt

    attempt_begins, start, plan = Holdings.attempt_begins, Attempt.start, Driver._plan
    originals: dict[int, Any] = {}

    def attempt(self: Holdings, ballot: Any, begin: Any) -> None:
        parts = originals.setdefault(id(self), (self.boundary, self.sender))
        self.boundary, self.sender = parts if is_ready(begin.step) else (None, None)
        attempt_begins(self, ballot, begin)

    def start_attempt(self: Attempt) -> None:
        boundary = originals.setdefault(id(self.place), self.place.boundary)
        self.place.boundary = boundary if is_ready(self.begin.step) else None
        start(self)

    def plan_step(self: Driver, members: Mapping[str, int], orders: Sequence[Sequence[int]]) -> Any:
        ready = is_ready(self.standing.committed + 1)
        in_turn = [tuple(sorted(order)) for order in orders]
        return plan(self, members, orders if ready else in_turn)

    Holdings.attempt_begins = attempt  # type: ignore[method-assign]
    Attempt.start = start_attempt  # type: ignore[method-assign]
    Driver._plan = plan_step  # type: ignore[method-assign]
    run_planaria(arguments)


def ratios(lines: list[dict[str, Any]]) -> list[float]:
    """Return the tokens/s of each ready block over those of the block before it, which is not
    ready."""
    blocks: dict[int, list[float]] = {}
    for before, line in pairwise(lines):
        if line["step"] % BLOCK:
            blocks.setdefault(line["step"] // BLOCK, []).append(line["time"] - before["time"])
    medians = {block: statistics.median(seconds) for block, seconds in blocks.items()}
    return [medians[block - 1] / medians[block] for block in sorted(medians) if block % 2]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        prepare(Recipe([str(SHIPPED)]), data)
        for number, (policy, goal) in enumerate(GOALS.items()):
            run = resolve(override(loads(RUN), data__path=str(data), recovery__policy=policy))
            ready_to_off = ratios(train(run, run_alternating, Path(directory) / str(number), {}))
            low, middle, high = statistics.quantiles(ready_to_off, n=4)
            print(
                f"ratio {policy} ready / off: {middle:.3f} (quartiles {low:.3f} to {high:.3f}, "
                f"{len(ready_to_off)} pairs of blocks; goal {goal:.2f})"
            )
            keep("recovery", policy=policy, ready_to_off=ready_to_off)


if __name__ == "__main__":
    main()

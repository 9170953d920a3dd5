"""Committed steps per second while each fsync of one node takes 5 s, over those with fast disks.

One swarm of processes trains, and saves every few steps. The disk of a body node is slow for 15 s,
then that of stage 0, and so on; between these, all disks are fast for 15 s. Each rate is divided by
the mean of the two rates around it, so that other load of the machine counts for both.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import run_planaria
from planaria.node.run_file import loads, override
from planaria_lab.bench.rows import keep
from planaria_lab.bench.swarm import Lines, swarm

STAGES = 2
FSYNC = 5.0  # seconds
ROUNDS = 10
SECONDS = 15.0  # of each part of a round
GOAL = 0.95
PLACES = {"body node": "1.0", "stage 0": "0.0"}
RUN = f"""
name = "slow-disk"
steps = 1000000
[model]
preset = "tiny"
stages = {STAGES}
[training]
optimizer = "adamw"
batch = 16
microbatch = 4
validation_microbatches = 0
[saves]
every = 2
[swarm]
start_grace = 2
"""


def run_on_disk(folder: Path, arguments: list[str]) -> None:
    """Run `planaria ARGUMENTS...`. If they begin with a slot, its fsync takes FSYNC seconds more
    while `folder` has a file of that name."""
    if arguments[0] in PLACES.values():
        slow, fsync = folder / arguments[0], os.fsync

        def slowly(descriptor: int) -> None:
            if slow.exists():
                time.sleep(FSYNC)
            fsync(descriptor)

        vars(os)["fsync"] = slowly
        arguments = [*arguments[1:], "--restart", "no"]  # a restart would make the disk fast
    run_planaria(arguments)


def rate(look: Callable[[], Lines]) -> float:
    """Return the committed steps per second of the next `SECONDS` seconds."""
    began = time.time()
    time.sleep(SECONDS)
    steps = [line for line in look() if line["time"] >= began]
    return len(steps) / (time.time() - began)


def main() -> None:
    ratios: dict[str, list[float]] = {place: [] for place in PLACES}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        prepare(Recipe([str(SHIPPED)]), folder / "data")
        run = resolve(override(loads(RUN), data__path=str(folder / "data")))
        nodes = {
            f"{stage}.0": [
                *([f"{stage}.0"] if f"{stage}.0" in PLACES.values() else []),
                *("node", "--stage", str(stage), "--threads", "1"),
                *("--save-dir", str(folder / f"saves-{stage}")),
            ]
            for stage in range(STAGES + 1)
        }
        with swarm(run, partial(run_on_disk, folder), folder / "run", nodes) as look:
            while len(look()) < 10:
                time.sleep(0.2)
            fast, slow = [rate(look)], []
            for place, slot in [*PLACES.items()] * ROUNDS:
                (folder / slot).touch()
                slow.append((place, rate(look)))
                (folder / slot).unlink()
                fast.append(rate(look))
    for (place, slowed), beside in zip(slow, pairwise(fast), strict=True):
        ratios[place].append(slowed / statistics.mean(beside))
    for place, measured in ratios.items():
        low, middle, high = statistics.quantiles(measured, n=4)
        print(
            f"steps/s, {place} with a disk of {FSYNC:g} s an fsync / without: {middle:.3f} "
            f"(quartiles {low:.3f} to {high:.3f}; {statistics.mean(fast):.1f} steps/s without)"
        )
        keep("slow_disk", place=place, ratios=measured, steps_per_second=fast)
    print(f"goal: {GOAL}")


if __name__ == "__main__":
    main()

"""Time that the loss of a replica within a step costs, if the step goes on or is tried again.

A swarm loses three replicas, one after the other, by SIGKILL, each after half of its microbatches
of a step. This is done with each setting of `recovery.masking`, and with three and with four
replicas per stage. The cost is the time of that step from commit to commit, less the median of the
steps around it, in steps. It is divided by the lost replica's share of the step's microbatches,
which is one over the number of replicas. A stage needs that time to compute them again at the speed
of one replica.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
from pathlib import Path

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import run_planaria
from planaria.node.run_file import loads, override
from planaria_lab.bench.rows import keep
from planaria_lab.bench.swarm import train

STAGES, REPLICAS = 2, (3, 4)
LOST = {"1.1": 6, "2.0": 12, "1.0": 18}  # slot -> step in which it is lost
AROUND = 4  # steps before and after a loss that give the usual time
GOAL = 1.5
RUN = f"""
name = "loss"
steps = 24
[model]
preset = "mini"
stages = {STAGES}
context = 128
[training]
optimizer = "adamw"
batch = 48
microbatch = 2
validation_microbatches = 0
"""


def run_half(arguments: list[str]) -> None:
    """Run `planaria ARGUMENTS...`. With a number before them, die in the middle of that step."""
    from planaria.node.transaction.attempt import Attempt

    if not arguments[0].isdigit():
        run_planaria(arguments)
        return
    count, step = Attempt._count, int(arguments.pop(0))

    def dying(self: Attempt, microbatch: int, seconds: float) -> None:
        if self.begin.step == step and len(self.applied) >= len(self._plan.mine) // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        count(self, microbatch, seconds)

    Attempt._count = dying  # type: ignore[method-assign]
    run_planaria(arguments)


def costs(masking: str, replicas: int, data: Path, out: Path) -> tuple[list[float], float, int]:
    """Train a swarm; return the cost of each loss in steps, the median seconds of a step, and the
    number of aborted attempts."""
    changes = {"recovery__masking": masking, "swarm__replicas": replicas}
    run = resolve(override(loads(RUN), data__path=str(data), **changes))
    lines = train(run, run_half, out, {slot: [str(step)] for slot, step in LOST.items()})
    times = {line["step"]: line["time"] for line in lines}
    took = {step: times[step] - times[step - 1] for step in times if step - 1 in times}
    events = [json.loads(line) for path in (out / "logs").glob("events-*") for line in path.open()]
    aborted = sum(event["kind"] == "aborted" for event in events)
    lost = [cost(took, step) for step in LOST.values()]
    return lost, statistics.median(took.values()), aborted


def cost(took: dict[int, float], lost_in: int) -> float:
    """Return the time of the step `lost_in` above the usual time, in usual steps."""
    around = [took[lost_in + offset] for offset in range(-AROUND, AROUND + 1) if offset]
    usual = statistics.median(around)
    return (took[lost_in] - usual) / usual


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        prepare(Recipe([str(SHIPPED)]), data)
        for replicas in REPLICAS:
            _compare(replicas, data, Path(directory))


def _compare(replicas: int, data: Path, folder: Path) -> None:
    steps_lost = {}
    for masking in ("abort", "reassign"):
        out = folder / f"{masking}-{replicas}"
        lost, seconds, aborted = costs(masking, replicas, data, out)
        steps_lost[masking] = statistics.mean(lost)
        each = ", ".join(f"{cost:.2f}" for cost in lost)
        print(
            f"{replicas} replicas, {masking}: {steps_lost[masking]:.2f} steps a loss ({each}), "
            f"{aborted} aborted; {seconds:.2f} s a step",
            flush=True,
        )
        figures = {"steps_a_loss": lost, "seconds_a_step": seconds, "aborted": aborted}
        keep("replica_loss", masking=masking, replicas=replicas, **figures)
    share = steps_lost["reassign"] * replicas
    print(f"ratio reassign / abort: {steps_lost['reassign'] / steps_lost['abort']:.2f}")
    print(f"ratio reassign / the lost replica's share of a step: {share:.2f} (goal {GOAL})")


if __name__ == "__main__":
    main()

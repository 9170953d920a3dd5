"""Tokens per second of a swarm on one machine, over those of one process with the same cores, and
of PyTorch's own pipeline engine.

All three train the same model on the same windows; a microbatch takes half a second or more in one
process. They take turns of one step, in alternating order. While one computes, the processes of the
others are stopped (SIGSTOP), so that other load of the machine is much the same for all. The result
is the median of the turns' ratios. It takes minutes, and prints each figure as soon as it has it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from planaria.node.data.corpus import Corpus
from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import run_planaria
from planaria.node.run_file import RunFile, loads, override
from planaria_lab.bench.rows import keep
from planaria_lab.bench.stage import seconds
from planaria_lab.bench.swarm import Living, swarm
from planaria_lab.bench.torch_pipeline import torch_pipeline
from planaria_lab.convergence.training import TrainingSwarm

STAGES, CONTEXT = 4, 256
CPU = torch.device("cpu")
ONE, SWARM, TORCH = "one process", "swarm", "torch.distributed.pipelining"
ROUNDS = 5
LOOK = 0.005  # seconds
GOAL, GOAL_OF_TORCH = 0.95, 1.0
RUN = f"""
name = "bench"
steps = 1000
[model]
preset = "midi"
stages = {STAGES}
context = {CONTEXT}
[training]
optimizer = "adamw"
batch = 96
microbatch = 8
validation_microbatches = 0
[swarm]
start_grace = 2
"""


class Trains(Protocol):
    def step(self) -> float:
        """Train one step, and return its seconds."""
        ...


class OneProcess:
    """One process that trains with all threads of torch."""

    def __init__(self, run: RunFile, corpus: Corpus, device: torch.device) -> None:
        self._swarm, self._device = TrainingSwarm(run, corpus, device=device), device

    def step(self) -> float:
        return seconds(self._swarm.step, self._device)


class Processes:
    """Processes that are stopped except during their steps. The time from a step's commit until
    they are stopped counts for the next step."""

    def __init__(self, living: Living) -> None:
        self._living = living
        self._seconds = 0.0  # of the step in progress
        self._steps = self._await(1)
        living.stand_still()

    def step(self) -> float:
        resumed = time.time()
        self._living.go_on()
        self._steps = self._await(self._steps + 1)
        committed = self._living()[self._steps - 1]["time"]
        self._living.stand_still()
        seconds = self._seconds + committed - resumed
        self._seconds = time.time() - committed
        return float(seconds)

    def _await(self, steps: int) -> int:
        """Wait until at least `steps` steps are committed, and return their number."""
        while (steps_now := len(self._living())) < steps:
            time.sleep(LOOK)
        return steps_now


def turns(trainers: dict[str, Trains]) -> Iterator[dict[str, float]]:
    """Yield for each round the seconds of a step of each trainer. The order is reversed after each
    round."""
    order = list(trainers)
    for trainer in trainers.values():
        trainer.step()  # first steps are slow, and not counted
    for _ in range(ROUNDS):
        yield {name: trainers[name].step() for name in order}
        order.reverse()


def ratio(rounds: list[dict[str, float]], name: str, reference: str) -> float:
    """Return the median ratio of tokens per second, those of `name` over those of `reference`."""
    return statistics.median(turn[reference] / turn[name] for turn in rounds)


def main() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        corpus, _ = prepare(Recipe([str(SHIPPED)]), out / "data")
        run = resolve(override(loads(RUN), data__path=str(out / "data")))
        with (
            swarm(run, run_planaria, out / "swarm", one_each(run, CPU)) as ours,
            torch_pipeline(run, out / "torch") as theirs,
        ):
            starters: dict[str, Callable[[], Trains]] = {
                ONE: lambda: OneProcess(run, corpus, CPU),
                SWARM: lambda: Processes(ours),
                TORCH: lambda: Processes(theirs),
            }
            rounds = measure(starters)
    tokens = run.training.batch * CONTEXT
    keep(
        "pipeline",
        tokens_per_second=[{name: tokens / s for name, s in turn.items()} for turn in rounds],
    )
    print(f"ratio swarm / one process: {ratio(rounds, SWARM, ONE):.2f} (goal {GOAL})")
    print(f"ratio swarm / {TORCH}: {ratio(rounds, SWARM, TORCH):.2f} (goal {GOAL_OF_TORCH})")


def one_each(run: RunFile, device: torch.device) -> dict[str, list[str]]:
    """Return the arguments of one node per stage, by slot, all on this device."""
    arguments = ["--threads", "1", "--cloud", "none", "--device", str(device)]
    stages = range(run.model.body_stages + 1)
    return {str(stage): ["node", "--stage", str(stage), *arguments] for stage in stages}


def measure(starters: dict[str, Callable[[], Trains]]) -> list[dict[str, float]]:
    """Return for each round the seconds of a step of each trainer. A trainer is started after the
    one before has been stopped."""
    rounds = []
    for turn in turns({name: begin() for name, begin in starters.items()}):
        rounds.append(turn)
        print("   ".join(f"{name}: {s:.2f} s a step" for name, s in turn.items()), flush=True)
    return rounds


if __name__ == "__main__":
    main()

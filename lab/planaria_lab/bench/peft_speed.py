"""Tokens per second of a swarm that trains adapters on one machine, over those of peft in one
process with the same cores: `python -m planaria_lab.bench.peft_speed [--microbatch SAMPLES]`.

The model has the shapes of SmolLM2-135M and random weights. Both train LoRA of rank 16 on all seven
matrices of each layer, on the same samples: eight of 128 tokens per step. They take turns of one
step (see `pipeline`). The result is the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from planaria.node.data.mixture import Data, open_data
from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import run_planaria
from planaria.node.run_file import RunFile, loads, override
from planaria_lab.bench.frozen import MODELS, written
from planaria_lab.bench.peft_losses import losses_of_peft
from planaria_lab.bench.pipeline import CPU, Processes, Trains, measure, one_each, ratio
from planaria_lab.bench.rows import keep
from planaria_lab.bench.stage import seconds
from planaria_lab.bench.swarm import swarm

SWARM, PEFT, GOAL = "swarm", "peft", 1.0
RUN: Final = """
name = "bench"
steps = 1000
[model]
stages = 3
context = 128
[training]
batch = 8
validation_microbatches = 0
[training.lora]
rank = 16
[swarm]
start_grace = 2
"""


class Peft:
    """One process that trains with all cores."""

    def __init__(self, run: RunFile, corpus: Data) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._losses = losses_of_peft(run, corpus)

    def step(self) -> float:
        return seconds(lambda: next(self._losses), CPU)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatch", type=int, default=1, help="samples of a microbatch")
    microbatch = parser.parse_args().microbatch
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        prepare(Recipe([str(SHIPPED)], vocabulary=2048), out / "data")
        model = written(MODELS["SmolLM2-135M"], out / "data", out / "model")
        changes = {"model__from": str(model), "training__microbatch": microbatch}
        run = resolve(override(loads(RUN), data__path=str(out / "data"), **changes))
        with swarm(run, run_planaria, out / "swarm", one_each(run, CPU)) as ours:
            starters: dict[str, Callable[[], Trains]] = {
                SWARM: lambda: Processes(ours),
                PEFT: lambda: Peft(run, open_data(run.data)),
            }
            rounds = measure(starters)
    tokens = run.training.batch * run.config.context
    keep(
        "peft_speed",
        microbatch=microbatch,
        tokens_per_second=[{name: tokens / s for name, s in turn.items()} for turn in rounds],
    )
    print(f"ratio swarm / peft: {ratio(rounds, SWARM, PEFT):.2f} (goal {GOAL})")


if __name__ == "__main__":
    main()

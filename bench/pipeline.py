"""Tokens per second of a swarm on one machine against one process with the same cores.

The model is large enough that a microbatch takes at least half a second in one process. Both train
the same windows; the swarm is `planaria up`, processes and sockets included; both are measured
from their first commit to their last, one after the other, twice. It takes minutes; each figure is
printed when it is there.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.rows import keep
from planaria.lab.convergence.training import train
from planaria.node.data.corpus import Corpus
from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.run_file import RunFile, dumps, loads, override

TEXT = Path(__file__).parent.parent / "corpus" / "austen"
STAGES, CONTEXT = 4, 256
RUN = f"""
name = "bench"
steps = 4
[model]
preset = "midi"
stages = {STAGES}
context = {CONTEXT}
[training]
batch = 96
microbatch = 8
validation_microbatches = 0
"""


def one_process(run: RunFile, corpus: Corpus) -> float:
    """Tokens per second, all cores in one process."""
    torch.set_num_threads(os.cpu_count() or 1)
    steps = train(run, corpus)
    next(steps)
    started = time.perf_counter()
    counted = sum(1 for _ in steps)
    tokens = counted * run.training.batch * CONTEXT
    return tokens / (time.perf_counter() - started)


def swarm(run: RunFile, out: Path) -> float:
    """Tokens per second of `planaria up`, from its ledger."""
    run_file = out.with_suffix(".toml")
    run_file.write_text(dumps(run))
    command = [sys.executable, "-m", "planaria", "up", str(run_file), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    tokens = sum(line["tokens"] for line in steps[1:])
    return float(tokens / (steps[-1]["time"] - steps[0]["time"]))


def main() -> None:
    alone, together = [], []
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        corpus, _ = prepare(Recipe([str(TEXT)]), data)
        run = override(loads(RUN), data__path=str(data))
        for repeat in range(2):
            alone.append(one_process(run, corpus))
            print(f"one process, {os.cpu_count()} cores: {alone[-1]:.0f} tokens/s", flush=True)
            together.append(swarm(run, Path(directory) / str(repeat)))
            print(
                f"swarm of {STAGES + 1} nodes, the same cores: {together[-1]:.0f} tokens/s",
                flush=True,
            )
    a, b = statistics.mean(alone), statistics.mean(together)
    print(f"ratio swarm / one process: {b / a:.2f} (goal 0.90)")
    keep("pipeline", tokens_per_second={"one process": alone, "swarm": together})


if __name__ == "__main__":
    main()

"""Difference between a run that is killed and resumed with another number of nodes, and an
uninterrupted run: `OUT=lab/results/elastic python -m planaria_lab.bench.elastic [SEEDS]`.

ECRL (section 9) names as further work to resume the state of N processes by M, under failures. Here
N and M are 2, 3, 5 and 8 nodes: stage 0 and a node for each body stage of the same eight layers.
For each pair, N nodes train until all processes, also the registry, get SIGKILL within a step. `up
--resume --stages` goes on with M nodes, these are killed too, and N nodes train to the end. A row
has the largest difference of a step's loss from the uninterrupted run's, and the number of steps
trained twice. It also has the seconds from each resume to the first commit, and the audit. A pair
that has a row already is not trained again.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any, Final, NamedTuple

from scipy.stats import t

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED
from planaria_lab.bench.rows import FOLDER, keep
from planaria_lab.saves.swarm import commits

NODES: Final = (2, 3, 5, 8)
STEPS: Final = 24
RUN: Final = """
name = "elastic"
steps = {steps}
seed = {seed}
[model]
preset = "tiny"
layers = 8
stages = {stages}
[data]
path = "{data}"
[training]
batch = 8
microbatch = 2
validation_microbatches = 0
[saves]
every = 1
"""
PR_SET_CHILD_SUBREAPER: Final = 36  # prctl(2)
LOOK: Final = 0.01
"""Seconds between two reads of the ledgers."""
DEADLINE: Final = 180.0
"""Seconds that the nodes have for their steps, from one start to the next kill or the end."""


class Trained(NamedTuple):
    """The results of a run, or of a part of it between two kills."""

    losses: dict[int, float]  # step -> nats a token; the newer loss if the step was trained twice
    twice: int  # steps trained twice
    waited: float  # seconds from the start of its processes to the first commit


def train(arguments: Sequence[str], out: Path, until: int | None) -> Trained:
    """Run `planaria up ARGUMENTS`, and kill it when the step `until` is committed; None: let it
    end. Raises RuntimeError."""
    before, began = commits(out), time.time()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "planaria", "up", *arguments, "--seats", "1", "--http", "none"]
    with (out.parent / f"{out.name}.log").open("a", encoding="utf-8") as log:
        swarm = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    while swarm.poll() is None:
        newest = max((line["step"] for line in commits(out) if line not in before), default=0)
        if until is not None and newest >= until:
            swarm.kill()  # all its processes die, too
        elif time.time() > began + DEADLINE:
            swarm.kill()
            raise RuntimeError(f"step {until or STEPS} was not committed; logs are in {out}")
        time.sleep(LOOK)
    with suppress(ChildProcessError):  # a dying node may still commit a step
        while os.waitpid(-1, 0):
            pass
    if until is None and swarm.returncode:
        raise RuntimeError(f"the run ended with status {swarm.returncode}; logs are in {out}")
    after = [line for line in commits(out) if line not in before]
    steps = {line["step"] for line in before}
    twice = sum(line["step"] in steps for line in after)
    return Trained({line["step"]: line["loss"] for line in after}, twice, after[0]["time"] - began)


def audit(out: Path) -> dict[str, int]:
    found = json.loads((out / "summary.json").read_text(encoding="utf-8"))["audit"]
    return {name: found[name] for name in ("duplicates", "missing", "extra")}


def never_stopped(run_file: Path, out: Path) -> dict[int, float]:
    """Return the losses of an uninterrupted run, by step."""
    return train([str(run_file), "--out", str(out)], out, None).losses


def there_and_back(first: int, other: int, seed: int, run_file: Path, out: Path) -> dict[str, Any]:
    """Train with `first` nodes, `other` nodes, and `first` nodes again, with two kills, and return
    the results."""
    chance = random.Random(f"{seed} {first} {other}")
    kills = chance.randint(5, 9), chance.randint(13, 17)
    resumes = [["--resume", str(out), "--stages", str(nodes - 1)] for nodes in (other, first)]
    begin, untils = [str(run_file), "--out", str(out)], (*kills, None)
    parts = [train(way, out, at) for way, at in zip((begin, *resumes), untils, strict=True)]
    losses = {step: loss for part in parts for step, loss in part.losses.items()}
    return {
        "losses": losses,
        "killed": kills,
        "twice": sum(part.twice for part in parts),
        "seconds": [part.waited for part in parts[1:]],
        "audit": audit(out),
    }


def difference(losses: dict[int, float], others: dict[int, float]) -> float:
    """Return the largest difference between two runs' losses of a step. Raises ValueError unless
    both have all steps."""
    if not list(range(1, STEPS + 1)) == sorted(losses) == sorted(others):
        raise ValueError(
            f"the runs have steps {sorted(losses)} and {sorted(others)}, not all of 1 to {STEPS}"
        )
    return max(abs(losses[step] - others[step]) for step in losses)


def measure(seed: int, pairs: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Train the uninterrupted runs of a seed, and yield a row for each pair of numbers of nodes."""
    with tempfile.TemporaryDirectory() as directory:
        out, run_files = Path(directory), {}
        prepare(Recipe([str(SHIPPED)], vocabulary=512), out / "data")
        for nodes in NODES:
            run_files[nodes] = out / f"{nodes}.toml"
            fields = {"steps": STEPS, "seed": seed, "stages": nodes - 1, "data": out / "data"}
            run_files[nodes].write_text(RUN.format(**fields), encoding="utf-8")
        whole = {n: never_stopped(file, out / f"whole-{n}") for n, file in run_files.items()}
        for first, other in pairs:
            run = there_and_back(first, other, seed, run_files[first], out / f"{first}-{other}")
            yield {
                "seed": seed,
                "nodes": [first, other],
                "difference": difference(run.pop("losses"), whole[first]),
                **run,
            }


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each pair: the largest difference, and the means over the seeds of the other
    figures with their 95 % confidence intervals (Student's t)."""
    yield "| nodes | seeds | difference | first commit after, s | steps twice |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for pair in permutations(NODES, 2):
        of_pair = [row for row in rows if row["nodes"] == [*pair]]
        if not of_pair:
            continue
        apart = max(row["difference"] for row in of_pair)
        waits = interval([row["seconds"][0] for row in of_pair])
        twice = interval([row["twice"] / len(row["killed"]) for row in of_pair])
        to = f"{pair[0]} to {pair[1]}"
        yield f"| {to} | {len(of_pair)} | {apart:.0e} | {waits} | {twice} |"


def interval(values: Sequence[float]) -> str:
    """Format the mean and half of its 95 % confidence interval."""
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return f"{mean:.1f}"
    half = t.ppf(0.975, count - 1) * statistics.stdev(values) / math.sqrt(count)
    return f"{mean:.1f} ± {half:.1f}"


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # so that `train` can wait for all processes
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    path = Path(os.environ.get("OUT") or FOLDER) / "elastic.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["seed"], *row["nodes"]) for row in rows}
    for seed in range(seeds):
        pairs = [pair for pair in permutations(NODES, 2) if (seed, *pair) not in done]
        for row in measure(seed, pairs) if pairs else ():
            keep("elastic", **row)
            rows.append(row)
            print(f"seed {seed}, {row['nodes']}: audit {row['audit']}", flush=True)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()

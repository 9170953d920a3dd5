"""Memory and seconds per step of sixty node processes on this machine, and the cost of ten losses.

Ten stages of six replicas train the smallest model. Ten nodes, drawn from a seed, get SIGKILL in
the middle of steps drawn from it, too. The others go on, and the ledger must have every sample
once. The reference is a swarm with one node per stage in the same run, which computes the same in a
sixth of the processes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from random import Random

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED, resolve
from planaria.node.machine.processes import run_planaria
from planaria.node.report.ledger import audit
from planaria.node.run_file import RunFile, loads, override
from planaria_lab.bench.rows import keep
from planaria_lab.bench.swarm import LOOK, Living, Watched, swarm

STAGES = 10  # with stage 0
REPLICAS = 6
LOSSES = 10
SEED = 0
STEPS = 80
QUIET = 10  # steps before the first loss, and after the last one
RUN = f"""
name = "many"
steps = {STEPS}
[model]
preset = "tiny"
stages = {STAGES - 1}
layers = {STAGES - 1}
[training]
optimizer = "adamw"
batch = 48
microbatch = 2
validation_microbatches = 0
[swarm]
replicas = {REPLICAS}
"""


def nodes(replicas: int) -> dict[str, list[str]]:
    """Map the slot of each node to its arguments."""
    arguments = ["--threads", "1", "--seats", "1", "--save-dir", "none"]
    return {
        f"{stage}.{number}": ["node", "--stage", str(stage), *arguments]
        for stage in range(STAGES)
        for number in range(replicas)
    }


def memory(look: Living) -> float:
    """Return the megabytes of all processes. Each counts its share of a shared page (PSS)."""
    summaries = [
        Path(f"/proc/{process}/smaps_rollup").read_text()
        for process in look.processes.running().values()
    ]
    lines = [line.split() for text in summaries for line in text.splitlines()]
    return sum(int(words[1]) for words in lines if words[0] == "Pss:") * 1024 / 1e6


def computed(look: Living) -> float:
    """Return the processor time of all running processes in seconds."""
    statuses = [
        Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        for process in look.processes.running().values()
    ]
    return sum(int(fields[11]) + int(fields[12]) for fields in statuses) / os.sysconf("SC_CLK_TCK")


def seconds_alone(run: RunFile, out: Path) -> float:
    """Return the median seconds of a step of a swarm with one node per stage."""
    few = resolve(override(run, swarm__replicas=1, steps=2 * QUIET))
    with swarm(few, run_planaria, out, nodes(1)) as look:
        lines = Watched(look, out / "logs").train(QUIET)
    return float(statistics.median(line["seconds"] for line in lines))


def train(run: RunFile, out: Path, one_each: float) -> None:
    drawn = Random(SEED)
    slots = nodes(REPLICAS)
    lost = drawn.sample(sorted(slots), LOSSES)
    at = sorted(drawn.sample(range(QUIET, STEPS - QUIET), LOSSES))
    began = time.monotonic()
    with swarm(run, run_planaria, out, slots, mortal=slots) as look:
        watched = Watched(look, out / "logs")
        watched.train(1)
        started, before = time.monotonic() - began, computed(look)
        quiet = watched.train(at[0] - 2)
        need, of_processors = memory(look), (computed(look) - before) / len(quiet)
        for step, slot in zip(at, lost, strict=True):
            while watched.committed()[-1]["step"] < step:
                time.sleep(LOOK)
            look.processes.kill(slot)
            print(f"node {slot} killed after step {step}", flush=True)
        while (lines := watched.committed())[-1]["step"] < STEPS:
            time.sleep(LOOK)
        aborted = len(watched.events("aborted"))
    usual = statistics.median(line["seconds"] for line in quiet)
    print(
        f"{len(slots)} nodes train {started:.0f} s after their start, and need {need / 1e3:.1f} "
        f"GB; {usual:.2f} s a step, {of_processors:.2f} of processors; ratio to a node for each "
        f"stage ({one_each:.2f} s): {usual / one_each:.2f}",
        flush=True,
    )
    samples = audit(out / "logs")
    wrong = samples.duplicates + samples.missing + samples.extra
    since = [line["seconds"] for line in lines if line["step"] > at[0]]
    print(
        f"{LOSSES} losses within {sum(since):.0f} s: {statistics.mean(since):.2f} s a step on "
        f"average, {max(since):.1f} the longest, {aborted} attempts aborted; ratio average / "
        f"before: {statistics.mean(since) / usual:.2f}; "
        f"of {samples.expected} samples {wrong} wrong",
        flush=True,
    )
    figures = {"nodes": len(slots), "started": started, "megabytes": need, "since": since}
    figures |= {"usual": usual, "one_each": one_each, "of_processors": of_processors}
    keep("many", **figures, aborted=aborted, expected=samples.expected, wrong=wrong)
    if not samples.exact:
        raise SystemExit(f"the ledger isn't exact: {samples}")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        prepare(Recipe([str(SHIPPED)]), folder / "data")
        run = override(loads(RUN), data__path=str(folder / "data"))
        one_each = seconds_alone(run, folder / "few")
        train(resolve(run), folder / "many", one_each)


if __name__ == "__main__":
    main()

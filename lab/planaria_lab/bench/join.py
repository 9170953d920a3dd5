"""What the join of a replica costs the others: the time in which nothing trains, by the step.

A swarm with two replicas of each stage trains as `planaria up` does it; one is killed, and the node
that replaces it joins while the others go on. The driver measures how long nothing trained because
of it: the gather that names the joiner, and from the moment in which all others were ready to the
commit with which it entered. What the loss itself has cost before counts as the loss's. That the
newcomer's own start-up makes steps slower, since it runs on the same cores, is no stall, nor is the
copy that its sources make of their state in memory.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from planaria.node.data.prepare import prepare
from planaria.node.data.recipe import Recipe
from planaria.node.launch.resolve import SHIPPED
from planaria.node.run_file import dumps, loads, override
from planaria_lab.bench.rows import keep

GOAL = 0.10  # of a step
SECONDS = 0.2  # or these, whichever is more
RUN = """
name = "join"
steps = 40
[model]
preset = "mini"
stages = 2
layers = 4
[training]
optimizer = "adamw"
batch = 32
microbatch = 4
validation_microbatches = 0
[swarm]
replicas = 2
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        data, out = Path(directory) / "data", Path(directory) / "out"
        prepare(Recipe([str(SHIPPED)]), data)
        run_file = Path(directory) / "join.toml"
        run_file.write_text(dumps(override(loads(RUN), data__path=str(data))))
        command = [
            sys.executable,
            "-m",
            "planaria",
            "up",
            str(run_file),
            "--out",
            str(out),
        ]
        subprocess.run([*command, "--kill", "1.1@5"], check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((out / "summary.json").read_text())
        lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    step = statistics.median(line["seconds"] for line in lines if "step" in line)
    for rebuild in summary["rebuilds"]:
        stall, copied = rebuild["stall_seconds"], rebuild["bytes"] / 1e6
        print(
            f"stage {rebuild['stage']}, {rebuild['method']}, {copied:.1f} MB: joined in "
            f"{rebuild['rebuild_seconds']:.2f} s, in {stall:.3f} s of which nothing trained; "
            f"a step takes {step:.3f} s"
        )
        print(f"ratio stall / step: {stall / step:.3f} (goal {GOAL:.2f}, or {SECONDS} s)")
        keep("join", step_seconds=step, **rebuild)
    print(f"attempts aborted: {summary['attempts']['aborted']} (by the loss itself)")


if __name__ == "__main__":
    main()

"""Time in which nothing trains because a replica joins, in steps.

`planaria up` trains a swarm with two replicas of each stage. One replica is killed, and its
replacement joins while the others go on. The driver measures the stall: the gather that names the
newcomer, and the time from when all others were ready to the commit with which it entered. The
stall by the loss itself is not included. Nor are slower steps because the newcomer starts on the
same cores, or because its sources copy their state in memory.
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

GOAL = 0.10  # stall, as a share of a step
SECONDS = 0.2  # stall, if that is more than the share
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

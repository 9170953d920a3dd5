"""A swarm of processes on this machine, trained to its run's end for a benchmark."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planaria.node.local.processes import PLANARIA, Processes, Work
from planaria.node.run_file import RunFile, dumps

DEADLINE = 900.0  # seconds


def train(
    run: RunFile, work: Work, out: Path, before: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """The lines of the ledger. Processes do `work`, each with the arguments of `planaria`, behind
    those that `before` has for its slot: only there one may end early. Raises SystemExit."""
    logs = out / "logs"
    logs.mkdir(parents=True)
    (out / "run.toml").write_text(dumps(run))
    processes = Processes(logs, {"OMP_NUM_THREADS": "1"}, PLANARIA, work)
    deadline = time.monotonic() + DEADLINE
    try:
        address = out / "address"
        registry = ["--run", str(out / "run.toml"), "--address-file", str(address)]
        processes.start("registry", ["bootstrap", "--listen", "127.0.0.1:0", *registry])
        while not address.exists():
            time.sleep(0.05)
        for stage in range((run.model.stages or 0) + 1):
            for replica in range(run.swarm.replicas):
                slot = f"{stage}.{replica}"
                where = ["--join", address.read_text().strip(), "--stage", str(stage)]
                files = ["--listen", "127.0.0.1:0", "--out", str(logs), "--threads", "1"]
                processes.start(slot, [*before.get(slot, ()), "node", *where, *files])
        while True:
            lines = _ledger(logs)
            if lines and lines[-1]["step"] == run.steps:
                return lines
            ended = [one for one in processes.ended() if one.slot not in before]
            if ended or time.monotonic() > deadline:
                raise SystemExit(f"no end after {DEADLINE:.0f} s, or ended: {ended}; see {logs}")
            time.sleep(0.2)
    finally:
        processes.kill_all()


def _ledger(logs: Path) -> list[dict[str, Any]]:
    """The ledgers' steps in order: several files where the driver has changed, each with a last
    line that may be half there."""
    text = "\n".join(path.read_text().rpartition("\n")[0] for path in logs.glob("ledger-*.jsonl"))
    lines = [line for line in map(json.loads, text.splitlines()) if "step" in line]
    return sorted(lines, key=lambda line: line["step"])

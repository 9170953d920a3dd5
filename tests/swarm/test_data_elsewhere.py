"""A node whose data lies on a web server trains as one that has it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from planaria.node.launch.resolve import resolve
from planaria.node.machine.processes import PLANARIA, Processes
from planaria.node.report.ledger import audit
from planaria.node.run_file import dumps
from tests.range_server import range_server
from tests.swarm.lines import Lines
from tests.swarm.small import small

DEADLINE = 300.0  # seconds; only a hanging test gets there
STEPS = 6


def trained(folder: Path, data: Path, said: list[str]) -> list[float]:
    """Losses by step, of a registry and two nodes. `said`: to that of stage 0; without the folder
    that the run file names, where that isn't said."""
    run = resolve(small(1, steps=STEPS, data__path=str(data)))
    folder.mkdir()
    (folder / "run.toml").write_text(dumps(run))
    (folder / "logs").mkdir()
    processes = Processes(folder / "logs", {"OMP_NUM_THREADS": "1"}, PLANARIA)
    file = folder / "address"
    try:
        at = ["--listen", "127.0.0.1:0", "--http", "none", "--address-file", str(file)]
        processes.start("registry", ["bootstrap", "--run", str(folder / "run.toml"), *at])
        until = time.monotonic() + DEADLINE
        while not file.exists():
            assert time.monotonic() < until, "the registry doesn't listen"
            time.sleep(0.02)
        if str(data) not in said:
            data.rename(data.with_name("gone"))
        for stage, more in enumerate((said, [])):
            join = ["node", "--join", file.read_text().strip(), "--stage", str(stage)]
            kept = ["--out", str(folder / "logs"), "--save-dir", "none", "--threads", "1"]
            processes.start(str(stage), [*join, *kept, *more])
        while len(losses := committed(folder / "logs")) < STEPS:
            assert time.monotonic() < until, processes.log("0").read_text()
            time.sleep(0.05)
    finally:
        processes.kill_all()
    assert audit(folder / "logs").exact
    return losses


def committed(logs: Path) -> list[float]:
    return [line["loss"] for line in Lines(logs).of("ledger-*.jsonl") if "step" in line]


def test_it_makes_the_same_steps(data: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(data, tmp_path / "here")
    here = trained(tmp_path / "a", copied, ["--data", str(copied)])
    with range_server(data) as served:
        there = trained(tmp_path / "b", copied, ["--data", served.url])
        assert served.sent("train-00000.bin") > 0
    assert there == here and len(here) == STEPS

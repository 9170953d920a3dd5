"""A node whose data is on a web server trains the same steps as a node with the data."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from planaria.node.data.corpus import Corpus
from planaria.node.launch.resolve import resolve
from planaria.node.machine.processes import PLANARIA, Processes
from planaria.node.report.ledger import audit
from planaria.node.run_file import dumps, override
from tests.range_server import range_server
from tests.reference import train
from tests.swarm.lines import Lines
from tests.swarm.small import small

DEADLINE = 300.0  # seconds; reached only by a hang
STEPS = 6


def test_it_makes_the_same_steps(data: Path, tmp_path: Path) -> None:
    run, logs, file = small(1, steps=STEPS), tmp_path / "logs", tmp_path / "address"
    resolved = dumps(resolve(override(run, data__path=str(data))))
    (tmp_path / "run.toml").write_text(resolved.replace(str(data), str(tmp_path / "nowhere")))
    logs.mkdir()
    processes = Processes(logs, {"OMP_NUM_THREADS": "1"}, PLANARIA)
    with range_server(data) as served:
        try:
            at = ["--listen", "127.0.0.1:0", "--http", "none", "--address-file", str(file)]
            processes.start("registry", ["bootstrap", "--run", str(tmp_path / "run.toml"), *at])
            until = time.monotonic() + DEADLINE
            while not file.exists():
                assert time.monotonic() < until, "the registry doesn't listen"
                time.sleep(0.02)
            for stage, more in enumerate((["--data", served.url], [])):
                join = ["node", "--join", file.read_text().strip(), "--stage", str(stage)]
                kept = ["--out", str(logs), "--save-dir", "none", "--threads", "1"]
                processes.start(str(stage), [*join, *kept, *more])
            while len(losses := committed(logs)) < STEPS:
                assert time.monotonic() < until, processes.log("0").read_text()
                time.sleep(0.05)
        finally:
            processes.kill_all()
        assert served.sent("train-00000.bin") > 0
    assert audit(logs).exact
    assert losses == pytest.approx(list(train(run, Corpus.open(data))), rel=1e-5)


def committed(logs: Path) -> list[float]:
    return [line["loss"] for line in Lines(logs).of("ledger-*.jsonl") if "step" in line]

"""Nodes die, by SIGKILL, at the worst moments: a commit in hand, in the middle of a rebuild."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.event_log import Tail
from node.ledger import audit
from node.processes import Processes
from node.resolve import resolve
from node.run_file import dumps, loads
from tests.swarm.deaths import run_planaria_until

RUN = """
steps = {steps}
[model]
preset = "tiny"
dim = 32
context = 32
stages = 4
[training]
batch = 8
microbatch = 1
warmup = 5
validation_microbatches = 2
[recovery]
policy = "checkfree+"
relearn_passes = 2
"""
DEADLINE = 180.0  # seconds; only a hanging swarm gets there


class Swarm:
    """A registry and the only node of each of stages 0..4. `deaths`: for each slot, what each of
    its processes, one after the other, is to die of."""

    def __init__(self, out: Path, data: Path, steps: int, deaths: dict[str, list[str]]) -> None:
        self.out, self.deaths = out, deaths
        self.deadline = time.monotonic() + DEADLINE
        run = loads(RUN.format(steps=steps) + f'[data]\npath = "{data}"')
        (out / "run.toml").write_text(dumps(resolve(run)))
        (out / "logs").mkdir()
        self.processes = Processes(
            out / "logs",
            {"OMP_NUM_THREADS": "1"},
            ["node.serve", "bootstrap.service"],
            run_planaria_until,
        )
        self.tails: dict[Path, Tail] = {}
        self.events: list[dict[str, Any]] = []
        self.killed: list[str] = []

    def train(self) -> None:
        """Starts everything; who has died is replaced at once. Returns when all is finished."""
        address = self.out / "address"
        arguments = ["--run", str(self.out / "run.toml"), "--listen", "127.0.0.1:0"]
        self.processes.start("registry", ["bootstrap", *arguments, "--address-file", str(address)])
        while not address.exists():
            self._pause()
        for stage in range(5):
            self._start(f"{stage}.0", address.read_text())
        while len({e["node"] for e in self.read("finished")}) < 5:
            for ended in self.processes.ended():
                assert ended.status == -signal.SIGKILL, self.processes.log(ended.slot).read_text()
                self.killed.append(ended.slot)
                self._start(ended.slot, address.read_text())
            self._pause()

    def _start(self, slot: str, address: str) -> None:
        planned = self.deaths.get(slot, [])
        death = planned.pop(0).split() if planned else []
        self.processes.start(
            slot,
            [
                *(*death, "node", "--join", address.strip(), "--stage", slot.partition(".")[0]),
                *("--listen", "127.0.0.1:0", "--out", str(self.out / "logs"), "--threads", "1"),
            ],
        )

    def _pause(self) -> None:
        assert time.monotonic() < self.deadline, f"hangs; died: {self.killed}"
        time.sleep(0.02)

    def read(self, kind: str) -> list[dict[str, Any]]:
        for path in (self.out / "logs").glob("events-*.jsonl"):
            self.events += self.tails.setdefault(path, Tail(path)).lines()
        return [event for event in self.events if event["kind"] == kind]


@pytest.fixture
def swarm(data: Path, tmp_path: Path) -> Iterator[Any]:
    started: list[Swarm] = []

    def start(steps: int, **deaths: str) -> Swarm:
        """Deaths by slot: `_2_0="commit@4"`; those of later processes behind a comma."""
        by_slot = {
            slot[1:].replace("_", "."): planned.split(",") for slot, planned in deaths.items()
        }
        started.append(Swarm(tmp_path, data, steps, by_slot))
        started[0].train()
        return started[0]

    yield start
    for one in started:
        one.processes.kill_all()


def test_deaths_between_ready_and_commit(swarm, tmp_path):
    """A body stage, an end stage, and twice the driver, which is all of stage 0."""
    done = swarm(20, _2_0="commit@4", _4_0="commit@8", _0_0="decide@12,commit@16")
    assert sorted(done.killed) == ["0.0", "0.0", "2.0", "4.0"]
    found = audit(tmp_path / "logs")
    assert found.exact
    assert found.steps == 20
    methods = {(event["stage"], event["method"]) for event in done.read("rebuilt")}
    assert methods == {(2, "checkfree+"), (4, "checkfree+"), (0, "stage0-copy")}


def test_deaths_in_the_middle_of_a_rebuild(swarm, tmp_path):
    """Stage 3 is lost; then its joiner, before it has put anything in place; then stage 4, while
    the next joiner fetches from it; then the driver, when both have their state."""
    done = swarm(16, _3_0="commit@6,place@1", _4_0="serve@5", _0_0="sync@5")
    assert sorted(done.killed) == ["0.0", "3.0", "3.0", "4.0"]
    found = audit(tmp_path / "logs")
    assert found.exact
    assert found.steps == 16
    lines = (tmp_path / "logs").glob("ledger-*.jsonl")
    assert max(json.loads(line).get("step", 0) for p in lines for line in p.open()) == 16

"""Tests of `planaria node` as started by hand: it restarts a node that crashed, and leaves when the
cloud takes its machine back."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planaria.node.cli import app
from planaria.node.launch.notices import ADDRESS_VARIABLE, MARGIN
from planaria.node.launch.own_folders import folder_options
from planaria.node.launch.resolve import resolve
from planaria.node.run_file import RunFile, dumps
from planaria.node.wire.seat_names import node_of
from tests.forked import Forked
from tests.metadata_service import metadata_service
from tests.swarm.lines import Lines
from tests.swarm.small import small

DEADLINE = 300.0  # seconds; reached only by a hang


class ByHand:
    """A registry and nodes of a run, each started by a command."""

    def __init__(self, folder: Path, run: RunFile) -> None:
        self.folder, self.lines = folder, Lines(folder)
        self.started: list[Forked] = []
        self.environment: dict[str, str] = {}
        self.start_registry("registry", run)

    def start_registry(self, name: str, run: RunFile, *options: str) -> None:
        """Start a registry, which replaces an earlier one."""
        file, address = self.folder / f"{name}.toml", self.folder / "address"
        file.write_text(dumps(resolve(run)))
        address.unlink(missing_ok=True)
        self.folders = folder_options(resolve(run))
        where = ["--listen", "127.0.0.1:0", "--address-file", str(address)]
        journal = ["--journal", str(self.folder / f"{name}.journal")]
        self.start(name, "bootstrap", "--run", str(file), *where, *journal, *options)
        self.until(address.exists)

    def start(self, name: str, *arguments: str, **how: Any) -> Forked:
        """Start `planaria ARGUMENTS...`; `how` as for Forked."""
        log = self.folder / f"{name}.log"
        own = self.environment  # passed on only by its own fork server
        how |= {"cwd": self.folder, "environment": own, "takes_all": bool(own)}
        process = Forked(log, *arguments, **how)
        self.started.append(process)
        return process

    def start_node(self, name: str, stage: int, *options: str, **how: Any) -> Forked:
        where = ["--join", self.address, "--stage", str(stage), "--out", str(self.folder)]
        return self.start(name, "node", *where, *self.folders, "--threads", "1", *options, **how)

    @property
    def address(self) -> str:
        """Return the registry's address."""
        return (self.folder / "address").read_text().strip()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return self.lines.events(kind)

    def at_stage(self, stage: int) -> list[int]:
        """Return the process ids of nodes that have served the stage, in order."""
        seats = [event["node"] for event in self.events("serving") if event["stage"] == stage]
        pids = {event["node"]: int(event["pid"]) for event in self.events("joined")}
        return [pids[node_of(seat)] for seat in seats]

    def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE
        while not (result := condition()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return result

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.wait(DEADLINE)


@pytest.fixture
def by_hand(data: Path, tmp_path: Path) -> Iterator[ByHand]:
    place = ByHand(tmp_path, small(steps=100_000, data__path=str(data)))
    yield place
    place.end()


def test_a_node_that_is_killed_comes_back_and_ends_when_its_supervisor_is_told_to(by_hand) -> None:
    by_itself = ["--seats", "1"]  # no node takes a second seat meanwhile
    supervisors = [by_hand.start_node(f"node-{n}", n, *by_itself) for n in range(3)]
    by_hand.until(lambda: by_hand.events("committed"))
    (pid,) = by_hand.at_stage(1)
    assert pid != supervisors[1].pid
    os.kill(pid, signal.SIGKILL)
    by_hand.until(lambda: by_hand.events("rebuilt"))
    at = by_hand.events("rebuilt")[0]["step"]
    by_hand.until(lambda: by_hand.events("committed")[-1]["step"] > at + 2)
    assert len(by_hand.at_stage(1)) == 2
    supervisors[1].send_signal(signal.SIGINT)
    assert supervisors[1].wait(DEADLINE) == 0
    (preempted,) = by_hand.events("preempted")
    assert preempted["node"] == by_hand.events("joined")[-1]["node"]


def test_a_run_of_nodes_that_were_told_where_to_join_and_the_data_can_be_audited(data, tmp_path):
    place = ByHand(tmp_path, small(steps=6, data__path=str(data)))
    try:
        join = (tmp_path / "address").read_text().strip()
        asked = ["node", "--join", join, *place.folders, "--restart", "no"]
        nodes = [place.start(f"node-{n}", *asked) for n in range(3)]
        place.until(lambda: place.lines.events("finished", "out/*/events-*.jsonl"))
        signals = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
        for node, number in zip(nodes, signals, strict=True):
            node.send_signal(number)
        assert [node.wait(DEADLINE) for node in nodes] == [0, 0, 0]
    finally:
        place.end()
    (out,) = (tmp_path / "out").iterdir()
    assert re.fullmatch("run-[0-9a-f]{8}", out.name)
    audited = CliRunner().invoke(app, ["audit", str(out)])
    assert audited.exit_code == 0, audited.output
    assert "6 committed steps of 6" in audited.output
    assert len(list(out.glob("events-*.jsonl"))) == 3
    model = ["export", str(out / "saves"), "--out", str(tmp_path / "model")]
    exported = CliRunner().invoke(app, model)
    assert "has the model of step 6" in exported.output, exported.output


def test_a_node_whose_machine_is_taken_back_leaves_in_the_time_that_is_left(by_hand) -> None:
    """The node finds out in which cloud it is, and isn't started again."""
    with metadata_service("aws") as service:
        by_hand.environment[ADDRESS_VARIABLE] = service.address
        node = by_hand.start_node("node-1", 1)
        by_hand.until(lambda: by_hand.events("serving"))
        end = datetime.now(UTC) + timedelta(seconds=30)
        service.action = {"action": "terminate", "time": end.strftime("%Y-%m-%dT%H:%M:%SZ")}
        assert node.wait(DEADLINE) == 0
    (preempted,) = by_hand.events("preempted")
    assert preempted["reason"].startswith("AWS: terminate at ")
    assert preempted["grace"] <= 30.0 - MARGIN
    assert len(by_hand.events("joined")) == 1
    assert "left: stopped by its owner" in (by_hand.folder / "registry.log").read_text()

"""Nodes die, by SIGKILL, at the worst moments: a commit in hand, in the middle of a rebuild."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planaria.node.data.corpus import Corpus
from planaria.node.report.ledger import audit
from tests.reference import train
from tests.swarm.deaths import Swarm
from tests.swarm.small import small


@pytest.fixture
def swarm(data: Path, tmp_path: Path) -> Iterator[Any]:
    started: list[Swarm] = []

    def start(steps: int, saves: Path | None = None, **deaths: str) -> Swarm:
        """Deaths by slot: `_2_0="commit@4"`; those of later processes behind a comma."""
        by_slot = {
            slot[1:].replace("_", "."): planned.split(",") for slot, planned in deaths.items()
        }
        run = small(
            stages=4,
            steps=steps,
            recovery__policy="checkfree+",
            recovery__relearn__passes=2,
            saves__every=4 if saves else None,
        )
        started.append(Swarm(tmp_path, data, run, by_slot, saves))
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
    assert methods == {(2, "checkfree+"), (4, "checkfree+"), (0, "snapshot")}


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


def test_a_death_right_after_a_save(swarm, data, tmp_path):
    """The only node of a body stage, then that of stage 0 with the driver: each comes back on its
    disk, which has the very step that the others stand at, and nothing is guessed."""
    done = swarm(16, tmp_path / "saves", _2_0="saved@5", _0_0="saved@9")
    assert sorted(done.killed) == ["0.0", "2.0"]
    found = {event["stage"]: event for event in done.read("rebuilding")}
    assert {(of, e["method"], e["exact"]) for of, e in found.items()} == {
        (2, "save", True),
        (0, "save", True),
    }
    for event in done.read("rebuilt"):
        assert event["step"] == {2: 4, 0: 8}[event["stage"]]
        assert [source["step"] for source in event["sources"]] == [event["step"]]
    assert audit(tmp_path / "logs").exact
    ledgers = (tmp_path / "logs").glob("ledger-*.jsonl")
    lines = [json.loads(line) for path in ledgers for line in path.open()]
    losses = {line["step"]: line["loss"] for line in lines if "step" in line}
    undisturbed = train(done.run, Corpus.open(data))
    assert [losses[step] for step in sorted(losses)] == pytest.approx(list(undisturbed), rel=1e-5)

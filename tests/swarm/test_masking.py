"""Replicas die in the middle of a step, by SIGKILL, or hang, and the step goes on."""

from __future__ import annotations

import json
import os
import signal
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

    def make(masking: str, steps: int, **deaths: str) -> Swarm:
        by_slot = {slot[1:].replace("_", "."): [death] for slot, death in deaths.items()}
        run = small(replicas=3, steps=steps, training__batch=12, recovery__masking=masking)
        started.append(Swarm(tmp_path, data, run, by_slot))
        return started[0]

    yield make
    for one in started:
        one.processes.kill_all()


def check_nothing_shows(done: Swarm, data: Path) -> None:
    """Every microbatch counted once, no attempt was tried again, and the losses are those of one
    process to which nothing has happened."""
    logs = done.out / "logs"
    found = audit(logs)
    assert found.exact
    assert found.steps == done.run.steps
    assert [event["reason"] for event in done.read("aborted")] == []
    lines = [json.loads(line) for path in logs.glob("ledger-*.jsonl") for line in path.open()]
    losses = {line["step"]: line["loss"] for line in lines if "step" in line}
    undisturbed = list(train(done.run, Corpus.open(data)))
    assert [losses[step] for step in sorted(losses)] == pytest.approx(undisturbed, rel=1e-5)


def test_a_death_at_any_moment_of_a_step_leaves_no_trace(swarm, data):
    """Before a forward pass, between it and the backward pass, after that, while averaging, and
    sources."""
    deaths = {"_1_0": "forward@3", "_2_0": "backward@6", "_1_1": "counted@9", "_2_1": "average@12"}
    done = swarm("reassign", 18, **deaths, _0_1="source@15", _0_2="source@15")
    done.train(replace=False)
    assert {"1.0", "2.0", "1.1", "2.1"} < set(done.killed)
    masked = [event["nodes"] for event in done.read("masked")]
    assert len([node for nodes in masked for node in nodes]) == len(done.killed)
    check_nothing_shows(done, data)


def test_deaths_at_once_and_of_who_makes_up_for_one(swarm, data):
    done = swarm("reassign", 9, _1_0="forward@5", _2_0="forward@5", _1_1="patch@5")
    done.train(replace=False)
    assert sorted(done.killed) == ["1.0", "1.1", "2.0"]
    assert sum(len(event["nodes"]) for event in done.read("masked")) == 3
    check_nothing_shows(done, data)


def test_what_a_node_that_hung_says_late_counts_for_nothing(swarm, data):
    """Others do its microbatches, it is evicted, and then it wakes up with all it had to say."""
    done = swarm("reassign", 16)
    hung: list[int] = []

    def masked() -> list[int]:
        """The steps that went on without it. Another node may be slow, too."""
        names = {event["node"] for event in done.read("joined") if event["pid"] in hung}
        return [
            e["step"] for e in done.read("masked") if {n.split("/")[0] for n in e["nodes"]} & names
        ]

    def hang_and_wake() -> None:
        if not hung and any(event["step"] >= 5 for event in done.read("committed")):
            hung.append(done.processes.running()["1.0"])
            os.kill(hung[0], signal.SIGSTOP)
        committed = [event["step"] for event in done.read("committed")]
        if len(hung) == 1 and set(masked()[:1]) & set(committed):
            os.kill(hung[0], signal.SIGCONT)
            hung.append(0)

    done.train(meanwhile=hang_and_wake)
    assert len(masked()) == 1
    check_nothing_shows(done, data)

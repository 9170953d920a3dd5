"""Nodes are killed with SIGKILL in the middle of a step, and the step goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planaria.node.data.corpus import Corpus
from planaria.node.report.ledger import audit
from planaria.node.wire.seat_names import node_of
from tests.reference import train
from tests.swarm.deaths import Swarm
from tests.swarm.small import small


def check_nothing_shows(done: Swarm, data: Path) -> None:
    """Check that every microbatch counted once, that no attempt was repeated, and that the losses
    are those of one undisturbed process."""
    logs = done.out / "logs"
    result = audit(logs)
    assert result.exact
    assert result.steps == done.run.steps
    assert [event["reason"] for event in done.read("aborted")] == []
    lines = [json.loads(line) for path in logs.glob("ledger-*.jsonl") for line in path.open()]
    losses = {line["step"]: line["loss"] for line in lines if "step" in line}
    undisturbed = list(train(done.run, Corpus.open(data)))
    assert [losses[step] for step in sorted(losses)] == pytest.approx(undisturbed, rel=1e-5)


def test_a_death_at_any_moment_of_a_step_leaves_no_trace(data: Path, tmp_path: Path) -> None:
    """Nodes die before a forward pass, between it and the backward pass, after that, while
    averaging, and as sources."""
    deaths = {"1.0": "forward@3", "2.0": "backward@6", "1.1": "counted@9", "2.1": "average@12"}
    deaths |= {"0.1": "source@15", "0.2": "source@15"}
    run = small(replicas=3, steps=18, training__batch=12, recovery__masking="reassign")
    done = Swarm(tmp_path, data, run, deaths)
    done.train()
    assert {"1.0", "2.0", "1.1", "2.1"} < set(done.killed)
    masked = [event["nodes"] for event in done.read("masked")]
    assert len([node for nodes in masked for node in nodes]) == len(done.killed)
    check_nothing_shows(done, data)


def test_who_has_its_twin_takes_the_seat_of_a_stages_only_node_in_the_same_step(
    data: Path, tmp_path: Path
) -> None:
    run = small(stages=3, steps=10, training__batch=8, recovery__policy="redundant")
    roomy = dict.fromkeys(("0.0", "1.0", "3.0"), 4)
    done = Swarm(tmp_path, data, run, {"2.0": "backward@4"}, seats=roomy)
    done.train()
    assert done.killed == ["2.0"]
    (taken,) = done.read("seat taken")
    assert (taken["step"], taken["stage"], taken["microbatches"]) == (4, 2, 8)
    before = {e["stage"]: node_of(e["node"]) for e in done.read("serving")[:4]}
    assert node_of(taken["by"]) == before[1], "at the stage before is its twin"
    rebuilt = [e["method"] for e in done.read("rebuilt") if e["stage"] == 2]
    assert rebuilt[0] == "redundant"
    check_nothing_shows(done, data)

"""The only nodes of stages are killed with SIGKILL, one after the other. No node replaces them, and
the remaining ones go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.node.data.corpus import Corpus
from planaria.node.report.ledger import audit_merged, merge
from planaria.node.wire.seat_names import was_added
from tests.reference import train
from tests.swarm.deaths import Swarm
from tests.swarm.small import small

STAGES, STEPS = 4, 22
DEATHS = {"2.0": "forward@6", "3.0": "backward@10", "4.0": "counted@14", "0.0": "decide@18"}
PROMISED = {
    "checkfree": ["checkfree", "checkfree", "interpolate", "snapshot"],
    "redundant": ["redundant"] * 4,
    "checkpoint": ["checkpoint"] * 4,
}
"""Policy -> the method for each of these losses, as in the table of docs/recovery.md. Policies that
rebuild by snapshot or by swapped order are in lab/tests/swarm/test_recovery.py."""
EXACT = ("redundant", "checkpoint")
"""Policies whose rebuilds don't change the losses."""


@pytest.mark.parametrize("policy", PROMISED)
def test_down_to_one_node_each_stage_comes_back_as_its_policy_promises(
    data: Path, tmp_path: Path, policy: str
) -> None:
    run = small(
        stages=STAGES,
        steps=STEPS,
        recovery__policy=policy,
        recovery__snapshot__fraction=1.0,
        recovery__snapshot__period=1,
        recovery__checkpoint__every=2,
        recovery__checkpoint__dir=str(tmp_path / "checkpoints"),
    )
    done = Swarm(tmp_path, data, run, DEATHS, seats={"1.0": STAGES + 1})
    done.train()
    assert done.killed == list(DEATHS)
    assert came_back(done) == list(zip([2, 3, 4, 0], PROMISED[policy], strict=True))
    merged = merge(sorted((done.out / "logs").glob("ledger-*.jsonl")))
    result = audit_merged(merged)
    assert (result.exact, result.steps) == (True, STEPS)
    if policy in EXACT:
        losses = [line["loss"] for line in merged.lines]
        assert losses == pytest.approx(list(train(run, Corpus.open(data))), rel=1e-5)


def came_back(done: Swarm) -> list[tuple[int, str]]:
    """Return stage and method of the first rebuild of each added seat, in order of time."""
    first: dict[str, tuple[int, str]] = {}
    for event in sorted(done.read("rebuilt"), key=lambda event: event["time"]):
        if was_added(event["node"]):
            first.setdefault(event["node"], (event["stage"], event["method"]))
    return list(first.values())

"""The only node of a stage dies in the middle of a step, by SIGKILL, and the step goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.node.wire.naming import node_of
from tests.swarm.deaths import Swarm
from tests.swarm.small import small
from tests.swarm.test_masking import check_nothing_shows


@pytest.mark.parametrize("death", ["forward@4", "backward@4", "counted@4"])
def test_who_has_its_twin_takes_its_seat_in_the_same_step(
    data: Path, tmp_path: Path, death: str
) -> None:
    run = small(stages=3, steps=10, training__batch=8, recovery__policy="redundant")
    roomy = dict.fromkeys(("0.0", "1.0", "3.0"), 4)
    done = Swarm(tmp_path, data, run, {"2.0": [death]}, seats=roomy)
    try:
        done.train(replace=False)  # who comes in its place might be there first
    finally:
        done.processes.kill_all()
    assert done.killed == ["2.0"]
    (taken,) = done.read("seat taken")
    assert (taken["step"], taken["stage"], taken["microbatches"]) == (4, 2, 8)
    before = {e["stage"]: node_of(e["node"]) for e in done.read("serving")[:4]}
    assert node_of(taken["by"]) == before[1], "at the stage before is its twin"
    rebuilt = [e["method"] for e in done.read("rebuilt") if e["stage"] == 2]
    assert rebuilt[0] == "redundant"
    check_nothing_shows(done, data)

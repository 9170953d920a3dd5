"""Tests of `planaria up` under faults. SIGKILL ends the only node of a stage, the driver, the
registry or all processes; SIGSTOP freezes a node; nodes come and go as in a trace."""

from __future__ import annotations

import os
import signal
import time

from planaria.node.report.ledger import audit
from tests.swarm.paced import pace_up
from tests.swarm.small import SMALL, small


def assert_clean(summary: dict, steps: int) -> None:
    assert summary["steps"] == steps
    assert summary["audit"]["expected"] == steps * SMALL.training.batch
    assert [summary["audit"][k] for k in ("duplicates", "missing", "extra")] == [0, 0, 0]
    assert summary["replicas_identical"]


def test_a_swarm_of_which_nobody_is_left_ends_at_once(up):
    swarm = up(small(stages=1, steps=100_000), "--no-replace", "--kill", "0@4", "--kill", "1@4")
    status, output = swarm.finish()
    assert status == 1
    assert "no node is left, and none will be started" in output
    assert [swarm.summary()["audit"][k] for k in ("duplicates", "extra")] == [0, 0]


def test_nodes_come_and_go_as_a_spot_trace_has_it(up, tmp_path):
    trace = tmp_path / "spot.csv"
    trace.write_text("0,add,a\n0,add,b\n9,add,c\n20000,remove,b\n40000,add,d\n")
    run = small(stages=2, steps=100_000)
    swarm = up(run, "--trace", str(trace), "--speedup", "10", before=pace_up)
    swarm.wait_until("who comes", lambda: len(swarm.events("started")) == 5)
    swarm.wait_until("the rebuild", lambda: swarm.events("rebuilt"))
    step = swarm.events("rebuilt")[-1]["step"]
    swarm.wait_until("more steps", lambda: swarm.committed() > step + 2)
    (killed,) = swarm.events("killed")
    *first, last = [event for event in swarm.events("started") if event["slot"] != "registry"]
    assert [event["slot"] for event in first] == ["0.0", "1.0", "2.0"]
    assert (killed["slot"], last["slot"]) == ("1.0", "1.0")
    assert swarm.events("committed")[0]["time"] < killed["time"] < last["time"]
    swarm.end(signal.SIGTERM)
    assert [swarm.summary()["audit"][k] for k in ("duplicates", "missing", "extra")] == [0, 0, 0]


def test_after_a_registry_restart_views_grow_and_losses_heal(up):
    swarm = up(small(stages=3, steps=100_000), before=pace_up)
    swarm.wait_until("step 5", lambda: swarm.committed() >= 5)
    os.kill(swarm.pid("registry"), signal.SIGKILL)
    swarm.wait_until("another registry", lambda: len(swarm.events("started")) >= 6)
    assert not swarm.events("aborted")
    before = swarm.events("committed")[-1]["step"]
    os.kill(swarm.pid("2.0"), signal.SIGKILL)
    swarm.wait_until("the rebuild", lambda: swarm.events("rebuilt"))
    rebuilt = swarm.events("rebuilt")[0]
    assert (rebuilt["stage"], rebuilt["method"]) == (2, "snapshot")
    swarm.wait_until("more steps", lambda: swarm.committed() > rebuilt["step"] + 3)
    assert rebuilt["step"] >= before
    swarm.end(signal.SIGINT)
    assert swarm.summary()["cost"]["policy"] == "auto"
    assert swarm.summary()["cost"]["parts"]["snapshot"]["extra_bytes"] > 0


def test_a_frozen_node_is_fenced_and_comes_back_as_a_new_one(up):
    swarm = up(small(steps=100_000), "--replicas", "2", before=pace_up)
    swarm.wait_until("step 5", lambda: swarm.committed() >= 5)
    frozen = swarm.pid("1.1")
    (name,) = {event["node"] for event in swarm.events("joined") if event["pid"] == frozen}
    joined = len(swarm.events("joined"))
    os.kill(frozen, signal.SIGSTOP)
    at_freeze = swarm.committed()
    swarm.wait_until("steps without it", lambda: swarm.committed() > at_freeze + 5)
    swarm.wait_until("its eviction", lambda: name not in swarm.members())
    os.kill(frozen, signal.SIGCONT)
    swarm.wait_until("its return", lambda: len(swarm.events("joined")) > joined)
    swarm.wait_until("its copy", lambda: swarm.events("rebuilt"))
    step = swarm.events("rebuilt")[-1]["step"]
    swarm.wait_until("steps with it", lambda: swarm.committed() > step + 5)
    swarm.end(signal.SIGTERM)
    summary = swarm.summary()
    assert [summary["audit"][k] for k in ("duplicates", "missing", "extra")] == [0, 0, 0]
    assert summary["replicas_identical"]
    assert summary["rebuilds"][-1]["method"] == "replica"


def test_a_loss_that_the_policy_cannot_heal_stops_a_strict_run_with_a_reason(up):
    run = small(stages=3, steps=1000, recovery__policy="checkfree", recovery__snapshot__first=0)
    swarm = up(run, "--kill", "1@6", "--strict")
    status, output = swarm.finish()
    assert status == 1
    assert "stage 1 is lost" in output
    assert "--strict" in output
    assert 5 <= swarm.summary()["steps"] < 100  # the kill is late on a busy machine


def methods(summary: dict) -> list[tuple[int, str]]:
    return [(row["stage"], row["method"]) for row in summary["rebuilds"]]


def test_after_a_power_cut_the_run_is_resumed(up, tmp_path):
    """SIGKILL for `planaria up` ends all of its processes."""
    saves = tmp_path / "saves"
    run = small(steps=30, saves__every=4)
    swarm = up(run, "--save-dir", str(saves), takes_all=True)
    swarm.wait_until("step 13", lambda: swarm.committed() >= 13)
    pids = [int(event["pid"]) for event in swarm.events("started")]
    swarm.process.kill()
    deadline = time.monotonic() + 120
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    so_far = audit(swarm.out)
    assert so_far.exact
    assert so_far.steps >= 13
    status, output = up(saves).finish()
    assert status == 0, output
    summary = swarm.summary()
    assert_clean(summary, 30)
    assert {method for _, method in methods(summary)} <= {"save"}
    (resuming,) = swarm.events("resuming")[:1]
    assert resuming["exact"]
    assert resuming["step"] >= 8


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

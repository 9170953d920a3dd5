"""Each of these is killed with SIGKILL in the middle of a step: a replica, the driver, the only
node of a body stage, the registry; and one node is frozen with SIGSTOP."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from bench.one_process import train
from node.corpus import Corpus
from node.run_file import loads

SMALL = """
steps = {steps}
[model]
preset = "tiny"
dim = 32
context = 32
stages = {stages}
[training]
batch = 8
microbatch = 1
warmup = 5
validation_microbatches = 2
"""


def assert_clean(summary: dict, steps: int) -> None:
    assert summary["steps"] == steps
    assert summary["audit"]["expected"] == steps * 8
    assert [summary["audit"][k] for k in ("duplicates", "missing", "extra")] == [0, 0, 0]
    assert summary["replicas_identical"]


def test_every_kind_of_kill_heals(up):
    """The driver, a replica, and a whole body stage, in one run."""
    swarm = up(
        SMALL.format(steps=30, stages=4),
        *("--replicas", "2", "--kill", "2@8", "--kill", "3.1@15", "--kill", "0.0@22"),
    )
    status, output = swarm.finish()
    assert status == 0, output
    summary = swarm.summary()
    assert_clean(summary, 30)
    methods = [(row["stage"], row["method"]) for row in summary["rebuilds"]]
    assert methods.count((2, "checkfree")) == 1
    assert {(3, "replica"), (0, "replica")} <= set(methods)
    assert {method for stage, method in methods if stage != 2} == {"replica"}
    for row in summary["rebuilds"]:
        assert row["bytes"] > 0
        assert row["sources"]
    assert summary["attempts"]["committed"] == 30
    assert summary["attempts"]["aborted"] >= 1
    assert (swarm.out / "loss.png").stat().st_size > 10_000


@pytest.mark.parametrize("replicas", [1, 2])
def test_without_failures_a_swarm_equals_one_process(up, data, replicas):
    toml = SMALL.format(steps=20, stages=2)
    swarm = up(toml, "--replicas", str(replicas))
    status, output = swarm.finish()
    assert status == 0, output
    lines = [json.loads(line) for line in (swarm.out / "ledger.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "step" in line]
    # The same arithmetic; only the order in which microbatches add up differs.
    assert losses == pytest.approx(list(train(loads(toml), Corpus.open(data))), rel=1e-5)
    assert_clean(swarm.summary(), 20)


def test_the_registry_can_be_killed(up):
    swarm = up(SMALL.format(steps=40, stages=2))
    swarm.wait_until("step 5", lambda: swarm.committed() >= 5)
    os.kill(swarm.pid("registry"), signal.SIGKILL)
    status, output = swarm.finish()
    assert status == 0, output
    summary = swarm.summary()
    assert_clean(summary, 40)
    assert summary["attempts"]["aborted"] == 0
    assert not summary["rebuilds"]


def test_after_a_registry_restart_views_grow_and_losses_heal(up):
    swarm = up(SMALL.format(steps=100_000, stages=3))
    swarm.wait_until("step 5", lambda: swarm.committed() >= 5)
    os.kill(swarm.pid("registry"), signal.SIGKILL)
    swarm.wait_until("another registry", lambda: len(swarm.events("started")) >= 6)
    before = swarm.events("committed")[-1]["step"]
    os.kill(swarm.pid("2.0"), signal.SIGKILL)
    swarm.wait_until("the rebuild", lambda: swarm.events("rebuilt"))
    rebuilt = swarm.events("rebuilt")[-1]
    assert (rebuilt["stage"], rebuilt["method"]) == (2, "checkfree")
    swarm.wait_until("more steps", lambda: swarm.committed() > rebuilt["step"] + 3)
    assert rebuilt["step"] >= before


def test_a_frozen_node_is_fenced_and_comes_back_as_a_new_one(up):
    swarm = up(SMALL.format(steps=100_000, stages=2), "--replicas", "2")
    swarm.wait_until("step 5", lambda: swarm.committed() >= 5)
    frozen = swarm.pid("1.1")
    joined = len(swarm.events("joined"))
    os.kill(frozen, signal.SIGSTOP)
    thaw = time.monotonic() + 20
    at_freeze = swarm.committed()
    swarm.wait_until("steps without it", lambda: swarm.committed() > at_freeze + 5)
    swarm.wait_until("20 s in the cold", lambda: time.monotonic() > thaw)
    os.kill(frozen, signal.SIGCONT)
    swarm.wait_until("its return", lambda: len(swarm.events("joined")) > joined)
    swarm.wait_until("its copy", lambda: swarm.events("rebuilt"))
    step = swarm.events("rebuilt")[-1]["step"]
    swarm.wait_until("steps with it", lambda: swarm.committed() > step + 5)
    swarm.process.send_signal(signal.SIGTERM)
    swarm.finish()
    summary = swarm.summary()
    assert [summary["audit"][k] for k in ("duplicates", "missing", "extra")] == [0, 0, 0]
    assert summary["replicas_identical"]
    assert summary["rebuilds"][-1]["method"] == "replica"


def test_losing_an_end_stage_stops_the_run_with_a_reason(up):
    swarm = up(SMALL.format(steps=1000, stages=3), "--kill", "1@6")
    status, output = swarm.finish()
    assert status == 1
    assert "stage 1 is lost" in output
    assert swarm.summary()["steps"] == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_leaves_no_process_behind(up, number):
    swarm = up(SMALL.format(steps=100_000, stages=2))
    swarm.wait_until("step 2", lambda: swarm.committed() >= 2)
    pids = [event["pid"] for event in swarm.events("started")]
    assert len(pids) == 4
    swarm.process.send_signal(number)
    status, output = swarm.finish()
    assert status != 0
    assert "Traceback" not in output
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

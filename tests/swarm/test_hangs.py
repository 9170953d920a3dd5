"""Tests of compute threads that hang while event loops run, as with a stuck device."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planaria.node.machine.hang_watch import FLOOR
from planaria.node.report.ledger import audit
from planaria.node.wire.seat_names import node_of
from tests.swarm.deaths import Swarm
from tests.swarm.in_process import LocalSwarm, OneSeat
from tests.swarm.small import small

HUNG = "1.0"


@pytest.fixture
def sick(data: Path, tmp_path: Path) -> Iterator[Swarm]:
    run = small(steps=40, training__batch=12, training__validation_microbatches=0)
    sick = Swarm(tmp_path, data, run, {HUNG: "forward~5"})
    yield sick
    sick.processes.kill_all()


def test_a_node_that_hangs_says_so_and_ends_when_it_is_told_to(sick: Swarm) -> None:
    sick.start()
    while not (hangs := sick.read("hangs")):
        sick.pause()
    assert hangs[0]["task"] == "forward"
    pid = sick.processes.running()[HUNG]
    os.kill(pid, signal.SIGTERM)
    ended: list[int] = []
    while not ended:
        ended = [process.status for process in sick.processes.ended() if process.slot == HUNG]
        sick.pause()
    assert ended == [0]
    assert "hangs" in sick.processes.log(HUNG).read_text()


LONE = small(
    stages=3,
    steps=100_000,
    training__batch=6,
    training__validation_microbatches=0,
    recovery__relearn__passes=0,
    swarm__progress=20,  # the machine may stand still for some seconds
)


@pytest.fixture
def hang() -> Iterator[Callable[[OneSeat], None]]:
    """Return a function that lets a node's compute thread hang from its next forward pass on."""
    over = threading.Event()

    def strike(node: OneSeat) -> None:
        def forward(*_: object) -> None:
            over.wait()

        node.seat.arithmetic.work.forward = forward

    yield strike
    over.set()


async def test_the_last_node_of_a_stage_that_hangs_is_named_at_once_and_comes_back_as_it_was(
    corpus, tmp_path, hang
):
    """It saves its state outside its compute thread before its process ends."""
    async with LocalSwarm(LONE, corpus, tmp_path, tmp_path / "saves") as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        sick, others = swarm.nodes[2, 0][0], [n for n, _ in swarm.nodes.values()]
        others.remove(sick)
        hang(sick)
        await swarm.until(lambda: sick.client.reported.stalled_seconds)
        assert sick.client.reported.stalled_seconds >= FLOOR
        await swarm.until(lambda: swarm.lines.events("held up"))
        assert not sick.over.done()
        await swarm.until(sick.over.done)
        assert "hang: " in sick.over.result()
        at = swarm.committed()
        await swarm.nodes.pop((2, 0))[1]
        swarm.start(2, 0)
        await swarm.until(lambda: swarm.committed() >= at + 3)
        assert not any(node.over.done() for node in others)
    assert {node_of(event["node"]) for event in swarm.lines.events("held up")} == {sick.node}
    rebuilt = swarm.lines.events("rebuilt")
    assert [(e["stage"], e["method"], e["step"]) for e in rebuilt] == [(2, "save", at)]
    assert audit(tmp_path).exact

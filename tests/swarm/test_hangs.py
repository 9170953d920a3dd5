"""Compute threads that hang in processes whose event loops live, as with a stuck device."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.swarm.deaths import Swarm

RUN = """
steps = 40
[model]
preset = "tiny"
dim = 32
context = 32
stages = 2
[training]
batch = 12
microbatch = 1
warmup = 5
validation_microbatches = 0
[swarm]
replicas = {replicas}
progress = {progress}
"""
HUNG = "1.0"


@pytest.fixture
def swarm(data: Path, tmp_path: Path) -> Iterator[Callable[..., Swarm]]:
    started: list[Swarm] = []

    def make(hang: str, replicas: int = 1, progress: int = 120) -> Swarm:
        toml = RUN.format(replicas=replicas, progress=progress)
        started.append(Swarm(tmp_path, data, toml, {HUNG: [hang]}))
        return started[0]

    yield make
    for one in started:
        one.processes.kill_all()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_node_that_hangs_says_so_and_ends_when_it_is_told_to(swarm, number) -> None:
    sick = swarm("forward~5")
    sick.start()
    while not (said := sick.read("hangs")):
        sick.pause()
    assert said[0]["task"] == "forward"
    pid = sick.processes.running()[HUNG]
    os.kill(pid, number)
    ended: list[int] = []
    while not ended:
        ended = [one.status for one in sick.processes.ended() if one.slot == HUNG]
        sick.pause()
    assert ended == [0]
    assert "hangs" in sick.processes.log(HUNG).read_text()

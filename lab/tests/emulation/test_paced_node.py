"""Tests of nodes with an emulated processor: the time of each pass, and which processes wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planaria.node.stage.work import TorchWork
from planaria_lab.emulation import paced_node
from planaria_lab.emulation.paced_node import Pace, arm, run_paced

PACE = Pace(forward=0.1, backward=0.2, head=0.5)


@pytest.mark.parametrize(
    ("kind", "position", "at_head", "seconds"),
    [
        ("activation", 0, False, 0.0),  # embedding
        ("activation", 1, False, 0.1),
        ("gradient", 3, True, 0.5),
        ("gradient", 2, False, 0.2),
    ],
)
def test_a_pass_has_the_seconds_of_its_kind(
    kind: str, position: int, at_head: bool, seconds: float
) -> None:
    assert PACE.of(kind, position, at_head) == seconds


def test_what_is_left_of_a_pass_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node sleeps until the pass's time is over, less decoding, computing and encoding. The sleep
    is reported as part of the pass's time."""
    now, slept, spent, sent = 100.0, [], [], []

    def takes(seconds: float) -> None:
        nonlocal now
        now += seconds

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 9))
        takes(seconds)

    clock = SimpleNamespace(perf_counter=lambda: now, sleep=sleep)
    monkeypatch.setattr(paced_node, "time", clock)
    monkeypatch.setattr(TorchWork, "_decode_valid", lambda work, *given: takes(0.02))
    monkeypatch.setattr(
        TorchWork, "_frame_onward", lambda _, *given: takes(0.01) or sent.append(given)
    )
    arm(PACE, monkeypatch.setattr)
    work: Any = SimpleNamespace(_spend=lambda visit, since: spent.append(round(now - since, 9)))
    visit = SimpleNamespace(position=1, at_head=False)
    for kind, computing in (("activation", 0.03), ("gradient", 0.5)):  # the second exceeds its pace
        TorchWork._decode_valid(work, visit, "peer", None)
        started = now
        takes(computing)
        TorchWork._frame_onward(work, kind, visit, "tensor", started)
        assert sent.pop() == (kind, visit, "tensor", started)
    assert slept == spent == [0.04, 0.0]


def test_only_nodes_are_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    armed: list[Pace] = []
    monkeypatch.setattr("planaria.node.machine.processes.run_planaria", ran.append)
    monkeypatch.setattr(paced_node, "arm", armed.append)
    run_paced(PACE, ["bootstrap", "--run", "x"])
    assert armed == []
    run_paced(PACE, ["node", "--join", "x"])
    assert armed == [PACE]
    assert ran == [["bootstrap", "--run", "x"], ["node", "--join", "x", "--restart", "no"]]

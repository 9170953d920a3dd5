"""Nodes whose processor is emulated: how long each pass takes, and who waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planaria.lab.emulation import paced_node
from planaria.lab.emulation.paced_node import Pace, arm, run_paced
from planaria.node.stage.work import TorchWork

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
    now, slept, sent = 100.0, [], []

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 9))

    clock = SimpleNamespace(perf_counter=lambda: now, sleep=sleep)
    monkeypatch.setattr(paced_node, "time", clock)
    monkeypatch.setattr(TorchWork, "_onward", lambda work, *given: sent.append(given))
    arm(PACE, monkeypatch.setattr)
    onward: Any = TorchWork._onward
    visit = SimpleNamespace(position=1, at_head=False)
    onward(None, "activation", visit, "tensor", 99.97)
    onward(None, "gradient", visit, "tensor", 99.5)  # it has taken longer than it should
    assert slept == [0.07, 0.0]
    assert sent == [
        ("activation", visit, "tensor", 99.97),
        ("gradient", visit, "tensor", 99.5),
    ]


def test_only_nodes_are_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    armed: list[Pace] = []
    monkeypatch.setattr("planaria.node.local.processes.run_planaria", ran.append)
    monkeypatch.setattr(paced_node, "arm", armed.append)
    run_paced(PACE, ["bootstrap", "--run", "x"])
    assert armed == []
    run_paced(PACE, ["node", "--join", "x"])
    assert armed == [PACE]
    assert ran == [["bootstrap", "--run", "x"], ["node", "--join", "x", "--restart", "no"]]

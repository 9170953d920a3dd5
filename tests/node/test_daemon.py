"""What a node has of its process and machine."""

from __future__ import annotations

from threading import Barrier
from types import SimpleNamespace
from typing import Any

from planaria.node.daemon import DaemonMachine
from planaria.node.report.wall_clock import WallClock

PATIENCE = 10.0
"""Seconds after which a seat that waits alone fails."""


async def test_seats_wait_for_a_hung_disk_together() -> None:
    waiting = Barrier(2)
    seat = SimpleNamespace(holdings=SimpleNamespace(finish_saves=lambda _: waiting.wait(PATIENCE)))
    seats = SimpleNamespace(agents={"1": seat, "2": seat})
    machine: Any = DaemonMachine.__new__(DaemonMachine)
    machine._node = SimpleNamespace(seats=seats, tell=print, tell_costs=print)
    machine._place = SimpleNamespace(experiment=None)
    machine.compute = SimpleNamespace(stop=lambda: True)
    machine.wall = WallClock(0.0)
    machine.files = []
    assert await machine.finish("", seconds=1.0) == ""

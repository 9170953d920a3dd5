"""How long a connection's round trip takes, by its heartbeats.

Each says when it left, and what the last one said that had come, later by as long as that waited
for it. So nobody's clock has to be like another's. The shortest one counts, once there are some:
they wait for whoever is busy.

Pure; `now` in seconds of any one clock.
"""

from __future__ import annotations

from typing import Final

from planaria.node.wire.frames import UINT64
from planaria.node.wire.stage_pb2 import Heartbeat

ENOUGH: Final = 8
"""Answers, of which one won't have waited."""


class RoundTrip:
    """Of one connection, at one of its ends."""

    def __init__(self) -> None:
        self._shortest = 0.0
        self._answers = 0
        self._said, self._came = 0, 0.0  # by the peer; 0: nothing

    @property
    def seconds(self) -> float:
        """0: not known yet."""
        return self._shortest if self._answers >= ENOUGH else 0.0

    def say(self, now: float) -> tuple[int, int]:
        """`sent` and `echo` of a heartbeat that leaves."""
        waited = _microseconds(now - self._came) if self._said else 0
        return _microseconds(now), min(self._said + waited, UINT64 - 1)

    def hear(self, heartbeat: Heartbeat, now: float) -> None:
        """One has come. What can't be doesn't count."""
        self._said, self._came = heartbeat.sent, now
        took = (_microseconds(now) - heartbeat.echo) * 1e-6
        if heartbeat.echo and took > 0:
            self._shortest = min(self._shortest, took) if self._answers else took
            self._answers += 1


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)

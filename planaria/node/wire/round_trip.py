"""Round-trip time of a connection, measured by its heartbeats.

Each heartbeat has its sending time, and echoes that of the last one received, plus the time since
then. So clocks needn't agree. The result is the shortest of several measurements, since a busy node
delays heartbeats.

Pure; `now` in seconds of any one clock.
"""

from __future__ import annotations

from typing import Final

from planaria.node.wire.frame_format import UINT64
from planaria.node.wire.stage_pb2 import Heartbeat

ENOUGH: Final = 8
"""Measurements, of which at least one is taken as undelayed."""


class RoundTrip:
    """Measures the round trip of one connection, at one of its ends."""

    def __init__(self) -> None:
        self._shortest = 0.0
        self._answers = 0
        self._peer_sent = 0  # the peer's last `sent`; 0: none
        self._received_at = 0.0  # when it came

    @property
    def seconds(self) -> float:
        """The round trip; 0: not known yet."""
        return self._shortest if self._answers >= ENOUGH else 0.0

    def say(self, now: float) -> tuple[int, int]:
        """The fields `sent` and `echo` of an outgoing heartbeat."""
        waited = _microseconds(now - self._received_at) if self._peer_sent else 0
        return _microseconds(now), min(self._peer_sent + waited, UINT64 - 1)

    def hear(self, heartbeat: Heartbeat, now: float) -> None:
        """Record a received heartbeat. Impossible values are ignored."""
        self._peer_sent, self._received_at = heartbeat.sent, now
        took = (_microseconds(now) - heartbeat.echo) * 1e-6
        if heartbeat.echo and took > 0:
            self._shortest = min(self._shortest, took) if self._answers else took
            self._answers += 1


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)

"""Decides when an idle link closes its connection.

A link dialled on demand, or no longer required by the newest view, would stay up as long as both
ends live. A long run would end with a connection between all pairs. So a link that neither end has
used for a while *rests*: both keep the session, without a connection. An end with something to send
dials, and both resume as after a broken connection (session.py). So nothing that was sent is lost.

Both ends must agree, so that neither takes the closed connection for a fault. Each heartbeat says
whether its sender could do without a connection. An end closes the connection when a heartbeat
shows that the peer has heard this from it.

Pure; `now` in seconds of any one clock.
"""

from __future__ import annotations

from typing import Final

NEEDED: Final = 0
SPARE: Final = 1
"""Value of a heartbeat: this end could do without a connection."""
AGREED: Final = 2
"""Value of a heartbeat: SPARE, and the peer has sent the same."""


class IdleEnd:
    """One end's need of a link. `spare`: nothing is queued, in flight or requested there."""

    def __init__(self, patience: float, now: float) -> None:
        """`patience`: seconds without use."""
        self._patience, self._used = patience, now
        self._peers = NEEDED  # the peer's last value

    def used(self, now: float) -> None:
        """Record that something but a heartbeat has been sent or received."""
        self._used = now

    def is_spare(self, spare: bool, now: float) -> bool:
        """Whether this end could do without a connection: it hasn't used it for a while."""
        return spare and now - self._used >= self._patience

    def say(self, spare: bool, now: float) -> int:
        """The value of the next heartbeat: whether this end, and the peer, needs the connection."""
        if not self.is_spare(spare, now):
            return NEEDED
        return AGREED if self._peers else SPARE

    def hear(self, value: int, spare: bool, now: float) -> bool:
        """Record a heartbeat's value. Returns whether to close the connection, and rest."""
        self._peers = value
        return value == AGREED and self.is_spare(spare, now)

    def rests(self, spare: bool, now: float) -> bool:
        """Whether a closed or dead connection was meant to close."""
        return bool(self._peers) and self.is_spare(spare, now)

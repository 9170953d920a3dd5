"""When a link that nobody needs gives its connection back.

A link that was dialled since something turned out to be needed, or that the newest view asks for
no more, would stay for as long as both ends live, and a long run would come to one of all to all.
So one that neither end has used for a while *rests*: both keep the session, and nothing carries it.
Who has something to send dials, and both go on where they were, as when a connection breaks
(session.py). So whatever crosses, nothing that was sent is lost.

Both have to know of it only so that neither takes it for a fault. Each heartbeat says whether this
end could do without a connection; who hears that the other knows that of this one hangs up.

Pure; `now` in seconds of any one clock.
"""

from __future__ import annotations

from typing import Final

NEEDED: Final = 0
SPARE: Final = 1
"""What a heartbeat says: this end could do without a connection."""
AGREED: Final = 2
"""... and has heard the same of the other."""


class IdleEnd:
    """What one end of a link knows. `spare`: nothing waits there, is on its way or is asked for."""

    def __init__(self, patience: float, now: float) -> None:
        """`patience`: seconds without use."""
        self._patience, self._used = patience, now
        self._peers = NEEDED  # as it has said last

    def used(self, now: float) -> None:
        """Something has been sent, or has come, but for heartbeats."""
        self._used = now

    def is_spare(self, spare: bool, now: float) -> bool:
        return spare and now - self._used >= self._patience

    def say(self, spare: bool, now: float) -> int:
        """For a heartbeat."""
        if not self.is_spare(spare, now):
            return NEEDED
        return AGREED if self._peers else SPARE

    def hear(self, said: int, spare: bool, now: float) -> bool:
        """A heartbeat has said this. Returns whether to hang up, and rest."""
        self._peers = said
        return said == AGREED and self.is_spare(spare, now)

    def rests(self, spare: bool, now: float) -> bool:
        """The connection is over, or carries nothing any more: whether that was to be."""
        return bool(self._peers) and self.is_spare(spare, now)

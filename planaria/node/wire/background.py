"""How much may be under way on a link for what travels in the background to leave as well.

Whatever is sent queues behind what was sent before: in the socket's buffer, and in front of the
link's narrowest place. Neither can be taken back or overtaken, so what is urgent waits for all of
it. This bounds it, after LEDBAT (RFC 6817): by how much a chunk took longer than the shortest of
late, from sending to acknowledgement, is how long it queued, and the window is what makes that
`TARGET`. It counts all kinds, so that the background takes what the others leave.

Pure; `now` in seconds of any one clock.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

TARGET: Final = 0.025
"""Seconds that what is urgent may wait for the background on a link that is otherwise empty; on one
with a long round trip an eighth of that, since times vary with it."""
FIRST: Final = 12 << 10
"""Bytes of the window at first, and of the smallest chunk: what TCP begins with (RFC 6928). With
more, its own slow start would look like a queue."""
LEAST, MOST = 48 << 10, 2 << 20
"""Bytes that the window doesn't fall below again, and doesn't exceed; MOST is what copies.py has
under way."""
PARTS: Final = 16
"""Chunks in a window, unless they would be too small."""
PERIOD: Final = 10.0
"""Seconds after which the shortest time is measured anew, with nothing of the background under way;
that of the period before counts, too. A path that has become longer isn't a queue."""
PROOF: Final = 0.2
"""Seconds since the window was last changed in which no chunk may have been quick, for it to become
smaller: a peer that has something else to do answers late now and then. In a quarter of them chunks
have to come: with a long round trip there is no answer before all of them are over."""
FASTEST: Final = 2.0
"""Times as large, or as small, as the window becomes in a round trip at most."""


def chunk_in_simulation(bytes_per_second: float, round_trip: float) -> int:
    """Bytes of a chunk behind which what is urgent waits, on average, as it does behind the
    background on such a link: half of them are still to be sent. On a slow link that is what the
    smallest window has more than fits into a round trip of seconds."""
    queued = max(TARGET * bytes_per_second, LEAST - round_trip * bytes_per_second)
    return round(max(FIRST, min(2 * queued, MOST)))


class _Sent(NamedTuple):
    end: int
    size: int
    at: float
    flight: int


class Background:
    """The window of one direction of one connection."""

    def __init__(self) -> None:
        self.window = FIRST
        self._open = FIRST  # of the window
        self._sent: dict[int, deque[_Sent]] = {}  # by frame
        self._shortest = self._former = math.inf  # of this period, and of the one before
        self._anew = -math.inf  # when the next one begins
        self._answered = -math.inf  # when something has been acknowledged
        self._changed = -math.inf  # when the window was last thought over
        self._first = math.inf  # when the first chunk came that has left since
        self._best = math.inf  # seconds that the quickest of these has taken
        self._met = False  # it has been as large as the link allows

    def room(self, flight: int, now: float) -> int:
        """Bytes that the next chunk may have when `flight` are under way; 0: it has to wait until
        more is acknowledged."""
        if now >= self._anew and self._sent:
            return 0
        if not flight:
            return FIRST  # alone, and with little of its own to carry, it takes the shortest time
        return self._chunk if flight + self._chunk <= min(self._open, self.window) else 0

    def sent(self, frame: int, end: int, size: int, flight: int, now: float) -> None:
        """The last `size` bytes of `frame` up to `end` have left, and `flight` in all are under way
        with them."""
        paused = not self._sent and now - self._answered > self._shortest
        if paused or now >= self._anew:  # all of the window at once would be a queue
            self._open = max(FIRST, self.window // 4)
        if now >= self._anew:
            self._former, self._shortest = self._shortest, math.inf
            self._anew = now + PERIOD
        self._sent.setdefault(frame, deque()).append(_Sent(end, size, now, flight))

    def acknowledged(self, frame: int, end: int, now: float) -> None:
        """The peer has the bytes of `frame` up to `end`; it may be of any kind."""
        sent = self._sent.get(frame, deque())
        last: _Sent | None = None
        while sent and sent[0].end <= end:
            last = sent.popleft()
            self._open += last.size
        if last is None:
            return
        if not sent:
            del self._sent[frame]
        self._answered = now
        self._think_over(last, max(now - last.at, 1e-6), now)
        self._open = min(self._open, self.window)

    def _think_over(self, chunk: _Sent, took: float, now: float) -> None:
        self._shortest = min(self._shortest, took)
        if chunk.at < self._changed:  # it tells of the window that was
            return
        self._first = min(self._first, now)
        self._best = min(self._best, took)
        shortest = min(self._shortest, self._former)
        wanted = shortest + max(TARGET, shortest / 8)
        full = chunk.flight + self._chunk > self.window  # else there is no telling of a larger one
        if took <= wanted and full:
            self._change(min(wanted / took, FASTEST) if self._met else FASTEST, now)
        elif now - self._changed >= PROOF and now - self._first >= PROOF / 4:
            self._met = self._met or self._best > wanted
            self._change(min(1.0, wanted / self._best), now)

    def _change(self, times: float, now: float) -> None:
        window = round(self.window * max(times, 1 / FASTEST))
        self.window = min(MOST, max(window, min(self.window, LEAST)))
        self._changed, self._first, self._best = now, math.inf, math.inf

    @property
    def _chunk(self) -> int:
        return max(FIRST, self.window // PARTS)

"""The window of background traffic on a link: bytes in flight that still let it send.

Each byte sent queues behind those sent before: in the socket's buffer, and before the bottleneck.
Queued bytes can't be recalled or overtaken, so urgent traffic waits for all of them. The window
bounds that queue, after LEDBAT (RFC 6817). The queueing delay is a chunk's time from sending to
acknowledgement, minus the shortest of recent ones. The window keeps that delay at `TARGET`. Bytes
of all kinds count, so that background traffic takes what the others leave.

Pure; `now` in seconds of any one clock.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

TARGET: Final = 0.025
"""Seconds that urgent traffic may wait for the background on a link that is otherwise empty. With a
long round trip it is an eighth of that trip, since times vary with it."""
FIRST: Final = 12 << 10
"""Bytes of the first window and of the smallest chunk: TCP's initial window (RFC 6928). With more,
TCP's own slow start would look like a queue."""
LEAST, MOST = 48 << 10, 2 << 20
"""Bounds of the window in bytes, once it has reached LEAST. MOST is what copies.py has in
flight."""
PARTS: Final = 16
"""Chunks in a window, unless they would be smaller than FIRST."""
PERIOD: Final = 10.0
"""Seconds after which the shortest time is measured anew, with no background bytes in flight. That
of the period before counts, too. A path that has become longer isn't a queue."""
PROOF: Final = 0.2
"""Seconds since the last change of the window without a quick chunk before it shrinks: a busy peer
acknowledges late now and then. Chunks must arrive during a quarter of them: with a long round trip
no acknowledgement comes before all of them are over."""
FASTEST: Final = 2.0
"""Largest factor by which the window grows or shrinks in a round trip."""


class _Sent(NamedTuple):
    end: int
    size: int
    at: float
    flight: int


class Background:
    """The window of background traffic in one direction of one connection."""

    def __init__(self) -> None:
        self.window = FIRST
        self._open = FIRST  # part of the window in use
        self._sent: dict[int, deque[_Sent]] = {}  # by frame
        self._shortest = self._former = math.inf  # seconds, of this period and of the one before
        self._anew = -math.inf  # when the next period begins
        self._answered = -math.inf  # time of the last acknowledgement
        self._changed = -math.inf  # time of the last decision about the window
        self._first = math.inf  # when the first chunk sent since then was acknowledged
        self._best = math.inf  # seconds of the quickest of these chunks
        self._met = False  # the window has reached the link's limit

    def room(self, flight: int, now: float) -> int:
        """Bytes of the next background chunk, if `flight` are in flight; 0: it has to wait."""
        if now >= self._anew and self._sent:
            return 0
        if not flight:
            return FIRST  # a small chunk alone takes the shortest time
        return self._chunk if flight + self._chunk <= min(self._open, self.window) else 0

    def sent(self, frame: int, end: int, size: int, flight: int, now: float) -> None:
        """Record that the last `size` bytes of `frame` up to `end` have left; `flight`: bytes in
        flight, with these."""
        paused = not self._sent and now - self._answered > self._shortest
        if paused or now >= self._anew:  # all of the window at once would be a queue
            self._open = max(FIRST, self.window // 4)
        if now >= self._anew:
            self._former, self._shortest = self._shortest, math.inf
            self._anew = now + PERIOD
        self._sent.setdefault(frame, deque()).append(_Sent(end, size, now, flight))

    def acknowledged(self, frame: int, end: int, now: float) -> None:
        """Record that the peer has the bytes of `frame`, of any kind, up to `end`."""
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
        self._adapt(last, max(now - last.at, 1e-6), now)
        self._open = min(self._open, self.window)

    def _adapt(self, chunk: _Sent, took: float, now: float) -> None:
        """Changes the window by the time that an acknowledged chunk took."""
        self._shortest = min(self._shortest, took)
        if chunk.at < self._changed:  # it measures the former window
            return
        self._first = min(self._first, now)
        self._best = min(self._best, took)
        shortest = min(self._shortest, self._former)
        wanted = shortest + max(TARGET, shortest / 8)
        full = chunk.flight + self._chunk > self.window  # only then a larger one may be useful
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

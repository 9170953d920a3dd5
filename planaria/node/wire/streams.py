"""How many streams carry a link, each on a TCP connection of its own.

A lost packet about halves a TCP connection's congestion window, which takes some round trips to
recover. Losses without a full queue limit one connection to about 1.2 / sqrt(loss) packets in a
round trip, whatever the link's capacity (Mathis et al., The macroscopic behavior of the TCP
congestion avoidance algorithm, 1997). Several carry as many times that. On a link that is full,
more of them carry no more.

So more streams are tried: twice as many, while a backlog lasts and the last doubling has paid. It
doubles, since a ninth stream beside eight gains less than the variation of a link's rate.

Pure; `now` in seconds of any one clock.
"""

from __future__ import annotations

from collections import deque
from typing import Final

MOST: Final = 16
BACKLOG: Final = 64 << 10
"""Bytes in flight from which, until all of them have arrived, the link limits the rate, and not
the data to send."""
SETTLING: Final = 0.25
"""Seconds of backlog in which a new stream reaches its speed."""
MEASURING: Final = 2.0
"""Seconds of backlog, after SETTLING, over which the rate is measured."""
GAIN: Final = 1.15
"""Least speedup over half the streams for which a doubling is kept."""
GAP: Final = 1.0
"""Seconds without acknowledgements after which measuring restarts: one end was stopped."""
REST: Final = 10.0
LONGEST_REST: Final = 640.0
"""Seconds from a useless doubling to the next try; they double with each useless one in a row."""
SHORTEST: Final = 1e-3
"""Seconds of a burst beyond a round trip below which its rate isn't known: clocks and event loops
are no more exact."""
RATES: Final = 9
"""Large bursts of which the fastest has the link's rate: busy nodes and slow starts delay most."""


class Streams:
    """Chooses the number of streams in one direction of a link."""

    def __init__(self) -> None:
        self.wanted = 1
        self.steady = 1  # streams that have proven faster
        self._began: float | None = None  # of the burst in flight; None: nothing is
        self._burst = 0  # bytes of it that have arrived
        self._large: deque[tuple[int, float]] = deque(maxlen=RATES)  # bytes and seconds of bursts
        self._rate = 0.0  # bytes a second with this number, or half of it; a recent mean
        self._trying = False  # `wanted` is twice the number that has proven its worth
        self._rest, self._rested = REST, 0.0  # length of the next rest; end of this one
        self._seconds, self._bytes = -SETTLING, 0  # of this measurement
        self._backlog, self._since = False, 0.0

    def rate(self, round_trip: float) -> float:
        """Bytes per second that the link has carried beyond its round trip; 0: not known."""
        rates = (size / max(SHORTEST, seconds - round_trip) for size, seconds in self._large)
        return max(rates, default=0.0)

    def update(self, under_way: int, acknowledged: int, now: float) -> None:
        """Take in the link's traffic: `under_way` bytes are in flight, and `acknowledged` have
        arrived since the last call."""
        self._measure_burst(under_way, acknowledged, now)
        if self._backlog and now - self._since > GAP:
            self._change(self.wanted)
        elif self._backlog:
            self._seconds += now - self._since
            if self._seconds > 0:
                self._bytes += acknowledged
        self._backlog = under_way >= BACKLOG or (self._backlog and under_way > 0)
        self._since = now
        if self._seconds >= MEASURING:
            self._large.append((self._bytes, self._seconds))
            self._decide(self._bytes / self._seconds, now)

    def begin_anew(self) -> None:
        """Restart on a new connection, maybe by another path. It keeps half of the streams: if
        their number breaks connections, that ends."""
        self.wanted, self.steady = max(1, self.wanted // 2), max(1, self.steady // 2)
        self._rate, self._trying, self._rest = 0.0, False, REST
        self._backlog, self._began = False, None
        self._large.clear()
        self._change(self.wanted)

    def _measure_burst(self, under_way: int, acknowledged: int, now: float) -> None:
        if self._began is None and under_way:
            self._began, self._burst = now, 0
        elif self._began is not None:
            self._burst += acknowledged
            if not under_way:
                if self._burst >= BACKLOG:
                    self._large.append((self._burst, now - self._began))
                self._began = None

    def _decide(self, rate: float, now: float) -> None:
        """Doubles, halves or keeps the number of streams by a newly measured rate."""
        faster = rate >= GAIN * self._rate
        if self._trying and not faster:
            self._trying, self._rested = False, now + self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
            self._change(self.wanted // 2)
            return
        if self._trying:
            self._rest, self.steady = REST, self.wanted
        elif faster or rate < self._rate / GAIN:  # a start, e.g. before a first loss
            self._rate = rate
            self._change(self.wanted)
            return
        self._rate = rate if self._trying else (self._rate + rate) / 2
        self._trying = self.wanted < MOST and now >= self._rested
        self._change(2 * self.wanted if self._trying else self.wanted)

    def _change(self, wanted: int) -> None:
        self.wanted = wanted
        self._seconds, self._bytes = -SETTLING, 0

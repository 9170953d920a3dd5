"""How many streams carry a link, each on a TCP connection of its own.

A lost packet about halves a TCP connection's congestion window, which takes some round trips to
recover. Losses without a full queue limit one connection to about 1.2 / sqrt(loss) packets in a
round trip, whatever the link's capacity (Mathis et al., The macroscopic behavior of the TCP
congestion avoidance algorithm, 1997). Several carry as many times that. On a link that is full,
more of them carry no more.

So more streams are tried: twice as many, while a backlog lasts and the last doubling has paid. It
doubles, since a ninth stream beside eight gains less than the variation of a link's rate.

On a long round trip, one connection loses time after pauses. After one of a few hundred
milliseconds Linux restarts with ten packets in flight (RFC 2861), and cubic takes a round trip for
each doubling. This is known, and trying would take long where bursts differ. So on a long link with
bursts after pauses, the number of streams follows from the burst. Together they have all of it in
flight at once, or as much of it as the path holds.

Pure; `now` in seconds of any one clock.
"""

from __future__ import annotations

import math
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
FIRST: Final = 12 << 10
"""Bytes that TCP has in flight at first, and after a pause (RFC 6928), less the overhead of
frames."""
LONG: Final = 0.1
"""Seconds of a round trip from which bursts count their round trips. With 0.05, chunks for so many
streams cost more processor time than they gain."""
LEAST_TIMEOUT: Final = 0.2
"""Seconds beyond a round trip that Linux waits for an acknowledgement, and after which a gap is a
pause."""
SHORTEST: Final = 1e-3
"""Seconds of a burst beyond a round trip below which its rate isn't known: clocks and event loops
are no more exact."""
BURSTS: Final = 3
"""Consecutive bursts that must want more streams than exist."""


RATES: Final = 9
"""Large bursts of which the fastest has the link's rate: busy nodes and slow starts delay most."""


class Bursts:
    """How many streams a link's bursts after a pause need, in one direction."""

    def __init__(self) -> None:
        self._wanted: deque[int] = deque(maxlen=BURSTS)  # by the last bursts
        self._under_way = False
        self._cold = False  # the burst in flight came after a pause
        self._began, self._ended, self._bytes = 0.0, -math.inf, 0
        self.large: deque[tuple[int, float]] = deque(maxlen=RATES)  # bytes and seconds of bursts

    @property
    def wanted(self) -> int:
        """The number of streams that bursts need: a power of two, as in `Streams`."""
        least = min(self._wanted) if len(self._wanted) == BURSTS else 1
        return min(1 << (least - 1).bit_length(), MOST)

    def update(self, under_way: int, acknowledged: int, round_trip: float, now: float) -> None:
        """Take in the link's traffic, as `Streams.update` does."""
        if self._under_way:
            self._bytes += acknowledged
            if not under_way:
                self._under_way, self._ended = False, now
                if self._bytes >= BACKLOG:
                    self.large.append((self._bytes, now - self._began))
                if self._cold and round_trip:
                    self._note(round_trip, now - self._began - round_trip)
        elif under_way:
            self._under_way, self._began, self._bytes = True, now, 0
            self._cold = now - self._ended > round_trip + LEAST_TIMEOUT

    def _note(self, round_trip: float, more: float) -> None:
        """Record a burst that took `more` seconds longer than a round trip."""
        held = self._bytes
        if more > 0:
            held = min(held, round(self._bytes / more * round_trip))  # the path's rate is no less
        self._wanted.append(max(1, -(-held // FIRST)) if round_trip >= LONG else 1)


class Streams:
    """Chooses the number of streams in one direction of a link."""

    def __init__(self) -> None:
        self.wanted = 1
        self.steady = 1  # streams that have proven faster for data without pauses
        self._bursts = Bursts()
        self._rate = 0.0  # bytes a second with this number, or half of it; a recent mean
        self._trying = False  # `wanted` is twice the number that has proven its worth
        self._rest, self._rested = REST, 0.0  # length of the next rest; end of this one
        self._seconds, self._bytes = -SETTLING, 0  # of this measurement
        self._backlog, self._since = False, 0.0

    def rate(self, round_trip: float) -> float:
        """Bytes per second that the link has carried beyond its round trip; 0: not known."""
        large = self._bursts.large
        rates = (size / max(SHORTEST, seconds - round_trip) for size, seconds in large)
        return max(rates, default=0.0)

    def update(
        self, under_way: int, acknowledged: int, now: float, round_trip: float = 0.0
    ) -> None:
        """Take in the link's traffic: `under_way` bytes are in flight, and `acknowledged` have
        arrived since the last call. `round_trip` in seconds; 0: not known."""
        self._bursts.update(under_way, acknowledged, round_trip, now)
        if self._bursts.wanted > self.wanted:
            self._rate, self._trying = 0.0, False
            self._change(self._bursts.wanted)
        if self._backlog and now - self._since > GAP:
            self._change(self.wanted)
        elif self._backlog:
            self._seconds += now - self._since
            if self._seconds > 0:
                self._bytes += acknowledged
        self._backlog = under_way >= BACKLOG or (self._backlog and under_way > 0)
        self._since = now
        if self._seconds >= MEASURING:
            self._bursts.large.append((self._bytes, self._seconds))
            self._decide(self._bytes / self._seconds, now)

    def begin_anew(self) -> None:
        """Restart on a new connection, maybe by another path. It keeps half of the streams: if
        their number breaks connections, that ends."""
        self.wanted, self.steady = max(1, self.wanted // 2), max(1, self.steady // 2)
        self._rate, self._trying, self._rest = 0.0, False, REST
        self._backlog, self._bursts = False, Bursts()
        self._change(self.wanted)

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

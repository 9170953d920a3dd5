"""By how many streams a link is carried, each on a TCP connection of its own.

A packet that is lost halves what a TCP connection has under way, or nearly so, and it takes some
round trips until that is what it was. Where packets are lost other than by a full queue, one
connection carries some 1.2 / sqrt(loss) packets in a round trip whatever the link could carry
(Mathis et al., The macroscopic behavior of the TCP congestion avoidance algorithm, 1997), and
several carry as many times that. Where the link is full, more of them carry no more.

So it is tried: twice as many, while a backlog lasts and the last doubling has paid. Doubling, since
of eight streams a ninth brings less than what a link's rate varies by.

Pure; `now` in seconds of any one clock.
"""

from __future__ import annotations

from typing import Final

MOST: Final = 16
BACKLOG: Final = 64 << 10
"""Bytes under way from which on, until they all have arrived, a link's rate is what carries it, not
what there is to send."""
SETTLING: Final = 0.25
"""Seconds of backlog in which a new stream finds its speed."""
MEASURING: Final = 2.0
"""Seconds of backlog for which the rate is measured then."""
GAIN: Final = 1.15
"""Times as fast as half the streams that so many have to be, to stay."""
GAP: Final = 1.0
"""Seconds without news after which a measure begins anew: one of both ends was stopped."""
REST: Final = 10.0
LONGEST_REST: Final = 640.0
"""Seconds from streams that brought nothing to the next try; twice as many with each in a row."""


class Streams:
    """Of one direction of a link."""

    def __init__(self) -> None:
        self.wanted = 1
        self._rate = 0.0  # bytes a second with so many, or with half of them; the mean of late
        self._trying = False  # `wanted` is twice what has proven to be worth it
        self._rest, self._rested = REST, 0.0  # the next one; when the next try may be
        self._seconds, self._bytes = -SETTLING, 0  # of this measure
        self._backlog, self._since = False, 0.0

    def look(self, under_way: int, acknowledged: int, now: float) -> None:
        """So many bytes are under way, and so many more have arrived since the last look."""
        if self._backlog and now - self._since > GAP:
            self._change(self.wanted)
        elif self._backlog:
            self._seconds += now - self._since
            if self._seconds > 0:
                self._bytes += acknowledged
        self._backlog = under_way >= BACKLOG or (self._backlog and under_way > 0)
        self._since = now
        if self._seconds >= MEASURING:
            self._decide(self._bytes / self._seconds, now)

    def begin_anew(self) -> None:
        """The connection broke, and there is another, by another way maybe. Half of the streams are
        wanted at once: where it is their number that breaks connections, it doesn't go on so."""
        self.wanted = max(1, self.wanted // 2)
        self._rate, self._trying, self._rest = 0.0, False, REST
        self._backlog = False
        self._change(self.wanted)

    def _decide(self, rate: float, now: float) -> None:
        faster = rate >= GAIN * self._rate
        if self._trying and not faster:
            self._trying, self._rested = False, now + self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
            self._change(self.wanted // 2)
            return
        if self._trying:
            self._rest = REST
        elif faster or rate < self._rate / GAIN:  # it has only begun: up to a first loss, say
            self._rate = rate
            self._change(self.wanted)
            return
        self._rate = rate if self._trying else (self._rate + rate) / 2
        self._trying = self.wanted < MOST and now >= self._rested
        self._change(2 * self.wanted if self._trying else self.wanted)

    def _change(self, wanted: int) -> None:
        self.wanted = wanted
        self._seconds, self._bytes = -SETTLING, 0

"""By how many streams a link is carried, each on a TCP connection of its own.

A packet that is lost halves what a TCP connection has under way, or nearly so, and it takes some
round trips until that is what it was. Where packets are lost other than by a full queue, one
connection carries some 1.2 / sqrt(loss) packets in a round trip whatever the link could carry
(Mathis et al., The macroscopic behavior of the TCP congestion avoidance algorithm, 1997), and
several carry as many times that. Where the link is full, more of them carry no more.

So it is tried: twice as many, while a backlog lasts and the last doubling has paid. Doubling, since
of eight streams a ninth brings less than what a link's rate varies by.

Where a round trip is long, pauses are what one connection can't make up for: after one of a few
hundred milliseconds Linux has ten packets under way again (RFC 2861), and with cubic it takes a
round trip for each doubling. That is known, and needn't be tried, which takes long where bursts
differ: a long link on which bursts come after pauses has as many streams as have a burst under way
at once, or as much of it as the path holds.

Pure; `now` in seconds of any one clock.
"""

from __future__ import annotations

import math
from collections import deque
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
FIRST: Final = 12 << 10
"""Bytes that TCP has under way at first, and after a pause (RFC 6928), less what frames take
beside."""
LONG: Final = 0.1
"""Seconds of a round trip from which on it counts how many of them a burst takes. With 0.05 the
processors' time that so many chunks take is more than what they gain."""
LEAST_TIMEOUT: Final = 0.2
"""Seconds that Linux waits longer for an answer than a round trip, and after which a pause is
one."""
BURSTS: Final = 3
"""In a row have to want more streams than there are."""


class Bursts:
    """Of one direction of a link: how many streams those would have that come after a pause."""

    def __init__(self) -> None:
        self._wanted: deque[int] = deque(maxlen=BURSTS)  # by the last ones
        self._under_way = False
        self._cold = False  # the one that is under way came after a pause
        self._began, self._ended, self._bytes = 0.0, -math.inf, 0

    @property
    def wanted(self) -> int:
        """A power of two, as `Streams` has."""
        least = min(self._wanted) if len(self._wanted) == BURSTS else 1
        return min(1 << (least - 1).bit_length(), MOST)

    def look(self, under_way: int, acknowledged: int, round_trip: float, now: float) -> None:
        """As that of `Streams`. `round_trip` in seconds; 0: not known."""
        if self._under_way:
            self._bytes += acknowledged
            if not under_way:
                self._under_way, self._ended = False, now
                if self._cold and round_trip:
                    self._note(round_trip, now - self._began - round_trip)
        elif under_way:
            self._under_way, self._began, self._bytes = True, now, 0
            self._cold = now - self._ended > round_trip + LEAST_TIMEOUT

    def _note(self, round_trip: float, more: float) -> None:
        """The last one took so many seconds more than a round trip."""
        held = self._bytes
        if more > 0:
            held = min(held, round(self._bytes / more * round_trip))  # the path's rate is no less
        self._wanted.append(max(1, -(-held // FIRST)) if round_trip >= LONG else 1)


class Streams:
    """Of one direction of a link."""

    def __init__(self) -> None:
        self.wanted = 1
        self.steady = 1  # of those, that have made faster what goes on without a pause
        self._bursts = Bursts()
        self._rate = 0.0  # bytes a second with so many, or with half of them; the mean of late
        self._trying = False  # `wanted` is twice what has proven to be worth it
        self._rest, self._rested = REST, 0.0  # the next one; when the next try may be
        self._seconds, self._bytes = -SETTLING, 0  # of this measure
        self._backlog, self._since = False, 0.0

    def look(self, under_way: int, acknowledged: int, now: float, round_trip: float = 0.0) -> None:
        """So many bytes are under way, and so many more have arrived since the last look.
        `round_trip` in seconds; 0: not known."""
        self._bursts.look(under_way, acknowledged, round_trip, now)
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
            self._decide(self._bytes / self._seconds, now)

    def begin_anew(self) -> None:
        """The connection broke, and there is another, by another way maybe. Half of the streams are
        wanted at once: where it is their number that breaks connections, it doesn't go on so."""
        self.wanted, self.steady = max(1, self.wanted // 2), max(1, self.steady // 2)
        self._rate, self._trying, self._rest = 0.0, False, REST
        self._backlog, self._bursts = False, Bursts()
        self._change(self.wanted)

    def _decide(self, rate: float, now: float) -> None:
        faster = rate >= GAIN * self._rate
        if self._trying and not faster:
            self._trying, self._rested = False, now + self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
            self._change(self.wanted // 2)
            return
        if self._trying:
            self._rest, self.steady = REST, self.wanted
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

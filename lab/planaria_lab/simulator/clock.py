"""Simulated time, and what takes it: machines' cores, threads with a queue, and links.

Times in seconds. Events at the same time happen in the order in which they were planned, so that
equal input gives equal output.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from planaria.node.wire.background import FIRST, LEAST, MOST, TARGET

Then = Callable[[], object]

CHUNK: Final = 2 << 20
"""Bytes between which a more urgent frame overtakes (node/wire/link.py)."""
MOST_CHUNKS: Final = 16
"""That a frame is cut into here; those of a frame of more than 32 MiB are larger. A copy is cut so
that what is urgent waits for one of its chunks as it waits for the background on a real link."""
ON_WIRE: Final = 1500 / 1448
"""Bytes on a wire for each of a payload: headers of TCP and IP."""


def chunk_in_simulation(bytes_per_second: float, round_trip: float) -> int:
    """Bytes of a chunk that delays urgent traffic, on average, as much as the background on such a
    link: half of a chunk is still to be sent. On a slow link the delay is due to the part of the
    smallest window that exceeds what fits into `round_trip` seconds."""
    queued = max(TARGET * bytes_per_second, LEAST - round_trip * bytes_per_second)
    return round(max(FIRST, min(2 * queued, MOST)))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0  # that have happened
        self._due: list[tuple[float, int, Then]] = []
        self._planned = 0

    def at(self, time: float, then: Then) -> None:
        self._planned += 1
        heapq.heappush(self._due, (time, self._planned, then))

    def after(self, seconds: float, then: Then) -> None:
        self.at(self.now + seconds, then)

    def run(self, over: Callable[[], bool]) -> None:
        """Runs until `over`, or until nothing is due any more."""
        while self._due and not over():
            self.now, _, then = heapq.heappop(self._due)
            self.events += 1
            then()


class Cores:
    """The cores of one machine: tasks at the same time share them evenly. With a `count` of 0 every
    task has a core of its own."""

    def __init__(self, clock: Clock, count: int) -> None:
        self.clock, self.count = clock, count
        self._running: list[tuple[float, int, Then]] = []  # ends at this share of a core each
        self._started = 0
        self._share = 0.0  # of a core that each task running all the time would have got
        self._looked = 0.0
        self._version = 0

    def run(self, seconds: float, then: Then) -> None:
        if not self.count:
            self.clock.after(seconds, then)
            return
        self._advance()
        self._started += 1
        heapq.heappush(self._running, (self._share + seconds, self._started, then))
        self._plan()

    def _rate(self) -> float:
        return min(1.0, self.count / len(self._running))

    def _advance(self) -> None:
        if self._running:
            self._share += (self.clock.now - self._looked) * self._rate()
        self._looked = self.clock.now

    def _plan(self) -> None:
        self._version += 1
        if self._running:
            remaining = max(0.0, self._running[0][0] - self._share)
            self.clock.after(remaining / self._rate(), partial(self._end, self._version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return  # something has started or ended since
        self._advance()
        _, _, then = heapq.heappop(self._running)
        self._plan()
        then()


class Worker:
    """One task at a time, most urgent first, of equals the one that was posted first.

    `occupied` other than 1 makes it a pool that stands for 1 / occupied workers of equal load: a
    task takes as long as ever, and the next may start after that share of it.
    """

    def __init__(self, clock: Clock, cores: Cores, occupied: float = 1.0) -> None:
        self.clock, self.cores, self.occupied = clock, cores, occupied
        self.busy_seconds = 0.0
        self._queue: list[tuple[int, int, float, Then]] = []
        self._posted = 0
        self._busy = False

    def post(self, priority: int, seconds: float, then: Then) -> None:
        """Queues a task."""
        self._posted += 1
        heapq.heappush(self._queue, (priority, self._posted, seconds, then))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        if not self._queue:
            return
        _, _, seconds, then = heapq.heappop(self._queue)
        self._busy = True
        self.busy_seconds += seconds * self.occupied
        if self.occupied == 1.0:
            self.cores.run(seconds, partial(self._done, then))
        else:
            self.clock.after(seconds * self.occupied, self._free)
            self.clock.after(seconds, then)

    def _done(self, then: Then) -> None:
        self._free()  # a thread takes its next task before it hears what comes of the last
        then()

    def _free(self) -> None:
        self._busy = False
        self._next()


class Uplink:
    """A wire that several links have in common: one byte after the other."""

    def __init__(self, mbps: float) -> None:
        self.seconds_per_byte = 8 / (mbps * 1e6)
        self.busy_seconds = 0.0
        self.free = 0.0

    def passes(self, size: float, now: float) -> float:
        """The time at which the last of `size` bytes that are sent now is through."""
        seconds = size * self.seconds_per_byte
        self.busy_seconds += seconds
        self.free = max(self.free, now) + seconds
        return self.free


class Wire:
    """From one node to another: frames one after the other, the most urgent first, then a delay.
    A chunk is on the link and on the shared uplink at the same time, at the pace of the slower."""

    def __init__(self, clock: Clock, delay: float, mbps: float, uplink: Uplink | None) -> None:
        self.clock, self.delay = clock, delay
        self.seconds_per_byte = 8 / (mbps * 1e6)
        self.uplink = uplink
        self.sent = 0  # bytes of frames
        self.busy_seconds = 0.0
        slowest = max(self.seconds_per_byte, uplink.seconds_per_byte if uplink else 0.0)
        self._chunk = chunk_in_simulation(1 / slowest, 2 * delay)  # of the background
        self._queue: list[tuple[int, int, float, Then | None]] = []
        self._asked = 0
        self._busy = False

    def send(self, urgency: int, size: int, then: Then, background: bool = False) -> None:
        """`then`, when the whole frame has arrived."""
        self.sent += size
        chunks = min(MOST_CHUNKS, max(1, -(-size // CHUNK)))
        if background:
            chunks = max(1, -(-size // self._chunk))
        for chunk in range(chunks):
            self._asked += 1
            arrived: Any = then if chunk == chunks - 1 else None
            heapq.heappush(self._queue, (urgency, self._asked, size / chunks * ON_WIRE, arrived))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._queue)
        if not self._queue:
            return
        _, _, size, then = heapq.heappop(self._queue)
        seconds = size * self.seconds_per_byte
        self.busy_seconds += seconds
        through = self.clock.now + seconds
        if self.uplink is not None:
            through = max(through, self.uplink.passes(size, self.clock.now))
        self.clock.at(through, self._next)
        if then is not None:
            self.clock.at(through + self.delay, then)

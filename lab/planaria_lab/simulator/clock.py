"""A simulated clock and the resources that take time: cores, threads with a queue, and links.

Times are in seconds. Events at the same time happen in the order in which they were planned, so
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
"""Bytes of a chunk of a frame. A more urgent frame overtakes between two chunks
(node/wire/link.py)."""
MOST_CHUNKS: Final = 16
"""Maximum number of chunks of a simulated frame. Chunks of a frame of more than 32 MiB are larger
than `CHUNK`. Background frames have chunks of their own size: see `chunk_in_simulation`."""
ON_WIRE: Final = (1500 + 52 / 2) / 1448
"""Bytes on the wire for each byte of payload. Headers of TCP and IP are added, and an
acknowledgement for every second packet. A node sends as many of these as it gets, on average."""


def chunk_in_simulation(bytes_per_second: float, round_trip: float) -> int:
    """Bytes of a background chunk that delays urgent traffic as much as on a real link.

    On average, half of a chunk is still to be sent when urgent traffic arrives. On a slow link, the
    delay is due to a part of the smallest window: that which exceeds the bytes sent in `round_trip`
    seconds.
    """
    queued = max(TARGET * bytes_per_second, LEAST - round_trip * bytes_per_second)
    return round(max(FIRST, min(2 * queued, MOST)))


class Clock:
    """The simulated time, and a queue of planned events."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0  # number of events that have happened
        self._due: list[tuple[float, int, Then]] = []
        self._planned = 0

    def at(self, time: float, then: Then) -> None:
        self._planned += 1
        heapq.heappush(self._due, (time, self._planned, then))

    def after(self, seconds: float, then: Then) -> None:
        self.at(self.now + seconds, then)

    def run(self, over: Callable[[], bool]) -> None:
        """Runs events until `over` returns true, or until no event is planned."""
        while self._due and not over():
            self.now, _, then = heapq.heappop(self._due)
            self.events += 1
            then()


class Cores:
    """The cores of one machine, shared evenly by concurrent tasks. With a `count` of 0, every task
    has a core of its own."""

    def __init__(self, clock: Clock, count: int) -> None:
        self.clock, self.count = clock, count
        self._running: list[tuple[float, int, Then]] = []  # heap by value of _share at the end
        self._started = 0  # number of tasks
        self._share = 0.0  # core seconds that a task has got if it has run from the beginning
        self._looked = 0.0  # time of the last update of _share
        self._version = 0  # of the plan; an end planned by an older version is ignored

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
            return  # a task has started or ended since
        self._advance()
        _, _, then = heapq.heappop(self._running)
        self._plan()
        then()


class Worker:
    """A thread with a queue: runs one task at a time, the most urgent first, then by order of
    posting.

    With `occupied` other than 1, it is a pool that stands for 1 / occupied workers of equal load.
    A task then takes its usual time, and the next one may start after this share of that time.
    """

    def __init__(self, clock: Clock, cores: Cores, occupied: float = 1.0) -> None:
        self.clock, self.cores, self.occupied = clock, cores, occupied
        self.busy_seconds = 0.0
        self._queue: list[tuple[int, int, float, Then]] = []
        self._posted = 0
        self._busy = False

    def post(self, priority: int, seconds: float, then: Then) -> None:
        """Queues a task; a lower `priority` is more urgent. `then` is called when it is done."""
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
        self._free()  # a thread takes its next task before the result of the last has effects
        then()

    def _free(self) -> None:
        self._busy = False
        self._next()


class Uplink:
    """A wire shared by several links; it sends their bytes one after the other."""

    def __init__(self, mbps: float) -> None:
        self.seconds_per_byte = 8 / (mbps * 1e6)
        self.busy_seconds = 0.0
        self.free = 0.0  # time at which all bytes so far are sent

    def passes(self, size: float, now: float) -> float:
        """Adds `size` bytes at the time `now`, and returns the time when the last is sent."""
        seconds = size * self.seconds_per_byte
        self.busy_seconds += seconds
        self.free = max(self.free, now) + seconds
        return self.free


class Wire:
    """A link from one node to another: sends chunks one at a time, the most urgent first, each
    followed by a delay. A chunk crosses the link and the shared uplink at the same time, at the
    speed of the slower one."""

    def __init__(self, clock: Clock, delay: float, mbps: float, uplink: Uplink | None) -> None:
        self.clock, self.delay = clock, delay
        self.seconds_per_byte = 8 / (mbps * 1e6)
        self.uplink = uplink
        self.sent = 0  # bytes of all frames, without headers of TCP and IP
        self.busy_seconds = 0.0
        slowest = max(self.seconds_per_byte, uplink.seconds_per_byte if uplink else 0.0)
        self._chunk = chunk_in_simulation(1 / slowest, 2 * delay)  # bytes of a background chunk
        self._queue: list[tuple[int, int, float, Then | None]] = []
        self._asked = 0
        self._busy = False

    def send(self, urgency: int, size: int, then: Then, background: bool = False) -> None:
        """Sends a frame of `size` bytes, and calls `then` when all of it has arrived."""
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

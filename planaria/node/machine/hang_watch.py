"""Detection of hanging tasks in the compute thread."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Final, NamedTuple

TIMES: Final = 5.0
"""Multiple of the longest of its kind after which a task hangs. A kind may have short and long
tasks: those of two seats, or of embedding and head."""
FLOOR: Final = 5.0
"""Lower limit of that time in seconds."""
COMPILING: Final = 120.0
"""The same limit where a task may have to compile for a new shape."""
KNOWN: Final = 3
"""Number of tasks of a kind before their longest is used."""
REMEMBERED: Final = 9
"""Number of tasks of a kind that count, the last ones."""
STILL: Final = 2.0
"""Seconds in which a hanging thread takes no processor time."""
HELD_UP: Final = 1.0
"""Seconds between two checks that mean a delay of the whole process."""


class Hang(NamedTuple):
    """A task that has taken too long."""

    task: str
    seconds: float  # so far
    usual: float  # the longest of its kind lately; 0: unknown

    def __str__(self) -> str:
        usual = f", which takes {self.usual:.2g} s" if self.usual else ""
        return f"its compute thread hangs: {self.seconds:.0f} s at `{self.task}`{usual}"


class TaskProcessorTime:
    """The processor time of the thread, as seen at the checks of one task."""

    def __init__(self, seconds: float, now: float) -> None:
        self._first = self._last = seconds
        self._grew = now

    def computes(self, seconds: float, now: float, limit: float) -> bool:
        """Whether the thread computes, though perhaps slowly: it has taken processor time since a
        recent look, and less than `limit` seconds in all."""
        if seconds > self._last:
            self._last, self._grew = seconds, now
        return now - self._grew < STILL and seconds - self._first < limit


class HangWatch:
    """Times the compute thread's tasks, and reports hangs. `first`: seconds for a task of an
    unknown kind. `spins`: the thread takes processor time while it waits for its device, so a task
    that takes too much of it hangs. `now`: of any one clock."""

    def __init__(self, first: float, floor: float = FLOOR, spins: bool = True) -> None:
        self._first, self._floor, self._spins = first, floor, spins
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._at: tuple[str, float, float] | None = None  # task, since when, its usual time
        self.waits = False  # the current task waits for a disk
        self.slow: Hang | None = None  # what takes too long though its thread computes
        self._thread: tuple[float, TaskProcessorTime] | None = None  # by when its task began
        self._looked: float | None = None
        self._excused = 0.0  # earlier time doesn't count

    # --- in the compute thread

    def began(self, task: str, now: float) -> None:
        done = self._seconds[task]
        usual = max(done) if len(done) >= KNOWN else 0.0
        self._at = task, now, usual

    def ended(self, now: float) -> None:
        assert self._at is not None
        (task, since, _), self._at = self._at, None
        self._seconds[task].append(now - since)

    def waited(self, seconds: float) -> None:
        """Subtract time that the current task has waited for a disk, or anything but the device."""
        assert self._at is not None
        task, since, usual = self._at
        self._at = task, since + seconds, usual
        self.waits = False

    # --- on the event loop

    def find_hang(self, now: float, thread: float | None = None) -> Hang | None:
        """The hanging task, if any. Called several times a second: a longer gap means a delayed
        process. `thread`: processor time of the compute thread, in seconds; None: unknown."""
        self.slow = None
        if self._looked is not None and now - self._looked > HELD_UP:
            self._excused = now
        self._looked = now
        at = self._at
        if at is None or self.waits:
            return None
        task, since, usual = at
        seconds = now - max(since, self._excused)
        limit = max(self._floor, TIMES * usual) if usual else max(self._floor, self._first)
        is_slow = False
        if thread is not None:
            if self._thread is None or self._thread[0] != since:
                self._thread = since, TaskProcessorTime(thread, now)
            most = limit if self._spins else math.inf
            is_slow = self._thread[1].computes(thread, now, most)
        if seconds < limit:
            return None
        hang = Hang(task, seconds, usual)
        if is_slow:
            self.slow = hang
            return None
        return hang

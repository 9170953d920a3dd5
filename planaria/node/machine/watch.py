"""Detection of hanging tasks in the compute thread."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from typing import Final, NamedTuple

TIMES: Final = 5.0
"""Multiple of the median of its kind after which a task hangs."""
FLOOR: Final = 5.0
"""Lower limit of that time in seconds."""
COMPILING: Final = 120.0
"""The same limit where a task may have to compile for a new shape."""
KNOWN: Final = 3
"""Number of tasks of a kind before its median is used."""
REMEMBERED: Final = 9
HELD_UP: Final = 1.0
"""Seconds between two checks that mean a delay of the whole process."""


class Hang(NamedTuple):
    """A task that has taken too long."""

    task: str
    seconds: float  # so far
    usual: float  # median of its kind; 0: unknown

    def __str__(self) -> str:
        usual = f", which takes {self.usual:.2g} s" if self.usual else ""
        return f"its compute thread hangs: {self.seconds:.0f} s at `{self.task}`{usual}"


class Watch:
    """Times tasks. `first`: seconds for a task of an unknown kind. `now`: of any one clock."""

    def __init__(self, first: float, floor: float = FLOOR) -> None:
        self._first, self._floor = first, floor
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._at: tuple[str, float, float] | None = None  # task, since when, its median
        self.waits = False  # the current task waits for a disk
        self._looked: float | None = None
        self._excused = 0.0  # earlier time doesn't count

    # --- in the compute thread

    def began(self, task: str, now: float) -> None:
        done = self._seconds[task]
        usual = statistics.median(done) if len(done) >= KNOWN else 0.0
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

    def look(self, now: float) -> Hang | None:
        """Report a hang. Called several times a second: a longer gap means a delayed process."""
        if self._looked is not None and now - self._looked > HELD_UP:
            self._excused = now
        self._looked = now
        at = self._at
        if at is None or self.waits:
            return None
        task, since, usual = at
        seconds = now - max(since, self._excused)
        limit = max(self._floor, TIMES * usual) if usual else max(self._floor, self._first)
        return Hang(task, seconds, usual) if seconds >= limit else None

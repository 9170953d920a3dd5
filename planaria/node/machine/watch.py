"""How long a task of the compute thread may take before it hangs."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

TIMES: Final = 5.0
"""A task hangs after so many times the median of its kind ..."""
FLOOR: Final = 5.0
"""... and not before so many seconds."""
COMPILING: Final = 120.0
"""The same where a task may have to compile first, which it does for each new shape."""
KNOWN: Final = 3
"""Tasks of a kind after which it is known how long they take."""
REMEMBERED: Final = 9
HELD_UP: Final = 1.0
"""Seconds between two looks after which the whole process was held up, not its compute thread."""


class Hang(NamedTuple):
    """The compute thread is at one task for too long."""

    task: str
    seconds: float  # that it has taken so far
    usual: float  # median of its kind; 0: not known

    def __str__(self) -> str:
        usual = f", which takes {self.usual:.2g} s" if self.usual else ""
        return f"its compute thread hangs: {self.seconds:.0f} s at `{self.task}`{usual}"


def kind_of(work: Callable[..., Any]) -> str:
    """Tasks are of one kind when they call the same function."""
    while isinstance(work, partial):
        work = work.func
    return getattr(work, "__name__", type(work).__name__).strip("_")


class Watch:
    """`first`: seconds for a task of a kind that isn't known yet. `now` is any one clock's."""

    def __init__(self, first: float, floor: float = FLOOR) -> None:
        self._first, self._floor = first, floor
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._at: tuple[str, float, float] | None = None  # task, since when, its median
        self.waits = False  # the task at hand does nothing but that
        self._looked: float | None = None
        self._excused = 0.0  # what was before then says nothing of the compute thread

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
        """The task at hand goes on, having waited for a disk, or whatever isn't the device."""
        assert self._at is not None
        task, since, usual = self._at
        self._at = task, since + seconds, usual
        self.waits = False

    # --- beside it

    def look(self, now: float) -> Hang | None:
        """To be asked several times a second: who isn't was held up, as the task was."""
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

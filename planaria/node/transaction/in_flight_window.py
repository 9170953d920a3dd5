"""The in-flight window: how many microbatches a source has out, so that the pipeline is full.

By Little's law, the trip time divided by the time between two returns fills the pipeline. The trip
is the quickest of an attempt, with the least waiting; it grows with the links' delays. One more
microbatch for each stage may wait, so that no stage idles because one microbatch is late. While too
few are out, trips have their minimum time and returns follow from the number out. So each attempt
adds stages + 1. Once some node is always busy, more have no use, and the number stays.

Each microbatch that is out has its activations at all nodes of its route. So at most `MOST` times
stages + 1 are out, on which lab/planaria_lab/planning/memory.py relies.
"""

from __future__ import annotations

import math
from typing import Final

MOST: Final = 4
"""Maximum window, in multiples of stages + 1."""


def most_out(in_flight: int, stages: int) -> int:
    """Maximum microbatches that a source ever has out. `in_flight`: the run file's value, 0 for
    none; `stages`: body stages."""
    return in_flight or MOST * (stages + 1)


class InFlightWindow:
    """The window of one source. Times are seconds of any one clock. Measurements of one attempt
    determine the window of the next."""

    def __init__(self, in_flight: int, stages: int) -> None:
        """Arguments as for `most_out`."""
        self._least, self._most = in_flight or stages + 1, most_out(in_flight, stages)
        self.out = self._least  # the current window
        self._forget()

    def _forget(self) -> None:
        self._left: dict[int, float] = {}  # microbatch -> when it left
        self._trip = math.inf
        self._homes: list[float] = []

    def left(self, microbatch: int, now: float) -> None:
        """Notes that a microbatch has left its source."""
        self._left[microbatch] = now

    def home(self, microbatch: int, now: float) -> None:
        """Notes that a microbatch's gradient is back at its source."""
        self._trip = min(self._trip, now - self._left.pop(microbatch))
        self._homes.append(now)

    def begin(self) -> None:
        """Sets the window of the next attempt, by the measurements of the last one."""
        homes = self._homes
        if len(homes) > 1 and homes[-1] > homes[0] and self._trip < math.inf:
            between = (homes[-1] - homes[0]) / (len(homes) - 1)
            fill = min(self._trip / between, self._most)  # a float may be more than an int can be
            self.out = min(self._least + round(fill), self._most)
        self._forget()

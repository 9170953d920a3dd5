"""How many microbatches a source has out at a time, so that the pipeline is full.

By Little's law as many fill it as homecomings fall into one trip: its seconds, by those between two
homecomings. The trip is the quickest of an attempt, on which least was waited for; it grows with
the links' delays. Behind those that fill the pipeline one more for each stage may wait, so that no
stage idles because one microbatch is late. While too few are out, trips take no longer than ever
and homecomings follow from how many are out, so by each attempt there are stages + 1 more; once
something is busy all the time, more are of no use, and the number stays.

Each microbatch that is out has its activations at all nodes of its way, so there are at most
`MOST` times stages + 1 out, and lab/planaria_lab/planning/memory.py counts on that.
"""

from __future__ import annotations

import math
from typing import Final

MOST: Final = 4
"""Times stages + 1."""


def most_out(in_flight: int, stages: int) -> int:
    """Microbatches that a source ever has out at a time. `in_flight`: what the run file says, 0 for
    nothing; `stages`: body stages."""
    return in_flight or MOST * (stages + 1)


class InFlightWindow:
    """Of one source. Times in seconds, of any one clock. What one attempt at a step has measured
    holds for the next."""

    def __init__(self, in_flight: int, stages: int) -> None:
        """As for `most_out`."""
        self._least, self._most = in_flight or stages + 1, most_out(in_flight, stages)
        self.out = self._least  # so many may be
        self._forget()

    def _forget(self) -> None:
        self._left: dict[int, float] = {}  # microbatch -> when it left
        self._trip = math.inf
        self._homes: list[float] = []

    def left(self, microbatch: int, now: float) -> None:
        """It is on its way to the next stage."""
        self._left[microbatch] = now

    def home(self, microbatch: int, now: float) -> None:
        """Its gradient has come back, and was applied."""
        if microbatch in self._left:  # else it left ahead of its turn
            self._trip = min(self._trip, now - self._left.pop(microbatch))
        self._homes.append(now)

    def begin(self) -> None:
        """Another attempt."""
        homes = self._homes
        if len(homes) > 1 and homes[-1] > homes[0] and self._trip < math.inf:
            between = (homes[-1] - homes[0]) / (len(homes) - 1)
            fill = min(self._trip / between, self._most)  # a float may be more than an int can be
            self.out = min(self._least + round(fill), self._most)
        self._forget()

"""How fast a running snapshot is renewed, and whether that is fast enough to be of use."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from planaria.recovery.decide import RECENT

SHARE: Final = 0.08
"""Bytes of all snapshots, as a share of those that cross between stages in a step."""
MOST: Final = 1 / 8
LEAST: Final = 1 / 26
"""Bounds of the rows' share in an update. With `LEAST` each step, rows are some 18 steps old on
average: less than `decide.FRESH`."""
UPDATES: Final = 5
"""Updates by which a link is judged."""
MARGIN: Final = 0.75
"""Hysteresis: a snapshot is sent again once its rows would be at most so much of the limit old."""


def share_of_rows(whole: float, training: float) -> float:
    """The share of a stage's rows that its running snapshot gets in a step.

    `whole`: bytes of the snapshots of all stages; `training`: bytes that cross between stages in a
    step.
    """
    return min(MOST, max(LEAST, SHARE * training / max(whole, 1.0)))


class Pace:
    """How fast the link to a holder carries a snapshot, and whether that is fast enough.

    Where its rows would be older than a limit, on average, a guess costs no more. Then one update
    in `RECENT` steps tries the link. Pure.
    """

    def __init__(self, fraction: float, period: int, limit: int) -> None:
        """`fraction`: of the rows in an update; `period`: least number of steps between two;
        `limit`: in steps."""
        self._fraction, self._period, self._limit = fraction, period, limit
        self._ages: deque[float] = deque(maxlen=UPDATES)
        self.age = 0.0  # mean of the rows, in steps, at the pace of the last updates, or a trial
        self.kept = True

    @property
    def period(self) -> int:
        """Least number of steps until the next update."""
        return self._period if self.kept else RECENT

    def arrived(self, steps: int, first: bool = False) -> bool:
        """Record how many steps an update takes. `first`: the holder lacked rows, so it has up to
        `MOST` of them. Returns whether `kept` has changed."""
        shorter = min(1.0, self._fraction / MOST) if first else 1.0
        self._ages.append(max(steps * shorter, self._period) / (2 * self._fraction))
        self.age = median(self._ages) if self.kept else self._ages[-1]
        slow = self.kept and len(self._ages) == UPDATES and self.age > self._limit
        fast_again = not self.kept and self.age <= MARGIN * self._limit
        if slow or fast_again:
            self.kept = not self.kept
            self._ages.clear()
        return slow or fast_again

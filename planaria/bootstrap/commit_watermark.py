"""The newest committed step that the registry knows of: by the driver's reports.

The commit watermark decides whether a run may continue from what is left of it. The driver is the
run owner's, and is believed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from planaria.bootstrap.registry_pb2 import SeatReport

Age = tuple[int, int]
"""Lineage and committed step."""

WITHOUT_STATE: Final = frozenset(["syncing", "following"])
"""Phases in reports (node/transaction)."""


def age_of(seat: SeatReport) -> Age:
    """Lineage and committed step of a seat's state, by its report."""
    return seat.lineage, seat.committed


class CommitWatermark:
    """The newest committed step of a run that the registry knows of."""

    def __init__(self, steps: int) -> None:
        """`steps`: the run's total; 0: unknown."""
        self._steps = steps
        self.newest: Age = (0, 0)

    def impossible(self, committed: int) -> str:
        """Why no node can have committed this step; empty: it is possible."""
        if not self._steps or committed <= self._steps:
            return ""
        return f"step {committed} can't be committed in a run of {self._steps} steps"

    def reach(self, age: Age) -> None:
        self.newest = max(self.newest, age)

    def has_state(self, seat: SeatReport) -> bool:
        """Whether a seat has its stage's state. Age (0, 0) counts only at the start of a run."""
        if seat.phase in WITHOUT_STATE:
            return False
        return age_of(seat) > (0, 0) or self.newest <= (0, 1)

    def is_lost(self, seats: Iterable[SeatReport]) -> bool:
        """Whether a run with state has lost it at all seats. Files may restore it, and the newest
        may be at a node yet to come. Step 1 is no proof: it may be so new that only one node has
        reported it."""
        return self.newest > (0, 1) and not any(age_of(seat) > (0, 0) for seat in seats)

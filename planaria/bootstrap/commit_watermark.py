"""The newest committed step that the registry believes.

The commit watermark decides whether a run may continue from what is left of it, so no single node
can raise it beyond plausible values. The registry accepts the driver's report within a rate limit.
A report beyond the limit counts only as far as members of each stage confirm it. This happens
after the loss of the journal, or when a run starts from files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from planaria.bootstrap.registry_pb2 import SeatReport

Age = tuple[int, int]
"""Lineage and committed step."""

STEPS_PER_SECOND: Final = 1000
"""Upper bound of a run's commits."""
LINEAGES_PER_SECOND: Final = 1
"""Upper bound of a run's returns to files."""
WITHOUT_STATE: Final = frozenset(["syncing", "following"])
"""Phases in reports (node/transaction)."""


def age_of(seat: SeatReport) -> Age:
    """Lineage and committed step of the seat's state."""
    return seat.lineage, seat.committed


class CommitWatermark:
    """The watermark of one run. `newest`: the believed age."""

    def __init__(self, steps: int, patience: float) -> None:
        """`steps`: the run's total; 0: unknown. `patience`: seconds allowed for other members to
        confirm the driver's report."""
        self._steps, self._patience = steps, patience
        self.newest: Age = (0, 0)
        self._at: float | None = None  # time of `newest`
        self._ahead: float | None = None  # time since which the driver has been beyond the limit

    def impossible(self, committed: int) -> str:
        """Why no node can have committed this step; empty: it is possible."""
        if not self._steps or committed <= self._steps:
            return ""
        return f"step {committed} can't be committed in a run of {self._steps} steps"

    def restore(self, age: Age, now: float) -> None:
        self.newest, self._at = max(self.newest, age), now

    def driven(self, reported: Age, confirmed: Callable[[], Age], now: float) -> str:
        """Processes the driver's report `told`. `vouched`: returns the age that members of all
        stages confirm. Returns the problem if it persists beyond `patience`; empty: none."""
        if not self._is_in_time(reported, now):
            if (confirmed_age := confirmed()) > self.newest:
                self.newest, self._at = confirmed_age, now
            if not self._is_in_time(reported, now):
                self._ahead = now if self._ahead is None else self._ahead
                return self._ahead_of_all(reported) if now - self._ahead >= self._patience else ""
        self._ahead = None
        if reported > self.newest:
            self.newest, self._at = reported, now
        return ""

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

    def _is_in_time(self, reported: Age, now: float) -> bool:
        self._at = now if self._at is None else self._at
        (lineage, committed), seconds = self.newest, 1 + now - self._at
        return reported <= self.newest or (
            reported[0] <= lineage + LINEAGES_PER_SECOND * seconds
            and reported[1] <= committed + STEPS_PER_SECOND * seconds
        )

    def _ahead_of_all(self, reported: Age) -> str:
        return (
            f"step {reported[1]} of lineage {reported[0]} is too far ahead of step "
            f"{self.newest[1]} of lineage {self.newest[0]}, and not every stage confirms it"
        )

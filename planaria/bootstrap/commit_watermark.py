"""How far a run has come, as far as the registry believes it.

What was committed decides whether a run may go on from what is left of it, so nobody's word alone
makes it more than it can be. The driver tells it, within what time allows; what is beyond counts
only as far as members of each stage say so, too, as after the loss of the journal, or when a run
begins from files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

Age = tuple[int, int]
"""Lineage and committed step."""

STEPS_PER_SECOND: Final = 1000
"""More than any run commits."""
LINEAGES_PER_SECOND: Final = 1
"""A run goes back to files less often."""


class CommitWatermark:
    """Of one run. `newest` is what is believed."""

    def __init__(self, steps: int, patience: float) -> None:
        """`steps`: all that the run has; 0: not known. `patience`: seconds in which others have to
        say what the driver says."""
        self._steps, self._patience = steps, patience
        self.newest: Age = (0, 0)
        self._at: float | None = None  # when that was taken
        self._ahead: float | None = None  # since when the driver has been ahead of that

    def impossible(self, committed: int) -> str:
        """Why nobody can have committed this step; empty: somebody can."""
        if not self._steps or committed <= self._steps:
            return ""
        return f"step {committed} can't be committed in a run of {self._steps} steps"

    def restore(self, age: Age, now: float) -> None:
        self.newest, self._at = max(self.newest, age), now

    def driven(self, told: Age, vouched: Callable[[], Age], now: float) -> str:
        """The driver tells this. `vouched`: what members of all stages say. Returns what is wrong
        with it, if it stands when others have had the time to say the same; empty: nothing."""
        if not self._is_in_time(told, now):
            if (others := vouched()) > self.newest:
                self.newest, self._at = others, now
            if not self._is_in_time(told, now):
                self._ahead = now if self._ahead is None else self._ahead
                return self._ahead_of_all(told) if now - self._ahead >= self._patience else ""
        self._ahead = None
        if told > self.newest:
            self.newest, self._at = told, now
        return ""

    def _is_in_time(self, told: Age, now: float) -> bool:
        self._at = now if self._at is None else self._at
        (lineage, committed), seconds = self.newest, 1 + now - self._at
        return told <= self.newest or (
            told[0] <= lineage + LINEAGES_PER_SECOND * seconds
            and told[1] <= committed + STEPS_PER_SECOND * seconds
        )

    def _ahead_of_all(self, told: Age) -> str:
        return (
            f"step {told[1]} of lineage {told[0]} is not believed to be committed, since no time "
            f"was for it after step {self.newest[1]} of lineage {self.newest[0]}, and no member of "
            "each stage says so"
        )

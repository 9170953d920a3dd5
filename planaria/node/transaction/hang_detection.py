"""Members whose compute hangs, as their driver knows them, and what becomes of them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from planaria.node.transaction.stragglers import patience
from planaria.node.wire.naming import node_of

HEIR: Final = 30.0
"""Seconds in which an heir has to take over from the last node of a stage, which hangs."""
SLOW: Final = 10.0
"""A node is slow whose microbatches take so many times those of the others."""


class HangDetector:
    """`progress`: seconds without any after which the last node of a stage is replaced."""

    def __init__(self, progress: float) -> None:
        self._progress = progress
        self._steps: deque[float] = deque(maxlen=9)  # seconds that the last ones took
        self._proven: set[str] = set()
        self.why: dict[str, str] = {}  # by node, as it says itself
        self._since: dict[str, float] = {}
        self._heir_asked: dict[str, float] = {}

    # --- what is usual

    @property
    def usual(self) -> float:
        """Seconds that a step takes; 0: not known."""
        return statistics.median(self._steps) if self._steps else 0.0

    def committed(self, seconds: float, trained: Iterable[str]) -> None:
        """A step, by these nodes."""
        self._steps.append(seconds)
        self._proven.update(trained)

    def knows(self, node: str) -> None:
        """It has trained before, perhaps with another driver."""
        self._proven.add(node)

    def patience(self, node: str) -> float:
        """Seconds in which it has to compute something, if it has something to: one that never
        trained has more time."""
        if not self.usual or node not in self._proven:
            return self._progress / 2
        return min(patience(self.usual), self._progress / 2)

    def still_for_too_long(self, seconds: Mapping[str, float]) -> dict[str, str]:
        """Who hangs, and why; `seconds`: since when each has had something to compute, and has
        computed nothing."""
        return {
            node: f"it has computed nothing for {still:.0f} s, though it had something to"
            for node, still in seconds.items()
            if still >= self.patience(node)
        }

    # --- who hangs

    def hear(self, node: str, why: str, now: float) -> None:
        """What it says of itself; empty: it doesn't hang."""
        if why:
            self.why[node] = why
            self._since.setdefault(node, now)
        else:
            self.why.pop(node, None)
            self._since.pop(node, None)
            self._heir_asked.pop(node, None)

    def keep(self, members: Iterable[str]) -> None:
        """All others are members no longer."""
        for node in self.why.keys() - set(members):
            self.hear(node, "", 0.0)

    def to_replace(self, stages: Mapping[str, int], having: Iterable[str], now: float) -> str:
        """A node that is to go before anything begins; empty: none. The last one that has its
        stage's state does so when the run has waited for it, and one at a time. `stages`: of all
        members; `having`: those that have the newest state."""
        sound = [node for node in having if node not in self.why]
        for node in sorted(self.why.keys() & stages.keys()):
            waited = now - self._since[node] >= self._progress / 2
            if waited or not is_last(node, stages, sound):
                return node
        return ""

    def condemned(
        self, stages: Mapping[str, int], heard: Collection[str], now: float
    ) -> dict[str, str]:
        """Who hangs and can't even answer, since that is in the middle of an update, and why: to go
        at once where others of its stage answer. `heard`: who has answered."""
        node = self.to_replace(stages, heard, now)
        return {node: self.why[node]} if node and node not in heard else {}

    def heir_has_time(self, node: str, now: float) -> bool:
        """To take over from it."""
        return now - self._heir_asked.setdefault(node, now) < HEIR


def is_last(node: str, stages: Mapping[str, int], sound: Iterable[str]) -> bool:
    """Whether a seat of the same node is at a stage that has none of the `sound` ones of others.
    `node`: a seat; `stages`: of all seats."""
    own = node_of(node)
    left = {stages[seat] for seat in sound if seat in stages and node_of(seat) != own}
    return any(node_of(seat) == own and stage not in left for seat, stage in stages.items())


def slow_and_alone(stages: Mapping[str, int], seconds: Mapping[str, float]) -> list[str]:
    """The nodes that hold everybody up, each the only one of its stage, in words. `seconds`: per
    microbatch, by node."""
    known = [seconds[node] for node in stages if seconds.get(node)]
    if len(known) < 3:
        return []
    usual, count = statistics.median(known), list(stages.values())
    return [
        f"{node}, alone at stage {stage}, is slow: {seconds[node]:.2g} s a microbatch, "
        f"where {usual:.2g} s is usual"
        for node, stage in sorted(stages.items())
        if count.count(stage) == 1 and seconds.get(node, 0.0) >= SLOW * usual
    ]

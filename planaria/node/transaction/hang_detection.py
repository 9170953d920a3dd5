"""Detection and treatment of members whose compute hangs, by their driver."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from planaria.node.transaction.stragglers import patience
from planaria.node.wire.naming import node_of

HEIR: Final = 30.0
"""Seconds that an heir has to take over from a hanging node that is its stage's last."""
SLOW: Final = 10.0
"""Factor of slowness: a slow node's microbatches take so many times those of the others."""


class HangDetector:
    """Detects hanging members. `progress`: seconds without any that replace a stage's last node."""

    def __init__(self, progress: float) -> None:
        self._progress = progress
        self._steps: deque[float] = deque(maxlen=9)  # durations of the last steps, in seconds
        self._proven: set[str] = set()
        self.why: dict[str, str] = {}  # by node, its own report
        self._since: dict[str, float] = {}
        self._heir_asked: dict[str, float] = {}

    # --- usual durations

    @property
    def usual(self) -> float:
        """Usual seconds of a step; 0: unknown."""
        return statistics.median(self._steps) if self._steps else 0.0

    def committed(self, seconds: float, trained: Iterable[str]) -> None:
        """A step was committed by these nodes."""
        self._steps.append(seconds)
        self._proven.update(trained)

    def knows(self, node: str) -> None:
        """The node has trained before, perhaps with another driver."""
        self._proven.add(node)

    def patience(self, node: str) -> float:
        """Seconds that a node with work has to compute something; a node that never trained has
        more time."""
        if not self.usual or node not in self._proven:
            return self._progress / 2
        return min(patience(self.usual), self._progress / 2)

    def still_for_too_long(self, seconds: Mapping[str, float]) -> dict[str, str]:
        """Hanging nodes, and why; `seconds`: how long each had work and computed nothing."""
        return {
            node: f"it has computed nothing for {still:.0f} s, though it had something to"
            for node, still in seconds.items()
            if still >= self.patience(node)
        }

    # --- hanging nodes

    def hear(self, node: str, why: str, now: float) -> None:
        """Takes in a node's own report; empty: it doesn't hang."""
        if why:
            self.why[node] = why
            self._since.setdefault(node, now)
        else:
            self.why.pop(node, None)
            self._since.pop(node, None)
            self._heir_asked.pop(node, None)

    def keep(self, members: Iterable[str]) -> None:
        """Drops nodes that are no longer members."""
        for node in self.why.keys() - set(members):
            self.hear(node, "", 0.0)

    def to_replace(self, stages: Mapping[str, int], having: Iterable[str], now: float) -> str:
        """A node to be replaced before anything begins; empty: none. The last node with its stage's
        state is replaced once the run has waited for it, and one at a time. `stages`: of all
        members; `having`: members with the newest state."""
        sound = [node for node in having if node not in self.why]
        for node in sorted(self.why.keys() & stages.keys()):
            waited = now - self._since[node] >= self._progress / 2
            if waited or not is_last(node, stages, sound):
                return node
        return ""

    def condemned(
        self, stages: Mapping[str, int], heard: Collection[str], now: float
    ) -> dict[str, str]:
        """Nodes that hang in the middle of an update and can't answer, and why. They are removed at
        once where others of their stage answer. `heard`: members that have answered."""
        node = self.to_replace(stages, heard, now)
        return {node: self.why[node]} if node and node not in heard else {}

    def heir_has_time(self, node: str, now: float) -> bool:
        """Whether the heir still has time to take over from it."""
        return now - self._heir_asked.setdefault(node, now) < HEIR


def is_last(node: str, stages: Mapping[str, int], sound: Iterable[str]) -> bool:
    """Whether a seat of the same node is at a stage without `sound` seats of other nodes. `node`: a
    seat; `stages`: of all seats."""
    own = node_of(node)
    left = {stages[seat] for seat in sound if seat in stages and node_of(seat) != own}
    return any(node_of(seat) == own and stage not in left for seat, stage in stages.items())


def slow_and_alone(stages: Mapping[str, int], seconds: Mapping[str, float]) -> list[str]:
    """Sentences about slow nodes that hold up all others, each alone at its stage. `seconds`: per
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

"""Whose fault it is that attempts fail, as their driver sees it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from planaria.bootstrap.registry_pb2 import NONFINITE, SILENT
from planaria.node.transaction.effects import Effect, Suspect
from planaria.node.wire import stage_pb2 as pb

LONGEST_PAUSE: Final = 5.0
"""Seconds between attempts at most, after many failed in a row."""
SPOILT: Final = 3
"""Steps in which a node alone of its stage may make what is not finite; with the last one it is
accused of it."""


@dataclass
class Failures:
    """Since the last commit, which makes them new."""

    count: int = 0  # attempts in a row
    last: str = ""  # kind of reason for which one was given up
    accused: dict[str, dict[int, str]] = field(default_factory=dict)  # by whom, of what stage

    def pause(self) -> float:
        """Seconds until the next attempt."""
        return min(LONGEST_PAUSE, 0.1 * 2.0 ** min(self.count, 10)) if self.count > 1 else 0.0

    def again(self, why: str) -> bool:
        """Whether two in a row are given up for the same reason."""
        before, self.last = self.last, _kind_of(why)
        return self.last == before

    def guilty(self, peer: str, failed: pb.Failed, members: Mapping[str, int]) -> list[str]:
        """The members that `peer` accuses; or itself, if it has accused another replica of theirs:
        then what they have in common is that node."""
        accused = [node for node in failed.accused if node in members]
        if failed.cause == SILENT:
            return accused
        before = self.accused.setdefault(peer, {})
        if any(before.setdefault(members[node], node) != node for node in accused):
            return [peer]
        return accused


class Spoiling:
    """Nodes that make what is not finite."""

    def __init__(self) -> None:
        self.why: dict[str, str] = {}  # by node, in this step
        self.steps: Counter[str] = Counter()  # in which a node alone of its stage did

    def lets_through(self, training: Mapping[str, int]) -> bool:
        """Whether all nodes of a stage have: then it is the model. `training`: stages, by node."""
        left = {stage for node, stage in training.items() if node not in self.why}
        return left != set(training.values())

    def over(self, begin: pb.Begin) -> list[Effect]:
        """So is the step. Who made what is not finite, when its replicas didn't, was wrong."""
        effects: list[Effect] = []
        why, self.why = self.why, {}
        for node, reason in why.items() if not begin.non_finite else ():
            self.steps[node] += 1
            if self.steps[node] >= SPOILT:
                reason = f"{reason}, as in {SPOILT} steps; its replicas do better"
                effects.append(Suspect(node, reason, NONFINITE))
        return effects


def _kind_of(reason: str) -> str:
    """Reasons are of one kind that differ in figures only."""
    return re.sub(r"\b\d+(\.\d+)?\b", "#", reason)

"""Whose fault it is that attempts fail, as their driver sees it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from planaria.bootstrap.registry_pb2 import NONFINITE, SILENT
from planaria.node.naming import node_of
from planaria.node.transaction.effects import Effect, Suspect
from planaria.node.wire import stage_pb2 as pb

VAIN: Final = 3
"""Times that a node may accuse others for cause when nobody else does; with the last one it is
accused itself."""
NOBODY_ELSE: Final = "nobody else does"
HELD_UP: Final = 12
"""Attempts in a row that may fail by one node's word, less those that fail by others'; with the
last one it is accused. They take 40 s, in which two that can't reach each other get a relay."""
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
    words: Counter[str] = field(default_factory=Counter)  # by which attempts failed, by node

    def pause(self) -> float:
        """Seconds until the next attempt."""
        return min(LONGEST_PAUSE, 0.1 * 2.0 ** min(self.count, 10)) if self.count > 1 else 0.0

    def again(self, why: str) -> bool:
        """Whether two in a row are given up for the same reason."""
        before, self.last = self.last, _kind_of(why)
        return self.last == before

    def alone(self, peer: str) -> bool:
        """Once more; whether that was once too often."""
        self.words[node_of(peer)] += 1
        return 2 * self.words[node_of(peer)] - self.words.total() >= HELD_UP

    def keep(self, members: Collection[str]) -> None:
        """What others have said counts no more."""
        there = {node_of(one) for one in members}
        self.words = Counter({node: n for node, n in self.words.items() if node in there})

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

    def proven(self, accused: str) -> None:
        """Several say so of that node: who does, and accuses another one of its stage next, is none
        that accuses whomever it meets."""
        for by in self.accused.values():
            for stage in [stage for stage, node in by.items() if node == accused]:
                del by[stage]


class Charges:
    """Who has accused whom for cause, as long as both are members. Nobody's word alone takes a
    stage's last node away, nor two replicas; who accuses again and again, alone, is wrong."""

    def __init__(self) -> None:
        self._by: dict[str, set[str]] = {}  # by accused
        self._believed: dict[str, str] = {}  # by accuser: the replica that its word was enough for
        self._vain: Counter[str] = Counter()  # accusations, less one for each commit since then

    def believes(self, accuser: str, accused: str, spare: bool) -> bool:
        """Whether the accused is to go, or to be gone on without. `spare`: its stage has others.
        Asked twice, it says the same."""
        by = self._by.setdefault(accused, set())
        by.add(accuser)
        if self.are_several(accused):
            for one in by:
                self._vain.pop(one, None)
            return True
        return spare and self._believed.setdefault(accuser, accused) == accused

    def are_several(self, accused: str) -> bool:
        """Whether several nodes accuse it."""
        return len({node_of(one) for one in self._by.get(accused, ())}) > 1

    def in_vain(self, accuser: str) -> bool:
        """Once more; whether that was once too often."""
        self._vain[accuser] += 1
        return self._vain[accuser] >= VAIN

    def committed(self) -> None:
        self._vain = self._vain - Counter(dict.fromkeys(self._vain, 1))

    def keep(self, members: Collection[str]) -> None:
        """All others are members no longer; what they have said stands."""
        self._by = {accused: by for accused, by in self._by.items() if accused in members}
        self._believed = {by: accused for by, accused in self._believed.items() if by in members}
        self._vain = Counter({by: times for by, times in self._vain.items() if by in members})


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

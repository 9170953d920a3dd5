"""Whose fault it is that attempts fail, as their driver sees it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from planaria.bootstrap.registry_pb2 import SILENT
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.naming import node_of

VAIN: Final = 3
"""Times that a node may accuse others for cause when nobody else does; with the last one it is
accused itself."""
NOBODY_ELSE: Final = "nobody else does"
HELD_UP: Final = 12
"""Times in a row that nothing is committed by one node's word, or because its link is lost, less
those by others'; with the last one it is accused. Attempts that fail by its word take 40 s, in
which two that can't reach each other get a relay."""
UNVOTED: Final = 2
"""Attempts in a row that may wait for one node's vote until there was no progress for too long."""
HELD_UP_BY_SEVERAL: Final = 4 * HELD_UP
"""Such times after which it is accused whatever others do."""
LONGEST_PAUSE: Final = 5.0
"""Seconds between attempts at most, after many failed in a row."""
SPOILT: Final = 3
"""Steps in which a node alone of its stage may make what is not finite; with the last one it is
accused of it."""
LONGEST_REST: Final = 10
"""Times that a rest gets twice as long."""


@dataclass
class FailedAttempts:
    """Since the last commit, which makes them new."""

    count: int = 0  # attempts in a row
    last: str = ""  # kind of reason for which one was given up
    accused: dict[str, dict[int, str]] = field(default_factory=dict)  # by whom, of what stage
    lost_at: frozenset[str] = frozenset()  # who may have let all get lost that did
    lost: int = 0  # attempts in which something did
    words: Counter[str] = field(default_factory=Counter)  # by which nothing came of it, by node

    def pause(self) -> float:
        """Seconds until the next attempt."""
        return min(LONGEST_PAUSE, 0.1 * 2.0 ** min(self.count, 10)) if self.count > 1 else 0.0

    def again(self, why: str) -> bool:
        """Whether two in a row are given up for the same reason."""
        before, self.last = self.last, _kind_of(why)
        return self.last == before

    def alone(self, peer: str, by: int = 1) -> bool:
        """Once more, which counts as so many; whether that was once too often."""
        self.words[node_of(peer)] += by
        times = self.words[node_of(peer)]
        return 2 * times - self.words.total() >= HELD_UP or times >= HELD_UP_BY_SEVERAL

    def between(self, pairs: Collection[frozenset[str]]) -> str:
        """Between the two of each pair something has got lost. Returns who it must be by now, as
        it was there each time, and nobody else was; empty: that isn't known."""
        if not pairs:
            return ""
        self.lost += 1
        for pair in sorted(pairs, key=sorted):
            self.lost_at = (self.lost_at & pair) or pair
        *others, one = sorted(self.lost_at)
        return "" if others or self.lost < 2 else one

    def keep(self, members: Collection[str]) -> None:
        """What others have said counts no more."""
        there = {node_of(one) for one in members}
        self.words = Counter({node: n for node, n in self.words.items() if node in there})
        if not self.lost_at <= set(members):
            self.lost_at, self.lost = frozenset(), 0

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
    """Who has accused whom for cause, as long as both are members. One member's word keeps one
    replica from work for a while, and takes nobody's place; who accuses again and again, alone, is
    wrong."""

    def __init__(self) -> None:
        self._by: dict[str, set[str]] = {}  # by accused
        self._kept: dict[str, str] = {}  # by accuser: whom its word alone keeps from work
        self._vain: Counter[str] = Counter()  # accusations, less one for each commit since then

    def believes(self, accuser: str, accused: str) -> bool:
        """Whether the accused is to go, or to be gone on without: several say so. Asked twice, it
        says the same."""
        by = self._by.setdefault(accused, set())
        by.add(accuser)
        if not self.are_several(accused):
            return False
        for one in by:
            self._vain.pop(one, None)
        return True

    def keeps(self, accuser: str, accused: str) -> bool:
        """Whether its word is enough to keep the accused from work."""
        return self._kept.setdefault(accuser, accused) == accused

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
        """All others are members no longer."""
        there = set(members)
        self._by = {accused: by & there for accused, by in self._by.items() if accused in there}
        self._kept = {by: accused for by, accused in self._kept.items() if {by, accused} <= there}
        self._vain = Counter({by: times for by, times in self._vain.items() if by in there})


class RestingMembers:
    """Members that have no microbatches where their stage has others: who is to go, and for some
    steps who one member alone accuses. Then others find out whether that is so; if not, it is for
    twice as many steps the next time, and soon hardly costs anybody anything. Who is accused by a
    replica of its stage, which no plan keeps it apart from, has no part in attempts at all: it
    follows, as a joiner does."""

    def __init__(self) -> None:
        self._steps: dict[str, float] = {}  # left
        self._times: Counter[str] = Counter()
        self._apart: set[str] = set()  # those without a part

    def __contains__(self, node: str) -> bool:
        return node in self._steps

    @property
    def nodes(self) -> set[str]:
        return set(self._steps)

    def is_to_go(self, node: str) -> bool:
        return self._steps.get(node) == math.inf

    def has_no_part(self, node: str) -> bool:
        return node in self._apart

    def stop(self, nodes: Collection[str]) -> None:
        """They are to go."""
        self._steps |= dict.fromkeys(nodes, math.inf)
        self._apart |= set(nodes)

    def rest(self, node: str, by_replica: bool) -> None:
        """For a while, unless it does already."""
        if by_replica:
            self._apart.add(node)
        if node not in self._steps:
            self._steps[node] = 2.0 ** min(self._times[node], LONGEST_REST)
            self._times[node] += 1

    def committed(self) -> None:
        self._steps = {node: left - 1 for node, left in self._steps.items() if left > 1}
        self._apart &= self._steps.keys()

    def keep(self, members: Collection[str]) -> None:
        """All others are members no longer."""
        self._steps = {node: left for node, left in self._steps.items() if node in members}
        self._times = Counter({node: n for node, n in self._times.items() if node in members})
        self._apart &= self._steps.keys()


class NonFiniteSources:
    """Nodes that make what is not finite."""

    def __init__(self) -> None:
        self.why: dict[str, str] = {}  # by node, in this step
        self.steps: Counter[str] = Counter()  # in which a node alone of its stage did
        self.by: dict[str, set[str]] = {}  # who has told of it, in those

    def heard(self, node: str, by: str, reason: str) -> None:
        self.why[node] = reason
        self.by.setdefault(node, set()).add(by)

    def lets_through(self, training: Mapping[str, int]) -> bool:
        """Whether all nodes of a stage have: then it is the model. `training`: stages, by node."""
        left = {stage for node, stage in training.items() if node not in self.why}
        return left != set(training.values())

    def over(self, begin: pb.Begin) -> dict[str, str]:
        """So is the step. Who made what is not finite, when its replicas didn't, was wrong. Who was
        often enough, and why."""
        found: dict[str, str] = {}
        why, self.why = self.why, {}
        for node, reason in why.items():
            if begin.non_finite:
                self.by.pop(node, None)
                continue
            self.steps[node] += 1
            if self.steps[node] >= SPOILT:
                found[node] = f"{reason}, as in {SPOILT} steps; its replicas do better"
        return found

    def keep(self, members: Collection[str]) -> None:
        """All others are members no longer."""
        self.steps = Counter({node: n for node, n in self.steps.items() if node in members})
        self.by = {node: by & set(members) for node, by in self.by.items() if node in members}


def _kind_of(reason: str) -> str:
    """Reasons are of one kind that differ in figures only."""
    return re.sub(r"\b\d+(\.\d+)?\b", "#", reason)

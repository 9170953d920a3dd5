"""Stragglers: which node holds up a late attempt, from the members' accounts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from planaria.node.transaction.routing import Route, routes
from planaria.node.wire import stage_pb2 as pb

STILL = 5.0
"""Minimum seconds in which a node with work has to compute something; otherwise twice the usual
duration of a step."""
ASK = 0.5
"""Seconds between two inquiries."""
LAPSE = 2.0
"""Seconds between two accounts after which the older one proves nothing about the time between: a
node, or the driver itself, was held up."""
SLOW = 1.5
"""An attempt is late after so many times the usual duration of a step ..."""
LATE = 1.0
"""... and not before so many seconds."""


class OverdueVisit(NamedTuple):
    """The next visit of a microbatch that isn't home."""

    microbatch: int
    node: str
    stage: int
    backward: bool

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        return f"microbatch {self.microbatch}, {way} at {self.node} of stage {self.stage}"


@dataclass(frozen=True)
class _MemberAccount:
    account: pb.Account
    at: float
    still: float  # since when it had work but computed nothing
    busy: float  # since when it had work


class StragglerDetector:
    """The accounts of one attempt; `now` is the driver's clock."""

    def __init__(self) -> None:
        self._asked = -math.inf
        self._heard: dict[str, _MemberAccount] = {}
        self._told: set[str] = set()  # stragglers already returned

    def is_due(self, now: float) -> bool:
        """Whether an inquiry is due; counts it as sent."""
        due = now - self._asked >= ASK
        if due:
            self._asked = now
        return due

    def heard(self, peer: str, account: pb.Account, now: float) -> None:
        before, still, busy = self._heard.get(peer), now, now
        if before is not None and now - before.at < LAPSE and before.account.computing:
            busy = before.busy
            if account.computed == before.account.computed:
                still = before.still
        self._heard[peer] = _MemberAccount(account, now, still, busy)

    def standing_still(self) -> dict[str, float]:
        """Seconds for which nodes with work have computed nothing."""
        return {
            node: one.at - one.still
            for node, one in sorted(self._heard.items())
            if one.account.computing
        }

    def slow(self, members: Iterable[pb.Place]) -> list[str]:
        """Nodes that have computed for a while when no other node of their stage has work. Each is
        returned once."""
        stages: dict[int, list[str]] = {}
        for place in members:
            stages.setdefault(place.stage, []).append(place.node)
        found = []
        for nodes in stages.values():
            busy = [node for node in nodes if self._is_computing(node)]
            if 1 == len(busy) < len(nodes) and self._heard.keys() >= set(nodes):
                found += [n for n in busy if self._heard[n].at - self._heard[n].busy >= ASK]
        found = [node for node in found if node not in self._told]
        self._told.update(found)
        return found

    def _is_computing(self, node: str) -> bool:
        one = self._heard.get(node)
        return one is not None and one.account.computing

    def missing(self, begin: pb.Begin, home: Collection[int]) -> set[frozenset[str]]:
        """Pairs of nodes between which a microbatch's next frame was lost: one has done its part,
        and the other has no work. A single node if it hasn't reported that a microbatch is home."""
        done = self._done()
        found: set[frozenset[str]] = set()
        for microbatch, route in routes(begin).items():
            passes = _passes(route, begin.kind == pb.Begin.TRAIN)
            newest = max((i for i, p in enumerate(passes) if (microbatch, *p) in done), default=-1)
            if microbatch in home or newest < 0:
                continue
            before, after = (route.nodes[at] for at, _ in (passes[newest:] + passes[-1:])[:2])
            if not self._is_computing(after):
                found.add(frozenset({before, after}))
        return found

    def _done(self) -> set[tuple[int, int, bool]]:
        return {
            (one.microbatch, one.position, one.backward)
            for heard in self._heard.values()
            for one in heard.account.done
        }

    def awaited(self, begin: pb.Begin, home: Collection[int]) -> list[OverdueVisit]:
        """The next visits of microbatches that aren't home. Excludes those that their source keeps
        until others are home."""
        done = self._done()
        training = begin.kind == pb.Begin.TRAIN
        found: list[OverdueVisit] = []
        held_back: list[OverdueVisit] = []
        for microbatch, route in routes(begin).items():
            if microbatch in home:
                continue
            passes = _passes(route, training)
            newest = max((i for i, p in enumerate(passes) if (microbatch, *p) in done), default=-1)
            position, backward = passes[min(newest + 1, len(passes) - 1)]
            node, stage = route.nodes[position], route.stages[position]
            one = OverdueVisit(microbatch, node, stage, backward)
            (held_back if newest < 0 else found).append(one)
        return found or held_back


def _passes(route: Route, training: bool) -> list[tuple[int, bool]]:
    """Position and direction of each pass, in order. At the head there is only a forward pass."""
    last = len(route.nodes) - 1
    forward = [(position, False) for position in range(last + 1)]
    return forward + [(position, True) for position in reversed(range(last))] * training


def patience(usual: float) -> float:
    """Seconds in which a node has to compute something, if a step usually takes `usual`."""
    return max(STILL, 2 * usual)


def is_late(seconds: float, usual: float) -> bool:
    """Whether an attempt should be over after so many seconds."""
    return seconds >= max(LATE, SLOW * usual)

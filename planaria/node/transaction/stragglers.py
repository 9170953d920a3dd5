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
        direction = "backward" if self.backward else "forward"
        return f"microbatch {self.microbatch}, {direction} at {self.node} of stage {self.stage}"


@dataclass(frozen=True)
class _MemberAccount:
    account: pb.Account
    at: float
    still: float  # since when it had work but computed nothing
    busy: float  # since when it had work


class StragglerDetector:
    """The accounts of one attempt; `now` is the driver's clock."""

    def __init__(self) -> None:
        self._inquired_at = -math.inf
        self._accounts: dict[str, _MemberAccount] = {}
        self._reported: set[str] = set()  # stragglers already returned

    def is_due(self, now: float) -> bool:
        """Whether an inquiry is due; counts it as sent."""
        due = now - self._inquired_at >= ASK
        if due:
            self._inquired_at = now
        return due

    def heard(self, peer: str, account: pb.Account, now: float) -> None:
        before, still, busy = self._accounts.get(peer), now, now
        if before is not None and now - before.at < LAPSE and before.account.computing:
            busy = before.busy
            if account.computed == before.account.computed:
                still = before.still
        self._accounts[peer] = _MemberAccount(account, now, still, busy)

    def standing_still(self) -> dict[str, float]:
        """Seconds for which nodes with work have computed nothing."""
        return {
            node: member.at - member.still
            for node, member in sorted(self._accounts.items())
            if member.account.computing
        }

    def slow(self, members: Iterable[pb.Place]) -> list[str]:
        """Nodes that have computed for a while when no other node of their stage has work. Each is
        returned once."""
        stages: dict[int, list[str]] = {}
        for place in members:
            stages.setdefault(place.stage, []).append(place.node)
        slow_nodes = []
        for nodes in stages.values():
            busy = [node for node in nodes if self._is_computing(node)]
            if 1 == len(busy) < len(nodes) and self._accounts.keys() >= set(nodes):
                slow_nodes += [
                    n for n in busy if self._accounts[n].at - self._accounts[n].busy >= ASK
                ]
        slow_nodes = [node for node in slow_nodes if node not in self._reported]
        self._reported.update(slow_nodes)
        return slow_nodes

    def _is_computing(self, node: str) -> bool:
        member = self._accounts.get(node)
        return member is not None and member.account.computing

    def missing(self, begin: pb.Begin, home: Collection[int]) -> set[frozenset[str]]:
        """Pairs of nodes between which a microbatch's next frame was lost: one has done its part,
        and the other has no work. A single node if it hasn't reported that a microbatch is home."""
        done = self._done()
        pairs: set[frozenset[str]] = set()
        for microbatch, route in routes(begin).items():
            passes = _passes(route, begin.kind == pb.Begin.TRAIN)
            newest = max((i for i, p in enumerate(passes) if (microbatch, *p) in done), default=-1)
            if microbatch in home or newest < 0:
                continue
            before, after = (route.nodes[at] for at, _ in (passes[newest:] + passes[-1:])[:2])
            if not self._is_computing(after):
                pairs.add(frozenset({before, after}))
        return pairs

    def _done(self) -> set[tuple[int, int, bool]]:
        return {
            (visit.microbatch, visit.position, visit.backward)
            for member in self._accounts.values()
            for visit in member.account.done
        }

    def awaited(self, begin: pb.Begin, home: Collection[int]) -> list[OverdueVisit]:
        """The next visits of microbatches that aren't home. Excludes those that their source keeps
        until others are home."""
        done = self._done()
        training = begin.kind == pb.Begin.TRAIN
        overdue: list[OverdueVisit] = []
        not_begun: list[OverdueVisit] = []
        for microbatch, route in routes(begin).items():
            if microbatch in home:
                continue
            passes = _passes(route, training)
            newest = max((i for i, p in enumerate(passes) if (microbatch, *p) in done), default=-1)
            position, backward = passes[min(newest + 1, len(passes) - 1)]
            node, stage = route.nodes[position], route.stages[position]
            visit = OverdueVisit(microbatch, node, stage, backward)
            (not_begun if newest < 0 else overdue).append(visit)
        return overdue or not_begun


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

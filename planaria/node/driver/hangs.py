"""Hangs and stragglers: which member delays an attempt, by the members' accounts."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from planaria.node.transaction.routing import Route, nodes_by_stage, routes, stages_in
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.seat_names import node_of

STILL: Final = 5.0
"""Minimum seconds in which a node with work has to compute something; otherwise twice the usual
duration of a step."""
ASK: Final = 0.5
"""Seconds between two inquiries."""
LAPSE: Final = 2.0
"""Seconds between two accounts after which the older one proves nothing about the time between: a
node, or the driver itself, was held up."""
LATE: Final = 1.5
"""An attempt is late after so many times the usual duration of a step ..."""
LATE_SECONDS: Final = 1.0
"""... and not before so many seconds."""
HEIR: Final = 30.0
"""Seconds that an heir has to take over from a hanging node that is its stage's last."""
SLOW: Final = 10.0
"""Factor of slowness: a slow node's microbatches take so many times those of the others."""


class OverdueVisit(NamedTuple):
    """The visit that a microbatch waits for, since it isn't home."""

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
    """Finds the members that delay one attempt, by their accounts; `now` is the driver's clock."""

    def __init__(self) -> None:
        self._inquired_at = -math.inf
        self._accounts: dict[str, _MemberAccount] = {}
        self._reported: set[str] = set()  # stragglers already returned

    def is_due(self, now: float) -> bool:
        """Whether the members are to be asked for accounts now; counts the inquiry as sent."""
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

    def slow(self, begin: pb.Begin) -> list[str]:
        """Nodes that compute when no other of their stage has work. Each is returned once."""
        slow_nodes = []
        for nodes in nodes_by_stage(stages_in(begin)).values():
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

    def lost_between(self, begin: pb.Begin, home: Collection[int]) -> set[frozenset[str]]:
        """Pairs of nodes between which a microbatch's next frame was lost: one has done its part,
        and the other has no work. A single node if it hasn't reported that a microbatch is home."""
        pairs: set[frozenset[str]] = set()
        for _, route, passes, newest in self._under_way(begin, home):
            if newest >= 0:
                before, after = (route.nodes[at] for at, _ in (passes[newest:] + passes[-1:])[:2])
                if not self._is_computing(after):
                    pairs.add(frozenset({before, after}))
        return pairs

    def _under_way(
        self, begin: pb.Begin, home: Collection[int]
    ) -> Iterator[tuple[int, Route, list[tuple[int, bool]], int]]:
        """Each microbatch that isn't home: its route, all its passes, and the index of the newest
        one that is done; -1: none is."""
        done = {
            (visit.microbatch, visit.position, visit.backward)
            for member in self._accounts.values()
            for visit in member.account.done
        }
        for microbatch, route in routes(begin).items():
            if microbatch not in home:
                passes = _passes(route, begin.kind == pb.Begin.TRAIN)
                newest = [i for i, at in enumerate(passes) if (microbatch, *at) in done]
                yield microbatch, route, passes, max(newest, default=-1)

    def awaited(self, begin: pb.Begin, home: Collection[int]) -> list[OverdueVisit]:
        """The next visits of microbatches that aren't home; if possible of those on their way."""
        overdue: list[OverdueVisit] = []
        not_begun: list[OverdueVisit] = []
        for microbatch, route, passes, newest in self._under_way(begin, home):
            position, backward = passes[min(newest + 1, len(passes) - 1)]
            node, stage = route.nodes[position], route.stages[position]
            visit = OverdueVisit(microbatch, node, stage, backward)
            (not_begun if newest < 0 else overdue).append(visit)
        return overdue or not_begun


def _passes(route: Route, training: bool) -> list[tuple[int, bool]]:
    """A microbatch's passes in order: position and direction. At the head it only goes forward."""
    last = len(route.nodes) - 1
    forward = [(position, False) for position in range(last + 1)]
    return forward + [(position, True) for position in reversed(range(last))] * training


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
        """The usual duration of a step in seconds; 0: unknown."""
        return statistics.median(self._steps) if self._steps else 0.0

    def is_late(self, seconds: float) -> bool:
        """Whether an attempt of so many seconds should be over by now."""
        usual = self.usual
        return seconds >= (max(LATE_SECONDS, LATE * usual) if usual else self._progress / 4)

    def committed(self, seconds: float, trained: Iterable[str]) -> None:
        """Takes in the duration of a committed step, and the nodes that have trained in it."""
        self._steps.append(seconds)
        self._proven.update(trained)

    def knows(self, node: str) -> None:
        """Notes that a node has trained before, perhaps with another driver."""
        self._proven.add(node)

    def patience(self, node: str) -> float:
        """Seconds that a node with work has to compute something; a node that never trained has
        more time."""
        if not self.usual or node not in self._proven:
            return self._progress / 2
        return min(max(STILL, 2 * self.usual), self._progress / 2)

    def still_for_too_long(self, seconds: Mapping[str, float]) -> dict[str, str]:
        """Hanging nodes, and why; `seconds`: how long each had work and computed nothing."""
        return {
            node: f"it has computed nothing for {still:.0f} s, though it had work"
            for node, still in seconds.items()
            if still >= self.patience(node)
        }

    # --- hanging nodes

    def hear(self, node: str, why: str, now: float) -> None:
        """Takes in a node's own report that it hangs, and why; empty: it doesn't."""
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
        """A hanging node to be replaced before anything begins; empty: none. The last node with its
        stage's state is replaced once the run has waited for it, and one at a time. `stages`: of
        all members; `having`: members with the newest state."""
        sound = [node for node in having if node not in self.why]
        for node in sorted(self.why.keys() & stages.keys()):
            waited = now - self._since[node] >= self._progress / 2
            if waited or not is_last(node, stages, sound):
                return node
        return ""

    def to_remove(
        self, stages: Mapping[str, int], heard: Collection[str], now: float
    ) -> dict[str, str]:
        """The node that hangs in the middle of an update and can't answer a query, and why; or
        none. It is removed at once where others of its stage answer. `heard`: members that have
        answered."""
        node = self.to_replace(stages, heard, now)
        return {node: self.why[node]} if node and node not in heard else {}

    def heir_has_time(self, node: str, now: float) -> bool:
        """Whether the heir of a hanging node still has time to take over from it."""
        return now - self._heir_asked.setdefault(node, now) < HEIR


def is_last(node: str, stages: Mapping[str, int], sound: Iterable[str]) -> bool:
    """Whether a stage would lose its last `sound` seat with this seat's node. `stages`: by seat."""
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

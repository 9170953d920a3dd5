"""Leases: which member is silent, by renewals, streams, probes and dials, and when it has to go.

A heap has the earliest deadline of each member; stale entries are dropped on access.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator

from planaria.bootstrap.effects import Dial, Effect, Probe
from planaria.bootstrap.history import ViewHistory
from planaria.bootstrap.member_table import Members, NodeRecord
from planaria.bootstrap.neighbours import place_of
from planaria.bootstrap.unreachable_pairs import LOOKS, UnreachablePairs

ACCUSERS_NAMED = 3


class Leases:
    def __init__(
        self,
        members: Members,
        unreachable: UnreachablePairs,
        history: ViewHistory,
        numbers: Iterator[int],
    ) -> None:
        """`numbers`: of dials."""
        self._members, self._unreachable, self._history = members, unreachable, history
        self._rules, self._numbers, self._probes = members.rules, numbers, itertools.count(1)
        self._deadlines: list[tuple[float, str]] = []

    def stream_opened(self, node: NodeRecord) -> list[Effect]:
        node.streaming, node.lost, node.dial, node.gone = True, None, 0, False
        if node.probe:
            return [Probe(node.name, node.probe)]
        if node.accusers:
            self.answered(node)
        return []

    def renewed(self, node: NodeRecord, now: float) -> None:
        node.renewed = now
        if node.reached_by:
            node.reached_by = ""
            self._history.note(f"{node.name} ({place_of(node.member)}) is heard again")

    def answered(self, node: NodeRecord) -> None:
        """Ends suspicions of a node that answered. unreachable_pairs.py has its reachability."""
        node.accusers, node.probe = {}, 0
        self._history.note(f"{node.name} answers the registry")

    def stream_lost(self, node: NodeRecord, now: float) -> list[Effect]:
        """Records the loss of the node's stream, and dials it. A machine whose process has ended
        refuses a dial, which shortens the wait. A node without a network, or one that can't be
        dialled, has its lease to return."""
        node.streaming, node.lost, node.dial = False, now, next(self._numbers)
        address = node.member.address
        return [Dial(node.dial, node.name, address, self._rules.lease)] if address else []

    def dialled(self, node: NodeRecord, question: int, alive: bool | None) -> None:
        if node.dial == question and alive is False:
            node.gone = True
            self.schedule(node)

    def suspect(self, node: NodeRecord, now: float) -> list[Effect]:
        """Probes a suspected node if it has a stream, else dials it; once."""
        if not node.streaming:
            return self.stream_lost(node, now) if node.lost is None else []
        if node.probe:
            return []
        node.probe, node.probed = next(self._probes), now
        self.schedule(node)
        return [Probe(node.name, node.probe)]

    def doom(self, node: NodeRecord, reason: str) -> None:
        """Makes the node's eviction due."""
        node.doomed = reason
        self.schedule(node)

    def paused(self, seconds: float, now: float) -> None:
        """Extends the leases by a pause of the registry."""
        for node in self._members:
            node.renewed = min(now, node.renewed + seconds)
            node.probed = min(now, node.probed + seconds)
            if node.lost is not None:
                node.lost = min(now, node.lost + seconds)
        self.restart()

    def restart(self) -> None:
        """Schedules the deadlines of all members anew."""
        self._deadlines = []
        for node in self._members:
            node.due = math.inf
            self.schedule(node)

    def schedule(self, node: NodeRecord) -> None:
        """Puts a node's deadline on the heap, if it is earlier than that there."""
        due = self._deadline(node)
        if due < node.due:
            node.due = due
            heapq.heappush(self._deadlines, (due, node.name))

    def expired(self, now: float) -> Iterator[tuple[NodeRecord, str]]:
        """Yields overdue nodes and the reason; evict each before the next one is requested."""
        while self._deadlines and self._deadlines[0][0] <= now:
            due, name = heapq.heappop(self._deadlines)
            node = self._members.by_name.get(name)
            if node is None or node.due != due:
                continue
            node.due = math.inf
            if reason := self._overdue(node, now):
                yield node, reason
            else:
                self.schedule(node)

    def _deadline(self, node: NodeRecord) -> float:
        """The earliest deadline by which a node has to be heard."""
        if node.doomed:
            return -math.inf
        due = node.renewed + self._rules.lease
        if node.probe:
            due = min(due, node.probed + self._rules.probe_timeout)
        if node.reached_by:
            due = max(due, node.checked + self._rules.lease / LOOKS)
        return min(due, self._awaited(node))

    def _awaited(self, node: NodeRecord) -> float:
        """The deadline for a node's return after the loss of its stream and a refused dial."""
        lost = node.lost if node.gone else None
        return math.inf if lost is None else lost + self._rules.reconnect

    def _overdue(self, node: NodeRecord, now: float) -> str:
        """Why a node is past its deadline; empty: it isn't, or is spared."""
        if node.doomed:
            return node.doomed
        rules, was_reached = self._rules, bool(node.reached_by)
        named = itertools.islice(node.accusers.items(), ACCUSERS_NAMED)
        accused = "".join(f"; suspected by {a}: {w}" for a, w in named)
        if now >= self._awaited(node):
            return f"its stream broke, without a new one for {rules.reconnect:g} s{accused}"
        if node.probe and now >= node.probed + rules.probe_timeout:
            why = f"no answer to a probe for {rules.probe_timeout:g} s"
        elif now >= node.renewed + rules.lease:
            why = f"not renewed for {rules.lease:g} s"
        else:
            return ""
        if self._spare(node, now):
            return ""
        return f"{why}{', and no member reaches it any more' * was_reached}{accused}"

    def _spare(self, node: NodeRecord, now: float) -> bool:
        """Spares a silent node that is the last holder of a stage while another member reaches it;
        the check is repeated soon."""
        former_helper, spared = node.reached_by, self._members.last_working(node.name, now)
        node.reached_by = self._unreachable.reached_by(node.name, now) if spared else ""
        if not node.reached_by:
            return False
        if not former_helper:
            self._history.note(
                f"{node.name} ({place_of(node.member)}) is not heard, but {node.reached_by} "
                "reaches it: it stays, as the only node with its stage's state"
            )
        node.checked, node.probe, node.accusers = now, 0, {}
        return True

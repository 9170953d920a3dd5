"""How long a node that has to leave waits for somebody to take over what only it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.neighbours import stages_of
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.naming import node_of

APPOINTMENT = 2.0
"""Seconds that a node which has to leave waits for the registry to find somebody for its seat."""


def may_have_heir(view: registry.View, leaver: str) -> bool:
    """Whether the registry has somebody to send to where the node, or the node of the seat, has to
    leave: a standby or whoever else has room, or a replica that its stage can do without. Who
    leaves, too, is none of these."""
    others = [m for m in view.members if node_of(m.node) != node_of(leaver) and not m.leaving]
    seats = Counter({node_of(m.node): 0 for m in others})
    seats.update(node_of(m.node) for m in others for _ in m.seats)
    served = Counter(seat.stage for member in others for seat in member.seats)
    return max(served.values(), default=0) > 1 or any(
        seats[node_of(member.node)] < (member.room or 1) for member in others
    )


class Leaving:
    """A node that was told to leave at `now`, in `view`, and has said so to the registry."""

    def __init__(self, node: str, view: registry.View, now: float) -> None:
        self._node, self._told = node, now
        own = next((member for member in view.members if member.node == node), registry.Member())
        self._replicas = {stage: _staying(view, node, stage) for stage in stages_of(own)}
        self._appointed: dict[int, float] = {}  # when somebody was last to take it, by stage

    def waits(
        self, stage: int, view: registry.View, trains: Iterable[pb.Place], now: float
    ) -> bool:
        """Whether somebody is to take the stage over, or may be. `trains`: who takes part in the
        attempt.

        Not before views say who leaves is it known who stays: of two replicas that are told to
        leave at once, each may still take the other for one that does. Whose mark comes later sees
        the other's.
        """
        if not self._is_known(view):
            return now < self._told + APPOINTMENT
        if self.lives_on(stage, view) or self.heir(stage, view, trains):
            return False
        since = self._appointed.setdefault(stage, now)
        if _staying(view, self._node, stage):
            self._appointed[stage] = now
            return True
        return may_have_heir(view, self._node) and now < since + APPOINTMENT

    def _is_known(self, view: registry.View) -> bool:
        return any(member.node == self._node and member.leaving for member in view.members)

    def lives_on(self, stage: int, view: registry.View) -> bool:
        """Whether a replica that was there before stays."""
        return bool(self._replicas.get(stage, set()) & _staying(view, self._node, stage))

    def heir(self, stage: int, view: registry.View, trains: Iterable[pb.Place]) -> str:
        """The seat that has got the stage's state since then; empty: none has, or needs to."""
        there = _staying(view, self._node, stage) - self._replicas.get(stage, set())
        seats = (place.node for place in trains if place.stage == stage)
        return next((seat for seat in seats if node_of(seat) in there), "")


def _staying(view: registry.View, node: str, stage: int) -> set[str]:
    """The other nodes at the stage that don't leave."""
    return {
        member.node
        for member in view.members
        if stage in stages_of(member) and member.node != node and not member.leaving
    }

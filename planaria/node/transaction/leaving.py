"""How long a leaving node waits for another one to take over what only it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.neighbours import stages_of
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.seat_names import node_of

APPOINTMENT = 2.0
"""Seconds that a leaving node waits for the registry to find a successor for its seat."""


def may_have_heir(view: registry.View, leaver: str) -> bool:
    """Whether the registry can find a successor for the leaving node or seat: a standby, another
    node with room, or a surplus replica. Leaving nodes don't count."""
    others = [m for m in view.members if node_of(m.node) != node_of(leaver) and not m.leaving]
    seats = Counter({node_of(m.node): 0 for m in others})
    seats.update(node_of(m.node) for m in others for _ in m.seats)
    served = Counter(seat.stage for member in others for seat in member.seats)
    return max(served.values(), default=0) > 1 or any(
        seats[node_of(member.node)] < (member.room or 1) for member in others
    )


class Leaving:
    """A node that was asked to leave at `now`, in `view`, and has reported it to the registry."""

    def __init__(self, node: str, view: registry.View, now: float) -> None:
        self._node, self._reported_at = node, now
        own = next((member for member in view.members if member.node == node), registry.Member())
        self._replicas = {stage: _staying(view, node, stage) for stage in stages_of(own)}
        self._appointed: dict[int, float] = {}  # when a successor was last appointed, by stage

    def waits(
        self, stage: int, view: registry.View, trains: Iterable[pb.Place], now: float
    ) -> bool:
        """Whether the leaver waits for a successor at the stage, which is appointed or may be
        found. `trains`: members of the attempt.

        Until a view marks this node as leaving, the remaining nodes aren't known: two replicas that
        leave at once may each count on the other. The one that is marked later sees the other's
        mark.
        """
        if not any(member.node == self._node and member.leaving for member in view.members):
            return now < self._reported_at + APPOINTMENT
        if self.lives_on(stage, view) or self.heir(stage, view, trains):
            return False
        since = self._appointed.setdefault(stage, now)
        if _staying(view, self._node, stage):
            self._appointed[stage] = now
            return True
        return may_have_heir(view, self._node) and now < since + APPOINTMENT

    def lives_on(self, stage: int, view: registry.View) -> bool:
        """Whether another node stays that served the stage when this one was asked to leave."""
        return bool(self._replicas.get(stage, set()) & _staying(view, self._node, stage))

    def heir(self, stage: int, view: registry.View, trains: Iterable[pb.Place]) -> str:
        """The seat that has received the stage's state since then; empty: none has, or needs to."""
        newcomers = _staying(view, self._node, stage) - self._replicas.get(stage, set())
        seats = (place.node for place in trains if place.stage == stage)
        return next((seat for seat in seats if node_of(seat) in newcomers), "")


def _staying(view: registry.View, node: str, stage: int) -> set[str]:
    """The nodes at the stage, without this one, that don't leave."""
    return {
        member.node
        for member in view.members
        if stage in stages_of(member) and member.node != node and not member.leaving
    }

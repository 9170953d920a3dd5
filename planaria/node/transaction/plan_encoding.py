"""Plan encoding: each member's part of an attempt's plan. Pure.

The driver has the whole `Begin` and sends a member its part of it:

- the microbatches that visit the member, with nodes as numbers in the list of members; of all
  others their number;
- the joiners of its stage that follow;
- the members. A member that received the attempt before gets the changes since then; after a query,
  the differences from the view of the query.

So the bytes that a driver sends for a step grow with its nodes, not with their square.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

from planaria.bootstrap import registry_pb2 as registry
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.transaction.routing import stages_in
from planaria.node.wire import stage_pb2 as pb

Members = Mapping[str, int]
"""Stages of the attempt's members, by node."""


def active(view: registry.View) -> dict[str, int]:
    """The stages of the members that aren't standbys, each of which has one seat here."""
    return {member.node: member.seats[0].stage for member in view.members if member.seats}


class PlanEncoder:
    """The driver's side: encodes what members haven't received yet."""

    def __init__(self) -> None:
        self.doubt()

    def doubt(
        self, view: int = 0, members: Members = MappingProxyType({}), having: Iterable[str] = ()
    ) -> None:
        """Forgets the last plan, which may not have arrived. `members`: of this view, which the
        members in `having` know; they get the differences from it."""
        self._last, self._members = Ballot(view, 0), members
        self._informed = frozenset(having)

    def tell(
        self, ballot: Ballot, begin: pb.Begin, parts: Mapping[str, pb.Begin], stages: Members
    ) -> None:
        """Encodes an attempt that begins, or goes on, under the ballot into `parts`, by node.
        `stages`: of these nodes."""
        visits = _visits(begin)
        joiners: defaultdict[int, list[pb.Joiner]] = defaultdict(list)
        for joiner in begin.joining:
            joiners[joiner.stage].append(joiner)
        new, rest = _without_lists(begin), _without_lists(begin)
        new.members.extend(begin.members)
        members = stages_in(begin)
        rest.members_of.CopyFrom(self._last.message())
        rest.left.extend(self._members.keys() - members.keys())
        changed = (node for node, stage in members.items() if self._members.get(node) != stage)
        rest.members.extend(pb.Place(node=node, stage=members[node]) for node in changed)
        to_new, to_informed = new.SerializeToString(), rest.SerializeToString()
        for node, part in parts.items():
            mine = visits.get(node, ())
            # Concatenated messages are the serialised form of their merge.
            part.MergeFromString(
                b"".join((to_informed if node in self._informed else to_new, *mine))
            )
            part.untold = len(begin.plan) - len(mine)
            part.joining.extend(joiners[stages[node]])
        self._last, self._informed, self._members = ballot, frozenset(stages), members


def _without_lists(begin: pb.Begin) -> pb.Begin:
    """A copy of the plan with the fields that all members get."""
    part = pb.Begin(step=begin.step, kind=begin.kind, non_finite=begin.non_finite)
    part.entering.extend(begin.entering)
    if begin.HasField("since"):
        part.since.CopyFrom(begin.since)
    return part


def _visits(begin: pb.Begin) -> dict[str, list[bytes]]:
    """The microbatches that visit a node, once each, by node, with the source before the other
    places. Each is a `Begin`, serialised once for all its receivers."""
    visits: dict[str, list[bytes]] = {place.node: [] for place in begin.members}
    number = {node: number for number, node in enumerate(visits)}
    by_number = [*visits.values()]
    for microbatch in begin.plan:
        places = [number[microbatch.source], *microbatch.places]
        numbered = pb.Microbatch(id=microbatch.id, order=microbatch.order, places=places)
        alone = pb.Begin(plan=[numbered]).SerializeToString()
        for place in places:
            by_number[place].append(alone)
    return visits


def _with_source(microbatch: pb.Microbatch, members: Sequence[pb.Place]) -> pb.Microbatch:
    """The microbatch with its source by name, which the first of its places numbers."""
    if microbatch.source or not microbatch.places:
        return microbatch
    source, *places = microbatch.places
    if source >= len(members):
        raise ValueError(f"the plan names member {source} as a source, of {len(members)} members")
    name = members[source].node
    return pb.Microbatch(id=microbatch.id, source=name, order=microbatch.order, places=places)


class PlanDecoder:
    """The member's side: keeps the members of the last attempt received."""

    def __init__(self) -> None:
        self._last, self._asked_in = NEVER, 0
        self._members: Members = {}
        self._view: Members = {}

    def queried(self, view: int, members: Members) -> None:
        """Notes that a driver has sent a query in the view of this number, with these members."""
        self._asked_in, self._view = view, members

    def has(self, view: int) -> bool:
        """Whether the view's members are known: a driver's last query was in it."""
        return self._asked_in == view

    def whole(self, ballot: Ballot, begin: pb.Begin) -> pb.Begin:
        """Restores a received plan: all members, and names of sources. Raises ValueError for
        differences from an attempt that isn't the last one received, or from an unknown view, or
        for a source without a part."""
        restored = pb.Begin()
        restored.CopyFrom(begin)
        if begin.HasField("members_of"):
            since = Ballot.of(begin.members_of)
            of_view = since.attempt == 0 and self.has(since.view)
            if since != self._last and not of_view:
                raise ValueError(
                    f"the plan lists changes since {since}, but {self._last} came last"
                )
            before, left = self._view if of_view else self._members, set(begin.left)
            stages = {n: at for n, at in before.items() if n not in left}
            stages |= stages_in(begin)
            for name in ("members_of", "left", "members"):
                restored.ClearField(name)
            places = [pb.Place(node=node, stage=stage) for node, stage in stages.items()]
            restored.members.extend(in_order(places))
        self._last, self._members = ballot, stages_in(restored)
        del restored.plan[:]
        restored.plan.extend(_with_source(m, restored.members) for m in begin.plan)
        return restored


def in_order(members: Collection[pb.Place]) -> list[pb.Place]:
    """The members in the order that gives nodes their numbers in a plan."""
    return sorted(members, key=attrgetter("node"))

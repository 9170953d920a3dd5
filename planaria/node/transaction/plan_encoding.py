"""What each member is told of an attempt: only what concerns it. Pure.

The driver has the whole `Begin`, and tells a member its part of it:

- of the plan the microbatches that it visits, or stands in for, where nodes are numbers in the list
  of who takes part; of all others how many they are;
- of those who follow, the ones of its stage;
- who takes part. Whoever was told of the attempt before is told who has come and gone since then;
  after the driver has asked everybody, what is other than in the view that it asked in.

So what a driver says of a step grows with its nodes, and not with their square.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from types import MappingProxyType

from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.recovery.masking import stand_ins

Members = Mapping[str, int]
"""Stages of those who take part."""


class PlanEncoder:
    """A driver's side: what the members have heard."""

    def __init__(self) -> None:
        self.doubt()

    def doubt(
        self, view: int = 0, members: Members = MappingProxyType({}), having: Iterable[str] = ()
    ) -> None:
        """What was told last may not have come. `members`: of this view, which those have, and
        will find when they are told what is other than in it."""
        self._last, self._members = Ballot(view, 0), members
        self._told = frozenset(having)

    def tell(
        self,
        ballot: Ballot,
        begin: pb.Begin,
        to: Mapping[str, pb.Begin],
        stages: Members,
        spare: bool,
    ) -> None:
        """What is told to these nodes, at their stages, of an attempt that begins, or goes on,
        under the ballot: it is written into `to`, by node. `spare`: nodes stand in for each
        other."""
        visits = _visits(begin, spare)
        joiners: defaultdict[int, list[pb.Joiner]] = defaultdict(list)
        for joiner in begin.joining:
            joiners[joiner.stage].append(joiner)
        new, rest = _without_lists(begin), _without_lists(begin)
        new.members.extend(begin.members)
        members = {place.node: place.stage for place in begin.members}
        self._tell_changes(rest, members)
        to_new, to_told = new.SerializeToString(), rest.SerializeToString()
        for node, part in to.items():
            mine = visits.get(node, ())
            # The bytes of messages end to end are those of what they are merged.
            part.MergeFromString(b"".join((to_told if node in self._told else to_new, *mine)))
            part.untold = len(begin.plan) - len(mine)
            part.joining.extend(joiners[stages[node]])
        self._last, self._told, self._members = ballot, frozenset(stages), members

    def _tell_changes(self, part: pb.Begin, members: Members) -> None:
        part.members_of.CopyFrom(self._last.message())
        part.left.extend(self._members.keys() - members.keys())
        for node, stage in members.items():
            if self._members.get(node) != stage:
                part.members.add(node=node, stage=stage)


def _without_lists(begin: pb.Begin) -> pb.Begin:
    """What all are told."""
    part = pb.Begin(step=begin.step, kind=begin.kind, non_finite=begin.non_finite)
    part.entering.extend(begin.entering)
    if begin.HasField("since"):
        part.since.CopyFrom(begin.since)
    return part


def _visits(begin: pb.Begin, spare: bool) -> dict[str, list[bytes]]:
    """By node, the microbatches that come to it, once each, or that it does ahead: of each a
    `Begin` with it, serialised once for all who are told it."""
    found: dict[str, list[bytes]] = {place.node: [] for place in begin.members}
    number = {node: number for number, node in enumerate(found)}
    by_number = [*found.values()]
    pairs = stand_ins(begin.members) if spare else {}
    ahead = {number[node]: number[stand_in] for node, stand_in in pairs.items()}
    for microbatch in begin.plan:
        told = _in_numbers(microbatch, number[microbatch.source])
        alone = pb.Begin(plan=[told]).SerializeToString()
        for place in chain(told.places, (ahead[one] for one in told.places if one in ahead)):
            by_number[place].append(alone)
    return found


def _in_numbers(microbatch: pb.Microbatch, source: int) -> pb.Microbatch:
    """With its source before the others."""
    return pb.Microbatch(
        id=microbatch.id, order=microbatch.order, places=[source, *microbatch.places]
    )


def _in_names(microbatch: pb.Microbatch, members: Sequence[pb.Place]) -> pb.Microbatch:
    if microbatch.source or not microbatch.places:
        return microbatch
    source, *places = microbatch.places
    if source >= len(members):
        raise ValueError(f"told of a source that is number {source} of {len(members)} members")
    name = members[source].node
    return pb.Microbatch(id=microbatch.id, source=name, order=microbatch.order, places=places)


class PlanDecoder:
    """A member's side: who takes part in the attempt that it has heard of last."""

    def __init__(self) -> None:
        self._last, self._asked_in = NEVER, 0
        self._members: Members = {}
        self._view: Members = {}

    def asked(self, view: int, members: Members) -> None:
        """By a driver, in the view of this number, which has these members."""
        self._asked_in, self._view = view, members

    def has(self, view: int) -> bool:
        """Its members are known, since a driver has asked in it last."""
        return self._asked_in == view

    def whole(self, ballot: Ballot, begin: pb.Begin) -> pb.Begin:
        """With all members, and sources by name. Raises ValueError when it says what has changed
        since an attempt that wasn't heard of last, or what is other than in a view that isn't here,
        or of a source that takes no part."""
        if begin.HasField("members_of"):
            since = Ballot.of(begin.members_of)
            of_view = since.attempt == 0 and self.has(since.view)
            if since != self._last and not of_view:
                raise ValueError(f"told who has come and gone since {since}, after {self._last}")
            before, left = self._view if of_view else self._members, set(begin.left)
            stages = {n: at for n, at in before.items() if n not in left}
            stages |= {place.node: place.stage for place in begin.members}
            begin = _with_members(begin, stages)
        self._last = ballot
        self._members = {place.node: place.stage for place in begin.members}
        return _with_sources(begin)


def _with_members(begin: pb.Begin, stages: Members) -> pb.Begin:
    found = pb.Begin()
    found.CopyFrom(begin)
    for name in ("members_of", "left", "members"):
        found.ClearField(name)
    found.members.extend(in_order([pb.Place(node=n, stage=at) for n, at in stages.items()]))
    return found


def _with_sources(begin: pb.Begin) -> pb.Begin:
    found = pb.Begin()
    found.CopyFrom(begin)
    del found.plan[:]
    found.plan.extend(_in_names(microbatch, begin.members) for microbatch in begin.plan)
    return found


def in_order(members: Collection[pb.Place]) -> list[pb.Place]:
    """As all list them: a plan says who serves a visit by number."""
    return sorted(members, key=attrgetter("node"))

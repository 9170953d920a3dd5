"""With whom a node keeps links, and its replicas with each other. Pure, and the same for all who
have the view.

While no stage has more than ALL nodes, everybody has a link to all with whom it may have to do in
a step. Beyond that a link to each would be hundreds for each node, so

- of a neighbouring stage a node has those that are near it in a *lane*: all nodes of a stage lie
  one after the other on a line from 0 to 1, in an order that nobody chooses, each as long as the
  part of the stage's speed that it has. Nodes at the same place of two stages do as much, so
  microbatches that go along a lane find nodes that finish together, and come home to where they
  left;
- of stage 0, the driver and those who may drive next;
- of its own stage its *partners*: replicas are laid out in the rows of a square, and a node has to
  do with those of its row, and with those at its place in other rows.

Whatever else turns out to be needed is dialled then (node/wire/outbox.py).
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from itertools import accumulate, islice, pairwise, product
from typing import Final

from planaria.bootstrap.registry_pb2 import Member, View

ALL: Final = 8
"""Nodes of a stage of which others have a link to each."""
NEAR: Final = 4
"""Nodes of a neighbouring stage that a node chooses; about as many more may choose it."""
FEW: Final = 2
"""... of a stage that has many times fewer."""
DRIVERS: Final = 8
"""Nodes of stage 0 to which everybody has a link: the driver, and the oldest others."""


def related(a: int, b: int, stages: int, swapped: bool) -> bool:
    """Whether nodes of stages a and b talk to each other in every step: replicas, neighbours, and
    stage 0 with everybody, since it holds the driver and both ends of the pipeline. With orders
    that swap the first two and the last two of the body stages, 1 and 3 are neighbours too, and
    L-2 and L."""
    return a == 0 or b == 0 or a == b or adjoining(a, b, stages, swapped)


def adjoining(a: int, b: int, stages: int, swapped: bool) -> bool:
    """Whether microbatches go from one to the other."""
    if abs(a - b) == 1 or {a, b} == {0, stages}:
        return True
    return swapped and {a, b} in ({1, 3}, {stages - 2, stages}, {0, 2}, {0, stages - 1})


def stages_of(member: Member) -> list[int]:
    """The stages at which it has seats, in order; empty: it is a standby."""
    return [seat.stage for seat in member.seats]


class Lane:
    """The nodes of a stage, one after the other."""

    def __init__(self, speeds: Mapping[str, float]) -> None:
        """Of a node, microbatches a second or anything else alike; 0: unknown, as fast as most."""
        known = sorted(speed for speed in speeds.values() if speed > 0)
        usual = known[len(known) // 2] if known else 1.0
        self.nodes = sorted(speeds, key=scattered)
        parts = [speeds[node] if speeds[node] > 0 else usual for node in self.nodes]
        total = sum(parts)
        ends = [end / total for end in accumulate(parts)]
        self.middles = [end - part / total / 2 for end, part in zip(ends, parts, strict=True)]
        self._at = dict(zip(self.nodes, self.middles, strict=True))

    def near(self, other: Lane, node: str) -> list[str]:
        """Those of the other lane that are near this one's node."""
        here = self._at[node]
        first = bisect_left(other.middles, here)
        around = range(max(0, first - NEAR), min(len(other.nodes), first + NEAR))
        nearest = sorted(around, key=lambda place: (abs(other.middles[place] - here), place))
        chosen = ALL * len(other.nodes) // len(self.nodes)
        return [other.nodes[place] for place in nearest[: min(NEAR, max(FEW, chosen))]]


@lru_cache(maxsize=1 << 15)  # of the nodes that a run has, and not of all that it ever had
def scattered(node: str) -> bytes:
    """Puts nodes into an order that has nothing to do with whose they are."""
    return hashlib.sha256(node.encode()).digest()


class Neighbours:
    """Who keeps links with whom, for what they do in a step, among the members of a view."""

    def __init__(self, members: Iterable[Member], driver: str, stages: int, swapped: bool) -> None:
        """`stages`: L, of the body."""
        self._stages, self._swapped = stages, swapped
        self._of: dict[str, list[int]] = {}
        self._speeds: dict[int, dict[str, float]] = {}
        for member in members:
            self._of[member.node] = stages_of(member)
            for stage in stages_of(member):
                self._speeds.setdefault(stage, {})[member.node] = member.speed
        ends = list(self._speeds.get(0, ()))  # in the order of joining
        self._drivers = {driver, *ends[:DRIVERS]} & set(ends)
        self._lanes: dict[int, Lane] = {}
        self._found: dict[tuple[int, int], dict[str, set[str]]] = {}  # links between two stages
        self._known: dict[str, frozenset[str]] = {}

    def of(self, node: str) -> frozenset[str]:
        """Those of one of them."""
        if node not in self._known:
            found = set[str]()
            for one, other in product(self._of.get(node, ()), self._speeds):
                if related(one, other, self._stages, self._swapped):
                    found |= self._at(node, one, other)
            self._known[node] = frozenset(found - {node})
        return self._known[node]

    def _at(self, node: str, one: int, other: int) -> set[str]:
        """Of a node with a seat at `one`, those at `other`."""
        there = self._speeds[other]
        if len(self._speeds[one]) <= ALL and len(there) <= ALL:
            return set(there)
        found = set[str]()
        if other == 0:
            found |= self._drivers
        if one == 0 and node in self._drivers:
            found |= there.keys()
        if one == other:
            found.update(partners(node, there))
        elif adjoining(one, other, self._stages, self._swapped):
            found |= self._links(one, other)[node]
        return found

    def _links(self, one: int, other: int) -> Mapping[str, set[str]]:
        """Between the nodes of two stages, by node of the first: either has chosen the other."""
        if (one, other) not in self._found:
            here, there = self._lane(one), self._lane(other)
            pairs = {(a, b) for a in here.nodes for b in here.near(there, a)}
            pairs |= {(a, b) for b in there.nodes for a in there.near(here, b)}
            found = {node: set[str]() for node in (*here.nodes, *there.nodes)}
            for a, b in pairs:
                found[a].add(b)
                found[b].add(a)
            self._found[one, other] = self._found[other, one] = found
        return self._found[one, other]

    def _lane(self, stage: int) -> Lane:
        if stage not in self._lanes:
            self._lanes[stage] = Lane(self._speeds[stage])
        return self._lanes[stage]


def to_link(own: Member, view: View, stages: int, swapped: bool) -> list[str]:
    """With whom `own` always keeps a link, in the view's order: who it needs in every step; all who
    serve, if nobody can dial it when it is needed; whom it carries for, and who carries for it."""
    members = {member.node: member for member in view.members} | {own.node: own}
    needed = {*Neighbours(members.values(), view.driver, stages, swapped).of(own.node)}
    for relay in view.relays:
        if own.node == relay.via:
            needed |= {relay.a, relay.b}
        elif own.node in (relay.a, relay.b):
            needed.add(relay.via)
    hidden = own.seats and not own.address
    return [
        member.node
        for member in view.members
        if member.node != own.node and (member.node in needed or (hidden and member.seats))
    ]


def lengths(count: int) -> list[int]:
    """Of the rows that so many replicas make; they differ by one at most."""
    number = 1
    if count > ALL:
        width = math.isqrt(count - 1) + 1
        number = -(-count // width)
    bounds = [count * row // number for row in range(number + 1)]
    return [stop - start for start, stop in pairwise(bounds)]


def rows(replicas: Collection[str]) -> list[list[str]]:
    """In the order of their ids."""
    ids = iter(sorted(replicas))
    return [list(islice(ids, length)) for length in lengths(len(replicas))]


def places(some: Collection[Collection[str]]) -> int:
    """That each of these rows has: into so many parts a gradient is cut."""
    return min(map(len, some))


def row_of(node: str, some: Collection[list[str]]) -> list[str]:
    (own,) = (row for row in some if node in row)
    return own


def partners(node: str, replicas: Collection[str]) -> list[str]:
    """Of this one of the replicas: those of its row, and those at its place in other rows. So any
    two replicas are partners, or have one in common."""
    some = rows(replicas)
    own = row_of(node, some)
    place = own.index(node)
    column = [row[place] for row in some if place < len(row)]
    return sorted({*own, *column} - {node})

"""The links that a node keeps: with nodes of other stages and with its replicas. Pure, and equal
for all nodes with the same view.

While no stage has more than ALL nodes, a node links to every node that it may need in a step. A
larger run would need hundreds of links per node. Instead, a node links to:
- nodes of a neighbouring stage near it in a *lane*, a line from 0 to 1. The nodes of a stage lie on
  it in hash order, each as long as its part of the stage's speed. Nodes at the same place of two
  stages do equal work. So microbatches along a lane reach nodes that finish together, and return to
  their source;
- at stage 0, the driver and its possible successors;
- in its own stage, its *partners*. Replicas form the rows of a square; the partners are the nodes
  of the same row, and those at the same place in other rows.

Other links are dialled when needed (node/wire/outbox.py).
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
"""Nodes per stage up to which each is linked to all."""
NEAR: Final = 4
"""Nodes of a neighbouring stage that a node chooses; about as many more may choose it."""
FEW: Final = 2
"""The same, for a neighbouring stage that has many times fewer nodes."""
DRIVERS: Final = 8
"""Nodes of stage 0 that every node links to: the driver, and the oldest others."""


def related(a: int, b: int, stages: int, swapped: bool) -> bool:
    """Whether nodes of stages a and b communicate in every step: replicas, neighbours, and stage 0
    with all, since it holds the driver and both ends of the pipeline. With orders that swap the
    first two and the last two body stages, 1 and 3 are neighbours too, and L-2 and L."""
    return a == 0 or b == 0 or a == b or adjoining(a, b, stages, swapped)


def adjoining(a: int, b: int, stages: int, swapped: bool) -> bool:
    """Whether microbatches go from one stage to the other."""
    if abs(a - b) == 1 or {a, b} == {0, stages}:
        return True
    return swapped and {a, b} in ({1, 3}, {stages - 2, stages}, {0, 2}, {0, stages - 1})


def stages_of(member: Member) -> list[int]:
    """The stages of the member's seats, in order; empty: a standby."""
    return [seat.stage for seat in member.seats]


def place_of(member: Member) -> str:
    """The member's stages, for people."""
    stages = stages_of(member)
    many = "s" if len(stages) > 1 else ""
    return f"stage{many} {', '.join(map(str, stages))}" if stages else "standby"


class Lane:
    """The nodes of a stage on the lane: a line on which nodes near each other have links."""

    def __init__(self, speeds: Mapping[str, float]) -> None:
        """`speeds`: by node, in any common unit; 0: unknown, taken as the median."""
        measured = sorted(speed for speed in speeds.values() if speed > 0)
        median = measured[len(measured) // 2] if measured else 1.0
        self.nodes = sorted(speeds, key=scattered)
        parts = [speeds[node] if speeds[node] > 0 else median for node in self.nodes]
        total = sum(parts)
        ends = [end / total for end in accumulate(parts)]
        self.middles = [end - part / total / 2 for end, part in zip(ends, parts, strict=True)]
        self._at = dict(zip(self.nodes, self.middles, strict=True))

    def near(self, other: Lane, node: str) -> list[str]:
        """The nodes of another stage that are nearest to `node` on the lane."""
        here = self._at[node]
        first = bisect_left(other.middles, here)
        around = range(max(0, first - NEAR), min(len(other.nodes), first + NEAR))
        nearest = sorted(around, key=lambda place: (abs(other.middles[place] - here), place))
        chosen = ALL * len(other.nodes) // len(self.nodes)
        return [other.nodes[place] for place in nearest[: min(NEAR, max(FEW, chosen))]]


@lru_cache(maxsize=1 << 15)  # bounded: a long run sees many nodes
def scattered(node: str) -> bytes:
    """A sort key that node owners cannot choose: the SHA-256 of the node id."""
    return hashlib.sha256(node.encode()).digest()


class Neighbours:
    """The links between the members of a view that their work in a step needs."""

    def __init__(self, members: Iterable[Member], driver: str, stages: int, swapped: bool) -> None:
        """`stages`: L, the number of body stages."""
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
        # Links between two stages, by node.
        self._cached_links: dict[tuple[int, int], dict[str, set[str]]] = {}
        self._cached: dict[str, frozenset[str]] = {}

    def of(self, node: str) -> frozenset[str]:
        """The nodes that `node` links to."""
        if node not in self._cached:
            linked = set[str]()
            for own_stage, other_stage in product(self._of.get(node, ()), self._speeds):
                if related(own_stage, other_stage, self._stages, self._swapped):
                    linked |= self._at(node, own_stage, other_stage)
            self._cached[node] = frozenset(linked - {node})
        return self._cached[node]

    def _at(self, node: str, own_stage: int, other_stage: int) -> set[str]:
        """The nodes of `other_stage` that a node of `own_stage` links to."""
        speeds = self._speeds[other_stage]
        if len(self._speeds[own_stage]) <= ALL and len(speeds) <= ALL:
            return set(speeds)
        linked = set[str]()
        if other_stage == 0:
            linked |= self._drivers
        if own_stage == 0 and node in self._drivers:
            linked |= speeds.keys()
        if own_stage == other_stage:
            linked.update(partners(node, speeds))
        elif adjoining(own_stage, other_stage, self._stages, self._swapped):
            linked |= self._links(own_stage, other_stage)[node]
        return linked

    def _links(self, stage: int, other_stage: int) -> Mapping[str, set[str]]:
        """Links between two stages, by node: a link exists if either node has chosen the other."""
        if (stage, other_stage) not in self._cached_links:
            lane, other_lane = self._lane(stage), self._lane(other_stage)
            pairs = {(a, b) for a in lane.nodes for b in lane.near(other_lane, a)}
            pairs |= {(a, b) for b in other_lane.nodes for a in other_lane.near(lane, b)}
            links = {node: set[str]() for node in (*lane.nodes, *other_lane.nodes)}
            for a, b in pairs:
                links[a].add(b)
                links[b].add(a)
            self._cached_links[stage, other_stage] = self._cached_links[other_stage, stage] = links
        return self._cached_links[stage, other_stage]

    def _lane(self, stage: int) -> Lane:
        if stage not in self._lanes:
            self._lanes[stage] = Lane(self._speeds[stage])
        return self._lanes[stage]


def to_link(own: Member, view: View, stages: int, swapped: bool) -> list[str]:
    """The nodes that `own` always links to, in the view's order: those needed in every step; all
    with seats, if `own` cannot be dialled; the ends of its relays, and its own relays."""
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
    """Row lengths for a stage's `count` replicas; they differ by at most one."""
    number = 1
    if count > ALL:
        width = math.isqrt(count - 1) + 1
        number = -(-count // width)
    bounds = [count * row // number for row in range(number + 1)]
    return [stop - start for start, stop in pairwise(bounds)]


def rows(replicas: Collection[str]) -> list[list[str]]:
    """The replicas of a stage in rows, in the order of their ids."""
    ids = iter(sorted(replicas))
    return [list(islice(ids, length)) for length in lengths(len(replicas))]


def places(all_rows: Collection[Collection[str]]) -> int:
    """How many places every row of replicas has: the number of parts of a gradient."""
    return min(map(len, all_rows))


def row_of(node: str, all_rows: Collection[list[str]]) -> list[str]:
    (own,) = (row for row in all_rows if node in row)
    return own


def partners(node: str, replicas: Collection[str]) -> list[str]:
    """The replicas in the row of `node`, and those at its place in other rows. Any two replicas are
    partners or have a common one."""
    all_rows = rows(replicas)
    own = row_of(node, all_rows)
    place = own.index(node)
    column = [row[place] for row in all_rows if place < len(row)]
    return sorted({*own, *column} - {node})

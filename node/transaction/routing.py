"""Which node serves which visit of a microbatch: the driver decides, by speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence, Sequence
from itertools import pairwise
from typing import NamedTuple

from planaria.node.wire import stage_pb2 as pb


def earliest_finish(
    nodes: Sequence[str], outstanding: Mapping[str, int], seconds: Mapping[str, float]
) -> str:
    """The node that would finish one more microbatch first; ties go to the smallest id.

    A node that was never measured counts as fast as the average of those that were.
    """
    known = [seconds[node] for node in nodes if seconds.get(node)]
    usual = sum(known) / len(known) if known else 1.0
    return min(
        nodes,
        key=lambda node: ((outstanding.get(node, 0) + 1) * (seconds.get(node) or usual), node),
    )


def share_out(
    ids: Iterable[int],
    nodes: Sequence[str],
    seconds: Mapping[str, float],
    detours: Callable[[int, str], int] = lambda identity, node: 0,
) -> list[str]:
    """A node for each microbatch: one of those that it takes the fewest `detours` to, so that these
    would finish together."""
    given: Counter[str] = Counter()
    chosen = []
    for identity in ids:
        ways = {node: detours(identity, node) for node in nodes}
        nearest = [node for node in nodes if ways[node] == min(ways.values())]
        node = earliest_finish(nearest, given, seconds)
        given[node] += 1
        chosen.append(node)
    return chosen


Pair = frozenset[str]
"""Of two nodes."""


class Route(NamedTuple):
    """Node and stage of each visit; the first and the last are the source, at stage 0."""

    nodes: tuple[str, ...]
    stages: tuple[int, ...]


def plan(
    orders: Sequence[Sequence[int]],
    replicas: Sequence[Sequence[str]],
    seconds: Mapping[str, float],
    apart: Collection[Pair] = frozenset(),
) -> list[Route]:
    """A route for each microbatch, so that the replicas of each stage would finish together, and as
    few as can be go between two nodes that don't reach each other directly.
    `orders`: of each microbatch; `replicas`: the nodes of stages 0, 1, .., L."""
    served = [share_out(range(len(orders)), nodes, seconds) for nodes in replicas]
    visits = [(0, *order, 0) for order in orders]
    while apart and any(_untangle(served, stage, visits, apart) for stage in range(len(served))):
        pass  # each time there are fewer such hops
    return [
        Route(tuple(served[stage][number] for stage in stages), stages)
        for number, stages in enumerate(visits)
    ]


def _untangle(
    served: Sequence[MutableSequence[str]],
    stage: int,
    visits: Sequence[tuple[int, ...]],
    apart: Collection[Pair],
) -> bool:
    """Microbatches change nodes with each other at this stage, so that fewer go between two that
    are `apart`; each node keeps as many as it had. Returns whether any did."""
    nodes = served[stage]
    beside = [
        tuple(served[b if a == stage else a][number] for a, b in pairwise(way) if stage in (a, b))
        for number, way in enumerate(visits)
    ]

    def hops(number: int, node: str) -> int:
        return sum(frozenset((node, other)) in apart for other in beside[number])

    hopeless = set[tuple[str, tuple[str, ...]]]()
    changed = False
    for one in range(len(nodes)):
        here = nodes[one]
        if not hops(one, here) or (here, beside[one]) in hopeless:
            continue
        for other, there in enumerate(nodes):
            now = hops(one, here) + hops(other, there)
            if there != here and hops(one, there) + hops(other, here) < now:
                nodes[one], nodes[other] = there, here
                changed = True
                break
        else:
            hopeless.add((here, beside[one]))
    return changed


def stand_ins(members: Iterable[pb.Place]) -> dict[str, str]:
    """By node, who computes its microbatches ahead, in case that it is lost: the next replica of
    its stage in the order of their ids. (That is SPARe's placement with a redundancy of 2: the
    shortest Golomb ruler of two marks is 0, 1.)"""
    replicas: dict[int, list[str]] = {}
    for place in members:
        replicas.setdefault(place.stage, []).append(place.node)
    found: dict[str, str] = {}
    for nodes in map(sorted, replicas.values()):
        if len(nodes) > 1:
            found.update(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    return found


def routes(begin: pb.Begin) -> dict[int, Route]:
    """The way of each microbatch of the plan. Raises ValueError for a plan that can't be."""
    found = {}
    for microbatch in begin.plan:
        visits = [begin.members[place] for place in microbatch.places if place < len(begin.members)]
        if [visit.stage for visit in visits] != list(microbatch.order):
            raise ValueError(f"microbatch {microbatch.id} is sent to nodes off its order")
        nodes = (microbatch.source, *(visit.node for visit in visits), microbatch.source)
        found[microbatch.id] = Route(nodes, (0, *microbatch.order, 0))
    return found

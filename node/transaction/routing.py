"""Which node serves which visit of a microbatch: the driver decides, by speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from planaria.node.wire import stage_pb2 as pb
from planaria.recovery.orders import order


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


def share_out(ids: Iterable[int], nodes: Sequence[str], seconds: Mapping[str, float]) -> list[str]:
    """A node for each microbatch, so that all nodes would finish together."""
    given: Counter[str] = Counter()
    chosen = []
    for _ in ids:
        node = earliest_finish(nodes, given, seconds)
        given[node] += 1
        chosen.append(node)
    return chosen


class Route(NamedTuple):
    """Node and stage of each visit; the first and the last are the source, at stage 0."""

    nodes: tuple[str, ...]
    stages: tuple[int, ...]


def plan(
    count: int,
    replicas: Sequence[Sequence[str]],
    seconds: Mapping[str, float],
    swapped: bool = False,
) -> list[Route]:
    """A route for each of `count` microbatches, so that the replicas of each stage would finish
    together. `replicas`: the nodes of stages 0, 1, .., L; `swapped`: orders of CheckFree+."""
    served = [share_out(range(count), nodes, seconds) for nodes in replicas]
    planned = []
    for identity in range(count):
        visits = order(identity, len(replicas) - 1, swapped)
        stages = (0, *visits, 0)
        planned.append(Route(tuple(served[stage][identity] for stage in stages), stages))
    return planned


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

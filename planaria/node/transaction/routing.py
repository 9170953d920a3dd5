"""Routes: which node serves which visit of a microbatch; the driver decides, by speed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableSequence,
    Sequence,
)
from heapq import heapify, heapreplace
from itertools import chain, islice, pairwise
from types import MappingProxyType
from typing import Final, NamedTuple

from planaria.bootstrap.neighbours import ALL, scattered
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.seat_names import node_of

ROUNDING: Final = 1e-9
"""Relative tolerance of sums of seconds: smaller gains move nothing."""


SHORTENED: Final = 0.8
"""Factor on the seconds of a seat for each step in which it had no microbatch."""


def shortened(seat: str, stages: Mapping[str, int], seconds: Mapping[str, float]) -> float:
    """Seconds per microbatch that are expected of a seat after a step in which it had none: fewer,
    so that a seat that was slow once is tried again, but no fewer than its stage's fastest has.
    `stages`: by seat."""
    known = [s for each, s in seconds.items() if s and stages.get(each) == stages[seat]]
    return max(min(known, default=0.0), SHORTENED * seconds.get(seat, 0.0))


def paces(seats: Iterable[str], seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds per microbatch at a stage's seats; unmeasured ones have the others' average."""
    measured = {seat: seconds.get(seat, 0.0) for seat in seats}
    known = [pace for pace in measured.values() if pace]
    usual = sum(known) / len(known) if known else 1.0
    return {seat: pace or usual for seat, pace in measured.items()}


def earliest_finish(
    seats: Iterable[str],
    given: Mapping[str, int],
    pace: Mapping[str, float],
    busy: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """The seat that would finish one more microbatch first; ties go to the smallest id. `busy`:
    seconds in which its node computes for other seats."""
    return min(
        seats,
        key=lambda seat: (
            busy.get(node_of(seat), 0.0) + (given.get(seat, 0) + 1) * pace[seat],
            seat,
        ),
    )


def turns(seats: Sequence[str], pace: Mapping[str, float]) -> Iterator[str]:
    """Yields the stage's seat for each next microbatch: the one that would finish it first; ties go
    to the smallest id. Each takes the logarithm of the number of seats."""
    ends = [(pace[seat], seat, 1) for seat in seats]
    heapify(ends)
    while True:
        _, seat, given = ends[0]
        yield seat
        heapreplace(ends, ((given + 1) * pace[seat], seat, given + 1))


def share_out(
    ids: Iterable[int],
    seats: Sequence[str],
    pace: Mapping[str, float],
    detours: Callable[[int, str], int] = lambda identity, seat: 0,
    busy: Mapping[str, float] = MappingProxyType({}),
) -> list[str]:
    """A seat of the stage for each microbatch: among those with the fewest `detours`, so that their
    nodes would finish together."""
    given: Counter[str] = Counter()
    chosen = []
    for identity in ids:
        detours_of = {seat: detours(identity, seat) for seat in seats}
        nearest = [seat for seat in seats if detours_of[seat] == min(detours_of.values())]
        seat = earliest_finish(nearest, given, pace, busy)
        given[seat] += 1
        chosen.append(seat)
    return chosen


Pair = frozenset[str]
"""Two nodes."""


class Route(NamedTuple):
    """Node and stage of each visit; the first and the last are the source, at stage 0."""

    nodes: tuple[str, ...]
    stages: tuple[int, ...]

    @property
    def by_stage(self) -> dict[int, str]:
        """The node at each stage."""
        return dict(zip(self.stages, self.nodes, strict=True))


def plan(
    orders: Sequence[Sequence[int]],
    replicas: Sequence[Sequence[str]],
    seconds: Mapping[str, float],
    apart: Collection[Pair] = frozenset(),
) -> list[Route]:
    """A route for each microbatch, so that the nodes would finish together, with few hops between
    nodes that don't reach each other directly. A node with several seats computes for one at a
    time, and what it has begun stays there. `orders`: of each microbatch; `replicas`: the seats of
    stages 0, 1, .., L."""
    pace = [paces(seats, seconds) for seats in replicas]
    served = [list(islice(turns(list(stage), stage), len(orders))) for stage in pace]
    nodes = [node_of(seat) for seats in replicas for seat in seats]
    if len(set(nodes)) < len(nodes):
        served = _at_home(_evened_out([Counter(seats) for seats in served], pace), pace)
    elif any(len(seats) > ALL for seats in replicas):
        served = _along_lanes(served)
    visits = [(0, *order, 0) for order in orders]
    while apart and any(_untangle(served, stage, visits, apart) for stage in range(len(served))):
        pass  # each pass leaves fewer such hops
    return [
        Route(tuple(served[stage][number] for stage in stages), stages)
        for number, stages in enumerate(visits)
    ]


def _evened_out(
    counts: Sequence[Counter[str]], pace: Sequence[Mapping[str, float]]
) -> Sequence[Counter[str]]:
    """The number of each seat's microbatches, stage by stage. Single ones move to nodes that would
    finish them before their present nodes would have finished."""
    busy: dict[str, float] = {}
    for given, seconds in zip(counts, pace, strict=True):
        for seat, at in seconds.items():
            busy[node_of(seat)] = busy.get(node_of(seat), 0.0) + given[seat] * at
    moved = True
    while moved:
        moved = False
        for given, seconds in zip(counts, pace, strict=True):
            last = max(+given, key=lambda seat: (busy[node_of(seat)], seat), default=None)
            first = earliest_finish(seconds, {}, seconds, busy)
            if last is None:
                continue
            giver, taker = node_of(last), node_of(first)
            if busy[taker] + seconds[first] < busy[giver] * (1 - ROUNDING):
                given.subtract([last])
                given.update([first])
                busy[giver] -= seconds[last]
                busy[taker] += seconds[first]
                moved = True
    return counts


def _at_home(
    counts: Sequence[Counter[str]], pace: Sequence[Mapping[str, float]]
) -> list[list[str]]:
    """The seat of each microbatch at each stage: on the node of its source if possible, else on the
    node of the stage before; the first ones leave first. The others go to seats in the order in
    which these would finish."""
    served: list[list[str]] = []
    for given, seconds in zip(counts, pace, strict=True):
        left = Counter(given)
        own = {node_of(seat): seat for seat in seconds}
        chosen: dict[int, str] = {}
        for before in served[:1] + served[1:][-1:]:
            for number in reversed(range(len(before))):
                seat = own.get(node_of(before[number]), "")
                if number not in chosen and left[seat] > 0:
                    chosen[number] = seat
                    left[seat] -= 1
        ends = sorted(((n + 1) * seconds[seat], seat) for seat in left for n in range(left[seat]))
        turns = iter(seat for _, seat in ends)
        total = given.total()
        served.append([chosen.get(number) or next(turns) for number in range(total)])
    return served


def _along_lanes(served: Sequence[Sequence[str]]) -> list[list[str]]:
    """The nodes of microbatches, regrouped by the nodes' places in their lanes, between which links
    exist; each node keeps its number at each stage."""
    place = {seat: scattered(node_of(seat)) for seat in set(chain.from_iterable(served))}
    line = sorted(range(len(served[0])), key=lambda number: place[served[0][number]])
    regrouped = [[""] * len(line) for _ in served]
    for seats, chosen in zip(served, regrouped, strict=True):
        for number, seat in zip(line, sorted(seats, key=place.__getitem__), strict=True):
            chosen[number] = seat
    return regrouped


def _untangle(
    served: Sequence[MutableSequence[str]],
    stage: int,
    visits: Sequence[tuple[int, ...]],
    apart: Collection[Pair],
) -> bool:
    """Swaps microbatches between nodes at this stage, so that fewer hops are between nodes that are
    `apart`; each node keeps its number. Returns whether any moved."""
    nodes = served[stage]
    beside = [
        tuple(served[b if a == stage else a][number] for a, b in pairwise(way) if stage in (a, b))
        for number, way in enumerate(visits)
    ]

    def hops(number: int, node: str) -> int:
        return sum(frozenset((node, other)) in apart for other in beside[number])

    hopeless = set[tuple[str, tuple[str, ...]]]()
    changed = False
    for number in range(len(nodes)):
        node = nodes[number]
        if not hops(number, node) or (node, beside[number]) in hopeless:
            continue
        for swapped, successor in enumerate(nodes):
            now = hops(number, node) + hops(swapped, successor)
            if successor != node and hops(number, successor) + hops(swapped, node) < now:
                nodes[number], nodes[swapped] = successor, node
                changed = True
                break
        else:
            hopeless.add((node, beside[number]))
    return changed


def nodes_by_stage(stages: Mapping[str, int]) -> defaultdict[int, list[str]]:
    """The nodes of each stage, in the order of `stages`, the stage of each node."""
    nodes = defaultdict[int, list[str]](list)
    for node, stage in stages.items():
        nodes[stage].append(node)
    return nodes


def stages_in(begin: pb.Begin) -> dict[str, int]:
    """The stages of an attempt's members, by node."""
    return {place.node: place.stage for place in begin.members}


def routes(begin: pb.Begin) -> dict[int, Route]:
    """The route of each microbatch of the plan. Raises ValueError for an invalid plan."""
    return {microbatch.id: route(begin, microbatch) for microbatch in begin.plan}


def route(begin: pb.Begin, microbatch: pb.Microbatch) -> Route:
    """The route of one microbatch of the plan. Raises ValueError for an invalid one."""
    visits = [begin.members[place] for place in microbatch.places if place < len(begin.members)]
    if [visit.stage for visit in visits] != list(microbatch.order):
        raise ValueError(f"microbatch {microbatch.id} is sent to nodes off its order")
    nodes = (microbatch.source, *(visit.node for visit in visits), microbatch.source)
    return Route(nodes, (0, *microbatch.order, 0))

"""The orders in which microbatches visit the body stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple


def order(microbatch: int, stages: int, swapped: bool) -> tuple[int, ...]:
    """The visiting order of the body stages 1..L for a microbatch.

    With `swapped`, every second microbatch swaps the first two stages, and the last two. So each
    stage of a pair learns the other's part (CheckFree+, section 4.3). The run file has 4 stages or
    more then, so the pairs don't overlap.
    """
    natural = tuple(range(1, stages + 1))
    if not swapped or microbatch % 2 == 0:
        return natural
    return (2, 1, *natural[2:-2], stages, stages - 1)


def window_orders(
    step: int, microbatches: int, stages: int, swapped: bool
) -> list[tuple[int, ...]]:
    """The order of each microbatch of a step; steps count from 1.

    Every second microbatch of the run is swapped, so that half are even if a step has one or three;
    with one, it is every second step's.
    """
    before = (step - 1) * microbatches
    return [order(before + number, stages, swapped) for number in range(microbatches)]


def partner(stage: int, stages: int) -> int | None:
    """The stage that half of the microbatches visit in place of `stage`, with swapped orders."""
    return {1: 2, 2: 1, stages - 1: stages, stages: stages - 1}.get(stage)


def all_orders(stages: int, swapped: bool) -> list[tuple[int, ...]]:
    """The different orders in which microbatches visit the body stages."""
    return [order(microbatch, stages, swapped) for microbatch in range(2 if swapped else 1)]


# Lost stages in an order


class Run(NamedTuple):
    """Lost stages that a microbatch visits consecutively, maximal in length.

    Input: the output of the visit before `start`. Output: the input of the visit at `end`.
    """

    start: int  # index in the order
    stages: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.stages)


def runs(order: Sequence[int], lost: Collection[int]) -> tuple[Run, ...]:
    """The runs of lost stages in an order, or in a route's stages; stage 0 is in none."""
    visits = enumerate(order)
    return tuple(
        Run(visited[0][0], tuple(stage for _, stage in visited))
        for is_lost, group in groupby(visits, key=lambda visit: visit[1] in lost and visit[1] != 0)
        if is_lost and (visited := list(group))
    )


def blocks(orders: Iterable[Sequence[int]], lost: Collection[int]) -> list[tuple[int, ...]]:
    """Groups the lost body stages that must relearn together: those in a common run of any order.

    Every lost body stage is in one block; blocks and their stages ascend.
    """
    groups = [{stage} for stage in lost if stage != 0]
    for order in orders:
        for run in runs(order, lost):
            touched = [block for block in groups if not block.isdisjoint(run.stages)]
            groups = [block for block in groups if block not in touched]
            groups.append(set().union(*touched))
    return sorted(tuple(sorted(block)) for block in groups)


def adjoining(orders: Iterable[Sequence[int]], block: Collection[int]) -> tuple[int, ...]:
    """The stages, ascending, whose nodes may have inputs or outputs of runs in `block`."""
    stages = set()
    for order in orders:
        route = (0, *order, 0)
        for run in runs(route, block):
            stages |= {route[run.start - 1], route[run.end]}
    return tuple(sorted(stages))

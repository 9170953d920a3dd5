"""The orders in which microbatches visit the body stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple


def order(microbatch: int, stages: int, swapped: bool) -> tuple[int, ...]:
    """The body stages 1..L in the order in which this microbatch visits them.

    With `swapped`, every second microbatch visits the first two stages, and the last two, in
    swapped order (CheckFree+, section 4.3), so that each of such a pair learns the other's part.
    Raises ValueError when the pairs would overlap (L < 4).
    """
    natural = tuple(range(1, stages + 1))
    if not swapped:
        return natural
    if stages < 4:
        raise ValueError(f"swapped orders need at least 4 body stages, not {stages}")
    if microbatch % 2 == 0:
        return natural
    return (2, 1, *natural[2:-2], stages, stages - 1)


def window_orders(
    step: int, microbatches: int, stages: int, swapped: bool
) -> list[tuple[int, ...]]:
    """The order of each microbatch of a step, the first of which is 1.

    Every second one swaps of all that the run has had, so that half of them do even where a step
    has one or three: of single ones it is every second step's. Raises ValueError as `order` does.
    """
    before = (step - 1) * microbatches
    return [order(before + number, stages, swapped) for number in range(microbatches)]


def partner(stage: int, stages: int) -> int | None:
    """The stage that half of the microbatches visit in `stage`'s place, with swapped orders."""
    return {1: 2, 2: 1, stages - 1: stages, stages: stages - 1}.get(stage)


def all_orders(stages: int, swapped: bool) -> list[tuple[int, ...]]:
    """Every order that a microbatch may have."""
    return [order(microbatch, stages, swapped) for microbatch in range(2 if swapped else 1)]


# Where stages of an order are lost


class Run(NamedTuple):
    """Lost stages that a microbatch visits one after the other, as many as there are.

    Input: what the visit before `start` sent. Output: what the visit at `end` received.
    """

    start: int  # index in the order
    stages: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.stages)


def runs(order: Sequence[int], lost: Collection[int]) -> tuple[Run, ...]:
    """The runs of lost stages in an order, or in the stages of a route; stage 0 is in none."""
    visits = enumerate(order)
    return tuple(
        Run(found[0][0], tuple(stage for _, stage in found))
        for is_lost, group in groupby(visits, key=lambda visit: visit[1] in lost and visit[1] != 0)
        if is_lost and (found := list(group))
    )


def blocks(orders: Iterable[Sequence[int]], lost: Collection[int]) -> list[tuple[int, ...]]:
    """Which of the lost body stages have to relearn together: those that share a run in any order.

    Every lost body stage is in one block; blocks and their stages ascend.
    """
    found = [{stage} for stage in lost if stage != 0]
    for order in orders:
        for run in runs(order, lost):
            touched = [block for block in found if not block.isdisjoint(run.stages)]
            found = [block for block in found if block not in touched]
            found.append(set().union(*touched))
    return sorted(tuple(sorted(block)) for block in found)


def adjoining(orders: Iterable[Sequence[int]], block: Collection[int]) -> tuple[int, ...]:
    """The stages, ascending, whose nodes may have inputs or outputs of runs in `block`."""
    found = set()
    for order in orders:
        route = (0, *order, 0)
        for run in runs(route, block):
            found |= {route[run.start - 1], route[run.end]}
    return tuple(sorted(found))

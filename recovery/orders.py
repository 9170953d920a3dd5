"""In which order microbatches visit the body stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable


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


def partner(stage: int, stages: int) -> int | None:
    """The stage that half of the microbatches visit in `stage`'s place, with swapped orders."""
    return {1: 2, 2: 1, stages - 1: stages, stages: stages - 1}.get(stage)


def neighbours(stage: int, stages: int, swapped: bool) -> set[int]:
    """The stages that come right before or after `stage` in some order; 0 is before the first and
    after the last."""
    orders = [order(microbatch, stages, swapped) for microbatch in range(2 if swapped else 1)]
    found: set[int] = set()
    for visits in ((0, *body, 0) for body in orders):
        for a, b in itertools.pairwise(visits):
            if stage in (a, b):
                found |= {a, b}
    return found - {stage}


def blocks(lost: Iterable[int], stages: int, swapped: bool) -> list[list[int]]:
    """The stages of `lost` in groups that no stage outside a group links: a microbatch may pass
    from one to another of the same group, without a visit to a stage that is left."""
    groups: list[list[int]] = []
    for stage in sorted(lost):
        near = neighbours(stage, stages, swapped)
        joined = [group for group in groups if near.intersection(group)]
        groups = [group for group in groups if group not in joined]
        groups.append(sorted([stage, *(other for group in joined for other in group)]))
    return sorted(groups)

"""In which order microbatches visit the body stages."""

from __future__ import annotations


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

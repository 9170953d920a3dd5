"""A commit's factors of learning rate and gradient: one for each stage, or one for all.

Stages mostly have equal factors; then one is sent, because every node receives each commit.
"""

from __future__ import annotations

from collections.abc import Sequence


def collapsed(by_stage: Sequence[float]) -> Sequence[float]:
    return by_stage[:1] if len(set(by_stage)) == 1 else by_stage


def has_for(scales: Sequence[float], stage: int) -> bool:
    return len(scales) == 1 or stage < len(scales)


def of_stage(scales: Sequence[float], stage: int) -> float:
    """The factor of a stage. Raises IndexError if there is none (`has_for`)."""
    return scales[0] if len(scales) == 1 else scales[stage]

"""The factors of a commit on a stage's learning rate and gradient: by stage, or one for all.

Where all stages have the same, as they mostly do, it is told once: every node is told of each
commit.
"""

from __future__ import annotations

from collections.abc import Sequence


def told_once(by_stage: Sequence[float]) -> Sequence[float]:
    return by_stage[:1] if len(set(by_stage)) == 1 else by_stage


def has_for(scales: Sequence[float], stage: int) -> bool:
    return len(scales) == 1 or stage < len(scales)


def of_stage(scales: Sequence[float], stage: int) -> float:
    """Raises IndexError where there is none (`has_for`)."""
    return scales[0] if len(scales) == 1 else scales[stage]

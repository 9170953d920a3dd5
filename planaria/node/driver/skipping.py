"""Which steps are skipped, and what gradients are usual. Pure.

A step is committed as skipped, without an update, if the gradient of a stage isn't finite, or is
much longer than usual. Clipping wouldn't help: it keeps a wrong direction, and takes the length of
all other stages. Each commit has the usual norms, so the next driver goes on with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from planaria.node.wire import stage_pb2 as pb

TIMES: Final = 200.0
"""Multiple of its stage's usual norm above which a gradient is skipped."""
FOLLOWS: Final = 1.25
"""Largest factor by which a step changes a usual norm: a single wrong norm hardly moves it."""
BELIEVED: Final = 30
"""Skipped steps in a row after which long gradients are usual: the weights or the data are new."""
PAUSED: Final = 3
"""Skipped steps in a row after which a non-finite gradient pauses the run."""


def why_skipped(norms: Sequence[float], last: pb.Commit) -> str:
    """Why the step after `last` is skipped; empty: it isn't. `norms`: of each stage's gradient;
    NaN: not finite."""
    if stages := [str(stage) for stage, norm in enumerate(norms) if math.isnan(norm)]:
        return f"the gradient of stage {', '.join(stages)} was not finite"
    if last.skips >= BELIEVED or len(norms) != len(last.usual_norms):
        return ""
    return " and ".join(
        f"the gradient of stage {stage} was {norm / usual:.0f} times as long as usual"
        for stage, (norm, usual) in enumerate(zip(norms, last.usual_norms, strict=True))
        if norm > TIMES * usual > 0
    )


def usual_norms(norms: Sequence[float], last: pb.Commit) -> Sequence[float]:
    """The usual norms after a step with these `norms`; 0: unknown. Skipped steps don't count, nor
    do gradients of zero: nothing was scored."""
    if why_skipped(norms, last):
        return last.usual_norms
    if last.skips >= BELIEVED or len(norms) != len(last.usual_norms):
        return norms
    return [
        min(max(norm, usual / FOLLOWS), usual * FOLLOWS) if norm and usual else norm or usual
        for norm, usual in zip(norms, last.usual_norms, strict=True)
    ]


def why_paused(commit: pb.Commit, norms: Sequence[float]) -> str:
    """Why the run pauses after the commit of a step with these norms; empty: it doesn't."""
    if commit.skips < PAUSED or not math.isnan(commit.gradient_norm):
        return ""
    return (
        f"paused: {commit.skips} steps in a row were skipped, since {why_skipped(norms, commit)}; "
        "lower the learning rate, or go on from an older save"
    )

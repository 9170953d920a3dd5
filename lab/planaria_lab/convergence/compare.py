"""What losses cost in learning: pure functions of the runs' validation curves.

A curve is a sequence of (iteration, loss), the loss in nats a token on the same held-out samples.
Every comparison is paired: with the run of the same seed and windows that lost nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

Curve = Sequence[tuple[int, float]]


class Spread(NamedTuple):
    """What a figure is over the seeds. `deviation` is the sample's standard deviation, NaN for one
    seed."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        deviation = statistics.stdev(values) if len(values) > 1 else math.nan
        mean = statistics.fmean(values) if values else math.nan
        return cls(mean, deviation)


@dataclass(frozen=True)
class CostOfLosses:
    """What its losses cost one run, against the one of its seed that lost nothing."""

    final: float  # its loss at the end
    difference: float  # of the losses after as many iterations
    iterations: float  # extra ones to reach the target; inf: not reached
    behind: float  # iterations ago that the other one's loss was what this one's is at the end
    relearned: float  # iterations' worth of computing that relearning took
    background: float  # of them, those in the background
    waited: float  # iterations' time that others waited, were nodes always busy

    @property
    def net(self) -> float:
        """Iterations, those that the computing would have been counted as not taken."""
        return self.behind + self.relearned

    @property
    def net_waited_for(self) -> float:
        """The same, without the computing that nobody waited for."""
        return self.net - self.background


def loss_at(curve: Curve, iteration: float) -> float:
    """Between two validations in a line; outside of them the nearest."""
    if iteration <= curve[0][0]:
        return curve[0][1]
    for (start, a), (end, b) in pairwise(curve):
        if iteration <= end:
            return a + (b - a) * (iteration - start) / (end - start)
    return curve[-1][1]


def reached(curve: Curve, loss: float) -> float:
    """The iteration from which on the loss is never above `loss` again; inf if it is at the end."""
    if curve[-1][1] > loss:
        return math.inf
    after = max((i for i, (_, value) in enumerate(curve) if value > loss), default=-1)
    if after < 0:
        return float(curve[0][0])
    (start, a), (end, b) = curve[after], curve[after + 1]
    return start + (end - start) * (a - loss) / (a - b)


def iteration_cost(curve: Curve, other: Curve, target: int) -> float:
    """Extra iterations to reach, for good, the loss that `other` has after `target` (SCAR, eq. 4,
    with the loss for the distance). May be negative; inf if it is not reached."""
    loss = loss_at(other, target)
    return reached(curve, loss) - min(float(target), reached(other, loss))


def behind(curve: Curve, other: Curve) -> float:
    """How many iterations ago `other` was where `curve` ends; unlike the iteration cost always
    finite, and 0 if `curve` ends below it."""
    end, loss = curve[-1]
    return max(0.0, min(end, other[-1][0]) - min(reached(other, loss), float(other[-1][0])))


def behind_at_the_end(run: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Iterations by which a line's run is behind the line of the run without losses."""
    curve, against = curve_of(run), curve_of(other)
    return behind([(i, loss) for i, loss in curve if i <= against[-1][0]], against)


def cost(run: Mapping[str, Any], other: Mapping[str, Any], target: int) -> CostOfLosses:
    """Compares two lines of the results: a run, and the one that lost nothing."""
    curve, against = curve_of(run), curve_of(other)
    end = against[-1][0]
    whole, background = _relearned(run)
    return CostOfLosses(
        final=loss_at(curve, end),
        difference=loss_at(curve, end) - against[-1][1],
        iterations=iteration_cost(curve, against, target),
        behind=behind_at_the_end(run, other),
        relearned=whole * run["share"],
        background=background * run["share"],
        waited=whole - background,
    )


def curve_of(run: Mapping[str, Any]) -> Curve:
    """The validation curve in a line of the results."""
    return [(iteration, loss) for iteration, _, loss in run["validation"]]


def _relearned(run: Mapping[str, Any]) -> tuple[float, float]:
    """Passes of a stage over a step's tokens, and those of them that ran in the background, counted
    once for stages that relearn together: forward, backward, and what each update takes beyond."""
    seen = {}
    for line in run["rebuilds"]:
        if "relearned" in line:
            seen[line["iteration"], line["relearned"]["before"]] = line["relearned"]
    tokens, each = run["window"], run["update_tokens"] if seen else 0.0

    def passes(prefix: str) -> float:
        return math.fsum(
            done[f"{prefix}stage_tokens"] + done[f"{prefix}stage_updates"] * each
            for done in seen.values()
        )

    return passes("") / tokens, passes("background_") / tokens

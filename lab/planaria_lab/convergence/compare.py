"""Costs of lost stages in learning: pure functions of the runs' validation curves.

A curve is a sequence of (iteration, loss), with the loss in nats a token on the same held-out
samples. Each run is compared with the run without losses that has the same seed and windows.
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
    """Mean and standard deviation of a figure over the seeds. `deviation` is the sample's; NaN for
    one seed."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        deviation = statistics.stdev(values) if len(values) > 1 else math.nan
        mean = statistics.fmean(values) if values else math.nan
        return cls(mean, deviation)


@dataclass(frozen=True)
class CostOfLosses:
    """The cost of one run's lost stages, against the run of its seed that lost none."""

    final: float  # loss after as many iterations as the other run has
    difference: float  # of the two runs' losses after these iterations
    iterations: float  # extra iterations to the target; inf: not reached
    behind: float  # iterations since the other run had this run's final loss
    relearned: float  # computing of relearning, in iterations
    background: float  # the part of `relearned` in the background
    waited: float  # waiting for relearning, in iterations, if nodes are always busy

    @property
    def net(self) -> float:
        """Iterations behind, plus the computing of relearning in iterations."""
        return self.behind + self.relearned

    @property
    def net_waited_for(self) -> float:
        """`net` without the computing in the background."""
        return self.net - self.background


def loss_at(curve: Curve, iteration: float) -> float:
    """Return the linearly interpolated loss at an iteration; outside the curve the nearest."""
    if iteration <= curve[0][0]:
        return curve[0][1]
    for (start, a), (end, b) in pairwise(curve):
        if iteration <= end:
            return a + (b - a) * (iteration - start) / (end - start)
    return curve[-1][1]


def reached(curve: Curve, loss: float) -> float:
    """Return the iteration after which the curve stays at or below `loss`; inf if it ends above."""
    if curve[-1][1] > loss:
        return math.inf
    after = max((i for i, (_, value) in enumerate(curve) if value > loss), default=-1)
    if after < 0:
        return float(curve[0][0])
    (start, a), (end, b) = curve[after], curve[after + 1]
    return start + (end - start) * (a - loss) / (a - b)


def iteration_cost(curve: Curve, other: Curve, target: int) -> float:
    """Return the extra iterations to reach, for good, the loss of `other` after `target` iterations
    (SCAR, eq. 4, with loss for distance). May be negative; inf if that loss isn't reached."""
    loss = loss_at(other, target)
    return reached(curve, loss) - min(float(target), reached(other, loss))


def behind(curve: Curve, other: Curve) -> float:
    """Return how many iterations ago `other` reached the final loss of `curve`. It is 0 if
    `curve` ends below `other`, and always finite, unlike the iteration cost."""
    end, loss = curve[-1]
    return max(0.0, min(end, other[-1][0]) - min(reached(other, loss), float(other[-1][0])))


def behind_at_the_end(run: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the iterations by which `run` is behind the run without losses (lines of results)."""
    curve, against = curve_of(run), curve_of(other)
    return behind([(i, loss) for i, loss in curve if i <= against[-1][0]], against)


def cost(run: Mapping[str, Any], other: Mapping[str, Any], target: int) -> CostOfLosses:
    """Return the cost of a run against the run that lost nothing. Both are lines of the results."""
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
    """Return the validation curve of a line of the results."""
    return [(iteration, loss) for iteration, _, loss in run["validation"]]


def _relearned(run: Mapping[str, Any]) -> tuple[float, float]:
    """Return relearning's passes of a stage over a step's tokens: all, and those in the background.

    A pass is forward and backward. Computing of updates beyond these is included. Stages that
    relearn together share one count.
    """
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

"""Closed forms of how much loss redundancy endures and what it costs (SPARe, §4, appendix B).

There are N groups and N shard types; r groups host each type. Failures strike one surviving group
at a time, each with the same probability. A *wipe-out* is the failure of a type's last host; it
causes a global restart. lab/results/spare/README.md derives the formulas that the paper lacks.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import lambertw


def endured(groups: int, redundancy: int) -> float:
    """Return the mean number of failures until the first wipe-out: N^(1-1/r) Γ(1+1/r) (eq. 3)."""
    if not 1 <= redundancy <= groups:
        raise ValueError(f"redundancy {redundancy} of {groups} groups: between 1 and all of them")
    return math.pow(groups, 1 - 1 / redundancy) * math.gamma(1 + 1 / redundancy)


def fewest_stacks(groups: int, failures: int) -> int:
    """Return the stacks that N - k groups compute for N types under even load: ⌈N/(N-k)⌉."""
    if not 0 <= failures < groups:
        raise ValueError(f"{failures} failures of {groups} groups: at least one group must be left")
    return -(-groups // (groups - failures))


def mean_stacks(groups: int, redundancy: int) -> float:
    """Return a step's stacks without patch compute, averaged over the failures endured (eq. 6)."""
    endures = endured(groups, redundancy)
    return sum(fewest_stacks(groups, k) for k in range(int(endures))) / endures


def patch_share(groups: int, failures: int, stacks: int) -> float:
    """Return the probability that failure k → k+1 takes the only copy of a type (eq. 40, 41).

    Then the step needs another stack. With S stacks on N - k groups, at least 2N - S(N-k) of the
    S(N-k) places have the only copy of their type.
    """
    places = stacks * (groups - failures)
    if places < groups:
        raise ValueError(f"{places} places don't hold {groups} types")
    return max(0, 2 * groups - places) / places


def mean_stacks_patched(groups: int, redundancy: int) -> float:
    """Return the stacks of a step in which a group fails, with patch compute, averaged over the
    failures endured (eq. 5). Steps without a failure need `mean_stacks`."""
    endures = endured(groups, redundancy)
    patches = (
        patch_share(groups, k, fewest_stacks(groups, k)) for k in range(min(int(endures), groups))
    )
    return mean_stacks(groups, redundancy) + sum(patches) / endures


def best_redundancy(groups: int) -> float:
    """Return the redundancy with the least time-to-train: (ln N + γ) / ln 2 (eq. 8), not rounded.
    Beyond it, three stacks are needed before a wipe-out."""
    return (math.log(groups) + float(np.euler_gamma)) / math.log(2)


def availability(period: float, save: float, interval: float, restart: float) -> float:
    """Return the share of wall time that becomes progress. All times are in the same unit.

    A checkpoint (`save`, C) follows each `period` of work (T). Failures strike work and saves, at
    exponentially distributed intervals with mean `interval` (M). A `restart` (R) follows each. Work
    and save together take (M + R)(exp((T + C)/M) - 1) on average until they succeed.
    """
    if min(period, interval) <= 0 or min(save, restart) < 0:
        raise ValueError(
            f"period {period} and interval {interval} must be positive, "
            f"save {save} and restart {restart} not negative"
        )
    segment = (period + save) / interval
    return period * math.exp(-segment) / (-math.expm1(-segment) * (interval + restart))


def best_period(save: float, interval: float) -> float:
    """Return the period of the highest availability, in the unit of `save` (C) and `interval` (M).

    It is M (1 + W(-exp(-1 - C/M))) with Lambert's W; for small saves √(2CM). It doesn't depend on
    the restart.
    """
    if save <= 0 or interval <= 0:
        raise ValueError(f"save {save} and interval {interval} must be positive")
    return interval * (1 + float(lambertw(-math.exp(-1 - save / interval)).real))


def best_availability(save: float, interval: float, restart: float) -> float:
    """Return the availability at `best_period`: (M - T)/(M + R)."""
    return (interval - best_period(save, interval)) / (interval + restart)


def time_to_train(
    groups: int, redundancy: int, *, mtbf: float, save: float, restart: float
) -> float:
    """Return time-to-train over that with one stack and no failures (eq. 7), with the best period
    between checkpoints. `mtbf`: mean time between failures of any group."""
    interval = mtbf * endured(groups, redundancy)
    return mean_stacks_patched(groups, redundancy) / best_availability(save, interval, restart)

"""How much loss redundancy endures and what it costs: closed forms (SPARe, §4 and appendix B).

N groups, N shard types, each hosted by r groups. Failures strike the surviving groups evenly, one
at a time; a *wipe-out* is the failure that takes a type's last host, and brings a global restart.
lab/results/spare/README.md derives what is not in the paper.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import lambertw


def endured(groups: int, redundancy: int) -> float:
    """Failures until the first wipe-out, on average: N^(1-1/r) Γ(1+1/r) (eq. 3)."""
    if not 1 <= redundancy <= groups:
        raise ValueError(f"redundancy {redundancy} of {groups} groups: between 1 and all of them")
    return math.pow(groups, 1 - 1 / redundancy) * math.gamma(1 + 1 / redundancy)


def fewest_stacks(groups: int, failures: int) -> int:
    """Stacks that N - k groups must compute for N types, if the load is even: ⌈N/(N-k)⌉."""
    if not 0 <= failures < groups:
        raise ValueError(f"{failures} failures of {groups} groups: somebody must be left")
    return -(-groups // (groups - failures))


def mean_stacks(groups: int, redundancy: int) -> float:
    """Stacks in a step, averaged over the failures endured, without patch compute (eq. 6)."""
    endures = endured(groups, redundancy)
    return sum(fewest_stacks(groups, k) for k in range(int(endures))) / endures


def patch_share(groups: int, failures: int, stacks: int) -> float:
    """The probability that failure k → k+1 takes the only copy of a type, so that the step needs a
    stack more: with S stacks on N - k groups at least 2N - S(N-k) of S(N-k) places are the only
    ones of their type (eq. 40, 41)."""
    places = stacks * (groups - failures)
    if places < groups:
        raise ValueError(f"{places} places don't hold {groups} types")
    return max(0, 2 * groups - places) / places


def mean_stacks_patched(groups: int, redundancy: int) -> float:
    """Stacks in a step in which a group fails, averaged over the failures endured, with patch
    compute (eq. 5). Steps without a failure need `mean_stacks`."""
    endures = endured(groups, redundancy)
    patches = (
        patch_share(groups, k, fewest_stacks(groups, k)) for k in range(min(int(endures), groups))
    )
    return mean_stacks(groups, redundancy) + sum(patches) / endures


def best_redundancy(groups: int) -> float:
    """The redundancy beyond which three stacks are needed before a wipe-out, and time-to-train is
    least: (ln N + γ) / ln 2 (eq. 8); to be rounded."""
    return (math.log(groups) + float(np.euler_gamma)) / math.log(2)


def availability(period: float, save: float, interval: float, restart: float) -> float:
    """The share of wall time that becomes progress, if a checkpoint is saved after each `period` of
    work, with exponentially distributed failures, `interval` apart on average, that strike work and
    saves, and a `restart` after each. All in the same unit of time.

    Work and save together take (M + R)(exp((T + C)/M) - 1) on average until they succeed.
    """
    if min(period, interval) <= 0 or min(save, restart) < 0:
        raise ValueError(
            f"period {period} and interval {interval} must be positive, "
            f"save {save} and restart {restart} not negative"
        )
    segment = (period + save) / interval
    return period * math.exp(-segment) / (-math.expm1(-segment) * (interval + restart))


def best_period(save: float, interval: float) -> float:
    """The period of the highest availability, M (1 + W(-exp(-1 - C/M))) with Lambert's W; for small
    saves √(2CM). The restart has no say in it. In the unit of `save` and `interval`."""
    if save <= 0 or interval <= 0:
        raise ValueError(f"save {save} and interval {interval} must be positive")
    return interval * (1 + float(lambertw(-math.exp(-1 - save / interval)).real))


def best_availability(save: float, interval: float, restart: float) -> float:
    """The availability at `best_period`, which is (M - T)/(M + R)."""
    return (interval - best_period(save, interval)) / (interval + restart)


def time_to_train(
    groups: int, redundancy: int, *, mtbf: float, save: float, restart: float
) -> float:
    """Time-to-train by the time it takes with one stack and no failures (eq. 7), with the best
    period between checkpoints. `mtbf`: between failures of any of the groups."""
    interval = mtbf * endured(groups, redundancy)
    return mean_stacks_patched(groups, redundancy) / best_availability(save, interval, restart)

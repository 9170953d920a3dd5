"""Relearning: training of a rebuilt stage on recorded inputs and outputs of the lost one.

The neighbours of a lost stage keep its inputs and outputs of the last committed steps. Adjacent
lost stages relearn as one: from the input of the first and the output of the last.

Most effective per time (lab/results/relearning): many tokens; few passes, in changing order; small
updates, each from a few samples of a pair; a rate that falls to 0; updates that move a matrix
equally in all directions.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from itertools import pairwise
from typing import Final

import xxhash

FIRST: Final = 4
"""Factor on the number of passes if the first body stage relearns, alone or with others. All other
stages read its output, so insufficient relearning costs ten times as much there."""
PULL: Final = 0.1
"""Fraction of the distance to the guess that each update reverts, times the learning rate, if the
first body stage relearns."""
YOUNG: Final = 100
"""Training steps from which relearning uses its full rate."""
LOOKS: Final = 4
"""Checks per pass whether a guess is good enough for training."""

SHARE: Final = 0.25
"""Seconds of relearning per second of preceding training."""
LEAST: Final = 0.2
"""Minimum fraction of its time that relearning gets, after recent losses or restarts."""


def time_for(seconds: float, trained: float, spent: float) -> float:
    """Seconds for relearning, within the run file's limit, while other stages wait: at most a
    quarter of the time `trained` since the last stall for a lost stage. With frequent losses,
    relearned weights are soon lost again. `spent`: seconds on relearning abandoned in this stall
    because of further losses."""
    whole = min(seconds, max(SHARE * trained, LEAST * seconds))
    return max(whole - spent, LEAST * whole)


def samples_at_a_time(tokens: int, context: int) -> int:
    """Samples in a relearning update of about `tokens` tokens; at least one."""
    return max(1, tokens // context)


def sample_parts(samples: int, at_most: int) -> list[slice]:
    """Slices of a pair's samples, of at most `at_most` each, as even as possible."""
    count = -(-samples // at_most)
    size, larger = divmod(samples, count)
    ends = [number * size + min(number, larger) for number in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]


def pass_count(wanted: int, stages: Collection[int]) -> int:
    """Relearning passes over the pairs of these stages: `wanted`, or more with the first one."""
    return wanted * FIRST if 1 in stages else wanted


def pull(stages: Collection[int]) -> float:
    """The pull to the guess in Muon's updates of these stages. The first body stage's guess is a
    copy of the second. Relearned without a pull, with so many updates, it doubles in size. The next
    guess of the second, made mostly of the first, is then far off."""
    return PULL if 1 in stages else 0.0


def peak_rate(lr: float, step: int) -> float:
    """Learning rate of the first relearning update after `step` steps of training. Early weights
    are small, and updates at `lr` would make them many times too large. The damage is permanent."""
    return lr * min(1.0, step / YOUNG)


def shuffled(count: int, a_pass: int) -> list[int]:
    """The order of parts in a relearning pass: new for each, equal for all nodes that relearn."""
    return sorted(
        range(count), key=lambda part: xxhash.xxh3_64_intdigest(struct.pack("<QQ", a_pass, part))
    )


def updates_per_check(parts: int) -> int:
    """Relearning updates between two checks of the result, in passes over `parts` parts."""
    return -(-parts // LOOKS)


def decayed_rate(lr: float, updates: float, time: float = 0.0) -> float:
    """Learning rate of the next relearning update. It falls linearly to 0 at the last update or the
    end of the time, whichever is first; both are given as completed fractions, 0 to 1."""
    return lr * (1 - min(1.0, max(updates, time)))


def ratio(error: float, norm: float) -> float:
    return error / norm if norm else float("inf")

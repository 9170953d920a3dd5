"""Relearning: a rebuilt stage is trained on what went into and came out of the lost one.

The nodes around a lost stage keep what went into it and what came out, of the last committed steps.
Stages lost next to each other are learned as one: the input of the first, the output of the last.

What teaches most in a given time (lab/results/relearning): many tokens, few passes over them in
ever new order, small updates (each pair is cut into parts of a few samples, and each part makes an
update), a rate that falls to 0, and updates that move a matrix in all its directions alike.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from itertools import pairwise
from typing import Final

import xxhash

FIRST: Final = 4
"""Times as many passes where the first body stage is learned, alone or with others. It makes of
embeddings what all others read, so half learned it costs ten times as much as any other."""
PULL: Final = 0.1
"""Share of the way back to the guess that each update goes, times the learning rate, where the
first body stage is learned."""
YOUNG: Final = 100
"""Steps of training after which relearning has its whole rate."""


LOOKS: Final = 4
"""Times in a pass that it is looked whether a guess is good enough to train on."""

SHARE: Final = 0.25
"""Seconds of relearning for each second of training before."""
LEAST: Final = 0.2
"""Share of its time that relearning has, however soon after the last loss, or often begun anew."""


def time_for(seconds: float, trained: float, spent: float) -> float:
    """Seconds for relearning, of those that the run file allows, while all others wait: no more
    than a quarter of those in which the run has `trained` since it last stood still for a lost
    stage. Where losses come often, what has been relearned will soon be lost. `spent`: on what was
    given up in this stall, since somebody else was lost meanwhile."""
    whole = min(seconds, max(SHARE * trained, LEAST * seconds))
    return max(whole - spent, LEAST * whole)


def at_a_time(tokens: int, context: int) -> int:
    """Samples of an update that is to be made of so many tokens: one at least."""
    return max(1, tokens // context)


def parts(samples: int, at_most: int) -> list[slice]:
    """Samples of a pair to be learned at a time: at most so many, as evenly as can be."""
    count = -(-samples // at_most)
    size, larger = divmod(samples, count)
    ends = [number * size + min(number, larger) for number in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]


def passes(wanted: int, stages: Collection[int]) -> int:
    """Over the pairs of these stages, where `wanted` are enough for others than the first."""
    return wanted * FIRST if 1 in stages else wanted


def pull(stages: Collection[int]) -> float:
    """Back to the guess, for Muon's updates of these stages. The first body stage's guess is a copy
    of the second; relearned without a pull, with so many updates, it comes out twice as large, and
    the next guess of the second, most of it made of the first, far off."""
    return PULL if 1 in stages else 0.0


def peak(lr: float, step: int) -> float:
    """Learning rate of the first update, after so many steps of training. Weights that have hardly
    moved yet are small. Moved by `lr` an update they come out many times too large, and what is
    lost by that isn't made up for until the end of the run."""
    return lr * min(1.0, step / YOUNG)


def shuffled(count: int, a_pass: int) -> list[int]:
    """In which order this pass takes so many parts: another one each pass, and the same for all who
    relearn together."""
    return sorted(
        range(count), key=lambda part: xxhash.xxh3_64_intdigest(struct.pack("<QQ", a_pass, part))
    )


def updates_to_look(parts: int) -> int:
    """Updates from one look to the next, in passes over so many parts."""
    return -(-parts // LOOKS)


def rate(lr: float, updates: float, time: float = 0.0) -> float:
    """Learning rate of the next update. It falls in a line to 0 at the last update, or when the
    time is over, if that comes first; of both the share that is done, 0 to 1."""
    return lr * (1 - min(1.0, max(updates, time)))


def ratio(error: float, norm: float) -> float:
    return error / norm if norm else float("inf")

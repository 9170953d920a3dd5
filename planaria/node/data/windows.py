"""The samples of each step, a function of (seed, step).

Each epoch visits all samples once, in a permutation computed position by position. A balanced
Feistel network permutes the numbers of 2·h bits. An image that is no sample is permuted again until
it is one (cycle walking), which permutes exactly the samples. See J. Black and P. Rogaway, "Ciphers
with Arbitrary Finite Domains", CT-RSA 2002.

Several corpora take turns in a constant cycle of positions. So each has its own stream of positions
and its own epochs, which again follow from the position alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import xxhash
from numpy.typing import NDArray

from planaria.node.data.batches import Batches
from planaria.node.data.mixture_cycle import Share

ROUNDS = 6
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # odd: spreads the epochs over the keys
SMALLEST_HALF = 3  # bits; a smaller network has few permutations


class Epochs:
    """The order of a corpus's samples: permutations of the ids [0, samples), one for each epoch."""

    def __init__(self, seed: int, samples: int) -> None:
        self.samples = samples
        self._half = max(SMALLEST_HALF, -(-(samples - 1).bit_length() // 2))
        seeds = (struct.pack("<QQ", seed, number) for number in range(ROUNDS))
        self._keys = np.array([xxhash.xxh3_64_intdigest(s) for s in seeds], np.uint64)

    def at(self, positions: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The sample ids at these positions of the concatenated epochs."""
        epochs = positions // np.uint64(self.samples)
        numbers = positions % np.uint64(self.samples)
        keys = _mix(self._keys[:, None] + epochs * GOLDEN)  # [ROUNDS, batch]
        images = self._feistel(numbers, keys)
        while (outside := images >= self.samples).any():
            images[outside] = self._feistel(images[outside], keys[:, outside])
        return images.astype(np.int64)

    def _feistel(self, numbers: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half = np.uint64(self._half)
        left, right = numbers >> half, numbers & np.uint64((1 << self._half) - 1)
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) >> (np.uint64(64) - half))
        return (left << half) | right


class Turns:
    """The order of several corpora: maps positions to corpora that have `turns` each in a cycle.

    The k-th of a corpus's w turns, from 0, comes at the share (k + 1/2) / w of the cycle. Ties go
    to the first corpus. So turns are spread evenly, and any positions in a row, as many as the
    cycle has, contain exactly each corpus's turns.
    """

    def __init__(self, turns: Sequence[int]) -> None:
        due = [(Fraction(2 * k + 1, 2 * w), of) for of, w in enumerate(turns) for k in range(w)]
        self.whose = np.array([of for _, of in sorted(due)], np.int64)
        self.turns = np.array(turns, np.uint64)
        self.before = np.zeros(len(due), np.uint64)  # earlier turns of the same corpus in the cycle
        for of in range(len(turns)):
            own = self.whose == of
            self.before[own] = np.arange(own.sum(), dtype=np.uint64)

    def at(self, positions: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """The corpus whose turn each position is, and the number of its earlier turns."""
        cycles, places = np.divmod(positions, np.uint64(len(self.whose)))
        whose = self.whose[places]
        return whose, cycles * self.turns[whose] + self.before[places]


class Windows:
    """The samples of each step, its window: as many ids as its batch has.

    Steps take positions in order: with one batch throughout, step t has [(t-1)·batch, t·batch). At
    its n-th turn, from 0, a corpus gives the sample at position n of its own `Epochs`. So each of
    its samples comes once in each of its epochs. Their seeds are `seed` for the first corpus, and
    the xxh3_64 of (seed, c) for corpus c > 0. Ids count on from one corpus to the next. Raises
    ValueError for figures below one, or a seed outside [0, 2^64).
    """

    def __init__(self, seed: int, shares: Sequence[Share], batches: Batches) -> None:
        if min((share.turns for share in shares), default=0) < 1:
            raise ValueError(f"no windows of the shares {shares}: each corpus has 1 turn or more")
        samples = min(share.samples for share in shares)
        batch = min(batches.samples, *(batch.samples for batch in batches.earlier), 1)
        if samples < 1 or batch < 1 or not 0 <= seed < 2**64:
            raise ValueError(
                f"no windows for seed {seed}, {samples} samples, batch {batches.samples}: samples "
                "and batch are at least 1, the seed is in [0, 2^64)"
            )
        self.batches = batches
        self._turns = Turns([share.turns for share in shares])
        self._first = np.cumsum([0, *(share.samples for share in shares)])
        self._own = [
            Epochs(_corpus_seed(seed, of), share.samples) for of, share in enumerate(shares)
        ]

    def epoch(self, step: int) -> int:
        """Number of epochs that all corpora have completed before the step."""
        first = self._position(step)
        cycles, place = divmod(first, len(self._turns.whose))
        begun = np.bincount(self._turns.whose[:place], minlength=len(self._own))
        had = [cycles * int(turns) + int(begun[of]) for of, turns in enumerate(self._turns.turns)]
        return min(count // own.samples for count, own in zip(had, self._own, strict=True))

    def ids(self, step: int) -> NDArray[np.int64]:
        """The step's sample ids, int64 [batch]; of one corpus, they repeat where an epoch ends."""
        first = np.uint64(self._position(step))
        positions = first + np.arange(self.batches.at_step(step).samples, dtype=np.uint64)
        whose, turns = self._turns.at(positions)
        ids = np.empty(len(whose), np.int64)
        for of, own in enumerate(self._own):
            mine = whose == of
            ids[mine] = self._first[of] + own.at(turns[mine])
        return ids

    def _position(self, step: int) -> int:
        """Position of the first sample of a step."""
        if step < 1:
            raise ValueError(f"steps count from 1, there is no window of step {step}")
        return self.batches.samples_until(step - 1)


def _corpus_seed(seed: int, corpus: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, corpus)) if corpus else seed


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer (variant 13 of D. Stafford's mixers): all bits depend on all bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def microbatch_ids(ids: NDArray[np.int64], microbatch_id: int, size: int) -> NDArray[np.int64]:
    """The samples of a microbatch of the window `ids`: microbatches are its slices of `size`.

    Raises ValueError when the window has no such microbatch.
    """
    if not 0 <= microbatch_id < -(-len(ids) // size):
        raise ValueError(
            f"a window of {len(ids)} samples has no microbatch {microbatch_id} of {size} samples"
        )
    return ids[microbatch_id * size : (microbatch_id + 1) * size]


def samples_hash(ids: NDArray[np.int64]) -> bytes:
    """Hash of a multiset of sample ids, 16 bytes: xxh3_128 of the sorted little-endian ids."""
    return xxhash.xxh3_128_digest(np.sort(ids).astype("<i8").tobytes())

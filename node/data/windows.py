"""Which samples a step trains on: everything follows from (seed, step).

Each epoch visits all samples once in an order of its own, a permutation that is computed position
by position: a balanced Feistel network permutes the numbers of 2·h bits, and a position whose image
is no sample is sent through again until it is one (cycle walking), which permutes exactly the
samples. See J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
"""

from __future__ import annotations

import struct

import numpy as np
import xxhash
from numpy.typing import NDArray

ROUNDS = 6
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # odd: spreads the epochs over the keys
SMALLEST_HALF = 3  # bits; with fewer, the network has few permutations to choose from


class Windows:
    """The window of each step: `batch` sample ids out of [0, samples).

    Step t takes positions [(t-1)·batch, t·batch) of the epochs' permutations laid end to end.
    Raises ValueError for figures below one, or a seed outside [0, 2^64).
    """

    def __init__(self, seed: int, samples: int, batch: int) -> None:
        if samples < 1 or batch < 1 or not 0 <= seed < 2**64:
            raise ValueError(
                f"no windows for seed {seed}, {samples} samples, batch {batch}: samples and batch "
                "are at least 1, the seed is in [0, 2^64)"
            )
        self.seed = seed
        self.samples = samples
        self.batch = batch
        self._half = max(SMALLEST_HALF, -(-(samples - 1).bit_length() // 2))
        seeds = (struct.pack("<QQ", seed, number) for number in range(ROUNDS))
        self._keys = np.array([xxhash.xxh3_64_intdigest(s) for s in seeds], np.uint64)

    def epoch(self, step: int) -> int:
        """Epoch of the step's first position, from 0."""
        return self._first(step) // self.samples

    def ids(self, step: int) -> NDArray[np.int64]:
        """Sample ids of `step` >= 1, int64 [batch]. They repeat only where an epoch ends."""
        positions = np.uint64(self._first(step)) + np.arange(self.batch, dtype=np.uint64)
        epochs = positions // np.uint64(self.samples)
        numbers = positions % np.uint64(self.samples)
        keys = _mix(self._keys[:, None] + epochs * GOLDEN)  # [ROUNDS, batch]
        images = self._feistel(numbers, keys)
        while (outside := images >= self.samples).any():
            images[outside] = self._feistel(images[outside], keys[:, outside])
        return images.astype(np.int64)

    def _first(self, step: int) -> int:
        if step < 1:
            raise ValueError(f"steps count from 1, there is no window of step {step}")
        return (step - 1) * self.batch

    def _feistel(self, numbers: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half = np.uint64(self._half)
        left, right = numbers >> half, numbers & np.uint64((1 << self._half) - 1)
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) >> (np.uint64(64) - half))
        return (left << half) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finalizer of SplitMix64 (variant 13 of D. Stafford's mixers): all bits depend on all bits."""
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
    """16 bytes that stand for a multiset of samples: xxh3_128 of the sorted little-endian ids."""
    return xxhash.xxh3_128_digest(np.sort(ids).astype("<i8").tobytes())

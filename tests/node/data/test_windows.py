from collections import Counter

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.node.data.windows import Windows, microbatch_ids, samples_hash

seeds = st.integers(0, 2**64 - 1)


@settings(deadline=None, max_examples=40)
@given(seeds, st.integers(1, 5000), st.integers(1, 600), st.integers(0, 3))
def test_every_epoch_visits_every_sample_once(
    seed: int, samples: int, batch: int, epoch: int
) -> None:
    windows = Windows(seed, samples, batch)
    begin, end = epoch * samples, (epoch + 1) * samples
    steps = range(begin // batch + 1, -(-end // batch) + 1)
    positions = np.concatenate([windows.ids(step) for step in steps])
    offset = begin - (steps[0] - 1) * batch
    visited = positions[offset : offset + samples]
    np.testing.assert_array_equal(np.sort(visited), np.arange(samples))


@settings(deadline=None)
@given(seeds, st.integers(1, 10**12), st.integers(1, 64), st.integers(1, 10**9))
def test_a_window_follows_from_seed_and_step_alone(
    seed: int, samples: int, batch: int, step: int
) -> None:
    ids = Windows(seed, samples, batch).ids(step)
    assert ids.dtype == np.int64
    assert ids.shape == (batch,)
    assert ids.min() >= 0 and ids.max() < samples
    np.testing.assert_array_equal(ids, Windows(seed, samples, batch).ids(step))
    # ... and not from how positions are cut into windows.
    alone = Windows(seed, samples, 1)
    assert ids[-1] == alone.ids(step * batch)[0]


@settings(deadline=None)
@given(seeds, st.integers(30, 5000), st.integers(0, 100))
def test_epochs_and_seeds_have_orders_of_their_own(seed: int, samples: int, epoch: int) -> None:
    orders = [
        Windows(s, samples, samples).ids(e + 1).tolist()
        for s, e in [(seed, epoch), (seed, epoch + 1), ((seed + 1) % 2**64, epoch)]
    ]
    assert len({tuple(order) for order in orders}) == 3


def test_order_looks_random() -> None:
    samples = 4000
    order = Windows(7, samples, samples).ids(1)
    # Neighbours in the order are no neighbours in the data, and do not tend to either end.
    assert np.count_nonzero(np.abs(np.diff(order)) <= 10) < samples * 0.02
    assert abs(np.corrcoef(np.arange(samples), order)[0, 1]) < 0.06
    # Which sample comes first is even over the seeds: chi-squared, 15 degrees of freedom.
    first = Counter(int(Windows(seed, 16, 1).ids(1)[0]) for seed in range(3200))
    assert sum((first[i] - 200) ** 2 / 200 for i in range(16)) < 45


def test_permutation_is_not_held_in_memory() -> None:
    ids = Windows(1, 10**10, 1024).ids(10**6)
    assert len(set(ids.tolist())) == 1024
    assert ids.max() > 2**32


def test_orders_never_change() -> None:
    # Runs resume by (seed, step), so another order would be another run.
    assert Windows(0, 1000, 8).ids(1).tolist() == [667, 589, 145, 495, 868, 257, 28, 948]
    assert Windows(3, 10**10, 3).ids(10**7).tolist() == [7152000520, 1041321274, 3110579404]


def test_epoch_of_a_step_is_that_of_its_first_position() -> None:
    windows = Windows(seed=0, samples=10, batch=4)
    assert [windows.epoch(step) for step in range(1, 7)] == [0, 0, 0, 1, 1, 2]


def test_microbatches_are_slices_of_the_window() -> None:
    ids = np.arange(10)
    assert [microbatch_ids(ids, i, 4).tolist() for i in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    for outside in (-1, 3):
        with pytest.raises(ValueError, match=f"no microbatch {outside}"):
            microbatch_ids(ids, outside, 4)


@settings(deadline=None)
@given(st.permutations(range(-3, 5)))
def test_samples_hash_ignores_order_only(ids: list[int]) -> None:
    digest = samples_hash(np.array(ids))
    assert digest == xxhash.xxh3_128_digest(np.arange(-3, 5, dtype="<i8").tobytes())
    assert digest != samples_hash(np.array([*ids, 0]))


@pytest.mark.parametrize(("seed", "samples", "batch"), [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_figures_that_make_no_windows_are_refused(seed: int, samples: int, batch: int) -> None:
    with pytest.raises(ValueError, match="no windows for"):
        Windows(seed, samples, batch)


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        Windows(0, 10, 2).ids(0)

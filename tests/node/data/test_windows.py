from collections import Counter

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.node.data.batches import Batches
from planaria.node.data.mixture_cycle import Share, turns_of
from planaria.node.data.windows import (
    Turns,
    Windows,
    microbatch_ids,
    samples_hash,
)

seeds = st.integers(0, 2**64 - 1)


def windows_of_one(seed: int, samples: int, batch: int) -> Windows:
    return Windows(seed, [Share(samples, 1)], Batches(batch))


@settings(deadline=None, max_examples=40)
@given(seeds, st.integers(1, 5000), st.integers(1, 600), st.integers(0, 3))
def test_every_epoch_visits_every_sample_once(
    seed: int, samples: int, batch: int, epoch: int
) -> None:
    batch = max(batch, samples // 100)  # not thousands of windows
    windows = windows_of_one(seed, samples, batch)
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
    ids = windows_of_one(seed, samples, batch).ids(step)
    assert ids.dtype == np.int64
    assert ids.shape == (batch,)
    assert ids.min() >= 0 and ids.max() < samples
    np.testing.assert_array_equal(ids, windows_of_one(seed, samples, batch).ids(step))
    # It doesn't depend on how positions are cut into windows.
    alone = windows_of_one(seed, samples, 1)
    assert ids[-1] == alone.ids(step * batch)[0]


@settings(deadline=None)
@given(seeds, st.integers(30, 5000), st.integers(0, 100))
def test_epochs_and_seeds_have_orders_of_their_own(seed: int, samples: int, epoch: int) -> None:
    orders = [
        windows_of_one(s, samples, samples).ids(e + 1).tolist()
        for s, e in [(seed, epoch), (seed, epoch + 1), ((seed + 1) % 2**64, epoch)]
    ]
    assert len({tuple(order) for order in orders}) == 3


def test_order_looks_random() -> None:
    samples = 4000
    order = windows_of_one(7, samples, samples).ids(1)
    # Neighbours in the order aren't neighbours in the data, and there is no trend.
    assert np.count_nonzero(np.abs(np.diff(order)) <= 10) < samples * 0.02
    assert abs(np.corrcoef(np.arange(samples), order)[0, 1]) < 0.06
    # The first sample is uniform over seeds: chi-squared, 15 degrees of freedom.
    first = Counter(int(windows_of_one(seed, 16, 1).ids(1)[0]) for seed in range(3200))
    assert sum((first[i] - 200) ** 2 / 200 for i in range(16)) < 45


def test_orders_never_change() -> None:
    # Runs resume by (seed, step), so another order would be another run.
    assert windows_of_one(0, 1000, 8).ids(1).tolist() == [
        667,
        589,
        145,
        495,
        868,
        257,
        28,
        948,
    ]
    far = windows_of_one(3, 10**10, 3).ids(10**7)
    assert far.tolist() == [7152000520, 1041321274, 3110579404]


def test_epoch_of_a_step_is_that_of_its_first_position() -> None:
    windows = windows_of_one(0, 10, 4)
    assert [windows.epoch(step) for step in range(1, 7)] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("shares", [[Share(50, 1)], [Share(30, 2), Share(20, 1)]])
def test_another_batch_takes_up_the_samples_where_the_one_before_has_ended(
    shares: list[Share],
) -> None:
    whole = Windows(5, shares, Batches(80)).ids(1)
    changed = Windows(5, shares, Batches(4).changed_after(3, 12, 1).changed_after(6, 8, 1))
    ids = [changed.ids(step) for step in range(1, 10)]
    assert [*map(len, ids)] == 3 * [4] + 3 * [12] + 3 * [8]
    np.testing.assert_array_equal(np.concatenate(ids), whole[: 3 * (4 + 12 + 8)])


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
        windows_of_one(seed, samples, batch)


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        windows_of_one(0, 10, 2).ids(0)


shares = st.lists(st.builds(Share, st.integers(1, 60), st.integers(1, 9)), min_size=2, max_size=5)


def positions(seed: int, mixture: list[Share], batch: int, steps: int) -> np.ndarray:
    """Return the sample ids of so many steps, one after the other."""
    windows = Windows(seed, mixture, Batches(batch))
    return np.concatenate([windows.ids(step) for step in range(1, steps + 1)])


def corpus_of(ids: np.ndarray, mixture: list[Share]) -> np.ndarray:
    ends = np.cumsum([share.samples for share in mixture])
    return np.searchsorted(ends, ids, side="right")


@settings(deadline=None, max_examples=60)
@given(seeds, shares, st.integers(1, 40), st.integers(0, 60))
def test_as_many_samples_in_a_row_as_there_are_turns_have_the_shares_exactly(
    seed: int, mixture: list[Share], batch: int, first: int
) -> None:
    """Thus a window whose size is a multiple of the number of turns has the shares exactly, too."""
    cycle = sum(share.turns for share in mixture)
    ids = positions(seed, mixture, batch, -(-(first + cycle) // batch))
    turns = np.bincount(corpus_of(ids[first : first + cycle], mixture), minlength=len(mixture))
    assert turns.tolist() == [share.turns for share in mixture]


@settings(deadline=None, max_examples=15)
@given(seeds, shares, st.integers(1, 40))
def test_each_corpus_gives_each_sample_once_in_each_of_its_epochs(
    seed: int, mixture: list[Share], batch: int
) -> None:
    ids = positions(seed, mixture, batch, 2 + 400 // batch)
    begins = np.cumsum([0, *(share.samples for share in mixture)])
    whose = corpus_of(ids, mixture)
    for of, share in enumerate(mixture):
        own = ids[whose == of] - begins[of]
        for epoch in range(len(own) // share.samples):
            part = own[epoch * share.samples : (epoch + 1) * share.samples]
            np.testing.assert_array_equal(np.sort(part), np.arange(share.samples))


@settings(deadline=None)
@given(seeds, shares, st.integers(1, 64), st.integers(1, 10**9))
def test_a_window_of_a_mixture_follows_from_seed_and_step_alone(
    seed: int, mixture: list[Share], batch: int, step: int
) -> None:
    windows = Windows(seed, mixture, Batches(batch))
    ids = windows.ids(step)
    assert ids.shape == (batch,) and ids.dtype == np.int64
    assert ids.min() >= 0 and ids.max() < sum(share.samples for share in mixture)
    assert ids[-1] == Windows(seed, mixture, Batches(1)).ids(step * batch)[0]
    assert windows.epoch(step) <= windows.epoch(step + 1)


def test_turns_are_spread_over_the_cycle() -> None:
    whose, had = Turns([7, 3]).at(np.arange(10, 20, dtype=np.uint64))
    assert whose.tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    assert had[whose == 0].tolist() == list(range(7, 14))
    assert had[whose == 1].tolist() == [3, 4, 5]


def test_a_mixture_stays_as_it_is() -> None:
    """Otherwise runs that go on after an update would repeat and miss samples."""
    mixture = [Share(1000, 7), Share(50, 3)]
    windows = Windows(5, mixture, Batches(10))
    assert windows.ids(1).tolist() == [805, 1039, 168, 775, 272, 1007, 840, 355, 1008, 40]
    assert [windows.epoch(step) for step in (1, 17, 18, 143, 144)] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("given", "turns"),
    [([0.7, 0.3], [7, 3]), ([1, 2], [1, 2]), ([0.1, 0.25, 0.65], [2, 5, 13]), ([4.0], [1])],
)
def test_shares_are_whole_turns(given: list[float], turns: list[int]) -> None:
    assert turns_of(given) == turns


@pytest.mark.parametrize(
    ("given", "says"),
    [([1, 0], "1, 0 must all be greater than 0"), ([0.33333, 0.66668], "fewer digits, as in 7")],
)
def test_shares_that_are_none_are_refused(given: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        turns_of(given)

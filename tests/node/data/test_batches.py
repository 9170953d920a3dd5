"""Tests of the number of samples of each step in a run whose batch has been changed."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from planaria.node.data.batches import Batch, Batches

SIZES = st.integers(1, 5)


@given(SIZES, st.lists(st.tuples(st.integers(0, 12), SIZES), max_size=5))
def test_each_step_has_the_batch_that_the_newest_change_gives_it(
    first: int, changes: list[tuple[int, int]]
) -> None:
    """A change may apply from a step before those of earlier changes."""
    batches, sizes = Batches(first), [first] * 20
    for step, samples in changes:
        batches = batches.changed_after(step, samples, 1)
        sizes[step:] = [samples] * (20 - step)
    assert [batches.at_step(step).samples for step in range(1, 21)] == sizes
    assert [batches.samples_until(step) for step in range(21)] == [0, *accumulate(sizes)]
    lasts = [batch.last for batch in batches.earlier]
    assert lasts == sorted({*lasts})


def test_a_change_to_the_same_batch_is_none() -> None:
    once = Batches(8, 2).changed_after(40, 12, 3)
    assert once == Batches(12, 3, (Batch(40, 8, 2),))
    assert once.changed_after(60, 12, 3) == once
    assert once.changed_after(40, 8, 2) == Batches(8, 2)
    assert once.changed_after(0, 6, 2) == Batches(6, 2)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.recovery.decide import RECENT
from planaria.recovery.snapshot_pace import LEAST, MARGIN, MOST, SHARE, UPDATES, Pace, share_of_rows

SIZES = st.floats(1, 1e15)


@given(SIZES, SIZES)
def test_snapshots_take_a_share_of_what_training_sends_unless_rows_would_be_old(whole, training):
    share = share_of_rows(whole, training)
    assert LEAST <= share <= MOST
    if LEAST < share < MOST:
        assert share * whole == pytest.approx(SHARE * training)


def arrive(pace: Pace, steps: int, times: int = UPDATES) -> list[bool]:
    return [pace.arrived(steps) for _ in range(times)]


def test_a_link_that_becomes_slow_ends_the_snapshot_once_and_a_quick_trial_begins_it_again():
    pace = Pace(1 / 8, 1, RECENT)
    assert not any(arrive(pace, 1)) and pace.kept and pace.age == 4
    assert arrive(pace, 40, 3) == [False, False, True]  # over half of the last five are late
    assert not pace.kept and pace.period == RECENT
    assert not any(arrive(pace, 13, 20)) and not pace.kept
    assert arrive(pace, 9, 1) == [True] and pace.kept and pace.period == 1
    assert pace.age == 36  # the age that the trial shows


def test_two_late_updates_among_quick_ones_change_nothing():
    pace = Pace(1 / 8, 1, RECENT)
    for _ in range(10):
        assert not any(pace.arrived(steps) for steps in (1, 400, 1, 1, 400))


@given(st.floats(LEAST, MOST), st.integers(1, 200))
def test_a_steady_link_changes_it_once_at_most(fraction, steps):
    pace = Pace(fraction, 1, RECENT)
    changes = arrive(pace, steps, 50)
    slow = steps / (2 * fraction) > RECENT
    assert sum(changes) == slow and pace.kept is not slow


@given(st.floats(LEAST, MOST), st.lists(st.integers(1, 60), min_size=1, max_size=200))
def test_a_link_near_the_limit_does_not_change_it_to_and_fro(fraction, jitter):
    between = [s for s in jitter if MARGIN * RECENT < s / (2 * fraction) <= RECENT]
    pace = Pace(fraction, 1, RECENT)
    assert not any(map(pace.arrived, between)) and pace.kept
    arrive(pace, 10_000)
    assert not any(map(pace.arrived, between)) and not pace.kept

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from planaria_lab.spare.endurance import (
    availability,
    best_availability,
    best_period,
    best_redundancy,
    endured,
    fewest_stacks,
    mean_stacks,
    mean_stacks_patched,
    patch_share,
    time_to_train,
)


@pytest.mark.parametrize(
    ("groups", "redundancy", "failures", "stacks"),
    [
        (200, 2, 12.5, 1.84),
        (200, 3, 30.5, 1.93),
        (200, 9, 105.1, 2.03),
        (200, 12, 123.2, 2.17),
        (600, 2, 21.7, 1.89),
        (600, 20, 424.2, 2.34),
        (1000, 2, 28.0, 1.96),
        (1000, 26, 750.7, 2.44),
    ],
)
def test_closed_forms_give_the_papers_theory_columns(
    groups: int, redundancy: int, failures: float, stacks: float
) -> None:
    assert endured(groups, redundancy) == pytest.approx(failures, abs=0.051)
    assert mean_stacks(groups, redundancy) == pytest.approx(stacks, abs=0.0051)


def test_without_redundancy_the_first_failure_is_the_last() -> None:
    assert endured(500, 1) == 1
    assert mean_stacks(500, 1) == 1


@given(st.integers(2, 2000), st.data())
def test_a_patch_is_certain_with_single_copies_and_never_with_two(
    groups: int, data: st.DataObject
) -> None:
    assert patch_share(groups, 0, 1) == 1
    assert patch_share(groups, 0, 2) == 0
    failures = data.draw(st.integers(0, groups - 1))
    stacks = fewest_stacks(groups, failures)
    assert 0 <= patch_share(groups, failures, stacks) <= 1


def test_the_patch_term_of_two_stacks_is_the_share_of_the_lost() -> None:
    """The term is (2N - 2(N-k)) / 2(N-k) = k / (N-k)."""
    assert patch_share(1000, 400, 2) == pytest.approx(400 / 600)
    assert mean_stacks_patched(1000, 9) - mean_stacks(1000, 9) == pytest.approx(0.32, abs=0.005)


@given(st.floats(0.01, 100), st.floats(0.1, 10_000), st.floats(0, 1000))
def test_no_period_beats_the_best(save: float, interval: float, restart: float) -> None:
    best = best_period(save, interval)
    best_found = minimize_scalar(
        lambda period: -availability(period, save, interval, restart),
        bounds=(best / 50, 50 * best),
        method="bounded",
    )
    assert -best_found.fun <= availability(best, save, interval, restart) * (1 + 1e-9)
    assert best_availability(save, interval, restart) == pytest.approx(
        availability(best, save, interval, restart)
    )


def test_the_best_period_of_cheap_saves_is_youngs() -> None:
    assert best_period(0.001, 1000) == pytest.approx(np.sqrt(2 * 0.001 * 1000), rel=1e-3)


def test_availability_is_what_happens() -> None:
    """The closed form is compared with work in segments that random failures start anew."""
    rng = np.random.default_rng(3)
    period, save, interval, restart = 30.0, 5.0, 100.0, 60.0
    wall, done, until = 0.0, 0, rng.exponential(interval)
    while done < 20_000:
        if until > period + save:
            wall, until, done = wall + period + save, until - period - save, done + 1
        else:
            wall, until = wall + until + restart, rng.exponential(interval)
    assert done * period / wall == pytest.approx(
        availability(period, save, interval, restart), rel=0.01
    )


def test_the_best_redundancy() -> None:
    assert [round(best_redundancy(n)) for n in (200, 600, 1000)] == [8, 10, 11]


@pytest.mark.parametrize("groups", [200, 600, 1000])
def test_time_to_train_is_low_until_a_third_stack_is_needed(groups: int) -> None:
    """Equation 8 leaves the patch term out, so its redundancy is only an upper end of the range."""
    best = round(best_redundancy(groups))
    times = [time_to_train(groups, r, mtbf=300, save=60, restart=3600) for r in range(2, best + 5)]
    least = int(np.argmin(times)) + 2
    assert 4 <= least <= best
    assert mean_stacks(groups, best - 1) < 2.03
    assert mean_stacks(groups, best + 3) > 2.1


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="redundancy 9 of 8 groups"):
        endured(8, 9)
    with pytest.raises(ValueError, match="at least one group must be left"):
        fewest_stacks(8, 8)
    with pytest.raises(ValueError, match="don't hold 10 types"):
        patch_share(10, 2, 1)
    with pytest.raises(ValueError, match="must be positive"):
        availability(0, 1, 1, 1)
    with pytest.raises(ValueError, match="must be positive"):
        best_period(0, 1)

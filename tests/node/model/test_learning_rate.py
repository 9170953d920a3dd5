from __future__ import annotations

import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.model.learning_rate import (
    Schedule,
    boost,
    describe_rate,
    rate_of,
    scheduled_rate,
    warmup_of,
    warmup_too_long,
)
from planaria.node.run_file import loads, override


def test_rate_warms_up_and_follows_a_cosine() -> None:
    rates = [scheduled_rate(step, 100, 2.0, 20, 0.1) for step in range(1, 121)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[19] == 2.0
    assert rates[59] == pytest.approx(2.0 * 0.55)
    assert rates[99] == pytest.approx(0.2)
    assert rates[100:] == [pytest.approx(0.2)] * 20


def test_other_schedules_fall_in_a_line_late_or_not_at_all() -> None:
    def rates(schedule: Schedule) -> list[float]:
        return [scheduled_rate(step, 100, 2.0, 20, 0.1, schedule, 0.2) for step in range(1, 121)]

    linear, constant, wsd = rates("linear"), rates("constant"), rates("wsd")
    assert linear[:20] == constant[:20] == wsd[:20] == rates("cosine")[:20]
    assert constant[19:] == [2.0] * 101
    assert [linear[at] for at in (19, 59, 99)] == pytest.approx([2.0, 2.0 * 0.55, 0.2])
    assert wsd[19:80] == [2.0] * 61
    assert [wsd[at] for at in (89, 99)] == pytest.approx([2.0 * 0.55, 0.2])
    assert linear[100:] == wsd[100:] == [pytest.approx(0.2)] * 20


@pytest.mark.parametrize(("steps", "warmup"), [(9, 0), (40, 4), (199, 19), (200, 20), (10**6, 20)])
def test_warm_up_is_at_most_a_tenth_of_a_run_that_says_nothing_of_it(steps, warmup) -> None:
    assert warmup_of(loads(f"steps = {steps}")) == warmup
    assert warmup_of(loads(f"steps = {steps}\n[training]\nwarmup = 500")) == 500


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "",
            "0.002 .matrices of body stages 0.01, by Muon. after 4 steps of warm-up, then cosine; "
            "0.0002 at step 40",
        ),
        ("[training]\nlr = 3e-4\nwarmup = 0\nlr_floor = 0.5", "0.0003 .* after 0 .*; 0.00015 at"),
        ("[training]\nschedule = 'constant'", "then constant; 0.002 at step 40"),
        ("training.optimizer = 'adamw'\n[model]\npreset = 'midi'", "0.0006 after"),
        ("[model]\nfrom = 'smollm'", "2e-05 after"),
    ],
)
def test_a_run_says_its_rate(text, sentence) -> None:
    run = loads(f"steps = 40\n{text}")
    assert re.search(sentence, describe_rate(run))
    assert warmup_too_long(run) is None


def test_a_warm_up_longer_than_the_run_is_warned_of_with_the_highest_rate() -> None:
    run = loads("steps = 3\n[training]\nwarmup = 500")
    assert max(rate_of(step, run) for step in (1, 2, 3)) == pytest.approx(1.2e-5)
    warning = warmup_too_long(run)
    assert warning is not None
    assert "no higher than 1.2e-05, 0.6% of training.lr = 0.002" in warning


@given(
    st.tuples(st.integers(1, 400), st.integers(1, 300)),
    st.integers(0, 300),
    st.tuples(st.floats(0, 1), st.floats(0, 9)),
    st.tuples(st.sampled_from(get_args(Schedule)), st.floats(0.001, 1)),
)
def test_rate_stays_between_nothing_and_its_peak(
    at: tuple[int, int], warmup: int, rates: tuple[float, float], how: tuple[Schedule, float]
) -> None:
    (step, steps), (floor, peak) = at, rates
    rate = scheduled_rate(step, steps, peak, warmup, floor, *how)
    assert 0 <= rate <= peak * (1 + 1e-12)
    if step > warmup:
        assert rate >= floor * peak * (1 - 1e-12)


def test_behind_a_change_of_settings_the_rate_rises_to_the_schedules() -> None:
    run = loads("steps = 100\n[training]\nlr = 0.01\nwarmup = 0\nschedule = 'constant'\nrewarm = 4")
    assert [rate_of(step, run) for step in (1, 2)] == [0.01, 0.01]
    changed = override(run, changes=[{"step": 40}])
    rates = [rate_of(step, changed) for step in range(40, 46)]
    assert rates == pytest.approx([0.01, 0.0025, 0.005, 0.0075, 0.01, 0.01])


def test_there_is_no_step_before_the_first() -> None:
    with pytest.raises(ValueError, match="no step 0"):
        scheduled_rate(0, 10, 1.0, 0, 0.1)


def test_boost_decays_in_a_line() -> None:
    assert boost(31, 30, 1.1, 100) == pytest.approx(1.1)
    assert boost(81, 30, 1.1, 100) == pytest.approx(1.05)
    assert [boost(step, 30, 1.1, 100) for step in (131, 500)] == [1.0, 1.0]
    assert boost(31, 30, 1.1, 1) == pytest.approx(1.1)
    assert boost(32, 30, 1.1, 1) == 1.0
    assert [boost(step, 30, 1.1, 0) for step in (31, 10_000)] == [1.1, 1.1], "for ever"
    assert [boost(step, 0, 1.1, 100) for step in (1, 31)] == [1.0, 1.0], "never"
    assert boost(30, 30, 1.1, 100) == 1.0

"""Tests of the closed form for a handover within a notice, against figures worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria_lab.planning.handover import NOTICES, Handover, notice_summary

BEST = ("exact", "weights", "part")


def handover(
    stage: int = 0, parameters: int = 10**9, step: float = 3.0, rtt: float = 0.0, mbps: float = 1e3
) -> Handover:
    return Handover(stage, parameters, step, rtt, mbps, tensors=3)


def test_seconds_are_those_of_the_formula() -> None:
    """4 GB take 32 s at 1 Gbit/s. POLL, the step, FAREWELL and MARGIN take 2 + 3 + 2 + 3 s. A round
    trip of 0.1 s adds one round trip, and those in which a window of 14 kB grows to 4 GB."""
    change = handover()
    assert (change.weights, change.state) == (4 * 10**9, 12 * 10**9)
    assert change.seconds(change.weights) == pytest.approx(10 + 32)
    assert change.seconds(change.state) == pytest.approx(10 + 96)
    rounds = 1 + math.log2(4e9 / 14_480 + 1)
    assert handover(rtt=0.1).seconds(change.weights) == pytest.approx(42 + 0.1 * rounds)


def test_what_a_notice_is_good_for() -> None:
    small, middle, large = handover(1, 10**7), handover(2, 5 * 10**8), handover(3, 2 * 10**9)
    verdicts = {n: [size.possible(n) for size in (small, middle, large)] for n in NOTICES}
    assert verdicts == {
        120.0: ["exact", "exact", "weights"],
        30.0: ["exact", "weights", "part"],
        10.0: ["part", "part", "part"],
    }
    assert notice_summary([small, middle, large], 120.0) == (
        "exact: stages 1-2 (within 58 s); weights without moments: stage 3 (all takes 202 s)"
    )
    assert notice_summary([small, middle, large], 30.0) == (
        "exact: stage 1 (within 11 s); weights without moments: stage 2 (all takes 58 s); "
        "not all weights: stage 3 (they take 74 s)"
    )
    assert notice_summary([small, large], 300.0) == "exact: stages 1, 3 (within 202 s)"
    assert notice_summary([small, handover(2, 10**7), large], 10.0).startswith(
        "not all weights: stages 1-3 ("
    )


@given(
    st.integers(1, 10**10),
    st.floats(0.0, 100.0),
    st.floats(0.0, 1.0),
    st.floats(1.0, 1e5),
    st.floats(0.0, 300.0),
    st.floats(1.0, 10.0),
)
def test_more_bandwidth_more_time_and_a_smaller_stage_are_never_worse(
    parameters: int, step: float, rtt: float, mbps: float, notice: float, more: float
) -> None:
    change = handover(0, parameters, step, rtt, mbps)
    rank = BEST.index(change.possible(notice))
    better = [
        (handover(0, parameters, step, rtt, more * mbps), notice),
        (handover(0, max(1, int(parameters / more)), step, rtt, mbps), notice),
        (handover(0, parameters, step / more, rtt / more, mbps), notice),
        (change, more * notice),
    ]
    assert all(BEST.index(of.possible(seconds)) <= rank for of, seconds in better)

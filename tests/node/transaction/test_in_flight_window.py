"""How large the in-flight window of a source is, by trips and returns of microbatches."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.transaction.in_flight_window import MOST, InFlightWindow, most_out

STAGES = 4
LEAST, MOST_OUT = STAGES + 1, MOST * (STAGES + 1)


def step(filling: InFlightWindow, trip: float, between: float, microbatches: int = 200) -> float:
    """Simulates an attempt; returns microbatches a second. A microbatch takes at least `trip`
    seconds, and returns are at least `between` seconds apart."""
    filling.begin()
    now = last = 0.0
    under_way: list[tuple[float, int]] = []
    for microbatch in range(microbatches):
        if len(under_way) == filling.out:
            now, home = heapq.heappop(under_way)
            filling.home(home, now)
        filling.left(microbatch, now)
        last = max(last + between, now + trip)
        heapq.heappush(under_way, (last, microbatch))
    for now, home in sorted(under_way):
        filling.home(home, now)
    return microbatches / now


def settled(filling: InFlightWindow, trip: float, between: float) -> InFlightWindow:
    for _ in range(MOST + 3):
        step(filling, trip, between)
    filling.begin()
    return filling


def test_it_ends_with_what_fills_the_pipe_and_one_more_for_each_stage() -> None:
    assert settled(InFlightWindow(0, STAGES), trip=0.6, between=0.1).out == 6 + LEAST


def test_while_nothing_is_busy_there_are_more_by_each_attempt() -> None:
    filling, outs = InFlightWindow(0, STAGES), []
    assert filling.out == LEAST
    for _ in range(5):
        step(filling, trip=100.0, between=0.1, microbatches=2000)
        outs.append(filling.out)
    assert outs == [5, 10, 15, 20, 20]


def test_links_that_get_quicker_need_fewer() -> None:
    filling = settled(InFlightWindow(0, STAGES), trip=10.0, between=0.1)
    assert filling.out == MOST_OUT
    assert settled(filling, trip=0.2, between=0.1).out == 2 + LEAST


def test_an_attempt_that_ends_before_two_are_home_changes_nothing() -> None:
    filling = settled(InFlightWindow(0, STAGES), trip=0.6, between=0.1)
    before = filling.out
    for homes in (0, 1):
        filling.left(7, 0.0)
        for _ in range(homes):
            filling.home(7, 50.0)
        filling.begin()
        assert filling.out == before


def test_homecomings_at_the_very_same_time_say_nothing() -> None:
    filling = InFlightWindow(0, STAGES)
    for microbatch in range(3):
        filling.left(microbatch, 1.0)
    for microbatch in range(3):
        filling.home(microbatch, 2.0)
    filling.begin()
    assert filling.out == LEAST


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.floats(0, 1e12)), max_size=40))
def test_whatever_happens_it_stays_within_its_bounds(
    happens: list[tuple[bool, int, float]],
) -> None:
    given_fixed, chosen, now = InFlightWindow(7, STAGES), InFlightWindow(0, STAGES), 0.0
    out: set[int] = set()
    for begins, microbatch, seconds in happens:
        now += seconds
        for filling in (given_fixed, chosen):
            if begins and microbatch == 9:
                filling.begin()
            else:
                (filling.home if microbatch in out else filling.left)(microbatch, now)
        out = set() if begins and microbatch == 9 else out ^ {microbatch}
    for filling in (given_fixed, chosen):
        filling.begin()
    assert given_fixed.out == 7 == most_out(7, STAGES)
    assert LEAST <= chosen.out <= MOST_OUT == most_out(0, STAGES)


@given(st.floats(0.01, 100.0), st.floats(0.01, 10.0), st.integers(1, 12))
def test_the_pipe_is_full_or_the_bound_is_reached(trip: float, between: float, stages: int) -> None:
    filling = settled(InFlightWindow(0, stages), trip, between)
    assert filling.out >= min(most_out(0, stages), trip / between)
    fixed = step(InFlightWindow(most_out(0, stages), stages), trip, between)
    assert step(filling, trip, between) == pytest.approx(fixed)


@given(st.floats(0.01, 10.0), st.floats(0.01, 10.0), st.integers(-8, 8))
def test_a_clock_with_other_units_makes_no_difference(
    trip: float, between: float, power: int
) -> None:
    factor = 2.0**power  # exact
    ours, theirs = InFlightWindow(0, STAGES), InFlightWindow(0, STAGES)
    for _ in range(3):
        step(ours, trip, between)
        step(theirs, factor * trip, factor * between)
        assert ours.out == theirs.out

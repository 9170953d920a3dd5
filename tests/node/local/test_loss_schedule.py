"""Tests of schedules of lost and new nodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.launch.errors import SwarmError
from planaria.node.local.loss_schedule import (
    HOUR,
    Change,
    DrawnLosses,
    TracedLosses,
    TraceError,
    TraceRow,
    choose_losses,
    parse_rate,
    places,
    read_trace,
    stage_of,
)
from planaria.node.run_file import loads


def test_places_are_taken_stage_by_stage() -> None:
    assert places(2, 2) == ["0.0", "1.0", "2.0", "0.1", "1.1", "2.1"]


def drawn(hourly: float, speedup: float = 1.0, seed: int = 0, replicas: int = 300) -> DrawnLosses:
    losses = DrawnLosses(places(3, replicas), hourly, speedup, seed)
    assert losses.first() == places(3, replicas)
    assert losses.due_changes(1e9) == []  # training has not begun
    losses.begin(1000.0)
    return losses


def lost(changes: list[Change]) -> list[str]:
    return [change.place for change in changes if not change.taken]


def test_a_rate_is_a_probability_in_an_hour_and_faster_the_more_it_is_sped_up() -> None:
    share = len(lost(drawn(0.25).due_changes(1000.0 + HOUR))) / 1200
    assert share == pytest.approx(0.25, abs=0.06)  # five standard deviations
    fast = drawn(0.25, speedup=100.0)
    assert len(lost(fast.due_changes(1000.0 + HOUR / 100))) == round(share * 1200)
    assert drawn(0.0).due_changes(1e12) == []


def test_who_is_drawn_follows_from_the_seed_and_each_is_replaced() -> None:
    changes = drawn(0.5).due_changes(1000.0 + HOUR)
    assert changes == drawn(0.5).due_changes(1000.0 + HOUR)
    assert changes != drawn(0.5, seed=1).due_changes(1000.0 + HOUR)
    assert [c.place for c in changes if c.taken] == lost(changes)


def test_whoever_takes_a_place_has_a_life_of_its_own() -> None:
    losses = drawn(0.5, replicas=1)
    first = lost(losses.due_changes(1000.0 + 100 * HOUR))
    assert sorted(first) == places(3, 1)
    assert losses.due_changes(1e12) == []
    for place in first:
        losses.started(place, 5000.0)
    ends = [n for n in range(2000) if lost(losses.due_changes(5000.0 + n * HOUR / 100))]
    assert ends
    assert ends[0] > 0


def rows(text: str) -> list[TraceRow]:
    """Parse trace rows: `3+a` adds a after three seconds, `4-a` removes it after four."""
    matches = [re.fullmatch(r"(\d+)([+-])(\w+)", word) for word in text.split()]
    return [TraceRow(float(m[1]), m[2] == "+", m[3]) for m in matches if m]


def test_a_trace_begins_where_each_stage_has_a_node() -> None:
    losses = TracedLosses(places(1, 2), rows("5+a 6-a 7+b 8+c 8+d 9+e 18-c"), speedup=1.0)
    assert losses.first() == ["0.0", "1.0", "0.1"]  # b, c, d
    assert losses.due_changes(1e6) == []
    losses.begin(100.0)
    assert losses.due_changes(100.0) == []
    assert losses.due_changes(101.0) == [("1.1", True)]  # e
    assert losses.more_to_come() is False
    assert losses.due_changes(109.9) == []
    assert losses.due_changes(110.0) == [("1.0", False)]  # c


def test_a_node_of_a_trace_takes_a_place_where_the_fewest_are_if_there_is_one() -> None:
    text = "0+a 0+b 0+c 0+d 1+e 2-e 3-b 3-a 4+f 5+g 6+h 7-x"
    losses = TracedLosses(places(1, 2), rows(text), speedup=10.0)
    assert losses.first() == ["0.0", "1.0", "0.1", "1.1"]
    losses.begin(0.0)
    assert losses.due_changes(0.29) == []  # e gets no place, and frees none
    assert losses.due_changes(0.3) == [("1.0", False), ("0.0", False)]
    assert losses.more_to_come()
    assert losses.due_changes(0.5) == [("0.0", True), ("1.0", True)]
    assert losses.due_changes(9.9) == []  # h gets no place; x is unknown


def test_a_trace_without_a_node_for_each_stage_is_refused() -> None:
    with pytest.raises(TraceError, match="never has 3 nodes at a time"):
        TracedLosses(places(2, 1), rows("0+a 0+b 1-a 2+c 3-b 4+d"), speedup=1.0)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60),
    st.integers(1, 3),
    st.floats(0.1, 1e3),
)
def test_at_each_time_a_place_is_for_one_and_who_comes_goes_where_the_fewest_are(
    steps: list[tuple[bool, int]], replicas: int, speedup: float
) -> None:
    trace = rows("0+x 0+y") + [TraceRow(float(n), a, str(k)) for n, (a, k) in enumerate(steps, 1)]
    losses = TracedLosses(places(1, replicas), trace, speedup)
    present = set(losses.first())
    assert {stage_of(place) for place in present} == {0, 1}
    losses.begin(0.0)
    for n in range(1, len(steps) + 1):
        for place, taken in losses.due_changes((n + 0.5) / speedup):
            assert (place in present) != taken
            (present.add if taken else present.remove)(place)
            free = set(places(1, replicas)) - present
            if taken:  # the other stage has as few, or is full
                counts = [sum(stage_of(p) == stage for p in present) for stage in (0, 1)]
                other = 1 - stage_of(place)
                room = any(stage_of(p) == other for p in free)
                assert counts[stage_of(place)] <= counts[other] + 1 or not room


def test_traces_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "spot.csv"
    path.write_text("0,add,a\n1500,remove,a\n")
    assert read_trace(path) == (TraceRow(0.0, True, "a"), TraceRow(1.5, False, "a"))
    for text, message in {
        "0,add\n": "line 1: '0,add' is not MILLISECONDS,add|remove,NODE",
        "5,add,a\n1,add,b\n": "line 2: its time is before",
        "5,remove,a\n": "adds no node",
    }.items():
        path.write_text(text)
        with pytest.raises(TraceError, match=re.escape(message)):
            read_trace(path)
    with pytest.raises(TraceError, match="can't read the trace"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("text", "hourly"), [("10%/h", 0.1), ("0.5%/h", 0.005), ("0%/h", 0.0), ("99.9%/h", 0.999)]
)
def test_a_rate_in_words(text: str, hourly: float) -> None:
    assert parse_rate(text) == pytest.approx(hourly)


@pytest.mark.parametrize("text", ["10", "10%", "10/h", "-1%/h", "100%/h", "10%/d", "ten%/h", ""])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"give the percentage.*as in 10%/h"):
        parse_rate(text)


def test_what_can_not_be_asked_of_up_is_refused(tmp_path: Path) -> None:
    run = loads("[model]\nstages = 4")
    with pytest.raises(SwarmError, match="two sources of losses"):
        choose_losses(run, "10%/h", tmp_path)
    for how in ({}, {"rate": "1%/h"}):
        with pytest.raises(SwarmError, match="--speedup 0: give a positive factor"):
            choose_losses(run, **how, speedup=0.0)
    with pytest.raises(SwarmError, match="--speedup 100: give"):
        choose_losses(run, speedup=100.0)
    with pytest.raises(SwarmError, match="--loss-rate '10' is not a rate"):
        choose_losses(run, "10")
    with pytest.raises(SwarmError, match="can't read the trace"):
        choose_losses(run, trace=tmp_path / "none.csv")
    path = tmp_path / "few.csv"
    path.write_text("0,add,a\n")
    with pytest.raises(SwarmError, match=r"few\.csv: the trace never has 5 nodes at a time"):
        choose_losses(run, trace=path)

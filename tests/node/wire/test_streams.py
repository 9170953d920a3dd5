"""Streams over a link that is simulated: by the rate of one stream, and of all together."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.node.wire.streams import (
    BACKLOG,
    MOST,
    REST,
    Streams,
)

TICK = 0.05  # seconds


class LossyLink:
    """A link of `each` bytes a second by a stream, `most` by all, varied by the share `noise`."""

    def __init__(self, each: float, most: float, noise: float = 0.0) -> None:
        self.each, self.most, self.noise = each, most, noise
        self.streams, self.now = Streams(), 0.0
        self.seen = [1]
        self._drawn = random.Random(1)

    def run(self, seconds: float, under_way: int = BACKLOG) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK
            rate = min(self.each * self.streams.wanted, self.most)
            rate *= self._drawn.uniform(1 - self.noise, 1 + self.noise)
            self.streams.update(under_way, round(rate * TICK), self.now)
            if self.streams.wanted != self.seen[-1]:
                self.seen.append(self.streams.wanted)


@given(st.floats(1e4, 1e9), st.floats(0.0, 0.4))
@settings(max_examples=10)  # each simulates an hour
def test_a_link_that_one_stream_fills_keeps_one(rate: float, noise: float) -> None:
    link = LossyLink(rate, rate, noise)
    link.run(3600.0)
    assert {*link.seen} == {1, 2}
    assert len(link.seen) < 25, "it is tried less and less"


@pytest.mark.parametrize(
    ("fill", "seen"),
    [(1.1, [1, 2, 1]), (1.9, [1, 2, 4, 2]), (8, [1, 2, 4, 8, 16, 8]), (99, [1, 2, 4, 8, 16])],
)
def test_there_are_more_while_they_bring_more(fill: float, seen: list[int]) -> None:
    """`fill`: the number of streams that fills the link."""
    link = LossyLink(1.2e6, fill * 1.2e6, noise=0.2)
    link.run(15.0)
    assert link.seen == seen
    assert max(seen) <= MOST


def test_what_is_quickly_gone_asks_for_none() -> None:
    link = LossyLink(1e6, 1e9)
    link.run(600.0, BACKLOG - 1)
    assert link.seen == [1]


def test_a_stream_that_only_begins_is_not_judged() -> None:
    link = LossyLink(1e5, 1e9)
    for _ in range(9):  # the rate doubles with each measurement
        link.run(2.0)
        link.each *= 2
    assert link.seen == [1]


def test_what_a_stream_carries_up_to_its_first_loss_is_no_measure() -> None:
    link = LossyLink(4e6, 1e9)
    for each in (4e6, 2e6, 1e6):
        link.each = each
        link.run(2.25)
    link.run(15.0)
    assert link.seen == [1, 2, 4, 8, 16]


def test_it_is_tried_again_after_a_rest() -> None:
    link = LossyLink(1e6, 1e6)
    link.run(15.0)
    assert link.seen == [1, 2, 1]
    link.most = 1e9
    link.run(REST + 15.0)
    assert link.seen == [1, 2, 1, 2, 4, 8, 16]


def test_after_a_break_half_of_them_are_wanted_at_once() -> None:
    link = LossyLink(1e6, 1e9)
    link.run(30.0)
    assert link.streams.wanted == MOST
    link.streams.begin_anew()
    assert link.streams.wanted == MOST // 2
    link.run(30.0)
    assert link.streams.wanted == MOST
    for _ in range(5):
        link.streams.begin_anew()
    assert link.streams.wanted == 1


def test_a_node_that_was_stopped_takes_no_link_for_slow() -> None:
    link = LossyLink(1e6, 1e6)
    for _ in range(30):
        link.run(1.0)
        link.now += 10.0
    assert link.seen == [1]


@pytest.mark.parametrize("size", [BACKLOG // 2, BACKLOG, 16 * BACKLOG])
def test_the_rate_of_a_link_is_that_of_its_fastest_burst_without_the_round_trip(size: int) -> None:
    streams, now, rate, round_trip = Streams(), 0.0, 1e6, 0.05
    for late in (0.0, 0.3, 0.1):
        now += 1.0
        streams.update(size, 0, now)
        now += round_trip + size / rate + late
        streams.update(0, size, now)
    assert streams.rate(round_trip) == (pytest.approx(rate) if size >= BACKLOG else 0.0)


def test_the_rate_is_measured_on_a_link_that_is_never_idle_too() -> None:
    link = LossyLink(1e6, 1e6)
    assert link.streams.rate(0.05) == 0.0
    link.run(10.0)
    assert link.streams.rate(0.05) == pytest.approx(1e6, rel=0.05)

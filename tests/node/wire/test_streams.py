"""Streams over a link that is simulated: by the rate of one stream, and of all together."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.node.wire.streams import (
    BACKLOG,
    BURSTS,
    FIRST,
    LEAST_TIMEOUT,
    LONG,
    MOST,
    REST,
    Bursts,
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


# Bursts


class BurstyLink:
    """A link with TCP in slow start. After a pause each stream has `FIRST` bytes under way, and
    twice as many in each round trip, until all of them fill the path."""

    def __init__(self, rate: float, round_trip: float) -> None:
        """`rate` is in bytes a second, `round_trip` in seconds."""
        self.rate, self.round_trip = rate, round_trip
        self.streams: Bursts | Streams = Bursts()
        self.wanted, self.now = 1, 1.0

    def burst(self, size: int, pause: float = 1.0) -> None:
        left, window = size, FIRST
        self.now += pause
        self._look(size, 0)
        while left:
            sent = min(left, window * self.wanted)
            self.now += max(self.round_trip, sent / self.rate)
            left, window = left - sent, 2 * window
            self._look(left, sent)
        self.wanted = max(self.wanted, self.streams.wanted)

    def _look(self, under_way: int, acknowledged: int) -> None:
        if isinstance(self.streams, Streams):
            self.streams.update(under_way, acknowledged, self.now, self.round_trip)
        else:
            self.streams.update(under_way, acknowledged, self.round_trip, self.now)

    def bursts(self, size: int, pause: float = 1.0) -> int:
        """The number of streams wanted after many bursts of `size` bytes."""
        for _ in range(5 * BURSTS):
            self.burst(size, pause)
        return self.wanted


@given(st.floats(1e6, 1e8), st.floats(LONG, 0.5), st.integers(1, 1 << 22))
def test_bursts_have_the_streams_that_let_them_leave_at_once(
    rate: float, round_trip: float, size: int
) -> None:
    link = BurstyLink(rate, round_trip)
    wanted = link.bursts(size)
    assert wanted in (1, 2, 4, 8, 16)
    assert wanted == 1 or wanted // 2 * FIRST < size, "half as many would do"
    begun = link.now
    link.burst(size)
    took = link.now - begun - 1.0
    if wanted < MOST and rate * round_trip > 2 * size:
        assert took == pytest.approx(round_trip), "it is there after one round trip"


@pytest.mark.parametrize(
    ("mbps", "round_trip", "size", "wanted"),
    [
        (50, 0.2, 133_000, 16),  # eleven would do
        (50, 0.2, 66_000, 8),
        (50, 0.2, 4 << 20, 16),
        (100, 0.1, 133_000, 16),
        (2, 0.2, 133_000, 8),  # the path holds 50 kB
        (1, 0.1, 133_000, 2),
        (100, 0.05, 133_000, 1),
        (1000, 0.001, 4 << 20, 1),  # a near node
    ],
)
def test_how_many_these_are(mbps: float, round_trip: float, size: int, wanted: int) -> None:
    assert BurstyLink(mbps * 125e3, round_trip).bursts(size) == wanted


def test_what_comes_without_a_pause_or_seldom_or_before_round_trips_are_known_wants_none() -> None:
    assert BurstyLink(6e6, 0.2).bursts(133_000, pause=0.2 + LEAST_TIMEOUT / 2) == 1
    link = BurstyLink(6e6, 0.2)
    for size in (133_000, 133_000, 5_000) * 5:
        link.burst(size)
    assert link.wanted == 1
    assert BurstyLink(6e6, 0.0).bursts(133_000) == 1


def test_bursts_begin_anew_with_the_connection() -> None:
    link = BurstyLink(6e6, 0.2)
    link.streams = streams = Streams()
    assert link.bursts(133_000) == streams.wanted == 16
    streams.begin_anew()
    assert streams.wanted == 8
    link.bursts(133_000)
    assert streams.wanted == 16


@pytest.mark.parametrize("size", [BACKLOG // 2, BACKLOG, 16 * BACKLOG])
def test_the_rate_of_a_link_is_that_of_its_fastest_burst_without_the_round_trip(size: int) -> None:
    streams, now, rate, round_trip = Streams(), 0.0, 1e6, 0.05
    for late in (0.0, 0.3, 0.1):
        now += 1.0
        streams.update(size, 0, now, round_trip)
        now += round_trip + size / rate + late
        streams.update(0, size, now, round_trip)
    assert streams.rate(round_trip) == (pytest.approx(rate) if size >= BACKLOG else 0.0)


def test_the_rate_is_measured_on_a_link_that_is_never_idle_too() -> None:
    link = LossyLink(1e6, 1e6)
    assert link.streams.rate(0.05) == 0.0
    link.run(10.0)
    assert link.streams.rate(0.05) == pytest.approx(1e6, rel=0.05)

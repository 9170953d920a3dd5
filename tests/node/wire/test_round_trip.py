"""Round trips measured by heartbeats between two ends whose clocks differ."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.wire.round_trip import ENOUGH, RoundTrip
from planaria.node.wire.stage_pb2 import Heartbeat

EVERY = 0.5  # seconds between heartbeats


def converse(forth: float, back: float, apart: float, late: random.Random) -> tuple[float, float]:
    """The round trips that both ends measure. Their heartbeats aren't aligned, and their clocks are
    `apart`. Half of the heartbeats come up to 0.1 s late."""
    a, b = RoundTrip(), RoundTrip()
    events: list[tuple[float, int, Heartbeat | None]] = []
    for beat in range(4 * ENOUGH):
        events.append((1 + beat * EVERY, 0, None))
        events.append((1 + (beat + late.random()) * EVERY, 1, None))
    clock = (0.0, apart)
    while events:
        events.sort(key=lambda event: event[:2])
        now, who, heard = events.pop(0)
        end = (a, b)[who]
        if heard is not None:
            end.hear(heard, now + clock[who])
            continue
        sent, echo = end.say(now + clock[who])
        takes = (forth, back)[who] + late.choice((0.0, late.uniform(0.0, 0.1)))
        events.append((now + takes, 1 - who, Heartbeat(sent=sent, echo=echo)))
    return a.seconds, b.seconds


@given(st.floats(0.0001, 1.0), st.floats(0.0001, 1.0), st.floats(0.0, 1e7), st.randoms())
def test_both_ends_find_the_same(
    forth: float, back: float, apart: float, late: random.Random
) -> None:
    for seconds in converse(forth, back, apart, late):
        assert forth + back - 1e-4 <= seconds <= forth + back + 0.2 + 1e-4


def test_a_few_answers_are_none() -> None:
    end = RoundTrip()
    for number in range(1, ENOUGH + 1):
        assert end.seconds == 0.0
        sent, _ = end.say(float(number))
        end.hear(Heartbeat(sent=1, echo=sent), number + 0.25)
    assert end.seconds == pytest.approx(0.25)


@given(
    st.lists(st.builds(Heartbeat, sent=st.integers(0, 2**64 - 1), echo=st.integers(0, 2**64 - 1)))
)
def test_whatever_a_peer_says_a_round_trip_is_a_time(heartbeats: list[Heartbeat]) -> None:
    end = RoundTrip()
    for number, heartbeat in enumerate(heartbeats):
        end.hear(heartbeat, float(number))
        assert 0.0 <= end.seconds <= len(heartbeats)
        sent, echo = end.say(number + 0.5)
        Heartbeat(sent=sent, echo=echo)

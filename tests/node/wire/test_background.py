"""A copy and urgent frames, through an outbox over a link that is simulated: a rate and a delay."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.node.wire.background import (
    FIRST,
    LEAST,
    MOST,
    PERIOD,
    TARGET,
    Background,
)
from planaria.node.wire.chunk_flow import ChunkInbox, ChunkOutbox
from planaria.node.wire.frame_format import PAYLOAD_LIMIT, Chunk, Frame, parse_chunk

MEBIBYTE: Final = 1 << 20
URGENT: Final = 4 << 10
COPY: Final = bytes(MEBIBYTE)


class SlowLink:
    """A link that sends bytes one after the other at `rate` bytes a second, and delays all by
    `delay` seconds. Acknowledgements are only delayed. Time advances with the events."""

    def __init__(self, rate: float, delay: float) -> None:
        self.rate, self.delay = rate, delay
        self.background = Background()
        self.outbox = ChunkOutbox(2 * MEBIBYTE, 16 * MEBIBYTE, lambda: self.background)
        self.inbox = ChunkInbox(PAYLOAD_LIMIT, 16 << 20)
        self.now = self.free = 0.0
        self.carried = 0  # bytes of copies that have arrived
        self.under_way: Counter[str] = Counter()  # bytes sent that haven't arrived, by kind
        self.copying = True
        self._kinds: dict[int, str] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time, next(self._numbers), work))

    def run(self, until: float) -> None:
        self._pump()
        while self._due and self._due[0][0] <= until:
            self.now, _, work = heapq.heappop(self._due)
            work()
            self._pump()
        self.now = until

    def urgent(self, kind: str = "gradient", size: int = URGENT) -> list[float]:
        """Sends an urgent frame; returns a list that gets the seconds until its acknowledgement."""
        began, took = self.now, []
        frame = Frame(kind, (1, 1), {}, [], bytes(size))
        self.outbox.push(frame, lambda: took.append(self.now - began))
        self._pump()
        return took

    def _pump(self) -> None:
        while self.copying and self.outbox.unacknowledged < 2 * MEBIBYTE:
            self.outbox.push(Frame("copy", (1, 1), {}, [], COPY))
        while (message := self.outbox.next(self.now)) is not None:
            self.free = max(self.free, self.now) + len(message) / self.rate
            chunk = parse_chunk(message)
            if chunk.head:
                frame = Frame.parse(chunk.head, memoryview(COPY)[: chunk.size])
                self._kinds[chunk.frame] = frame.kind
            self.under_way[self._kinds[chunk.frame]] += len(chunk.data)
            self.at(self.free + self.delay, partial(self._arrive, chunk))

    def _arrive(self, chunk: Chunk) -> None:
        self.under_way[self._kinds[chunk.frame]] -= len(chunk.data)
        frame = self.inbox.receive(chunk)
        if frame is not None and frame.kind == "copy":
            self.carried += frame.size
        for number, received in self.inbox.acknowledged().items():
            self.at(self.now + self.delay, partial(self._answered, number, received))

    def _answered(self, frame: int, received: int) -> None:
        self.outbox.acknowledge(frame, received, self.now)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.25e6, 15e6), st.floats(0.001, 0.1), st.floats(0.0, 0.3))
def test_urgent_frames_wait_tens_of_milliseconds_and_the_link_is_full(
    rate: float, delay: float, gap: float
) -> None:
    link = SlowLink(rate, delay)
    round_trip, wait = 2 * delay, max(TARGET, delay / 4)
    begun = 20 * (round_trip + wait + FIRST / rate)
    link.run(begun)
    before = link.carried
    link.run(begun + 10.0)
    most = min(rate, 0.8 * MOST / (round_trip + wait))
    assert link.carried - before > 0.9 * most * 10.0 - 2 * MEBIBYTE
    for _ in range(6):
        link.run(link.now + gap)
        took = link.urgent()
        link.run(link.now + 1.0)
        assert took
        longest = max(1.5 * wait, (round_trip + wait) / 2)  # the latter after a pause
        assert took[0] < round_trip + longest + (URGENT + LEAST) / rate


@given(st.lists(st.tuples(st.integers(1, MEBIBYTE), st.sampled_from([0.0, 1e-4, 0.02, 0.3, 20.0]))))
def test_whatever_a_peer_answers_the_copy_goes_on_within_bounds(
    answers: list[tuple[int, float]],
) -> None:
    """`answers`: how many bytes under way are acknowledged next, after how many seconds."""
    outbox, now = ChunkOutbox(2 * MEBIBYTE, 16 * MEBIBYTE), 0.0
    outbox.push(Frame("copy", (1, 1), {}, [], bytes(16 * MEBIBYTE)))
    sent = answered = 0
    for size, seconds in answers:
        while (message := outbox.next(now)) is not None:
            sent += len(parse_chunk(message).data)
        assert 0 < sent - answered <= MOST
        now += seconds
        answered = min(answered + size, sent)
        outbox.acknowledge(1, answered, now)
        if not outbox.frames:
            break


def test_what_others_have_under_way_counts() -> None:
    link = SlowLink(2.5e6, 0.025)
    link.run(5.0)
    link.copying = False
    link.run(10.0)
    assert link.outbox.unacknowledged == 0
    window = link.background.window
    link.urgent(size=window)
    link.copying = True
    link.run(10.0)
    assert link.under_way["copy"] == 0
    link.run(15.0)
    assert link.carried > 10 * MEBIBYTE
    link.urgent(size=window // 2)
    link.run(15.02)
    assert 0 < link.under_way["copy"] <= window


def test_after_a_pause_it_begins_with_a_quarter_of_the_window() -> None:
    link = SlowLink(2.5e6, 0.025)
    link.run(5.0)
    window = link.background.window
    assert window > 2.5e6 * 0.05
    link.copying = False
    link.run(8.0)
    link.copying = True
    link.run(8.0)
    assert 0 < link.under_way["copy"] <= window / 4


def test_only_answers_that_are_late_for_a_while_make_the_window_smaller() -> None:
    background, now, end = Background(), 0.0, 0

    def answered(seconds: float) -> int:
        nonlocal now, end
        flight = background.window
        end += flight
        background.sent(1, end, flight, flight, now)
        now += seconds
        background.acknowledged(1, end, now)
        return background.window

    while answered(0.001) < MOST:
        pass
    for _ in range(20):
        assert answered(0.06) == MOST, "the peer had something else to do"
        assert answered(0.06) == MOST
        assert answered(0.001) == MOST
    late = [answered(0.06) for _ in range(40)]
    assert late[2] == MOST
    assert LEAST == late[-1] < late[10] < MOST


def test_a_single_late_answer_proves_nothing_however_long_the_path() -> None:
    background, now, end = Background(), 0.0, 0
    for seconds in [0.4] * 12 + [0.8] + [0.4] * 3:
        flight = background.window
        end += flight
        background.sent(1, end, flight, flight, now)
        now += seconds
        background.acknowledged(1, end, now)
        largest = max(flight, background.window)
        assert background.window == largest
    assert largest == MOST


def test_a_path_that_has_become_longer_is_no_queue_for_ever() -> None:
    link = SlowLink(2.5e6, 0.01)
    link.run(5.0)
    link.delay = 0.1
    link.run(5.0 + 2 * PERIOD)
    before = link.carried
    link.run(15.0 + 2 * PERIOD)
    assert link.carried - before > 0.8 * 2.5e6 * 10


def test_a_new_connection_begins_anew() -> None:
    link = SlowLink(2.5e6, 0.025)
    link.run(5.0)
    assert link.background.window > LEAST
    outbox, made = link.outbox, link.background
    link.background = Background()
    outbox.rewind(*link.inbox.progress())
    assert outbox.next(5.0) is not None
    assert outbox.next(5.0) is None
    assert made.window > LEAST, "it is another one that counts"

from __future__ import annotations

import itertools
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from planaria.node.wire.budget import ITEM
from planaria.node.wire.frame_format import KINDS, Frame, WireError, buffers_of, parse_chunk
from planaria.node.wire.session import (
    Begun,
    Forgotten,
    Hello,
    Outdated,
    Session,
    SessionBounds,
)
from tests.harness.at_rest import check_at_rest
from tests.node.wire.test_chunk_flow import frame

BOUNDS = SessionBounds(
    chunk=10, window=30, payload=1000, messages=12 * (ITEM + 9), held=20 * (ITEM + 25)
)


@given(
    st.builds(
        Hello,
        *[st.integers(1, 2**64 - 1)] * 5,
        st.dictionaries(st.integers(1, 2**64 - 1), st.integers(0, 2**40), max_size=len(KINDS)),
    ),
    st.integers(0),
)
def test_any_flipped_bit_of_a_hello_is_noticed(hello: Hello, position: int) -> None:
    packed = hello.pack()
    assert Hello.parse(packed) == hello
    flipped = bytearray(packed.encode())
    bit = position % (8 * len(flipped))
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        Hello.parse(flipped.decode("latin-1"))


def test_an_old_hello_that_comes_to_a_newer_session_leaves_neither_end_stuck() -> None:
    near, far = Session(2, BOUNDS), Session(1, BOUNDS)
    old = far.hello()
    far.resume(near.hello())
    near = Session(3, BOUNDS)
    near.resume(old)
    with pytest.raises(Begun):
        far.resume(near.hello())
    with pytest.raises(Forgotten):
        Session(2, BOUNDS).resume(near.hello())


STREAMS = 3


class Connection:
    """Ordered pipes in each direction: one for messages and acknowledgements, and several for
    chunks. When it breaks, it loses what is in them."""

    def __init__(self, dialler: int) -> None:
        self.dialler = dialler
        self.broken = False
        # The pipe to each end; an int is a heartbeat, a map an acknowledgement.
        self.control: list[deque[bytes | int | dict[int, int]]] = [deque(), deque()]
        self.bulk: list[list[deque[bytes]]] = [[deque() for _ in range(STREAMS)] for _ in range(2)]


class Dial:
    """A hello on its way to the other end, or the answer on its way back."""

    def __init__(self, dialler: int, hello: Hello) -> None:
        self.dialler, self.hello = dialler, hello
        self.answer: Hello | None = None
        self.refused = False
        self.connection: Connection | None = None


class Life:
    """One session of an end, with all that it has received and sent."""

    def __init__(self, number: int) -> None:
        self.session = Session(number, BOUNDS)
        self.messages: list[bytes] = []
        self.frames: list[Frame] = []
        self.sent: list[bytes] = []
        self.sent_frames: list[Frame] = []


class End:
    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.lives = [Life(1)]

    @property
    def life(self) -> Life:
        return self.lives[-1]

    @property
    def session(self) -> Session:
        return self.life.session

    def begin_anew(self) -> None:
        if self.connection is not None:
            self.connection.broken = True
            self.connection = None
        self.lives.append(Life(len(self.lives) + 1))


class TwoEnds(RuleBasedStateMachine):
    """Whatever breaks, crosses or comes late, within a session nothing is lost, doubled or out of
    order. When one end has ended a session, the other end finds out."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = [End(), End()]
        self.dials: list[Dial] = []

    def attach(self, which: int, connection: Connection) -> None:
        end = self.ends[which]
        if end.connection is not None:
            end.connection.broken = True
        end.connection = connection

    # --- what the nodes do

    @rule(which=st.integers(0, 1), size=st.integers(0, 9))
    def send(self, which: int, size: int) -> None:
        end = self.ends[which]
        message = bytes([len(end.life.sent) % 256]) * (size + 1)
        end.life.sent.append(message)
        end.session.send(message)
        self.lose_if_overfull(end)

    @rule(which=st.integers(0, 1), kind=st.sampled_from(KINDS), size=st.integers(0, 45))
    def send_frame(self, which: int, kind: str, size: int) -> None:
        end = self.ends[which]
        sent = frame(size, kind, len(end.life.sent_frames))
        end.life.sent_frames.append(sent)
        end.session.outbox.push(sent)
        self.lose_if_overfull(end)

    def lose_if_overfull(self, end: End) -> None:
        if end.session.why_overfull():
            end.begin_anew()

    # --- what a connection carries

    @rule(which=st.integers(0, 1), heartbeat=st.booleans())
    def speak(self, which: int, heartbeat: bool) -> None:
        end = self.ends[which]
        if end.connection is None or end.connection.broken:
            return
        pipe = end.connection.control[1 - which]
        if heartbeat or end.session.acknowledgement_due:
            pipe.append(end.session.acknowledgement())
        elif received := end.session.inbox.acknowledged():
            pipe.append(received)
        elif (message := end.session.next_message()) is not None:
            pipe.append(message)

    @rule(which=st.integers(0, 1), streams=st.lists(st.integers(0, STREAMS - 1), max_size=5))
    def carry(self, which: int, streams: list[int]) -> None:
        end = self.ends[which]
        for stream in streams:
            if end.connection is None or end.connection.broken:
                return
            if (chunk := end.session.outbox.next(now=0.0)) is not None:
                end.connection.bulk[1 - which][stream].append(chunk)

    @rule(which=st.integers(0, 1), count=st.integers(1, 5))
    def listen(self, which: int, count: int) -> None:
        end = self.ends[which]
        for _ in range(count):
            if end.connection is None or not end.connection.control[which]:
                return
            item = end.connection.control[which].popleft()
            if isinstance(item, int):
                end.session.acknowledge_messages(item)
            elif isinstance(item, dict):
                for number, received in item.items():
                    end.session.outbox.acknowledge(number, received, now=0.0)
            else:
                end.session.message_came()
                end.life.messages.append(item)

    @rule(which=st.integers(0, 1), streams=st.lists(st.integers(0, STREAMS - 1), max_size=7))
    def collect(self, which: int, streams: list[int]) -> None:
        end = self.ends[which]
        for stream in streams:
            if end.connection is None or not (pipe := end.connection.bulk[which][stream]):
                continue
            chunk = parse_chunk(pipe.popleft())
            end.life.frames += end.session.inbox.take(chunk)

    # --- what happens to connections

    @rule(which=st.integers(0, 1), left=st.integers(0, 3))
    def break_one(self, which: int, left: int) -> None:
        """One end notices a break. The other may still receive the first `left` items of a pipe."""
        end = self.ends[which]
        if end.connection is None:
            return
        end.connection.broken = True
        for pipe in itertools.chain(end.connection.control, *end.connection.bulk):
            while len(pipe) > left:
                pipe.pop()
        end.connection = None
        self.lose_if_overfull(end)

    @rule(which=st.integers(0, 1))
    def lose(self, which: int) -> None:
        """The end has heard nothing for too long."""
        if self.ends[which].session.other:
            self.ends[which].begin_anew()

    @rule(which=st.integers(0, 1))
    def dial(self, which: int) -> None:
        end = self.ends[which]
        if end.connection is None:
            self.dials.append(Dial(which, end.session.hello()))

    @precondition(lambda self: self.dials)
    @rule(data=st.data())
    def dial_comes(self, data: st.DataObject) -> None:
        """Delivers any dial: to its acceptor or, with an answer, back to its dialler."""
        dial = data.draw(st.sampled_from(self.dials))
        self.dials.remove(dial)
        if dial.answer is None and not dial.refused:
            self.accept(dial)
        else:
            self.come_back(dial)

    def accept(self, dial: Dial) -> None:
        which = 1 - dial.dialler
        end = self.ends[which]
        try:
            try:
                end.session.resume(dial.hello)
            except Begun:
                end.begin_anew()
                end.session.resume(dial.hello)
        except Outdated:
            return
        except Forgotten:
            dial.refused = True
        else:
            dial.connection = Connection(dial.dialler)
            self.attach(which, dial.connection)
            dial.answer = end.session.hello()
        self.dials.append(dial)

    def come_back(self, dial: Dial) -> None:
        end = self.ends[dial.dialler]
        if dial.hello.session != end.session.number:  # its dialler has lost that session
            if dial.connection is not None:
                dial.connection.broken = True
        elif dial.refused:
            if end.session.is_newest(dial.hello):
                end.begin_anew()
        else:
            assert dial.answer is not None
            assert dial.connection is not None
            try:
                end.session.resume(dial.answer, dial.hello)
            except Outdated:
                dial.connection.broken = True
                return
            self.attach(dial.dialler, dial.connection)

    @precondition(lambda self: self.dials)
    @rule(data=st.data())
    def dial_is_lost(self, data: st.DataObject) -> None:
        dial = data.draw(st.sampled_from(self.dials))
        self.dials.remove(dial)
        if dial.connection is not None:
            dial.connection.broken = True

    # --- what must hold

    @invariant()
    def nothing_comes_twice_or_out_of_order(self) -> None:
        for which, end in enumerate(self.ends):
            for life in end.lives:
                if life.session.other:
                    self.check(life, self.ends[1 - which].lives[life.session.other - 1])

    def check(self, life: Life, other: Life) -> None:
        assert life.messages == other.sent[: len(life.messages)]
        for kind in KINDS:
            came = [f.fields["number"] for f in life.frames if f.kind == kind]
            sent = [f.fields["number"] for f in other.sent_frames if f.kind == kind]
            assert came == sent[: len(came)]

    @invariant()
    def what_is_held_is_bounded(self) -> None:
        for end in self.ends:
            assert end.session.held <= BOUNDS.held

    def teardown(self) -> None:
        """Once a connection stays up, all that was sent arrives."""
        self.dials.clear()
        for end in self.ends:
            end.connection = None
        for _ in range(3):  # an end may have given up the session that the other one resumes
            self.dial(0)
            self.accept(self.dials.pop())
            self.come_back(self.dials.pop())
            if self.ends[0].connection is not None:
                break
        assert self.ends[0].connection is self.ends[1].connection is not None
        for _ in range(1000):
            if not any(e.session.held or e.session.outbox.unfinished() for e in self.ends):
                break
            for which in (0, 1):
                for heartbeat in (False, False, True):
                    self.speak(which, heartbeat)
                self.carry(which, [0, 1, 0, 2])
                self.listen(1 - which, 5)
                self.collect(1 - which, [0, 1, 2, 0, 0, 1, 2])
        self.nothing_comes_twice_or_out_of_order()
        for which, end in enumerate(self.ends):
            life, other = end.life, self.ends[1 - which].life
            assert life.messages == other.sent
            assert len(life.frames) == len(other.sent_frames)
            for received in life.frames:
                sent = other.sent_frames[received.fields["number"]]
                assert b"".join(buffers_of(received.payload)) == b"".join(buffers_of(sent.payload))
            check_at_rest(end.session)


TestTwoEnds = TwoEnds.TestCase
TestTwoEnds.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)

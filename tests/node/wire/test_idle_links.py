from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from planaria.node.wire.budget import ITEM
from planaria.node.wire.idle_links import AGREED, NEEDED, SPARE, IdleEnd
from planaria.node.wire.session import Session, SessionBounds

PATIENCE = 10.0
BOUNDS = SessionBounds(chunk=10, window=30, payload=100, messages=1000 * ITEM, held=2000 * ITEM)


def test_who_is_in_use_or_asked_for_is_needed() -> None:
    end = IdleEnd(PATIENCE, now=0.0)
    assert end.say(spare=True, now=9.0) == NEEDED
    assert end.say(spare=True, now=10.0) == SPARE
    assert end.say(spare=False, now=10.0) == NEEDED
    end.used(11.0)
    assert end.say(spare=True, now=20.0) == NEEDED
    assert end.say(spare=True, now=21.0) == SPARE


def test_only_who_knows_that_the_other_knows_hangs_up() -> None:
    near, far = IdleEnd(PATIENCE, 0.0), IdleEnd(PATIENCE, 5.0)
    assert not far.hear(near.say(True, 10.0), True, 10.0)
    assert not near.hear(far.say(True, 10.0), True, 10.0)
    assert not near.rests(True, 10.0)
    assert far.say(True, 15.0) == AGREED
    assert near.hear(AGREED, True, 15.0)
    assert far.rests(True, 15.0)


@given(st.integers(0, 3) | st.integers(0, 2**32 - 1))
def test_whatever_a_peer_says_who_needs_it_does_not_hang_up(word: int) -> None:
    end = IdleEnd(PATIENCE, 0.0)
    assert not end.hear(word, spare=False, now=99.0)
    assert not end.rests(spare=False, now=99.0)


class Connection:
    """A pipe to each end, with messages and heartbeats. A heartbeat is a pair: how many messages
    have come, and the need that its sender states."""

    def __init__(self) -> None:
        self.over = False
        self.agreed = False  # an end has closed it by agreement
        self.pipes: tuple[deque[bytes | tuple[int, int]], ...] = deque(), deque()


class End:
    """One end of a link, simpler than `Link` in connection.py."""

    def __init__(self) -> None:
        self.session, self.idle = Session(1, BOUNDS), IdleEnd(PATIENCE, 0.0)
        self.connection: Connection | None = None
        self.rests, self.wanted = False, False
        self.sent: list[bytes] = []
        self.came: list[bytes] = []

    @property
    def spare(self) -> bool:
        return not (self.session.held or self.wanted)

    def hang_up(self) -> None:
        if self.connection is not None:
            self.connection.over = self.connection.agreed = True
        self.connection, self.rests = None, True

    def broke(self, now: float) -> None:
        self.connection, self.rests = None, self.idle.rests(self.spare, now)

    def carry_by(self, connection: Connection) -> None:
        if self.connection is not None:
            self.connection.over = True
        self.connection, self.rests = connection, False


class TwoEnds(RuleBasedStateMachine):
    """Messages arrive once and in order, whatever is sent, requested, lost or breaks while the ends
    agree to close. A connection closed by agreement is no fault. In the end both ends rest, or
    neither does."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ends = End(), End()
        self.dial(0)
        self.now = PATIENCE

    def on_its_way(self) -> bool:
        connections = [end.connection for end in self.ends]
        return any(any(connection.pipes) for connection in connections if connection is not None)

    @rule(seconds=st.sampled_from([0.5, 1.0, PATIENCE]))
    def pass_time(self, seconds: float) -> None:
        if seconds < PATIENCE or not self.on_its_way():  # messages take much less time
            self.now += seconds

    @rule(which=st.integers(0, 1))
    def send(self, which: int) -> None:
        end = self.ends[which]
        message = bytes([len(end.sent) % 256])
        end.sent.append(message)
        end.session.send(message)
        end.idle.used(self.now)
        end.rests = False

    @rule(which=st.integers(0, 1), wanted=st.booleans())
    def view(self, which: int, wanted: bool) -> None:
        end = self.ends[which]
        end.wanted, end.rests = wanted, end.rests and not wanted

    @rule(which=st.integers(0, 1))
    def speak(self, which: int) -> None:
        end = self.ends[which]
        while end.connection is not None and (message := end.session.next_message()) is not None:
            end.connection.pipes[1 - which].append(message)

    @rule(which=st.integers(0, 1))
    def beat(self, which: int) -> None:
        end = self.ends[which]
        if end.connection is not None:
            self.speak(which)
            word = end.idle.say(end.spare, self.now)
            end.connection.pipes[1 - which].append((end.session.acknowledgement(), word))

    @rule(which=st.integers(0, 1), count=st.integers(1, 4))
    def listen(self, which: int, count: int) -> None:
        end = self.ends[which]
        for _ in range(count):
            if end.connection is None or not end.connection.pipes[which]:
                return
            item = end.connection.pipes[which].popleft()
            if isinstance(item, bytes):
                end.session.message_came()
                end.came.append(item)
                end.idle.used(self.now)
                continue
            received, word = item
            end.session.acknowledge_messages(received)
            if end.idle.hear(word, end.spare, self.now):
                end.hang_up()

    @rule(which=st.integers(0, 1), left=st.integers(0, 3))
    def notice(self, which: int, left: int) -> None:
        """An end notices that its connection is over; some of what was on its way has come."""
        end = self.ends[which]
        if end.connection is not None and end.connection.over:
            pipe = end.connection.pipes[which]
            while len(pipe) > left:
                pipe.pop()
            self.listen(which, left + 1)
            end.broke(self.now)

    @rule(which=st.integers(0, 1))
    def hear_nothing(self, which: int) -> None:
        """The end hears nothing, not even that its connection is over. That is a fault only if the
        end has something to send, or the connection is requested."""
        end = self.ends[which]
        if end.connection is None or not end.connection.over or end.connection.pipes[which]:
            return
        if end.connection.agreed and end.spare:
            assert end.idle.rests(end.spare, self.now) or self.now - end.idle._used < PATIENCE
        if end.idle.rests(end.spare, self.now):
            end.broke(self.now)

    @rule(which=st.integers(0, 1), left=st.integers(0, 3))
    def break_off(self, which: int, left: int) -> None:
        """The connection breaks, though no end closed it."""
        end = self.ends[which]
        if end.connection is not None:
            end.connection.over = True
            self.notice(which, left)

    @rule(which=st.integers(0, 1))
    def dial(self, which: int) -> None:
        """A dial succeeds at once. test_session.py has dials that cross or are late."""
        end, other = self.ends[which], self.ends[1 - which]
        if end.connection is not None or end.rests:
            return
        hello = end.session.hello()
        other.session.resume(hello)
        end.session.resume(other.session.hello(), hello)
        connection = Connection()
        for each in (other, end):
            each.carry_by(connection)

    @invariant()
    def all_comes_once_and_in_order(self) -> None:
        for end, other in (self.ends, self.ends[::-1]):
            assert end.came == other.sent[: len(end.came)]

    @invariant()
    def who_rests_has_nothing_to_send(self) -> None:
        assert all(end.spare and end.connection is None for end in self.ends if end.rests)

    def go_on(self) -> None:
        for _ in range(60):
            for which in (0, 1):
                self.notice(which, 3)
                self.dial(which)
                self.speak(which)
                self.beat(which)
                for end in (0, 1):
                    self.listen(end, 4)
            self.now += 0.5

    def teardown(self) -> None:
        self.go_on()
        for end, far in (self.ends, self.ends[::-1]):
            assert end.came == far.sent
        asked_for = any(end.wanted for end in self.ends)
        near, far = self.ends
        if asked_for:
            assert near.connection is far.connection is not None
        else:
            assert near.rests and far.rests
        for end in self.ends:
            end.wanted = False
        self.go_on()
        assert near.rests and far.rests


TestTwoEnds = TwoEnds.TestCase
TestTwoEnds.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)

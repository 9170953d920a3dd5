"""Production links between processes in virtual time, under resets, partitions and relays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from planaria.bootstrap.registry_pb2 import SILENT, Cause
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.chunk_flow import ChunkOutbox
from planaria.node.wire.connection import Link
from planaria.node.wire.frame_format import Frame, WireError
from planaria.node.wire.link import Links, LinkSettings
from planaria.node.wire.link_table import Peer
from planaria.node.wire.relays import Relay
from planaria.node.wire.session import Hello, Session
from simulation.network import Network
from simulation.transport import MemoryTransport
from simulation.world import Process, World
from tests.bootstrap.conftest import identity

SETTINGS = LinkSettings(chunk=160)


class End:
    """A node that records what arrives."""

    def __init__(self, network: Network, name: str, dials_only: bool = False) -> None:
        self.name, self.address = name, "" if dials_only else f"{name}:1"
        self.process = Process(network.world, name)
        self.came: list[int] = []
        self.lost: list[str] = []
        self.ups = 0
        transport = MemoryTransport(network, self.process, name)
        events: Any = SimpleNamespace(
            on_link_up=self._up,
            on_link_lost=self._lost,
            on_message=self._take_message,
            on_frame=self._take_frame,
        )
        self.net = Links("run", name, identity(name), events, SETTINGS, transport=transport)
        self.process.spawn(self.net.start(self.address or None))

    @property
    def peer(self) -> Peer:
        return Peer(self.name, self.address, identity(self.name).public)

    def view(self, number: int, ends: Iterable[End], relays: Iterable[Relay] = ()) -> None:
        others = [other.name for other in ends if other is not self]
        self.process.run(self.net.set_peers, number, [end.peer for end in ends], others)
        self.process.run(self.net.set_relays, relays)

    def _up(self, peer: str, now: float) -> None:
        self.ups += 1

    def _lost(
        self, peer: str, reason: str, unacknowledged: list[Frame], now: float, cause: Cause
    ) -> None:
        assert cause == SILENT
        self.lost.append(reason)

    def _take_message(self, peer: str, message: pb.Message, now: float) -> None:
        self.came.append(2 * message.ballot.attempt)

    def _take_frame(self, peer: str, frame: Frame, now: float) -> None:
        self.came.append(2 * frame.fields["number"] + 1)


class Cast:
    """Nodes that are linked with each other, in a world of their own."""

    def __init__(self, seed: int, names: str = "ab") -> None:
        self.network = Network(World(seed))
        self.world = self.network.world
        self.world.straggling = 0.0
        self.ends = [End(self.network, name) for name in names]
        self.pass_time(0.1)
        self.new_view(1)
        self.ends[1].process.after(0.0, self.ends[1].net.demand, "a")  # so that dials cross
        self.pass_time(1.5)
        assert {end.ups for end in self.ends} == {len(names) - 1}

    def run(self, call: object, *arguments: object) -> None:
        """Calls from the world's event loop, and lets it run."""
        self.world.after(0.0, call, *arguments)  # type: ignore[arg-type]
        self.pass_time(0.001)

    def new_view(self, number: int, relays: Iterable[Relay] = ()) -> None:
        for end in self.ends:
            self.run(end.view, number, self.ends, relays)

    def send(self, end: End, to: End, item: pb.Message | Frame) -> None:
        def queue() -> None:
            assert end.net.send(to.name, item)

        self.run(end.process.run, queue)

    def pass_time(self, seconds: float) -> None:
        self.world.after(seconds, int)
        self.world.run_until(self.world.now + seconds)

    def reset(self, hosts: Collection[str] = "abc") -> None:
        """Breaks the connections between these hosts."""
        for connection in self.network.connections:
            if {end.process.host for end in connection.ends} <= {*hosts}:
                connection.break_off(at_once=1.0)


def numbered(number: int) -> pb.Message:
    return pb.Message(ballot=pb.Ballot(attempt=number))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_resets_and_blinks_all_comes_once_and_in_order(seed: int) -> None:
    cast = Cast(seed)
    chance, rounds = cast.world.random, 40
    for number in range(rounds):
        for end, other in (cast.ends, cast.ends[::-1]):
            cast.send(end, other, numbered(number))
            payload = bytes(chance.randrange(500))
            cast.send(end, other, Frame("probe", (0, 0), {"number": number}, [], payload))
        cast.pass_time(chance.uniform(0.001, 0.02))
        if chance.random() < 0.2:
            if chance.random() < 0.5:
                cast.reset()
            cast.network.part(number, frozenset("a"), frozenset("b"), chance.random() < 0.5)
            cast.pass_time(chance.uniform(0.001, 0.5))
            cast.network.heal(number)
            cast.pass_time(chance.uniform(1.5, 3.0))  # a lost first packet is sent again after 1 s
        elif chance.random() < 0.2:
            cast.reset()
    cast.pass_time(5.0)
    for end in cast.ends:
        assert not end.lost
        assert [n // 2 for n in end.came if n % 2 == 0] == list(range(rounds)), "messages"
        assert sorted(n // 2 for n in end.came if n % 2) == list(range(rounds)), "frames"


def test_a_link_that_loses_what_goes_one_way_is_lost_when_that_has_lasted() -> None:
    cast = Cast(0)
    near, far = cast.ends
    cast.network.part(0, frozenset("a"), frozenset("b"), both_ways=False)
    cast.pass_time(SETTINGS.silence - 0.6)
    assert not near.lost + far.lost
    cast.pass_time(2.0)
    assert "silent" in far.lost[0]
    assert "closed the link" in near.lost[0]
    cast.network.heal(0)
    cast.pass_time(3.0)
    assert [end.ups for end in cast.ends] == [2, 2]


def test_two_that_cannot_reach_each_other_talk_through_a_third_and_then_directly_again() -> None:
    cast = Cast(0, "abc")
    near, far, _ = cast.ends
    cast.network.part(0, frozenset("a"), frozenset("b"))
    cast.pass_time(0.1)
    cast.new_view(2, [Relay("a", "b", "c")])
    cast.pass_time(SETTINGS.silence + 4.0)
    assert [near.net.carrier("b"), far.net.carrier("a")] == ["c", "c"]
    cast.send(near, far, numbered(7))
    cast.pass_time(0.2)
    assert far.came == [14]
    cast.network.heal(0)
    cast.pass_time(12.0)
    assert [near.net.carrier("b"), far.net.carrier("a")] == ["", ""]
    assert len(near.lost) == 1


@pytest.mark.parametrize("seed", range(5))
def test_what_goes_through_a_relay_comes_once_and_in_order_while_its_links_blink(
    seed: int,
) -> None:
    cast = Cast(seed, "abc")
    near, far, _ = cast.ends
    cast.network.part(-1, frozenset("a"), frozenset("b"))
    cast.new_view(2, [Relay("a", "b", "c")])
    cast.pass_time(SETTINGS.silence + 4.0)
    chance, rounds = cast.world.random, 30
    for number in range(rounds):
        cast.send(near, far, numbered(number))
        cast.send(near, far, Frame("probe", (0, 0), {"number": number}, [], bytes(300)))
        if chance.random() < 0.2:
            cast.network.part(number, frozenset(chance.choice("ab")), frozenset("c"))
            cast.pass_time(chance.uniform(0.001, 0.5))
            cast.network.heal(number)
        elif chance.random() < 0.2:
            cast.reset()
        cast.pass_time(chance.uniform(0.001, 0.3))
    cast.pass_time(8.0)
    assert [n // 2 for n in far.came if n % 2 == 0] == list(range(rounds)), "messages"
    assert sorted(n // 2 for n in far.came if n % 2) == list(range(rounds)), "frames"


def test_a_session_that_ends_at_the_peer_as_it_is_resumed_is_begun_anew() -> None:
    cast = Cast(0)
    near, far = cast.ends
    session = far.net.session("a")
    hello = near.net.session("b").hello()

    def return_late() -> None:
        with pytest.raises(Exception, match="no such link any more"):
            far.net.resume("a", replace(hello, session=hello.session + 1))

    cast.run(far.process.run, return_late)
    assert far.lost == ["a has lost the link, and dialled anew"]
    assert far.net.session("a").number > session.number


def between(cast: Cast) -> int:
    """Number of intact connections."""
    return sum(connection.intact for connection in cast.network.connections)


@pytest.mark.parametrize("seed", range(8))
def test_dials_that_cross_leave_one_connection(seed: int) -> None:
    cast = Cast(seed)
    cast.pass_time(2.0)
    assert between(cast) == 1
    assert [end.lost for end in cast.ends] == [[], []]


def test_an_older_dial_that_comes_late_would_leave_two(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_any(self: Session, hello: Hello, answered: Hello | None = None) -> None:
        self.other, self._peers_hello = hello.session, hello.number

    monkeypatch.setattr(Session, "check", lambda *_: None)
    monkeypatch.setattr(Session, "resume", take_any)
    monkeypatch.setattr(Session, "is_newest", lambda *_: True)
    monkeypatch.setattr(Link, "detach", lambda self, why: None)
    with pytest.raises(AssertionError):
        for seed in range(20):
            test_dials_that_cross_leave_one_connection(seed)


WIDE = 3


def wide(monkeypatch: pytest.MonkeyPatch, seed: int) -> Cast:
    """Two nodes whose frames use several streams, with a frame in transit."""
    monkeypatch.setattr(ChunkOutbox, "streams", property(lambda outbox: WIDE))
    cast = Cast(seed)
    near, far = cast.ends
    cast.send(near, far, Frame("probe", (0, 0), {"number": 0}, [], bytes(2000)))
    return cast


@pytest.mark.parametrize("seed", range(8))
def test_frames_over_several_streams_come_once_while_streams_break(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cast = wide(monkeypatch, seed)
    near, far = cast.ends
    chance, rounds = cast.world.random, 30
    cast.pass_time(0.5)
    assert between(cast) == 1 + WIDE
    for number in range(1, rounds):
        cast.send(near, far, Frame("probe", (0, 0), {"number": number}, [], bytes(1000)))
        if chance.random() < 0.3:
            intact = [connection for connection in cast.network.connections if connection.intact]
            for connection in chance.sample(intact, min(1, len(intact))):
                connection.break_off(at_once=1.0)
        cast.pass_time(chance.uniform(0.001, 0.5))
    cast.pass_time(5.0)
    assert sorted(n // 2 for n in far.came if n % 2) == list(range(rounds))
    assert not near.lost + far.lost


def end_as_a_stream_is_added(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cast = wide(monkeypatch, seed)
    cast.pass_time(cast.world.random.uniform(0.0, 0.02) + 0.001)
    for end in cast.ends:
        cast.run(end.process.run, end.net.set_peers, 2, [end.peer], [])
    cast.pass_time(6.0)
    assert between(cast) == 0
    assert not [task.get_name() for task in cast.world.tasks if "stream" in task.get_name()]


@pytest.mark.parametrize("seed", range(8))
def test_a_stream_that_is_added_to_a_link_that_closes_is_closed_too(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_as_a_stream_is_added(seed, monkeypatch)


def changed_carriers(seed: int) -> None:
    """Sends frames while a relay takes a link over, and gives it back."""
    cast = Cast(seed, "abc")
    near, far, _ = cast.ends
    chance, sent, number = cast.world.random, 0, 1
    for carrier in ("c", "", "c", ""):
        number += 1
        if carrier:
            cast.new_view(number, [Relay("a", "b", "c")])
            cast.reset({"a", "b"})
            cast.network.part(number, frozenset("a"), frozenset("b"))
        else:
            cast.network.heal(number - 1)
        while near.net.carrier("b") != carrier:
            cast.send(near, far, Frame("probe", (0, 0), {"number": sent}, [], bytes(300)))
            sent += 1
            cast.pass_time(chance.uniform(0.001, 0.3))
    cast.pass_time(5.0)
    assert not near.lost + far.lost
    assert sorted(n // 2 for n in far.came if n % 2) == list(range(sent))


@pytest.mark.parametrize("seed", range(5))
def test_what_is_sent_while_the_carrier_changes_comes_once_and_in_order(seed: int) -> None:
    changed_carriers(seed)


def test_a_link_that_drops_what_was_under_way_when_the_carrier_changes_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rewind = ChunkOutbox.rewind

    def forgetful(self: ChunkOutbox, begun: int, partial: Mapping[int, int]) -> None:
        rewind(self, self._last, {})

    monkeypatch.setattr(ChunkOutbox, "rewind", forgetful)
    with pytest.raises((AssertionError, WireError)):
        for seed in range(5):
            changed_carriers(seed)

"""Three nodes, two of which can't reach each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from planaria.bootstrap.registry_pb2 import SILENT
from planaria.node.wire import relays
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.greetings import DIAL, Greetings
from planaria.node.wire.relays import Call, Relay, Relays
from planaria.node.wire.session import DialRefused, Hello
from tests.bootstrap.conftest import identity
from tests.harness.at_rest import check_at_rest
from tests.node.wire.test_link import (
    DEADLINE,
    Node,
    frame,
    message,
    peer_at,
    received,
    started,
    until,
    up,
)

NOBODY = "127.0.0.1:1"  # nothing listens there


def set_view(number: int, a: Node, b: Node, c: Node, reached: bool, relayed: bool = True) -> None:
    """Gives each node a view. `reached`: a and b have each other's address."""
    peers = [a.peer(), b.peer(), c.peer()]
    peers_of = {
        "a": [a.peer(), b.peer() if reached else peer_at("b", NOBODY), c.peer()],
        "b": [a.peer() if reached else peer_at("a", NOBODY), b.peer(), c.peer()],
        "c": peers,
    }
    for node in (a, b, c):
        node.links.set_peers(number, peers_of[node.name], {"a", "b", "c"} - {node.name})
        node.links.set_relays([Relay("a", "b", "c")] if relayed else [])


@asynccontextmanager
async def three(reached: bool = False) -> AsyncIterator[tuple[Node, Node, Node]]:
    a, b, c = Node("a"), Node("b"), Node("c")
    async with started(a, b, c, listen="abc"):
        set_view(1, a, b, c, reached)
        await up(a, b, c)
        yield a, b, c


async def exchange(a: Node, b: Node, count: int = 3) -> None:
    for near, far in ((a, b), (b, a)):
        for number in range(count):
            assert near.links.send(far.name, message(number))
            assert near.links.send(far.name, frame(9000, number=number))
    for near, far in ((a, b), (b, a)):
        await received(near, far, count, 9000)


async def test_two_that_cannot_reach_each_other_talk_through_a_third() -> None:
    async with three() as (a, b, c):
        assert a.links.carrier("b") == b.links.carrier("a") == "c"
        assert a.links.carrier("c") == ""
        await exchange(a, b)
        assert c.events.queue.empty(), "it carries without looking inside"
        assert c.links.bytes_out > 2 * 27_000, "what it carries is its traffic"
        assert a.links.bytes_out < 1.9 * 27_000, "and counts once where it comes from"
        await until(lambda: not c.links.relays.held)


async def test_for_what_was_changed_on_the_way_nobody_is_accused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The receiver can't know whether the relay or the peer changed it."""
    pass_on = Relays._pass_on

    def flipped(carrying: Relays, sender: str, to: str, sent: Frame) -> None:
        payload = b"".join(map(bytes, relays.buffers_of(sent.payload)))
        if sent.fields["say"] == "item":
            payload = payload[:-1] + bytes([payload[-1] ^ 1])
        pass_on(carrying, sender, to, replace(sent, payload=payload))

    async with three() as (a, b, _):
        monkeypatch.setattr(Relays, "_pass_on", flipped)
        a.links.send("b", message(1))
        peer, *_ = await b.events.next("lost")
        assert peer == "a"
        assert b.events.causes == [SILENT]


async def test_a_relay_can_call_nobody_in_the_name_of_who_it_carries_for() -> None:
    async with three() as (a, b, c):
        await exchange(a, b)
        hello = Greetings("run", "a", identity("c")).sign(DIAL, "b", Hello(9, 0, 1, 0, 0).pack())
        fields = {"from": "a", "call": "a forged", "say": "hello"}
        with pytest.raises(DialRefused, match="in the name of a is not signed"):
            await forged_call(c, b, Frame("call", (0, 0), fields, [], hello.encode()))


async def forged_call(c: Node, b: Node, hello: Frame) -> None:
    """Sends b a call by its relay c; raises b's answer as DialRefused."""
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def passed_on(sender: str, frame: Frame) -> None:
        if frame.fields.get("call") == "a forged" and not answer.done():
            answer.set_result(bytes(frame.payload).decode())

    c.links.relays.on_frame = passed_on  # type: ignore[method-assign]
    c.links._send_relayed("b", hello, None)
    async with asyncio.timeout(DEADLINE):
        code, _, sentence = (await answer).partition(" ")
    raise DialRefused(code, sentence)


# What a relay holds


class Wire:
    """The relays of one node. Tests say when what they send arrives. c carries for a and b."""

    def __init__(self, node: str, unlinked: str = "") -> None:
        self.unlinked = unlinked
        self.sent: list[tuple[str, Frame]] = []
        self.arrived: list[object] = []
        self.relays = Relays(node, self.send, lambda call, hello: None)
        self.relays.set([Relay("a", "b", "c")])

    def send(self, node: str, sent: Frame, arrived: object) -> bool:
        self.sent.append((node, sent))
        self.arrived.append(arrived)
        return node != self.unlinked

    def said_to(self) -> list[tuple[str, object]]:
        return [(node, sent.fields["say"]) for node, sent in self.sent]


def item(size: int) -> Frame:
    fields = {"to": "b", "call": "a 1", "say": "item"}
    return Frame("relayed", (0, 0), fields, [], bytes(size))


async def test_a_relay_holds_no_more_than_its_limit_for_a_pair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relays, "LIMIT", 100)
    wire = Wire("c")
    for _ in range(3):
        wire.relays.on_frame("a", item(50))
    assert wire.said_to() == [("b", "item"), ("b", "item"), ("a", "over"), ("b", "over")]
    assert wire.relays.held["a", "b", "relayed"] == 100
    wire.arrived[0]()  # type: ignore[operator]
    wire.relays.on_frame("a", item(50))
    assert wire.said_to()[-1] == ("b", "item")


@pytest.mark.parametrize("lost", ["a", "b"])
async def test_a_relay_holds_nothing_for_a_link_that_is_lost(lost: str) -> None:
    wire = Wire("c")
    for _ in range(2):
        wire.relays.on_frame("a", item(50))
    wire.arrived[0]()  # type: ignore[operator]
    wire.relays.lost(lost)
    check_at_rest(wire.relays)
    wire.arrived[1]()  # type: ignore[operator]
    check_at_rest(wire.relays)
    assert wire.said_to()[-1] == ("b" if lost == "a" else "a", "over")


async def test_what_a_relay_can_not_pass_on_it_does_not_hold() -> None:
    wire = Wire("c", unlinked="b")
    wire.relays.on_frame("a", item(50))
    assert wire.said_to() == [("b", "item"), ("a", "over")]
    check_at_rest(wire.relays)


async def test_a_call_ends_when_another_relay_is_to_carry_it() -> None:
    wire = Wire("a")
    call = wire.relays.call("b", "1 0 1 0 0")
    wire.relays.set([Relay("a", "b", "d")])
    with pytest.raises(DialRefused, match="c carries for a and b no more"):
        await call.answer
    assert await call.streams["Control"].read() is None


async def test_a_node_carries_only_for_those_that_the_view_names() -> None:
    wire = Wire("c")
    wire.relays.set([Relay("a", "d", "c")])
    wire.relays.on_frame("a", item(50))
    assert wire.said_to() == [("a", "over")]
    assert not wire.relays.held


async def test_who_is_called_before_it_has_the_view_says_so() -> None:
    """Otherwise the call would wait for its deadline."""
    ends = {name: Wire(name) for name in "ab"}
    ends["b"].relays.set([])
    call = ends["a"].relays.call("b", "1 0 1 0 0")
    (_, hello), *_ = ends["a"].sent
    ends["b"].relays.on_frame("c", replace(hello, fields={**hello.fields, "from": "a"}))
    ((to, refusal),) = ends["b"].sent
    assert (to, refusal.fields["to"]) == ("c", "a")
    ends["a"].relays.on_frame("c", replace(refusal, fields={**refusal.fields, "from": "b"}))
    with pytest.raises(DialRefused, match="b knows of no relay c"):
        await call.answer


async def test_who_claims_to_carry_is_not_believed() -> None:
    heard: list[Call] = []
    ends = Relays("a", lambda *_: True, lambda call, hello: heard.append(call))
    ends.set([Relay("a", "b", "c")])
    hello = Frame("call", (0, 0), {"from": "b", "call": "b 1", "say": "hello"}, [], b"1 0 1 0 0")
    ends.on_frame("d", hello)
    assert heard == []
    ends.on_frame("c", hello)
    assert [call.peer for call in heard] == ["b"]

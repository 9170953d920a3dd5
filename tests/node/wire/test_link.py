from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest
import torch
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from planaria.bootstrap.address import Address, Reach
from planaria.bootstrap.authority import Authority, Role
from planaria.bootstrap.credentials import Credentials
from planaria.bootstrap.registry_pb2 import CHECKSUM, SHAPE, Cause
from planaria.node.wire import link
from planaria.node.wire.frame_format import Frame, WireError, pack_chunk, seal
from planaria.node.wire.greetings import ADD, DIAL, PROTOCOL, Greetings
from planaria.node.wire.link import Links, LinkSettings
from planaria.node.wire.link_table import Peer
from planaria.node.wire.relays import Relay
from planaria.node.wire.session import DialRefused, Hello, Silence
from planaria.node.wire.stage_pb2 import Message
from planaria.node.wire.tensors import decode, encode
from tests.bootstrap.conftest import DEADLINE, certified, identity, until
from tests.harness.wire import Wire

TLS_HANDSHAKE = b"\x16\x03"
QUICK = LinkSettings(view_wait=0.05, handshake=10.0, chunk=1024, window=4096)


class Recorder:
    """Events of one node, in order."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.causes: list[Cause] = []  # why links were lost

    def on_message(self, peer: str, message: Message, now: float) -> None:
        self.queue.put_nowait(("message", peer, message))

    def on_frame(self, peer: str, frame: Frame, now: float) -> None:
        self.queue.put_nowait(("frame", peer, frame))

    def on_link_up(self, peer: str, now: float) -> None:
        self.queue.put_nowait(("up", peer))

    def on_link_lost(
        self, peer: str, reason: str, unacknowledged: list[Frame], now: float, cause: Cause
    ) -> None:
        self.causes.append(cause)
        self.queue.put_nowait(("lost", peer, reason, unacknowledged))

    async def next(self, kind: str) -> tuple[Any, ...]:
        async with asyncio.timeout(DEADLINE):
            event = await self.queue.get()
        assert event[0] == kind, event
        return event[1:]


class Node:
    def __init__(
        self,
        name: str,
        run: str = "run",
        settings: LinkSettings = QUICK,
        key: str = "",
        **more: Any,
    ) -> None:
        self.events = Recorder()
        self.links = Links(run, name, identity(key or name), self.events, settings, **more)
        self.name, self.address = name, ""

    def peer(self) -> Peer:
        return peer_at(self.name, self.address)


def peer_at(name: str, address: str = "") -> Peer:
    return Peer(name, address, identity(name).public)


@asynccontextmanager
async def started(*nodes: Node, listen: str = "ab") -> AsyncIterator[None]:
    try:
        for node in nodes:
            if node.name in listen:
                node.address = f"127.0.0.1:{await node.links.start('127.0.0.1:0')}"
            else:
                await node.links.start(None)
        yield
    finally:
        for node in nodes:
            await node.links.stop()
        assert [task for task in asyncio.all_tasks() if "link to" in task.get_name()] == []


def view(number: int, *nodes: Node) -> None:
    for node in nodes:
        others = [other.name for other in nodes if other is not node]
        node.links.set_peers(number, [other.peer() for other in nodes], others)


async def up(*nodes: Node) -> None:
    for node in nodes:
        for _ in range(len(nodes) - 1):
            await node.events.next("up")


@asynccontextmanager
async def linked(settings: LinkSettings = QUICK) -> AsyncIterator[tuple[Node, Node]]:
    """Nodes a and b with a link between them."""
    a, b = Node("a", settings=settings), Node("b", settings=settings)
    async with started(a, b):
        view(1, a, b)
        await up(a, b)
        yield a, b


@asynccontextmanager
async def relayed(settings: LinkSettings = QUICK) -> AsyncIterator[tuple[Node, Node, Wire]]:
    """Nodes a and b, whose link goes through a `Wire`."""
    a, b = Node("a", settings=settings), Node("b", settings=settings)
    async with started(a, b), Wire(b.address) as wire:
        b.address = wire.address
        view(1, a, b)
        await up(a, b)
        yield a, b, wire


async def received(node: Node, peer: Node, count: int, size: int) -> None:
    """Receives `count` messages and frames of `size` bytes; checks the order of each kind."""
    steps, numbers = [], []
    while len(steps) < count or len(numbers) < count:
        async with asyncio.timeout(DEADLINE):
            kind, sender, item = await node.events.queue.get()
        assert sender == peer.name
        if kind == "message":
            steps.append(item.ready.step)
        else:
            assert (kind, item.size) == ("frame", size)
            numbers.append(item.fields["number"])
    assert steps == numbers == list(range(count))


async def nine_frames(a: Node, b: Node) -> None:
    """Receives nine frames from a at b, and checks their order."""
    for number in range(9):
        peer, received = await b.events.next("frame")
        assert (peer, received.fields["number"], received.size) == ("a", number, 30_000)


def frame(size: int = 16, kind: str = "activation", **fields: Any) -> Frame:
    descriptors, buffers = encode([torch.arange(size, dtype=torch.uint8)], "none")
    return Frame(kind, (1, 2), fields, descriptors, buffers)


def message(step: int) -> Message:
    return Message(ballot={"view": 1, "attempt": 2}, ready={"step": step})


# What a link carries


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_messages_and_frames_both_ways_and_their_bytes_are_counted(run: Any) -> None:
    run(both_ways())


async def both_ways() -> None:
    async with linked() as (a, b):
        for near, far in ((a, b), (b, a)):
            for step in range(5):
                assert near.links.send(far.name, message(step))
            for step in range(5):
                assert await far.events.next("message") == (near.name, message(step))
            assert near.links.send(far.name, frame(10_000, microbatch=3))
            peer, received = await far.events.next("frame")
            assert peer == near.name
            assert (received.kind, received.ballot) == ("activation", (1, 2))
            assert received.fields == {"microbatch": 3}
            (tensor,) = decode(received.descriptors, received.payload)
            assert torch.equal(tensor, torch.arange(10_000, dtype=torch.uint8))
        await until(lambda: a.links.unacknowledged == 0)
        assert a.links.bytes_out > 10_000 < a.links.bytes_in
        assert a.links.traffic["b"].bytes_out == a.links.bytes_out


async def test_a_frame_that_cannot_travel_is_said_to_its_sender() -> None:
    a, b = Node("a"), Node("b")
    async with started(a, b):
        assert not a.links.send("b", message(1))
        assert not a.links.send("b", frame())
        view(1, a, b)
        await up(a, b)
        with pytest.raises(WireError, match="kind 'pickle'"):
            a.links.send("b", frame(kind="pickle"))
        with pytest.raises(WireError, match="a message of"):
            a.links.send("b", Message(failed={"reason": "a" * (link.MESSAGE_LIMIT + 1)}))
        assert a.links.linked("b")


# Who dials


@pytest.mark.parametrize("listen", ["a", "b"])
async def test_a_node_without_an_address_dials(listen: str) -> None:
    a, b = Node("a"), Node("b")
    async with started(a, b, listen=listen):
        view(1, a, b)
        await up(a, b)
        assert b.links.send("a", message(1))
        assert await a.events.next("message") == ("b", message(1))


# Who is refused


def hello(session: int = 1, number: int = 1, other: int = 0, **came: Any) -> str:
    came = {"messages": 0, "frames": 0} | came
    return Hello(session, other, number, **came).pack()


def metadata(node: Node, dialler: str, /, **changes: str) -> tuple[tuple[str, str], ...]:
    pairs = {"run": "run", "node": dialler, "peer": node.name, "link": hello()}
    pairs |= {"protocol": str(PROTOCOL), **changes}
    greetings = Greetings("run", dialler, identity(pairs.pop("key", dialler)))
    pairs["link"] = greetings.sign(DIAL, node.name, pairs["link"])
    return tuple((f"planaria-{key}", value) for key, value in pairs.items())


@asynccontextmanager
async def dialled(node: Node, dialler: str, /, **changes: str) -> AsyncIterator[Any]:
    """A connection that the test dials without `Links`: a Control stream."""
    pairs = metadata(node, dialler, **changes)
    own = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own, as in Links
    channels = grpc.aio.insecure_channel(node.address, own)
    async with channels as channel, asyncio.timeout(DEADLINE):
        call: Any = channel.stream_stream("/planaria.node.Stage/Control")(metadata=pairs)
        if not await call.initial_metadata():
            await call.read()
        yield call


async def last_words(call: Any) -> str:
    """The reason that the peer gives on Control for closing the link."""
    async with asyncio.timeout(DEADLINE):
        while True:
            message = Message.FromString(await call.read())
            if message.WhichOneof("body") == "farewell":
                return str(message.farewell.reason)


async def farewell(call: Any) -> str:
    """Reads the stream to its end; returns the details of its error."""
    try:
        while (await call.read()) is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.details() or ""
    return ""


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({"node": "x"}, "PERMISSION_DENIED", "'x' is no member of view 7, the newest that b knows"),
        ({"run": "other"}, "PERMISSION_DENIED", "b is in run run, not 'other'"),
        ({"peer": "c"}, "NOT_FOUND", "this is node b, not 'c'"),
        ({"protocol": "2"}, "FAILED_PRECONDITION", "b speaks protocol 1, the dialler 2"),
        ({"link": "x"}, "INVALID_ARGUMENT", "'x' is not a link's hello"),
        ({"link": hello(other=9)}, "DATA_LOSS", "b has no such link: its session 9 is over"),
        ({"link": hello(messages=5)}, "INVALID_ARGUMENT", "5 messages acknowledged"),
        ({"link": hello(partial={3: 4})}, "INVALID_ARGUMENT", "0 frames begun, but incomplete"),
        ({"key": "c"}, "UNAUTHENTICATED", "hello in the name of a is not signed by the key"),
        ({"token": "bad"}, "UNAUTHENTICATED", "the join token is not this run's"),
    ],
)
async def test_strangers_are_refused_with_a_sentence(
    changes: dict[str, str], code: str, sentence: str
) -> None:
    b = Node("b", settings=replace(QUICK, credentials=Credentials(token="good")))
    async with started(b):
        b.links.set_peers(7, [peer_at("a", ""), b.peer()], [])
        with pytest.raises(grpc.aio.AioRpcError, match=sentence) as error:
            async with dialled(b, "a", **({"token": "good"} | changes)):
                pass
        assert error.value.code() is grpc.StatusCode[code]
        async with dialled(b, "a", token="good"):
            assert await b.events.next("up") == ("a",)


async def test_a_dialler_that_a_newer_view_admits_has_only_to_wait() -> None:
    a, b = Node("a"), Node("b", settings=replace(QUICK, view_wait=DEADLINE))
    async with started(a, b):
        a.links.set_peers(2, [a.peer(), b.peer()], ["b"])
        b.links.set_peers(1, [b.peer()], [])
        b.links.set_peers(2, [a.peer(), b.peer()], [])
        await up(a, b)
        b.links.set_peers(1, [b.peer()], [])  # an older view doesn't count
        assert b.links.linked("a")


async def test_nobody_is_dialled_where_the_registry_is_not_near(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING", "planaria")
    settings = replace(QUICK, reach=Reach())
    a, b = Node("a", settings=settings), Node("b", settings=settings)
    async with started(a, b):
        view(1, a, b)
        await until(lambda: "on its own machine only" in caplog.text)
        assert not a.links.peers and not b.links.peers
    assert f"can't link to b: the address {b.address!r}" in caplog.text


async def test_two_nodes_cannot_share_a_port() -> None:
    a, b = Node("a"), Node("b")
    async with started(a, b, listen="a"):
        with pytest.raises(OSError, match=f"can't listen on {a.address}"):
            await b.links.start(a.address)


# Malformed input

piece = partial(pack_chunk, order=1)


def acknowledged(number: int, received: int) -> bytes:
    received_of = [{"frame": number, "bytes": received}]
    return seal(Message(acknowledged={"received": received_of}).SerializeToString())


@pytest.mark.parametrize(
    ("stream", "sent", "why", "cause"),
    [
        ("Bulk", b"\x08", "a chunk that ends inside a number", SHAPE),
        ("Bulk", piece(frame=2, size=1, data=[b"a"]), "a new frame would be 1", SHAPE),
        ("Bulk", piece(frame=1, size=1, data=[b"a"]), "head of a frame", SHAPE),
        ("Bulk", piece(frame=1, size=2**60), "a payload of 1152921504606846976", SHAPE),
        ("Bulk", piece(frame=1, size=1, order=0), "in place 0, which is taken", SHAPE),
        ("Bulk", pack_chunk(frame=1)[:-1] + b"\0", "checksum of a chunk of frame 1", CHECKSUM),
        ("Control", acknowledged(9, 4), "4 bytes of frame 9", SHAPE),
        ("Control", seal(b"\xff"), "not one of stage.proto's", SHAPE),
        ("Control", message(1).SerializeToString(), "checksum of a message", CHECKSUM),
    ],
)
async def test_malformed_input_ends_its_link_and_no_other(
    stream: str, sent: bytes, why: str, cause: Cause
) -> None:
    a, b = Node("a"), Node("b")
    async with started(a, b):
        peers = [a.peer(), b.peer(), peer_at("c", "")]
        a.links.set_peers(1, peers, ["b"])
        b.links.set_peers(1, peers, ["a"])
        await up(a, b)
        async with dialled(b, "c") as control:
            assert await b.events.next("up") == ("c",)
            async with adding(b, "c", *begun(b, "c")) as bulk:
                await (bulk if stream == "Bulk" else control).write(sent)
                assert why in await last_words(control)
            control.cancel()
            peer, reason, _ = await b.events.next("lost")
            assert peer == "c"
            assert why in reason
            assert b.events.causes == [cause]
        a.links.send("b", message(1))
        assert await b.events.next("message") == ("a", message(1))


async def test_what_answers_in_another_ones_name_gets_no_link() -> None:
    """The view has c at an address where a node with another key claims to be c."""
    a, b = Node("a"), Node("c", key="b")
    async with started(a, b, listen="ac"):
        a.links.set_peers(1, [a.peer(), peer_at("c", b.address)], ["c"])
        b.links.set_peers(1, [a.peer(), b.peer()], ["a"])
        with pytest.raises(DialRefused, match="in the name of c is not signed by the key"):
            await a.links._dial(peer_at("c", b.address))
        assert a.links.peers == []


# Several streams


async def carried_by(count: int, *nodes: Node) -> None:
    """Waits until the only link of each node has `count` streams for chunks."""
    for node in nodes:
        [only] = node.links.by_peer.values()
        await until(lambda: only.connection and len(only.connection._bulks) == count)  # noqa: B023


def want(node: Node, count: int) -> None:
    """Makes the node want `count` streams, as if it had measured that."""
    [only] = node.links.by_peer.values()
    only._framed = only.now
    only.session.outbox._streams.wanted = count
    assert only.connection is not None
    only.connection.note_streams()


@pytest.mark.parametrize("sender", ["a", "b"])
async def test_only_where_frames_go_there_is_a_stream_for_them(sender: str) -> None:
    async with relayed(SOON) as (a, b, wire):
        near, far = (a, b) if sender == "a" else (b, a)
        for number in range(2):
            for step in range(200):
                near.links.send(far.name, message(step))
            for step in range(200):
                assert await far.events.next("message") == (near.name, message(step))
            await carried_by(0, a, b)
            assert len(wire.writers) == 2 * (1 + number), "both ways"
            near.links.send(far.name, frame(100_000, number=number))
            assert (await far.events.next("frame"))[1].fields == {"number": number}
            assert len(wire.writers) == 2 * (2 + number)
            await carried_by(0, a, b)


async def test_a_link_by_which_no_frame_can_go_is_lost() -> None:
    """The dialler, which is the test, adds no stream for frames."""
    b = Node("b", settings=replace(SOON, handshake=0.2))
    async with started(b):
        b.links.set_peers(1, [peer_at("c", ""), b.peer()], [])
        async with dialled(b, "c") as control:
            await b.events.next("up")
            b.links.send("c", message(1))
            sent = frame(10)
            b.links.send("c", sent)
            why = await last_words(control)
            assert why.startswith("no stream for frames came up in 0.")
            assert await b.events.next("lost") == ("c", why, [sent])


async def test_a_peer_that_takes_no_stream_for_frames_is_dialled_anew() -> None:
    dials = asyncio.Event()

    async def refused(_: Any) -> None:
        dials.set()
        raise DialRefused("UNAVAILABLE", "one is enough")

    a, b = Node("a"), Node("b")
    b.links._take_bulk = refused  # type: ignore[method-assign]
    async with started(a, b):
        view(1, a, b)
        await up(a, b)
        first = a.links.by_peer["b"].connection
        a.links.send("b", frame(10, number=1))
        async with asyncio.timeout(DEADLINE):
            await dials.wait()
        await until(lambda: a.links.by_peer["b"].connection not in (first, None))
        a.links.send("b", message(1))
        assert await b.events.next("message") == ("a", message(1))
        assert a.events.queue.empty()


@pytest.mark.parametrize("who", ["a", "b"])
async def test_frames_keep_their_order_by_streams_that_come_and_go(who: str) -> None:
    """Either side may want the streams; a has dialled."""
    async with linked() as (a, b):
        number = 0
        for count in (1, 4, 16, 2, 1, 3):
            want(a if who == "a" else b, count)
            for _ in range(2):  # while streams change, and after that
                for near, far in ((a, b), (b, a)):
                    for size in (0, 100_000, 7):
                        assert near.links.send(far.name, frame(size, number=number, length=size))
                        number += 1
                for near, first in ((b, number - 6), (a, number - 3)):
                    for due in range(first, first + 3):
                        _, received = await near.events.next("frame")
                        assert received.fields["number"] == due
                        [tensor] = decode(received.descriptors, received.payload)
                        expected = torch.arange(received.fields["length"], dtype=torch.uint8)
                        assert torch.equal(tensor, expected)
                await carried_by(count, a, b)
        for near, far in ((a, b), (b, a)):
            await near.links.deliver(far.name, frame())
            await far.events.next("frame")
            assert near.links.unacknowledged == 0


async def test_streams_that_are_added_have_tls_as_the_others_have() -> None:
    authority = Authority.make(time.time())
    credentials = [certified(authority, Role.NODE, identity(name)) for name in "ab"]
    a, b = (
        Node(name, settings=replace(QUICK, credentials=own))
        for name, own in zip("ab", credentials, strict=True)
    )
    async with started(a, b), Wire(b.address) as wire:
        b.address = wire.address
        view(1, a, b)
        await up(a, b)
        want(a, 4)
        await carried_by(4, a, b)
        for number in range(9):
            assert a.links.send("b", frame(30_000, number=number))
        await nine_frames(a, b)
        assert len(wire.carried) == 2 * 5, "both ways, and messages have one of their own"
        assert all(carried[:2] == TLS_HANDSHAKE for carried in wire.carried)
        want(a, 1)
        await carried_by(1, a, b)


async def test_a_link_goes_on_when_a_stream_that_was_added_breaks() -> None:
    async with relayed() as (a, b, wire):
        want(a, 4)
        await carried_by(4, a, b)
        for number in range(9):
            assert a.links.send("b", frame(30_000, number=number))
        await asyncio.sleep(0)
        wire.writers[-1].transport.abort()
        await nine_frames(a, b)
        assert a.events.queue.empty()


@asynccontextmanager
async def adding(
    node: Node, dialler: str, hello: str, heard: str, **how: Any
) -> AsyncIterator[Any]:
    """A stream that the test adds as `dialler` to the connection that began with these hellos."""
    greetings = Greetings("run", dialler, identity(how.get("key", dialler)))
    pairs = dict(metadata(node, dialler))
    pairs["planaria-link"] = greetings.sign(ADD, node.name, str(how.get("number", 1)), hello, heard)
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(node.address, own) as channel:
        call: Any = channel.stream_stream("/planaria.node.Stage/Bulk")(
            metadata=tuple(pairs.items())
        )
        async with asyncio.timeout(DEADLINE):
            if not await call.initial_metadata():
                await call.read()
        yield call


def begun(node: Node, dialler: str) -> tuple[str, str]:
    """The hellos of the connection that `dialler` has made to `node`."""
    connection = node.links.by_peer[dialler].connection
    assert connection is not None
    return connection.hellos


async def test_a_stream_is_added_by_who_has_dialled_alone_and_once() -> None:
    b = Node("b")
    async with started(b):
        b.links.set_peers(1, [peer_at("c", ""), peer_at("d", ""), b.peer()], [])
        refused = partial(pytest.raises, grpc.aio.AioRpcError)
        with refused(match="b has no connection that c has dialled"):
            async with adding(b, "c", "", ""):
                pass
        async with dialled(b, "c") as control, dialled(b, "d"):
            hello, answered = begun(b, "c")
            for dialler, heard, how in (
                ("c", (hello, answered), {"key": "d"}),
                ("d", (hello, answered), {}),
                ("c", (hello, "another"), {}),
            ):
                with refused(match="is not signed by the key") as error:
                    async with adding(b, dialler, *heard, **how):
                        pass
                assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with refused(match="no member of view 1"):
                async with adding(b, "x", hello, answered):
                    pass
            async with AsyncExitStack() as stack:
                for number in range(1, link.MOST_STREAMS + 1):
                    more = adding(b, "c", hello, answered, number=number)
                    call = await stack.enter_async_context(more)
                with refused(match="or is one more than 16"):
                    async with adding(b, "c", hello, answered, number=99):
                        pass
                await call.write(pack_chunk())
                assert await call.read() is grpc.aio.EOF
                for number in (5, link.MOST_STREAMS, 0, -1, "seven", "9" * 80):
                    with refused(match=f"stream {number} was there before"):
                        async with adding(b, "c", hello, answered, number=number):
                            pass
                async with adding(b, "c", hello, answered, number=100) as call:
                    head = frame(0).head()
                    await call.write(pack_chunk(frame=1, size=1, head=head, data=[b"a"], order=2))
                    await call.write(pack_chunk(frame=1, order=2))
                    assert "in place 2, which is taken" in await last_words(control)
                control.cancel()


# Loss


async def test_a_link_goes_on_where_it_was_when_its_connections_break() -> None:
    async with relayed() as (a, b, wire):
        for time in range(5):
            for near, far in ((a, b), (b, a)):
                for number in range(4):
                    assert near.links.send(far.name, message(4 * time + number))
                    assert near.links.send(far.name, frame(7000, number=4 * time + number))
            await asyncio.sleep(0)
            wire.cut()
            assert a.links.linked("b")
            assert b.links.linked("a")
        for near, far in ((a, b), (b, a)):
            await received(near, far, 20, 7000)
            assert near.events.queue.empty()


async def test_connections_have_no_pauses_after_which_tcp_starts_slowly() -> None:
    assert link.WARM < 200, "Linux's least timeout is a round trip and 200 ms"
    async with relayed(replace(QUICK, heartbeat=60.0, silence=600.0)) as (a, b, wire):
        a.links.send("b", frame(number=0))
        await b.events.next("frame")
        assert len(wire.carried) == 4, "messages and frames, each way"
        more = [len(carried) + 100 for carried in wire.carried]
        await until(
            lambda: all(len(way) > size for way, size in zip(wire.carried, more, strict=True))
        )


async def silenced(monkeypatch: pytest.MonkeyPatch, *nodes: Node) -> None:
    """Makes the links of these nodes, and of no others, silent for too long."""
    silences = [link._silence for node in nodes for link in node.links.by_peer.values()]
    tick = Silence.tick
    monkeypatch.setattr(
        Silence, "tick", lambda self, now: 3.14 if self in silences else tick(self, now)
    )


@pytest.mark.parametrize("loser", ["a", "b"])
async def test_a_link_that_does_not_come_back_tells_what_may_be_lost(
    monkeypatch: pytest.MonkeyPatch, loser: str
) -> None:
    async with relayed() as (a, b, wire):
        near, far = (a, b) if loser == "a" else (b, a)
        near.links.send(far.name, frame(5000, number=0))
        assert (await far.events.next("frame"))[1].fields == {"number": 0}
        await until(lambda: near.links.unacknowledged == 0)

        wire.passing.clear()
        for number in range(1, 9):
            near.links.send(far.name, frame(5000, number=number))
        assert near.links.unacknowledged == 40_000
        wire.cut()
        await silenced(monkeypatch, near)
        peer, reason, lost = await near.events.next("lost")
        assert (peer, reason) == (far.name, "silent for 3.1 s")
        assert [item.fields["number"] for item in lost] == list(range(1, 9))
        assert near.links.unacknowledged == 0

        wire.passing.set()  # far hasn't noticed, and learns of the loss from either side's dial
        why = (await far.events.next("lost"))[1]
        assert "has no such link" in why or "anew" in why
        await up(a, b)
        near.links.send(far.name, frame(number=9))
        assert (await far.events.next("frame"))[1].fields == {"number": 9}


# Links that neither side needs

SOON = replace(QUICK, heartbeat=0.02, silence=DEADLINE, rest=0.1)


def rest(node: Node, peer: str) -> bool:
    return node.links.linked(peer) and peer not in node.links.peers


@asynccontextmanager
async def on_demand(**addresses: str) -> AsyncIterator[tuple[Node, Node]]:
    """Two nodes, of which b demands the link. `addresses`: their addresses in the view."""
    a, b = Node("a", settings=SOON), Node("b", settings=SOON)
    async with started(a, b):
        a.address, b.address = addresses.get("a", a.address), addresses.get("b", b.address)
        for node in (a, b):
            node.links.set_peers(1, [a.peer(), b.peer()], [])
        b.links.demand("a")
        await up(a, b)
        yield a, b
        assert a.events.queue.empty() and b.events.queue.empty()


@pytest.mark.parametrize("sender", ["a", "b"])
async def test_a_link_that_neither_side_needs_rests_until_one_has_something_to_send(
    sender: str,
) -> None:
    async with on_demand() as ends:
        near, far = ends if sender == "a" else ends[::-1]
        for _ in range(2):
            near.links.send(far.name, message(0))
            near.links.send(far.name, frame(5000, number=0))
            await received(far, near, 1, 5000)
            await until(lambda: rest(near, far.name) and rest(far, near.name))
            await until(lambda: not any(end.links._dialling for end in ends))


@pytest.mark.parametrize("address", ["", "127.0.0.1:1"])
async def test_a_link_does_not_rest_that_one_side_could_not_wake(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = asyncio.Event()

    async def look_for(links: Links, peer: str) -> bool:
        rests = await whether(links, peer)
        looked.set()
        return rests

    whether = Links.look_for
    monkeypatch.setattr(Links, "look_for", look_for)
    async with on_demand(b=address) as (a, b):
        if address:
            async with asyncio.timeout(DEADLINE):
                await looked.wait()
        before = b.links.bytes_in
        await until(lambda: b.links.bytes_in > before + 500)  # of heartbeats
        assert not (rest(a, "b") or rest(b, "a"))


async def test_a_relayed_peer_that_leaves_while_it_is_looked_for_is_not_dialled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def look_for(links: Links, peer: str) -> bool:
        links.set_peers(2, [a.peer(), c.peer()], ["c"])
        return True

    monkeypatch.setattr(Links, "look_for", look_for)
    a, b, c = map(Node, "abc")
    async with started(a, b, c, listen="abc"):
        b.address = "127.0.0.1:1"
        view(1, a, b, c)
        for node in (a, b, c):
            node.links.set_relays([Relay("a", "b", "c")])
        await until(lambda: a.links.view == 2 and "b" not in a.links._dialling)
    assert "crashed" not in caplog.text


async def test_who_acknowledges_nothing_is_lost_with_what_waits_for_it() -> None:
    """The peer's connection is up, but the peer acknowledges nothing."""
    b = Node("b", settings=replace(QUICK, held=20_000))
    async with started(b):
        b.links.set_peers(1, [peer_at("c", ""), b.peer()], [])
        async with dialled(b, "c"):
            await b.events.next("up")
            for number in range(9):
                b.links.send("c", frame(9000, number=number))
            assert (await b.events.next("lost"))[1].startswith("c has not taken the last 2")


@pytest.mark.parametrize("leaver", ["a", "b"])
async def test_a_node_that_stops_is_lost_at_once_and_reports_nothing_itself(leaver: str) -> None:
    async with linked() as (a, b):
        gone, left = (a, b) if leaver == "a" else (b, a)
        await gone.links.stop()
        assert (await left.events.next("lost"))[0] == gone.name
        assert gone.events.queue.empty()
        assert not left.links.linked(gone.name)


async def test_who_is_no_member_any_more_is_disconnected_unreported() -> None:
    async with linked() as (a, b):
        b.links.set_peers(2, [b.peer()], [])
        assert not b.links.linked("a")
        peer, reason, _ = await a.events.next("lost")
        assert (peer, reason) == ("b", "b closed the link: a is no member of view 2")
        assert b.events.queue.empty()


def test_silence_is_what_lasts_as_long_as_the_limit() -> None:
    silence = Silence(limit=3.0, interval=1.0, now=0.0)
    assert [silence.tick(now) for now in (1.0, 2.0)] == [None, None]
    assert silence.tick(3.0) == 3.0
    silence.heard(3.5)
    assert [silence.tick(now) for now in (4.0, 5.0, 6.0)] == [None, None, None]
    assert silence.tick(7.0) == 3.5


def test_a_node_that_was_busy_itself_accuses_nobody() -> None:
    silence = Silence(limit=3.0, interval=1.0, now=0.0)
    assert silence.tick(1.0) is None
    assert silence.tick(12.0) is None  # ten seconds late
    assert silence.tick(12.5) is None
    assert silence.tick(13.5) == 3.5 - 0.0


async def test_a_listening_node_answers_the_standard_health_check() -> None:
    """A node also answers under its own name, by which the registry checks a silent node."""
    node = Links("run", "a", identity("a"), Recorder())
    port = await node.start("127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service in ("", "planaria.node.Stage", "a"):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await node.stop()


async def test_a_delivery_is_over_when_the_peer_has_it_or_the_link_is_lost() -> None:
    a, b = Node("a"), Node("b")
    async with started(a, b):
        view(1, a, b)
        await a.events.next("up")
        assert a.links.peers == ["b"]
        frame = Frame("probe", (0, 0), {}, [], bytes(10_000))
        async with asyncio.timeout(DEADLINE):
            await a.links.deliver("b", frame)
        await b.events.next("up")
        assert (await b.events.next("frame"))[1].size == 10_000
        delivering = asyncio.create_task(a.links.deliver("b", frame))
        await asyncio.sleep(0)
        a.links.set_peers(2, [a.peer()], [])
        with pytest.raises(ConnectionError, match="the link to b is lost: b is no member"):
            await delivering
        with pytest.raises(ConnectionError, match="no link to b"):
            await a.links.deliver("b", frame)


MANY_IDENTITIES = """
from planaria.bootstrap.identity import Identity
from planaria.node.wire.link import Links

def resident():
    return int(open("/proc/self/statm").read().split()[1])

Links("run", "first", Identity.generate(), None)
before = resident()
for name in "abcdef":
    Links("run", name, Identity.generate(), None)
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_a_node_that_joins_anew_takes_no_more_memory() -> None:
    """Counts resident pages: the memory of one such node would be 7,936 pages of 4 KiB."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_IDENTITIES], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) < 1000


async def test_strangers_who_hold_connections_are_let_go_and_members_have_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("planaria.bootstrap.connection_limits.HANDSHAKE", 0.5)
    a, b, c = Node("a"), Node("b"), Node("c")
    async with started(a, b, c):
        view(1, a, b)
        await up(a, b)
        place = Address.parse(a.address)
        strangers = [await asyncio.open_connection(*place) for _ in range(10)]
        ended = asyncio.as_completed([reader.read() for reader, _ in strangers], timeout=DEADLINE)
        for end in ended:
            with suppress(ConnectionError):
                await end
        for node, linked in ((a, "bc"), (b, "a"), (c, "a")):
            node.links.set_peers(2, [other.peer() for other in (a, b, c)], linked)
        assert await a.events.next("up") == ("c",)
        assert await c.events.next("up") == ("a",)
        a.links.send("b", Message(reduce={}))
        assert (await b.events.next("message"))[0] == "a"
        for _, writer in strangers:
            writer.close()

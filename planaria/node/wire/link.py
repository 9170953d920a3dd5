"""Links: messages and frames from node to node.

A link is a session (session.py) over a sequence of connections (connection.py). link_table.py
decides which links there are, and who dials. `Links` dials and accepts: it makes each connection by
a handshake (greetings.py). Either side may dial; then both sides are alike, except that the dialler
adds streams. Two nodes that can't reach each other connect through a third member (relays.py) until
they can.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import re
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, NamedTuple, Protocol

from planaria.bootstrap.address import EVERYWHERE, Reach
from planaria.bootstrap.credentials import PLAIN, Credentials
from planaria.bootstrap.grpc_transport import GrpcTransport
from planaria.bootstrap.identity import Identity, instance_of
from planaria.bootstrap.registry_pb2 import Cause
from planaria.bootstrap.transport import (
    AcceptedStream,
    Broken,
    Channel,
    DialledStream,
    Handler,
    Stream,
    Transport,
)
from planaria.node.wire import stage_pb2
from planaria.node.wire.background import Background
from planaria.node.wire.connection import FAREWELL, Bulk, Connection, Link, Traffic
from planaria.node.wire.frame_format import HEAD_LIMIT, PAYLOAD_LIMIT, Frame, WireError, seal
from planaria.node.wire.greetings import ADD, ANSWER, DIAL, Greetings, check_metadata, metadata
from planaria.node.wire.link_table import FIRST_PAUSE, LONGEST_PAUSE, LinkTable, Peer
from planaria.node.wire.link_table import HEAD_START as HEAD_START
from planaria.node.wire.observers import Observers
from planaria.node.wire.relays import Call, Relay, Relays
from planaria.node.wire.session import DialRefused, Hello, Session, SessionBounds
from planaria.node.wire.streams import MOST as MOST_STREAMS

log = logging.getLogger(__name__)

CHUNK_LIMIT: Final = 4 << 20  # bytes; gRPC slows down beyond
MESSAGE_LIMIT: Final = CHUNK_LIMIT + HEAD_LIMIT + 1024  # bytes
CARRIED: Final = 1024  # bytes of overhead of a relayed message
HANDSHAKE_LIMIT: Final = 1024  # streams without a link, of all diallers together
DIRECTLY: Final = 5.0  # seconds between two checks whether a relay is still needed
LOOK: Final = 2.0  # seconds that such a check takes at most
IDLE: Final = 60_000  # milliseconds that a connection without calls stays open
WARM: Final = 150
"""Milliseconds between the answer to a ping and the next one, on each connection. Linux halves a
connection's congestion window for each pause of a round trip and 0.2 s, down to ten packets (RFC
2861). Pings leave no such pause, so the next burst need not start slowly."""

SERVICE: Final = "planaria.node.Stage"


@dataclass(frozen=True)
class LinkSettings(SessionBounds):
    """The settings of a node's links. Times in seconds, sizes in bytes."""

    chunk: int = 2 << 20  # at most CHUNK_LIMIT
    window: int = 16 << 20  # two chunks at least
    payload: int = PAYLOAD_LIMIT
    messages: int = 64 << 20
    held: int = 4 << 30
    heartbeat: float = 0.5
    silence: float = 3.0  # after which a link counts as lost; two heartbeats at least
    rest: float = 60.0  # without use, after which an unrequired link, or a Bulk, is given up
    view_wait: float = 2.0  # for the view that makes an unknown dialler a member
    handshake: float = 5.0
    background: Callable[[], Background] = Background  # for each connection
    credentials: Credentials = PLAIN
    insecure: bool = False  # plain text is accepted beyond this machine
    reach: Reach = EVERYWHERE  # addresses at which other nodes may be dialled


class LinkEvents(Protocol):
    """Callbacks on the event loop, in order; they must not block. A link is reported as up, then at
    most once as lost; messages and frames of its peer come between. Sleep and rest aren't
    reported. `now`: by the loop's clock."""

    def on_message(self, peer: str, message: stage_pb2.Message, now: float) -> None: ...

    def on_frame(self, peer: str, frame: Frame, now: float) -> None: ...

    def on_link_up(self, peer: str, now: float) -> None: ...

    def on_link_lost(
        self, peer: str, reason: str, unacknowledged: list[Frame], now: float, cause: Cause
    ) -> None:
        """`unacknowledged`: frames, including queued ones, that the peer may not have. `cause`: of
        an accusation against the peer, unless SILENT."""


class _Dial(NamedTuple):
    """A dial of a peer that isn't answered yet: its session and hello."""

    node: str
    session: Session
    hello: Hello
    signed: str  # the hello, with its signature


class Links(LinkTable):
    """This node's links. Belongs to the event loop that it is started on."""

    def __init__(
        self,
        run: str,
        node: str,
        identity: Identity,
        events: LinkEvents,
        settings: LinkSettings | None = None,
        observers: Observers | None = None,
        transport: Transport | None = None,
    ) -> None:
        """`transport`: gRPC unless given."""
        self.run, self.events = run, events
        self.settings = settings = settings or LinkSettings()
        super().__init__(node, lambda number: Session(number, settings, settings.background))
        self._greetings = Greetings(run, node, identity)
        options = _options(settings.silence), _options(settings.silence, server=True)
        self._transport = transport or GrpcTransport(
            settings.credentials, *options, settings.reach, settings.insecure
        )
        self._observers = observers  # None: only members are answered
        self.traffic: dict[str, Traffic] = {}  # by peer, of all its links so far
        self._view_changed = asyncio.Event()
        self.relays = Relays(node, self._send_relayed, self._called)
        self._handshakes = 0
        self._settling: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by peer
        self._trying: dict[asyncio.Task[None], None] = {}  # to dial, or to call
        self._tasks: dict[asyncio.Task[None], None] = {}  # both in the order of their start
        teach_malloc()

    async def start(self, listen: str | None) -> int:
        """Accept links on HOST:PORT, port 0: any that is free. Returns the port; 0 for None, when
        this node only dials. Raises OSError when it can't listen there, and CredentialsError for
        plain text beyond this machine without `insecure`."""
        if listen is None:
            return 0
        handlers: dict[str, Handler] = {
            f"{SERVICE}/{name}": partial(self._accept, name) for name in ("Control", "Bulk")
        }
        if self._observers is not None:
            handlers[f"{SERVICE}/Ask"] = self._accept_observer
        port = await self._transport.serve(listen, handlers, ("", SERVICE, self.node))
        self.dialable = True
        return port

    async def stop(self) -> None:
        """End all links, unreported, and leave nothing running."""
        self.stopping = True
        if self._observers is not None:
            self._observers.close(f"{self.node} stops")
        self._view_changed.set()
        connections = [link.connection for link in self.by_peer.values() if link.connection]
        for link in list(self.by_peer.values()):
            link.end(f"{self.node} stops", report=False)
        await asyncio.gather(*(connection.over.wait() for connection in connections))
        trying = [*self._trying]
        for task in trying:
            task.cancel()
        await asyncio.gather(*trying, return_exceptions=True)
        await self._transport.stop(FAREWELL)
        if self._tasks:
            _, stuck = await asyncio.wait(self._tasks, timeout=FAREWELL)
            for task in stuck:
                log.warning("cancelled %s, which did not end by itself", task.get_name())
                task.cancel()

    def set_peers(self, view: int, peers: Iterable[Peer], linked: Iterable[str]) -> None:
        super().set_peers(view, peers, linked)
        self._view_changed.set()
        self._view_changed = asyncio.Event()

    def set_relays(self, relays: Iterable[Relay]) -> None:
        """Set the relays of the view last passed to `set_peers`."""
        self.relays.set(relays)
        for peer in self.relays.peers:
            self.dial_soon(peer)

    def send(self, peer: str, item: stage_pb2.Message | Frame) -> bool:
        """Queue a message or frame for a peer. False: without a link, the item is dropped. Raises
        WireError for a frame that can't travel, and for a message that is too long."""
        link = self.by_peer.get(peer)
        if link is None:
            return False
        if isinstance(item, Frame):
            link.send_frame(item)
            return True
        data = seal(item.SerializeToString())
        if len(data) > MESSAGE_LIMIT:
            raise WireError(f"a message of {len(data)} bytes; at most {MESSAGE_LIMIT}")
        link.send(data)
        return True

    async def deliver(self, peer: str, frame: Frame) -> None:
        """Send a peer a frame, and wait until it has all of it. Raises ConnectionError when the
        link is missing or lost; WireError when the frame can't travel."""
        link = self.by_peer.get(peer)
        if link is None:
            raise ConnectionError(f"there is no link to {peer}")
        await link.deliver(frame)

    @property
    def bytes_in(self) -> int:
        return sum(traffic.bytes_in for traffic in self.traffic.values())

    @property
    def bytes_out(self) -> int:
        return sum(traffic.bytes_out for traffic in self.traffic.values())

    # For Link and Connection

    def forget(self, link: Link, report: bool) -> None:
        del self.by_peer[link.peer]
        self.relays.lost(link.peer)
        self.dial_soon(link.peer)
        if report:
            unfinished = link.session.outbox.unfinished()
            self.events.on_link_lost(link.peer, link.reason, unfinished, link.now, link.cause)

    async def look_for(self, peer: str) -> bool:
        """Whether the peer is a member, and answers at its address."""
        if (member := self.members.get(peer)) is None:
            return False
        return bool(await self._transport.is_alive(peer, member.address, LOOK))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._trying.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s crashed", task.get_name(), exc_info=error)

    # Dialling

    def via(self, peer: str) -> str:
        return self.relays.via(peer)

    def start_trying(self, peer: str, by_relay: bool, wait: float) -> None:
        name = f"{'call' if by_relay else 'dial'} {peer}"
        self._trying[self.spawn(self._keep_trying(peer, by_relay, wait), name)] = None

    async def _keep_trying(self, node: str, by_relay: bool, wait: float) -> None:
        """Dial, or call by the relay, until the link is up, by a dial of either side."""
        due = self.is_to_call if by_relay else self.is_to_dial
        trying = self._calling if by_relay else self._dialling
        pause, logged = FIRST_PAUSE, ""
        try:
            await asyncio.sleep(wait)
            while due(node):
                why = ""
                try:
                    await (self._call_by_relay(node) if by_relay else self._dial_if_worth(node))
                    pause = FIRST_PAUSE
                except (DialRefused, WireError) as error:
                    why = str(error)
                if why and why != logged and due(node):
                    by = f" by {self.via(node)}" if by_relay else ""
                    log.warning("can't link to %s%s: %s", node, by, why)
                logged = why
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            trying.remove(node)

    async def _dial_if_worth(self, node: str) -> None:
        """Dial a peer. A link that is relayed sleeps meanwhile, so look for the peer before."""
        peer, link = self.members[node], self.by_peer.get(node)
        if link is None or link.connection is None or await self.look_for(node):
            await self._dial(peer)  # unless it has left meanwhile
        else:
            await asyncio.sleep(DIRECTLY)

    async def _dial(self, peer: Peer) -> None:
        """Dial a peer directly. Returns when the connection has been up and is over, or at once
        when the other side has dialled. Raises DialRefused or WireError."""
        patience = self.settings.handshake
        channel: Channel | None = None
        try:
            async with self._settling[peer.node]:
                if not self.is_to_dial(peer.node):
                    return
                if why := await self._transport.not_to_dial(peer.address):
                    raise DialRefused("INVALID_ARGUMENT", why)
                link = self.by_peer.get(peer.node)
                if link is not None and link.connection is not None:
                    self._returning.add(peer.node)
                    patience = min(patience, LOOK)
                    link.detach("it is dialled directly")
                dial = self._begin(peer.node)
                channel = self._channel(peer)
                call = self._stream("Control", peer, dial.signed, channel)
                text = await self._resume_by(dial, _accepted(call, peer.node), patience)
                hellos = dial.signed, text
                connection = self._adopt(peer.node, dial.session, [call], "", hellos, dialled=True)
                self._returning.discard(peer.node)
            await self._keep_wide(peer, connection)
        finally:
            if peer.node in self._returning:  # the direct dial has failed
                self._returning.remove(peer.node)
                self.dial_soon(peer.node)
            if channel is not None:
                await channel.close()

    async def _call_by_relay(self, node: str) -> None:
        """Call a peer by its relay; as `_dial`."""
        dial, via = self._begin(node), self.via(node)
        call = self.relays.call(node, dial.signed)
        try:
            await self._resume_by(dial, call.answer, self.settings.handshake)
            connection = self._adopt(node, dial.session, call.streams.values(), via)
            await connection.over.wait()
        finally:
            self.relays.hang_up(call)

    def _begin(self, node: str) -> _Dial:
        session = self.session(node)
        hello = session.hello()
        return _Dial(node, session, hello, self._greetings.sign(DIAL, node, hello.pack()))

    async def _resume_by(self, dial: _Dial, answer: Awaitable[str], patience: float) -> str:
        """Resume the session by the peer's signed answer, which this returns. Raises DialRefused,
        and WireError."""
        try:
            async with asyncio.timeout(patience):
                text = await answer
            key = self._member(dial.node).key
            hello = self._greetings.verify(ANSWER, dial.node, key, text, dial.signed)
            self.answered(dial.node, dial.session, dial.hello, Hello.parse(hello))
        except TimeoutError:
            raise DialRefused("DEADLINE_EXCEEDED", f"no answer in {patience} s") from None
        except DialRefused as refused:
            self.dialled_in_vain(dial.node, dial.session, refused)
            raise
        return text

    def _channel(self, peer: Peer) -> Channel:
        """A channel to a peer, with its own TCP connection."""
        return self._transport.channel(peer.address, instance_of(peer.key))

    def _stream(self, name: str, peer: Peer, signed: str, channel: Channel) -> DialledStream:
        greeting = metadata(self.run, self.node, peer.node) | {"planaria-link": signed}
        return channel.stream(f"{SERVICE}/{name}", greeting)

    async def _keep_wide(self, peer: Peer, connection: Connection) -> None:
        """Keep adding the streams that either side wants, until the connection is over."""
        adding: list[asyncio.Task[None]] = []
        calls: list[DialledStream] = []  # not accepted yet
        try:
            while not connection.over.is_set():
                for number in await connection.other_streams():
                    work = self._add_stream(peer, connection, number, calls)
                    adding.append(self.spawn(work, f"stream {number} on the link to {peer.node}"))
                adding = [task for task in adding if not task.done()]
        finally:
            for call in calls:
                call.cancel()
            if not connection.over.is_set():  # this task was cancelled
                for task in adding:
                    task.cancel()
            await asyncio.gather(*adding, return_exceptions=True)

    async def _add_stream(
        self, peer: Peer, connection: Connection, number: int, calls: list[DialledStream]
    ) -> None:
        """Add a stream to a connection, if possible. Returns when the stream is over."""
        if await self._transport.not_to_dial(peer.address) or connection.over.is_set():
            connection.added()
            return
        channel = self._channel(peer)
        text = self._greetings.sign(ADD, peer.node, str(number), *connection.hellos)
        call = self._stream("Bulk", peer, text, channel)
        calls.append(call)
        try:
            try:
                async with asyncio.timeout(self.settings.handshake):
                    answer = await _accepted(call, peer.node)
                self._greetings.verify(ANSWER, peer.node, peer.key, answer, text)
            finally:
                calls.remove(call)
                connection.added()
            await connection.add(number, call, ours=True).over.wait()
        except (DialRefused, TimeoutError) as error:
            why = f"no stream {number} on the link to {peer.node}: {str(error) or 'no answer'}"
            log.info("%s", why)
            connection.not_added(why)
        finally:
            await channel.close()

    def _adopt(
        self,
        node: str,
        session: Session,
        streams: Iterable[Stream],
        via: str = "",
        hellos: tuple[str, str] = ("", ""),
        dialled: bool = False,
    ) -> Connection:
        """Make the connection of a link after a handshake; the link may be new."""
        link = self.by_peer.get(node)
        if new := link is None:
            link = Link(self, node, session)
            self.add(link)
            link.watch()
        assert link is not None
        connection = Connection(self, link, streams, via, hellos, dialled)
        link.carry_by(connection)
        again, carried = "" if new else " again", f", carried by {via}" if via else ""
        log.info("the link to %s is up%s%s", node, again, carried)
        if new:
            self.events.on_link_up(node, link.now)
        return connection

    # Relayed connections

    def _send_relayed(self, node: str, frame: Frame, arrived: Callable[[], None] | None) -> bool:
        link = self.by_peer.get(node)
        if link is None or link.via:
            return False
        if frame.kind == "call":  # Control: never queues behind weights
            link.send(seal(frame.in_message().SerializeToString()), arrived)
        else:
            link.send_frame(frame, arrived)
        return True

    def _called(self, call: Call, signed: str) -> None:
        """Handle a peer's hello that came by its relay."""
        try:
            hello = self._heard(call.peer, signed)
            if call.peer in self._returning:
                raise DialRefused("ALREADY_EXISTS", f"{self.node} dials {call.peer} directly")
            session = self._resume(call.peer, hello)
        except DialRefused as refused:
            self.relays.refuse(call, refused.code, str(refused))
            self.relays.hang_up(call)
            return
        answer = self._greetings.sign(ANSWER, call.peer, session.hello().pack(), signed)
        self.relays.answer(call, answer)
        connection = self._adopt(call.peer, session, call.streams.values(), self.via(call.peer))
        self.spawn(self._until_hung_up(call, connection), f"call of {call.peer}")

    async def _until_hung_up(self, call: Call, connection: Connection) -> None:
        await connection.over.wait()
        self.relays.hang_up(call)

    # Accepting

    async def _accept_observer(self, stream: AcceptedStream) -> None:
        assert self._observers is not None
        try:
            check_metadata(self.run, self.node, stream.metadata)
        except DialRefused as refused:
            log.info("refused an observer at %s: %s", stream.peer, refused)
            raise Broken(refused.code, str(refused)) from None
        await self._observers.serve(stream)

    async def _accept(self, name: str, stream: AcceptedStream) -> None:
        """Serve a dialled stream, Control or Bulk, until it is over. Raises Broken."""
        self._handshakes += 1
        try:
            if name == "Bulk":
                connection, bulk = await self._take_bulk(stream)
                over = bulk.over
            else:
                connection = await self._shake_hands(stream)
                over = connection.over
        except DialRefused as refused:
            level = logging.WARNING if refused.code == "UNAUTHENTICATED" else logging.INFO
            log.log(level, "refused a %s stream of %s: %s", name, stream.peer, refused)
            raise Broken(refused.code, str(refused)) from None
        finally:
            self._handshakes -= 1
        try:
            await over.wait()
            if connection.over.is_set():
                code = "ABORTED" if connection.is_last else "UNAVAILABLE"
                raise Broken(code, connection.reason)
        finally:  # cancelled: the dialler is gone
            if not over.is_set():
                connection.end("the connection broke")

    async def _shake_hands(self, stream: AcceptedStream) -> Connection:
        """Accept a dialled connection. Raises DialRefused."""
        dialler, signed = await self._hello_of(stream)
        hello = self._heard(dialler, signed)
        async with self._after_own_dial(dialler):
            self._member(dialler)
            session = self._resume(dialler, hello)
            answer = session.hello()
            text = self._greetings.sign(ANSWER, dialler, answer.pack(), signed)
            await stream.accept(self._answering(text))
            if session is not self.session(dialler) or not session.is_newest(answer):
                raise DialRefused("ALREADY_EXISTS", "another connection has come up")
            return self._adopt(dialler, session, [stream], hellos=(signed, text))

    async def _hello_of(self, stream: AcceptedStream) -> tuple[str, str]:
        """A stream's dialler, if it may have a link, and its signed hello. Raises DialRefused."""
        if self._handshakes > HANDSHAKE_LIMIT:
            raise DialRefused(
                "RESOURCE_EXHAUSTED", f"{self.node} is in {HANDSHAKE_LIMIT} handshakes"
            )
        check_metadata(self.run, self.node, stream.metadata)
        dialler = stream.metadata.get("planaria-node", "")
        try:
            async with asyncio.timeout(self.settings.view_wait):
                while dialler not in self.members and not self.stopping:
                    await self._view_changed.wait()
        except TimeoutError:
            raise DialRefused(
                "PERMISSION_DENIED",
                f"{dialler!r} is no member of view {self.view}, the newest that {self.node} "
                f"knows; waited {self.settings.view_wait} s for a newer one",
            ) from None
        return dialler, stream.metadata.get("planaria-link", "")

    def _member(self, node: str) -> Peer:
        """The member with this id. Raises DialRefused if there is none, or this node stops."""
        if self.stopping:
            raise DialRefused("ABORTED", f"{self.node} stops")
        if node not in self.members:
            raise DialRefused("PERMISSION_DENIED", f"{node} is no member of view {self.view}")
        return self.members[node]

    def _heard(self, dialler: str, signed: str) -> str:
        """The verified hello of a member that dials. Raises DialRefused."""
        hello = self._greetings.verify(DIAL, dialler, self._member(dialler).key, signed)
        if (link := self.by_peer.get(dialler)) is not None:
            link.heard()
        return hello

    def _resume(self, dialler: str, hello: str) -> Session:
        """Resume the session that the dialler names, or begin one. Raises DialRefused."""
        try:
            return self.resume(dialler, Hello.parse(hello))
        except WireError as error:
            raise DialRefused("INVALID_ARGUMENT", str(error)) from None

    async def _take_bulk(self, stream: AcceptedStream) -> tuple[Connection, Bulk]:
        """Accept a stream that the dialler adds to the connection. Raises DialRefused."""
        dialler, text = await self._hello_of(stream)
        peer, link = self._member(dialler), self.by_peer.get(dialler)
        connection = link.connection if link is not None else None
        if connection is None or connection.dialled or connection.via:
            why = f"{self.node} has no connection that {dialler} has dialled"
            raise DialRefused("FAILED_PRECONDITION", why)
        word = self._greetings.verify(ADD, dialler, peer.key, text, *connection.hellos)
        number = int(word) if re.fullmatch("[0-9]{1,9}", word) else 0
        if not connection.may_add(number):
            why = f"stream {word[:80]} was there before, or is one more than {MOST_STREAMS}"
            raise DialRefused("RESOURCE_EXHAUSTED", why)
        answer = self._greetings.sign(ANSWER, dialler, "taken", text)
        try:
            await stream.accept(self._answering(answer))
        finally:
            connection.added()
        return connection, connection.add(number, stream, ours=False)

    def _answering(self, signed: str) -> dict[str, str]:
        return {"planaria-node": self.node, "planaria-link": signed}

    @asynccontextmanager
    async def _after_own_dial(self, dialler: str) -> AsyncIterator[None]:
        """Delay a peer's dial for a while until this node's own has succeeded or failed. Of two
        dials that cross, that of the smaller id becomes the connection."""
        lock, locked = self._settling[dialler], False
        if self.node < dialler:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEAD_START):
                    locked = await lock.acquire()
        try:
            yield
        finally:
            if locked:
                lock.release()


def _options(silence: float, server: bool = False) -> list[tuple[str, int]]:
    options = [
        ("grpc.max_receive_message_length", MESSAGE_LIMIT + CARRIED),
        ("grpc.max_send_message_length", MESSAGE_LIMIT + CARRIED),
        ("grpc.keepalive_time_ms", WARM),
        ("grpc.keepalive_timeout_ms", int(2000 * silence)),  # a link ends by its own silence first
        ("grpc.http2.max_pings_without_data", 0),
    ]
    if server:
        return [
            *options,
            ("grpc.max_concurrent_streams", 4),
            ("grpc.max_connection_idle_ms", IDLE),
            ("grpc.http2.max_ping_strikes", 0),  # no ping is one too many
        ]
    return [
        *options,
        ("grpc.use_local_subchannel_pool", 1),  # a connection of its own for each channel
        ("grpc.enable_retries", 0),
    ]


@cache
def teach_malloc() -> None:
    """Raise malloc's threshold: handing freed chunks back to the kernel halves the speed of frames.
    glibc keeps twice the largest block freed so far (mallopt(3), M_MMAP_THRESHOLD; at most 32 MiB
    counts). So this frees one, never touched. Only once: the next one would be kept memory, touched
    in full. Threads share one arena (mallopt's M_ARENA_MAX, -8), since each arena keeps as much."""
    bytes(31 << 20)
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(-8, 1)


async def _accepted(call: DialledStream, node: str) -> str:
    """The signed hello of `node`, which has accepted this stream. Raises DialRefused."""
    try:
        received = await call.accepted()
        if received.get("planaria-node") != node:
            await call.read()  # raises the status that the stream ended with
            raise DialRefused("NOT_FOUND", f"no node {node} at the other end")
    except Broken as broken:
        raise DialRefused(broken.code, str(broken)) from None
    return received.get("planaria-link", "")

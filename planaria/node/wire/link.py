"""Links: messages and frames from node to node.

A link is a session (session.py) over a sequence of connections. A connection has a gRPC stream for
messages, Control, and Bulk streams for frames. Each has its own TCP connection, so that a vote
never queues behind weights. It has no Bulk stream without frames, one with frames, and more where
one TCP connection can't use the link's capacity (streams.py). Either side may dial; then both sides
are alike, except that the dialler adds streams. When a stream breaks, the link sleeps until one
side has dialled again, and resumes; it is lost when that takes too long. Two nodes that can't reach
each other connect through a third member (relays.py) until they can. A link that neither side needs
rests (idle.py): it has no connection, and nobody dials before there is something to send.

`Links` keeps the links up that the newest view requires, and accepts those that members of that
view dial.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import re
from collections import defaultdict
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final, Protocol
from urllib.parse import quote, unquote

import grpc
from grpc import StatusCode
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from planaria.bootstrap.address import EVERYWHERE, Reach, resolved_not_to_dial
from planaria.bootstrap.connection_limits import open_descriptors, server_options
from planaria.bootstrap.credentials import PLAIN, Credentials, add_port
from planaria.bootstrap.credentials import channel as open_channel
from planaria.bootstrap.identity import Identity, instance_of
from planaria.bootstrap.liveness import is_alive
from planaria.bootstrap.registry_pb2 import SILENT, Cause
from planaria.node.wire import stage_pb2
from planaria.node.wire.background import Background
from planaria.node.wire.budget import PEERS
from planaria.node.wire.chunks import ACKNOWLEDGE_EVERY
from planaria.node.wire.frames import (
    HEAD_LIMIT,
    PAYLOAD_LIMIT,
    Frame,
    WireError,
    pack_chunk,
    parse_chunk,
    parse_message,
    seal,
)
from planaria.node.wire.greetings import ForgedError, Greetings
from planaria.node.wire.idle import IdleEnd
from planaria.node.wire.observers import Observers
from planaria.node.wire.relays import KINDS as RELAYED
from planaria.node.wire.relays import Call, CallRefusedError, Relay, Relays
from planaria.node.wire.round_trip import RoundTrip
from planaria.node.wire.session import (
    Begun,
    Forgotten,
    Hello,
    Outdated,
    Session,
    SessionBounds,
    Silence,
)
from planaria.node.wire.streams import MOST as MOST_STREAMS

log = logging.getLogger(__name__)

PROTOCOL: Final = 1
CHUNK_LIMIT: Final = 4 << 20  # bytes; gRPC slows down beyond
MESSAGE_LIMIT: Final = CHUNK_LIMIT + HEAD_LIMIT + 1024  # bytes
CARRIED: Final = 1024  # bytes of overhead of a relayed message
HANDSHAKE_LIMIT: Final = 1024  # streams without a link, of all diallers together
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two dials
HEAD_START: Final = 1.0  # seconds that the side not in charge of dialling waits before it dials
DIRECTLY: Final = 5.0  # seconds between two checks whether a relay is still needed
LOOK: Final = 2.0  # seconds that such a check takes at most
IDLE: Final = 60_000  # milliseconds that a connection without calls stays open
FAREWELL: Final = 1.0  # seconds for a peer to read why a link is closed

SERVICE: Final = "planaria.node.Stage"
_CLOSES: Final = pack_chunk()  # the last chunk of a Bulk stream
LONGEST_REASON: Final = 1000  # characters of a farewell
_NO_LINK_THERE: Final = (  # answers of a peer that has no such link
    StatusCode.DATA_LOSS,
    StatusCode.NOT_FOUND,
    StatusCode.PERMISSION_DENIED,
    StatusCode.ABORTED,
)


@dataclass(frozen=True)
class LinkSettings:
    """Times in seconds, sizes in bytes."""

    heartbeat: float = 0.5
    silence: float = 3.0  # after which a link counts as lost
    rest: float = 60.0  # without use, after which an unrequired link, or a Bulk, is given up
    view_wait: float = 2.0  # for the view that makes an unknown dialler a member
    handshake: float = 5.0
    chunk: int = 2 << 20
    window: int = 16 << 20  # unacknowledged, in each direction
    payload: int = PAYLOAD_LIMIT
    messages: int = 64 << 20  # unacknowledged by a peer
    held: int = 4 << 30  # of unacknowledged messages and frames
    background: Callable[[], Background] = Background  # for each connection
    insecure: bool = False  # plain text is accepted beyond this machine
    reach: Reach = EVERYWHERE  # addresses at which other nodes may be dialled

    def __post_init__(self) -> None:
        if not 0 < self.chunk <= CHUNK_LIMIT:
            raise ValueError(f"chunk = {self.chunk} is not in 1..{CHUNK_LIMIT} bytes")
        if self.window < ACKNOWLEDGE_EVERY * self.chunk:
            raise ValueError(
                f"window = {self.window} is less than {ACKNOWLEDGE_EVERY} chunks of {self.chunk}"
            )
        if self.silence < 2 * self.heartbeat:
            raise ValueError(
                f"silence = {self.silence} is less than two heartbeats of {self.heartbeat} s"
            )


@dataclass(frozen=True)
class Peer:
    """A member of a view. `address`: HOST:PORT; "": it only dials. `key`: its public key."""

    node: str
    address: str
    key: bytes


class LinkEvents(Protocol):
    """Callbacks on the event loop, in order; they must not block. A link is reported as up, then at
    most once as lost; messages and frames of its peer come between. Sleep and rest aren't
    reported."""

    def on_message(self, peer: str, message: stage_pb2.Message) -> None: ...

    def on_frame(self, peer: str, frame: Frame) -> None: ...

    def on_link_up(self, peer: str) -> None: ...

    def on_link_lost(
        self, peer: str, reason: str, unacknowledged: list[Frame], cause: Cause
    ) -> None:
        """`unacknowledged`: frames, including queued ones, that the peer may not have. `cause`: of
        an accusation against the peer, unless SILENT."""


@dataclass(slots=True)
class Traffic:
    """Bytes of messages and chunks, without the overhead of gRPC."""

    bytes_in: int = 0
    bytes_out: int = 0


class _LinkStream(Protocol):
    """The common part of a call and of a servicer's context."""

    async def read(self) -> Any: ...

    async def write(self, message: bytes, /) -> None: ...


class _LinkOver(Exception):  # noqa: N818 (not an error)
    """The peer has closed the link; the message says why."""


class _Refused(Exception):  # noqa: N818 (not an error of this node)
    def __init__(self, code: StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class _Link:
    """A session with a peer, from when it is up until it is lost."""

    def __init__(self, links: Links, peer: str, session: Session) -> None:
        self._links, self.settings = links, links.settings
        self.peer, self.session = peer, session
        self.connection: _Connection | None = None  # None: the link sleeps, or rests
        self.rests = False
        self.via = ""  # the current or last relay; "": direct
        self.traffic = links.traffic.setdefault(peer, Traffic())
        self._loop = asyncio.get_running_loop()
        self._silence = Silence(self.settings.silence, self.settings.heartbeat, self.now)
        self._stuck = Silence(self.settings.handshake, self.settings.heartbeat, self.now)
        self._idle = IdleEnd(self.settings.rest, self.now)
        self._framed = -math.inf  # when a frame was last sent
        self._reached = False  # by a dial of this side, so that it can be waked from here
        self._look = -math.inf  # time of the last check of `_reached`
        self._stirs = asyncio.Event()  # set when the link stops resting
        self.over = asyncio.Event()
        self.reason, self.cause = "", SILENT

    def start(self) -> None:
        self._links.spawn(self._watch(), f"watch on the link to {self.peer}")

    def send(self, message: bytes, arrived: Callable[[], None] | None = None) -> None:
        self.session.send(message, arrived)
        self._sent()

    def send_frame(self, frame: Frame, arrived: Callable[[], None] | None = None) -> None:
        self.session.send_frame(frame, arrived)
        self._framed = self.now
        self._sent()

    def _sent(self) -> None:
        self.used()
        self._links.bound_what_is_held(self)
        if self.connection is not None:
            self.connection.wake()
        elif not self.over.is_set():
            self.wake()

    def carry_by(self, connection: _Connection) -> None:
        """Use a connection that has begun with hellos of this session."""
        self._stir()
        self.via = connection.via
        self._reached = self._reached or connection.dialled
        self.connection = connection
        connection.start()

    @property
    def streams(self) -> int:
        """Number of streams that this side wants for its frames."""
        outbox = self.session.outbox
        needed = outbox.frames or self.now - self._framed < self.settings.rest
        return outbox.streams if needed else 0

    # Idle links

    def used(self) -> None:
        self._idle.used(self.now)

    def say_idle(self) -> int:
        return self._idle.say(self._is_spare(), self.now)

    def hear_idle(self, value: int) -> None:
        if self._idle.hear(value, self._is_spare(), self.now):
            self._rest("neither side needs it")

    def _is_spare(self) -> bool:
        return self._reached and self._has_no_use()

    def _has_no_use(self) -> bool:
        return not (self.session.held or self.via or self._links.asks_for(self.peer))

    def _rest(self, why: str) -> None:
        """Rest until this side has something to send, or the other one dials."""
        log.info("the link to %s is closed until it is needed: %s", self.peer, why)
        self.rests = True
        self._stirs.clear()
        self.detach(why)

    def wake(self) -> None:
        if self.rests:
            self._stir()
            self._links.dial_soon(self.peer, first=True)

    def _stir(self) -> None:
        self.heard()
        self.rests = False
        self._stirs.set()

    async def _look_for(self) -> None:
        """Check whether this side could dial a peer that has dialled it."""
        self._reached = bool(await self._links.look_for(self.peer))

    def detach(self, why: str) -> None:
        """Give up the current connection: nothing more is received from it."""
        if self.connection is not None:
            connection, self.connection = self.connection, None
            connection.end(why)

    def broke(self, connection: _Connection) -> None:
        """Handle the end of a connection."""
        if self.connection is not connection:
            return
        self.connection = None
        if self.over.is_set():
            return
        if self._idle.rests(self._is_spare(), self.now):
            self._rest(connection.reason)
            return
        log.info("the link to %s is down, and may resume: %s", self.peer, connection.reason)
        self._links.dial_soon(self.peer)

    @property
    def now(self) -> float:
        return self._loop.time()

    def heard(self) -> None:
        self._silence.heard(self.now)

    def end(self, reason: str, report: bool = True, cause: Cause = SILENT) -> None:
        """End the link; only the first reason counts. `report`: to the events."""
        if self.over.is_set():
            return
        self.reason, self.cause = reason, cause
        self.over.set()
        self._stirs.set()
        if self.connection is not None:
            self.connection.say_farewell(reason)
        self._links.forget(self, report)

    async def _watch(self) -> None:
        while not self.over.is_set():
            if self.rests:
                await self._stirs.wait()
                continue
            try:
                async with asyncio.timeout(self.settings.heartbeat):
                    await self.over.wait()
            except TimeoutError:
                if not self.rests:
                    self._mind()

    def _mind(self) -> None:
        """Run the checks of one heartbeat."""
        silent = self._silence.tick(self.now)
        if silent is not None and self._idle.rests(self._is_spare(), self.now):
            self._rest(f"silent for {silent:.1f} s")  # the peer may have hung up, and isn't needed
        elif silent is not None:
            self.end(f"silent for {silent:.1f} s")
        elif self.connection is not None:
            self.connection.beat()
            self._mind_whether_carried(self.connection)
            self._mind_whether_reached()

    def _mind_whether_carried(self, connection: _Connection) -> None:
        """End the link if frames are stuck while messages pass."""
        connection.note_streams()
        if connection.carries or not self.session.outbox.frames:
            self._stuck.heard(self.now)
        if (stuck := self._stuck.tick(self.now)) is not None:
            self.end(f"no stream for frames came up in {stuck:.1f} s")

    def _mind_whether_reached(self) -> None:
        """Check that this side can dial: a link rests only where either side can wake it, and a
        dialled node may not be able to dial."""
        idle = self._idle.is_spare(self._has_no_use(), self.now)
        if idle and not self._reached and self.now - self._look >= self.settings.rest:
            self._look = self.now
            self._links.spawn(self._look_for(), f"look for {self.peer} on the link to it")


@dataclass(slots=True, eq=False)
class _Bulk:
    """A stream for chunks."""

    number: int
    stream: _LinkStream
    ours: bool = False  # added by this side, which closes it
    closing: bool = False  # no more chunks leave by it
    over: asyncio.Event = field(default_factory=asyncio.Event)


class _Connection:
    """The streams to a peer that carry a link, from the handshake until one of them breaks."""

    def __init__(
        self,
        links: Links,
        link: _Link,
        control: _LinkStream,
        bulk: _LinkStream | None = None,
        via: str = "",
        heard: tuple[str, str] | None = None,
    ) -> None:
        """`bulk`: the only Bulk stream of a relayed connection. `heard`: the hello of the peer that
        dialled and this side's answer, with signatures."""
        self._links, self._link, self._session = links, link, link.session
        self.via = via
        self._traffic = Traffic() if via else link.traffic  # relayed data count on the relay's link
        self.heard = heard
        self.dialled = heard is None and not via  # by this side
        self._control = control
        self._bulks = {0: _Bulk(0, bulk)} if bulk is not None else {}
        self._numbers: set[int] = set()  # of the newest streams added
        self._adding = 0
        self._own_streams = self._peers_streams = 0  # wanted by this side and by the peer
        self._other_streams = asyncio.Event()  # set when the number of streams is to change
        self._something_to_say, self._something_to_carry = asyncio.Event(), asyncio.Event()
        self._heartbeat = True  # a heartbeat is due
        self._round_trip = RoundTrip()
        self._farewell = ""
        self.over = asyncio.Event()
        self.reason = ""

    def start(self) -> None:
        """Start the tasks. They end by themselves once the connection is over and its streams are
        closed: gRPC does not free what a cancelled read would have returned."""
        for work in (self._speak, self._listen):
            self._spawn(work.__name__, work)
        for bulk in self._bulks.values():
            self._use(bulk)
        self.note_streams()

    def _use(self, bulk: _Bulk) -> None:
        self._spawn("_carry", partial(self._carry, bulk), bulk)
        self._spawn("_collect", partial(self._collect, bulk), bulk)

    def _spawn(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]], bulk: _Bulk | None = None
    ) -> None:
        name = name.strip("_")
        name_of_task = f"{name} on the link to {self._link.peer}"
        self._links.spawn(self._until_over(name, work, bulk), name_of_task)

    def wake(self) -> None:
        self.note_streams()
        self._something_to_say.set()
        self._something_to_carry.set()

    def beat(self) -> None:
        self._heartbeat = True
        self._something_to_say.set()

    def end(self, reason: str, lost: bool = False) -> None:
        """End the connection; `lost`: and the link with it."""
        if self.over.is_set():
            return
        self.reason = reason
        self.over.set()
        self.wake()
        self._other_streams.set()
        for bulk in self._bulks.values():
            bulk.over.set()
        if lost:
            self._link.end(reason)
        self._link.broke(self)

    def say_farewell(self, reason: str) -> None:
        """Send why the link is over; the peer closes the connection once it has read it."""
        if not self.over.is_set():
            self._farewell = reason[:LONGEST_REASON] or "no reason"
            self.wake()
            self._links.spawn(self._close(), f"farewell on the link to {self._link.peer}")

    @property
    def peer(self) -> str:
        return self._link.peer

    @property
    def is_last(self) -> bool:
        """Whether the link is over, too."""
        return self._link.over.is_set()

    # Added streams

    @property
    def carries(self) -> bool:
        """Whether a stream for frames is up."""
        return bool(self._carrying())

    def add(self, number: int, stream: _LinkStream, ours: bool) -> _Bulk:
        bulk = self._bulks[number] = _Bulk(number, stream, ours)
        if self.over.is_set():
            bulk.over.set()
        else:
            self._use(bulk)
        return bulk

    def may_add(self, number: int) -> bool:
        """Whether a stream with this number may be added: there is room, and the number is new.
        Streams dialled together may come in any order. If so, the stream counts as being added."""
        oldest = max(self._numbers, default=0) - 4 * MOST_STREAMS
        full = len(self._bulks) + self._adding >= MOST_STREAMS
        if full or number in self._numbers or number <= max(0, oldest):
            return False
        self._numbers = {earlier for earlier in self._numbers if earlier > oldest} | {number}
        self._adding += 1
        return True

    async def other_streams(self) -> list[int]:
        """Wait until the number of streams is to change, or the connection is over. Returns the
        numbers of streams to add; surplus ones are being closed."""
        await self._other_streams.wait()
        self._other_streams.clear()
        if self.over.is_set():
            return []
        carrying = self._carrying()
        wanted = min(max(self._own_streams, self._peers_streams), MOST_STREAMS)
        for bulk in carrying[wanted:]:
            bulk.closing = True
        self.wake()
        last = max(self._numbers, default=0)
        new = [*range(last + 1, last + 1 + wanted - len(carrying) - self._adding)]
        self._numbers = {last, *new}
        self._adding += len(new)
        return new

    def added(self) -> None:
        """An attempt to add a stream has ended, with or without success."""
        self._adding -= 1

    def not_added(self, why: str) -> None:
        """An attempt to add a stream has failed. Without any other, end the connection."""
        if not (self._carrying() or self._adding):
            self.end(why)

    def _carrying(self) -> list[_Bulk]:
        return [bulk for bulk in self._bulks.values() if not bulk.closing]

    def note_streams(self) -> None:
        """Announce a change in the number of streams that this side wants."""
        if self._own_streams != self._link.streams and not self.over.is_set():
            self._own_streams = self._link.streams
            log.info("%d streams for frames to %s", self._own_streams, self._link.peer)
            self._other_streams.set()
            self.beat()

    def _gone(self, bulk: _Bulk) -> None:
        """Remove a closed stream that has carried all its chunks."""
        del self._bulks[bulk.number]
        bulk.over.set()

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(FAREWELL):
                await self.over.wait()
        except TimeoutError:
            log.info("%s did not close the link when told why", self._link.peer)
            self.end(self._link.reason)

    async def _until_over(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]], bulk: _Bulk | None
    ) -> None:
        peer, mine = self._link.peer, self._links.node
        try:
            await work()
            if bulk is None or not bulk.closing:
                self.end(f"{peer} closed the connection")
        except _LinkOver as over:
            self.end(f"{peer} closed the link: {over}", lost=True)
        except WireError as error:
            self._refuse(error)
        except grpc.aio.AioRpcError as error:
            self.end(_describe(error), lost=error.code() is StatusCode.ABORTED)
        except (grpc.aio.BaseError, asyncio.InvalidStateError, asyncio.CancelledError):
            self.end("the connection broke")
        except Exception:
            self._link.end(f"{name} crashed in {mine}, see its log")
            raise

    def _refuse(self, error: WireError) -> None:
        cause = SILENT if self.via else error.cause  # a relay may have changed it
        self._link.end(f"{self._link.peer} sent an invalid message: {error}", cause=cause)

    async def _read(self, stream: _LinkStream) -> bytes | None:
        """The next item; None: the stream has ended."""
        data = await stream.read()
        if self.over.is_set() or data is grpc.aio.EOF:
            return None
        assert isinstance(data, bytes)
        self._link.heard()
        self._traffic.bytes_in += len(data)
        return data

    async def _write(self, stream: _LinkStream, data: bytes) -> None:
        self._traffic.bytes_out += len(data)
        await stream.write(data)

    # Tasks: two, and two for each stream of chunks

    async def _speak(self) -> None:
        while not self.over.is_set():
            over = self._link.over.is_set()
            if self._farewell:
                farewell, self._farewell = stage_pb2.Farewell(reason=self._farewell), ""
                await self._write(self._control, _sealed(farewell=farewell))
            elif self._heartbeat or self._session.acknowledgement_due:
                self._heartbeat = False
                await self._write(self._control, _sealed(heartbeat=self._say_heartbeat()))
            elif not over and (received := self._session.inbox.acknowledged()):
                pairs = (
                    stage_pb2.Received(frame=number, bytes=size)
                    for number, size in received.items()
                )
                acknowledged = stage_pb2.Acknowledged(received=pairs)
                await self._write(self._control, _sealed(acknowledged=acknowledged))
            elif not over and (message := self._session.next_message()):
                await self._write(self._control, message)
            else:
                self._something_to_say.clear()
                await self._something_to_say.wait()

    async def _listen(self) -> None:
        """Read until the peer has closed the connection, even when the link is over."""
        while (data := await self._read(self._control)) is not None:
            try:
                self._hear(data)
            except WireError as error:
                self._refuse(error)

    def _hear(self, data: bytes) -> None:
        message = parse_message(data)
        body = message.WhichOneof("body")
        if body == "farewell":
            raise _LinkOver(message.farewell.reason[:LONGEST_REASON])
        if self._link.over.is_set():
            return
        if body == "heartbeat":
            self._hear_heartbeat(message.heartbeat)
            return
        self._link.used()
        if body == "acknowledged":
            self._hear_acknowledged(message.acknowledged)
            return
        self._session.message_came()
        if self._session.acknowledgement_due:
            self._something_to_say.set()
        self._links.message_came(self._link.peer, message)

    def _say_heartbeat(self) -> stage_pb2.Heartbeat:
        sent, echo = self._round_trip.say(self._link.now)
        return stage_pb2.Heartbeat(
            view=self._links.view,
            received=self._session.acknowledgement(),
            streams=self._own_streams,
            sent=sent,
            echo=echo,
            idle=self._link.say_idle(),
        )

    def _hear_heartbeat(self, heartbeat: stage_pb2.Heartbeat) -> None:
        self._session.acknowledge_messages(heartbeat.received)
        self._round_trip.hear(heartbeat, self._link.now)
        self._session.outbox.round_trip = self._round_trip.seconds
        if heartbeat.streams != self._peers_streams:
            self._peers_streams = heartbeat.streams
            self._other_streams.set()
        self._link.hear_idle(heartbeat.idle)

    def _hear_acknowledged(self, acknowledged: stage_pb2.Acknowledged) -> None:
        for frame in acknowledged.received:
            self._session.outbox.acknowledge(frame.frame, frame.bytes, self._link.now)
        self.note_streams()
        self._something_to_carry.set()

    async def _carry(self, bulk: _Bulk) -> None:
        while not (self.over.is_set() or bulk.closing):
            chunk = None if self._link.over.is_set() else self._next_chunk(bulk)
            if chunk is not None:
                await self._write(bulk.stream, chunk)
            else:
                self._something_to_carry.clear()
                await self._something_to_carry.wait()
        if self.over.is_set():
            return
        if bulk.ours:
            # The reading task gets any error, too, unless the peer has already closed the stream.
            with suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
                await self._write(bulk.stream, _CLOSES)
        else:
            self._gone(bulk)

    def _next_chunk(self, bulk: _Bulk) -> bytes | None:
        """The stream's next chunk; streams beyond the number that this side wants get none."""
        carrying, outbox = self._carrying(), self._session.outbox
        streams = min(outbox.streams, len(carrying))
        place = carrying.index(bulk) if bulk in carrying else streams
        chunk = outbox.next(self._link.now, streams, place) if place < streams else None
        self.note_streams()
        return chunk

    async def _collect(self, bulk: _Bulk) -> None:
        while (data := await self._read(bulk.stream)) is not None:
            chunk = parse_chunk(data)
            chunk.verify()
            if self._link.over.is_set():
                continue
            if not chunk.frame and not bulk.ours:
                bulk.closing = True
                self.wake()
                return
            self._link.used()
            for frame in self._session.chunk_came(chunk):
                self._links.frame_came(self._link.peer, frame)
                if self._link.over.is_set() or self.over.is_set():
                    break
            self._something_to_say.set()
        if bulk.closing and not self.over.is_set():
            self._gone(bulk)


class Links:
    """This node's links. Belongs to the event loop that it is started on."""

    def __init__(
        self,
        run: str,
        node: str,
        identity: Identity,
        events: LinkEvents,
        settings: LinkSettings | None = None,
        credentials: Credentials = PLAIN,
        observers: Observers | None = None,
    ) -> None:
        self.run, self.node, self.events = run, node, events
        self._greetings = Greetings(run, node, identity)
        self.settings = settings or LinkSettings()
        self._credentials, self._reach = credentials, self.settings.reach
        self._observers = observers  # None: only members are answered
        self.traffic: dict[str, Traffic] = {}  # by peer, of all its links so far
        self._server: Any = None
        self.view = 0
        self._peers: dict[str, Peer] = {}
        self._linked: frozenset[str] = frozenset()
        self._demanded: set[str] = set()
        self._view_changed = asyncio.Event()
        self._links: dict[str, _Link] = {}  # up, asleep or at rest
        self._begun: dict[str, Session] = {}  # of links not up yet
        self._returning: set[str] = set()  # dialled directly, relayed before
        self._relays = Relays(node, self._send_relayed, self._called)
        self._numbers = itertools.count(1)
        self._handshakes = 0
        self._settling: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by peer
        self._stopping = False
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._calling: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        _teach_malloc()

    async def start(self, listen: str | None) -> int:
        """Accept links on HOST:PORT, port 0: any that is free. Returns the port; 0 for None, when
        this node only dials. Raises OSError when it can't listen there, and CredentialsError for
        plain text beyond this machine without `insecure`."""
        if listen is None:
            return 0
        server = grpc.aio.server(options=self._options(server=True))
        handlers: dict[str, Any] = {
            "Control": grpc.stream_stream_rpc_method_handler(self._accept_control),
            "Bulk": grpc.stream_stream_rpc_method_handler(self._accept_bulk),
        }
        if self._observers is not None:
            handlers["Ask"] = grpc.stream_stream_rpc_method_handler(self._accept_observer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = add_port(server, listen, self._credentials, self.settings.insecure)
        healthy = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        await server.start()
        for name in ("", SERVICE, self.node):  # the last for the registry's liveness checks
            await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._server = server
        return port

    async def stop(self) -> None:
        """End all links, unreported, and leave nothing running."""
        self._stopping = True
        self._linked = frozenset()
        if self._observers is not None:
            self._observers.close(f"{self.node} stops")
        self._view_changed.set()
        connections = [link.connection for link in self._links.values() if link.connection]
        for link in list(self._links.values()):
            link.end(f"{self.node} stops", report=False)
        await asyncio.gather(*(connection.over.wait() for connection in connections))
        dialling = [*self._dialling.values(), *self._calling.values()]
        for task in dialling:
            task.cancel()
        await asyncio.gather(*dialling, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(FAREWELL)
        if self._tasks:
            _, stuck = await asyncio.wait(self._tasks, timeout=FAREWELL)
            for task in stuck:
                log.warning("cancelled %s, which did not end by itself", task.get_name())
                task.cancel()

    def set_peers(self, view: int, peers: Iterable[Peer], linked: Collection[str]) -> None:
        """Set the members of the newest view (own node included or not), and those of them that
        need a link. Links to other nodes end, reported as lost only if they sleep or rest. An older
        view than the last has no effect."""
        if view < self.view or self._stopping:
            return
        self.view = view
        self._peers = {peer.node: peer for peer in peers}
        self._linked = frozenset(linked) & self._peers.keys() - {self.node}
        self._demanded.clear()
        self._begun = {node: begun for node, begun in self._begun.items() if node in self._peers}
        for link in list(self._links.values()):
            if link.peer not in self._peers:
                sleeps = link.connection is None
                link.end(f"{link.peer} is no member of view {view}", report=sleeps)
        for node in self._linked:
            if not self._dialable and not self._peers[node].address and node not in self._links:
                log.info(
                    "neither this node nor %s can be dialled: another member has to relay", node
                )
            if node in self._links:
                self._links[node].wake()
            self.dial_soon(node)
        self._view_changed.set()
        self._view_changed = asyncio.Event()

    def set_relays(self, relays: Iterable[Relay]) -> None:
        """Set the relays of the view last passed to `set_peers`."""
        self._relays.set(relays)
        for peer in self._relays.peers:
            self.dial_soon(peer)

    def demand(self, node: str) -> None:
        """Dial a member that needs no link by `set_peers`, whichever id is smaller. The link rests
        once neither side has used it for a while."""
        if node in self._peers and node not in self._links and self._peers[node].address:
            self._demanded.add(node)
            self.dial_soon(node)

    def send(self, peer: str, item: stage_pb2.Message | Frame) -> bool:
        """Queue an item. False: without a link, the item is dropped. Raises WireError for a frame
        that can't travel, and for a message that is too long."""
        link = self._links.get(peer)
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
        """Send a frame, and wait until the peer has all of it. Raises ConnectionError when the link
        is missing or lost; WireError when the frame can't travel."""
        link = self._links.get(peer)
        if link is None:
            raise ConnectionError(f"there is no link to {peer}")
        arrived = asyncio.Event()
        link.send_frame(frame, arrived.set)
        waits = [asyncio.create_task(event.wait()) for event in (arrived, link.over)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not arrived.is_set():
            raise ConnectionError(f"the link to {peer} is lost: {link.reason}")

    @property
    def peers(self) -> list[str]:
        """Peers with a link, awake or asleep, that doesn't rest."""
        return sorted(peer for peer, link in self._links.items() if not link.rests)

    def linked(self, peer: str) -> bool:
        """Whether a link to `peer` exists; it may rest."""
        return peer in self._links

    def carrier(self, peer: str) -> str | None:
        """The relay of the link to `peer`; "": the link is direct; None: there is no link."""
        link = self._links.get(peer)
        return link.via if link is not None else None

    @property
    def bytes_in(self) -> int:
        return sum(traffic.bytes_in for traffic in self.traffic.values())

    @property
    def bytes_out(self) -> int:
        return sum(traffic.bytes_out for traffic in self.traffic.values())

    @property
    def unacknowledged(self) -> int:
        """Bytes of payload in unacknowledged frames, queued ones too, on links that are up."""
        return sum(link.session.outbox.unacknowledged for link in self._links.values())

    def unacknowledged_by(self, peer: str) -> int:
        """Such bytes on the link to `peer`."""
        link = self._links.get(peer)
        return link.session.outbox.unacknowledged if link is not None else 0

    # For _Link and _Connection

    def forget(self, link: _Link, report: bool) -> None:
        del self._links[link.peer]
        self._relays.lost(link.peer)
        self.dial_soon(link.peer)
        if report:
            unfinished = link.session.outbox.unfinished()
            self.events.on_link_lost(link.peer, link.reason, unfinished, link.cause)

    def asks_for(self, peer: str) -> bool:
        """Whether a connection must always be up: the view requires it, or a side with something to
        send could not dial."""
        member = self._peers.get(peer)
        dialable = member is not None and bool(member.address) and self._dialable
        return peer in self._linked or not dialable or bool(self._relays.via(peer))

    async def look_for(self, peer: str) -> bool | None:
        """Whether a member answers at its address; None: it is no member."""
        if (member := self._peers.get(peer)) is None:
            return None
        return await is_alive(peer, member.address, self._credentials, LOOK, self._reach)

    def bound_what_is_held(self, link: _Link) -> None:
        """Enforce the limits after something was queued on `link`. All links together may hold
        `PEERS` times the limit of one; beyond that, the link that holds most is lost."""
        if why := link.session.overfull():
            link.end(f"{link.peer} {why}")
        elif sum(other.session.held for other in self._links.values()) > PEERS * self.settings.held:
            greedy = max(self._links.values(), key=lambda other: other.session.held)
            greedy.end(f"{greedy.peer} has not taken the last {greedy.session.held} bytes")

    def dial_soon(self, node: str, first: bool = False) -> None:
        """Dial if that is this node's task. `first`: without delay, since the other side doesn't
        know that the link is needed."""
        if self._is_to_call(node) and node not in self._calling:
            self._calling[node] = self.spawn(self._keep_calling(node), f"call {node}")
        if self._is_to_dial(node) and node not in self._dialling:
            late = node in self._links and not (first or self._dials(node))
            work = self._keep_dialling(node, HEAD_START if late else 0.0)
            self._dialling[node] = self.spawn(work, f"dial {node}")

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    # Dialling

    @property
    def _dialable(self) -> bool:
        own = self._peers.get(self.node)
        return bool(own.address) if own is not None else self._server is not None

    def _dials(self, node: str) -> bool:
        """Whether this side brings a link up: the only one that can, else the smaller id."""
        return bool(self._peers[node].address) and (not self._dialable or self.node < node)

    def _is_to_dial(self, node: str) -> bool:
        """Whether this node must dial that one now. Both sides dial a link that sleeps."""
        if self._stopping or node not in self._peers or not self._peers[node].address:
            return False
        if (link := self._links.get(node)) is not None:
            return (link.connection is None and not link.rests) or bool(link.via)
        return node in self._demanded or (node in self._linked and self._dials(node))

    async def _keep_dialling(self, node: str, wait: float) -> None:
        """Dial after `wait` seconds, until the link is up, by a dial of either side."""
        pause, logged = FIRST_PAUSE, ""
        try:
            await asyncio.sleep(wait)
            while self._is_to_dial(node):
                if not await self._is_worth_dialling(self._peers[node]):
                    await asyncio.sleep(DIRECTLY)
                    continue
                try:
                    await self._dial(self._peers[node])
                    pause, why = FIRST_PAUSE, ""
                except grpc.aio.AioRpcError as error:
                    why = _describe(error)
                except (_Refused, WireError) as error:
                    why = str(error)
                if why and why != logged and self._is_to_dial(node):
                    log.warning("can't link to %s: %s", node, why)
                logged = why
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            del self._dialling[node]

    async def _is_worth_dialling(self, peer: Peer) -> bool:
        """Whether the peer answers, if the link is relayed: the link sleeps while it is dialled."""
        link = self._links.get(peer.node)
        if link is None or link.connection is None:
            return True
        return bool(await self.look_for(peer.node))

    async def _dial(self, peer: Peer) -> None:
        """Returns when the connection has been up and is over, or at once when the other side has
        dialled. Raises AioRpcError, _Refused or WireError."""
        patience = self.settings.handshake
        call: Any = None
        channel: grpc.aio.Channel | None = None
        try:
            async with self._settling[peer.node]:
                if not self._is_to_dial(peer.node):
                    return
                if why := await resolved_not_to_dial(peer.address, self._reach):
                    raise _Refused(StatusCode.INVALID_ARGUMENT, why)
                if (link := self._links.get(peer.node)) is not None and link.connection is not None:
                    self._returning.add(peer.node)
                    patience = min(patience, LOOK)
                    link.detach("it is dialled directly")
                session = self._session(peer.node)
                hello = session.hello()
                signed = self._greetings.to_dial(peer.node, hello.pack())
                channel = self._channel(peer)
                call = self._call("Control", peer, signed, channel)
                try:
                    async with asyncio.timeout(patience):
                        text = await _accepted(call, peer.node)
                    answer = self._answer(peer.node, signed, text)
                except (grpc.aio.AioRpcError, _Refused) as error:
                    self._dialled_in_vain(peer.node, session, error)
                    raise
                connection = self._go_on(peer.node, session, hello, answer, call)
                self._returning.discard(peer.node)
            await self._keep_wide(peer, connection, signed, text)
        except TimeoutError:
            raise _Refused(
                StatusCode.DEADLINE_EXCEEDED, f"no answer from {peer.address} in {patience} s"
            ) from None
        finally:
            if peer.node in self._returning:  # in vain
                self._returning.remove(peer.node)
                self.dial_soon(peer.node)
            if channel is not None:
                call.cancel()
                await channel.close()

    def _session(self, node: str) -> Session:
        """The session of the link, or of the link to come."""
        if (link := self._links.get(node)) is not None:
            return link.session
        if node not in self._begun:
            settings = self.settings
            bounds = SessionBounds(
                chunk=settings.chunk,
                window=settings.window,
                payload=settings.payload,
                messages=settings.messages,
                held=settings.held,
            )
            self._begun[node] = Session(next(self._numbers), bounds, settings.background)
        return self._begun[node]

    def _dialled_in_vain(
        self, node: str, session: Session, error: grpc.aio.AioRpcError | _Refused
    ) -> None:
        """Record a failed dial; the link ends if the peer answers that it has none."""
        link = self._links.get(node)
        if link is None or link.session is not session:
            return
        code = error.code() if isinstance(error, grpc.aio.AioRpcError) else error.code
        if code is StatusCode.ALREADY_EXISTS:
            link.heard()
        elif code in _NO_LINK_THERE:
            why = _describe(error) if isinstance(error, grpc.aio.AioRpcError) else str(error)
            link.end(why)

    def _go_on(
        self,
        node: str,
        session: Session,
        own_hello: Hello,
        answer: Hello,
        control: _LinkStream,
        bulk: _LinkStream | None = None,
        via: str = "",
    ) -> _Connection:
        """Resume a session by the connection that was dialled with a hello. Raises _Refused;
        WireError for an impossible answer."""
        if session is not self._session(node):
            raise _Refused(StatusCode.CANCELLED, "another link has come up")
        try:
            session.resume(answer, own_hello)
        except Outdated as why:
            raise _Refused(StatusCode.CANCELLED, str(why)) from None
        except (Begun, Forgotten) as why:
            raise WireError(f"{node} answers for another link: {why}") from None
        return self._adopt(node, session, control, bulk, via)

    def _answer(self, node: str, signed: str, text: str) -> Hello:
        """Parse a node's signed answer to a hello. Raises _Refused if another node's key has signed
        it, and WireError."""
        peer = self._peers.get(node)
        if peer is None:
            raise self._is_no_member(node)
        try:
            return Hello.parse(self._greetings.answered(node, peer.key, signed, text))
        except ForgedError as why:
            raise _Refused(StatusCode.UNAUTHENTICATED, str(why)) from None

    def _verified(self, dialler: str, text: str) -> str:
        """Verify the hello of a member that dials. Raises _Refused."""
        try:
            return self._greetings.dialled(dialler, self._peers[dialler].key, text)
        except ForgedError as why:
            raise _Refused(StatusCode.UNAUTHENTICATED, str(why)) from None

    def _channel(self, peer: Peer) -> grpc.aio.Channel:
        """A channel with its own TCP connection."""
        own = self._credentials, self._options(), instance_of(peer.key)
        return open_channel(peer.address, *own)

    def _call(self, name: str, peer: Peer, signed: str, channel: grpc.aio.Channel) -> Any:
        metadata = (
            ("planaria-run", quote(self.run)),
            ("planaria-node", self.node),
            ("planaria-peer", peer.node),
            ("planaria-protocol", str(PROTOCOL)),
            ("planaria-link", signed),
            *self._credentials.metadata,
        )
        return channel.stream_stream(f"/{SERVICE}/{name}")(metadata=metadata)

    async def _keep_wide(
        self, peer: Peer, connection: _Connection, signed: str, answered: str
    ) -> None:
        """Add the streams that either side wants, until the connection is over."""
        adding: list[asyncio.Task[None]] = []
        calls: set[Any] = set()  # not accepted yet
        try:
            while not connection.over.is_set():
                for number in await connection.other_streams():
                    work = self._add_stream(peer, connection, number, (signed, answered), calls)
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
        self,
        peer: Peer,
        connection: _Connection,
        number: int,
        begun: tuple[str, str],
        calls: set[Any],
    ) -> None:
        """Add a stream; a failure leaves the connection as it was. `begun`: the connection's
        hellos. Returns when the stream is over."""
        if await resolved_not_to_dial(peer.address, self._reach) or connection.over.is_set():
            connection.added()
            return
        channel = self._channel(peer)
        text = self._greetings.to_add(peer.node, number, *begun)
        call = self._call("Bulk", peer, text, channel)
        calls.add(call)
        try:
            try:
                async with asyncio.timeout(self.settings.handshake):
                    answer = await _accepted(call, peer.node)
                self._greetings.answered(peer.node, peer.key, text, answer)
            finally:
                calls.remove(call)
                connection.added()
            await connection.add(number, call, ours=True).over.wait()
        except (grpc.aio.AioRpcError, _Refused, ForgedError, TimeoutError) as error:
            why = _describe(error) if isinstance(error, grpc.aio.AioRpcError) else str(error)
            why = f"no stream {number} on the link to {peer.node}: {why or 'no answer'}"
            log.info("%s", why)
            connection.not_added(why)
        finally:
            call.cancel()
            await channel.close()

    @asynccontextmanager
    async def _after_own_dial(self, dialler: str) -> AsyncIterator[None]:
        """Delay a peer's dial for a while until this node's own has succeeded or failed. Of two
        dials that cross, that of the smaller id becomes the connection."""
        if self.node > dialler:
            yield
            return
        lock = self._settling[dialler]
        try:
            async with asyncio.timeout(HEAD_START):
                await lock.acquire()
        except TimeoutError:
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def _is_no_member(self, node: str) -> _Refused:
        return _Refused(StatusCode.PERMISSION_DENIED, f"{node} is no member of view {self.view}")

    def _stops(self) -> _Refused:
        return _Refused(StatusCode.ABORTED, f"{self.node} stops")

    def _adopt(
        self,
        node: str,
        session: Session,
        control: _LinkStream,
        bulk: _LinkStream | None = None,
        via: str = "",
        heard: tuple[str, str] | None = None,
    ) -> _Connection:
        """Make a connection of the link with this session."""
        link = self._links.get(node)
        if new := link is None:
            link = self._links[node] = _Link(self, node, session)
            del self._begun[node]
            link.start()
        assert link is not None
        connection = _Connection(self, link, control, bulk, via, heard)
        link.carry_by(connection)
        again, carried = "" if new else " again", f", carried by {via}" if via else ""
        log.info("the link to %s is up%s%s", node, again, carried)
        if new:
            self.events.on_link_up(node)
        return connection

    # Relayed connections

    def message_came(self, peer: str, message: stage_pb2.Message) -> None:
        if message.WhichOneof("body") == "carried":
            carried = message.carried
            self._relays.on_frame(peer, Frame.parse(carried.head, carried.payload))
        else:
            self.events.on_message(peer, message)

    def frame_came(self, peer: str, frame: Frame) -> None:
        if frame.kind in RELAYED:
            self._relays.on_frame(peer, frame)
        else:
            self.events.on_frame(peer, frame)

    def _send_relayed(self, node: str, frame: Frame, arrived: Callable[[], None] | None) -> bool:
        link = self._links.get(node)
        if link is None or link.via:
            return False
        if frame.kind == "call":  # Control: never queues behind weights
            link.send(seal(frame.in_message().SerializeToString()), arrived)
        else:
            link.send_frame(frame, arrived)
        return True

    def _is_to_call(self, node: str) -> bool:
        """Whether this node must call that one by a relay: it has the smaller id. It doesn't call
        while it tries a direct dial: a call takes less time, and would overtake it."""
        if self._stopping or node not in self._peers or not self._relays.via(node):
            return False
        if node in self._returning:
            return False
        link = self._links.get(node)
        return self.node < node and (link is None or link.connection is None)

    async def _keep_calling(self, node: str) -> None:
        pause, logged = FIRST_PAUSE, ""
        try:
            while self._is_to_call(node):
                try:
                    await self._call_by_relay(node)
                    pause, why = FIRST_PAUSE, ""
                except (_Refused, WireError, CallRefusedError) as error:
                    why = str(error)
                if why and why != logged and self._is_to_call(node):
                    log.warning("no link to %s by %s: %s", node, self._relays.via(node), why)
                logged = why
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            del self._calling[node]

    async def _call_by_relay(self, node: str) -> None:
        """Like `_dial`, by a relay. Raises CallRefusedError, too."""
        session = self._session(node)
        hello, via = session.hello(), self._relays.via(node)
        signed = self._greetings.to_dial(node, hello.pack())
        call = self._relays.call(node, signed)
        try:
            async with asyncio.timeout(self.settings.handshake):
                answer = self._answer(node, signed, await call.answer)
            streams = call.streams["Control"], call.streams["Bulk"]
            connection = self._go_on(node, session, hello, answer, *streams, via)
            await connection.over.wait()
        except CallRefusedError as error:
            code = StatusCode.__members__.get(error.code, StatusCode.UNKNOWN)
            self._dialled_in_vain(node, session, _Refused(code, str(error)))
            raise
        except TimeoutError:
            raise _Refused(
                StatusCode.DEADLINE_EXCEEDED, f"no answer in {self.settings.handshake} s"
            ) from None
        finally:
            self._relays.hang_up(call)

    def _called(self, call: Call, signed: str) -> None:
        """Handle a peer's hello that came by its relay."""
        try:
            if self._stopping or call.peer not in self._peers:
                raise self._stops() if self._stopping else self._is_no_member(call.peer)
            hello = self._verified(call.peer, signed)
            if (link := self._links.get(call.peer)) is not None:
                link.heard()
            if call.peer in self._returning:
                why = f"{self.node} dials {call.peer} directly"
                raise _Refused(StatusCode.ALREADY_EXISTS, why)
            session = self._resume(call.peer, Hello.parse(hello))
        except (_Refused, WireError) as error:
            code = error.code if isinstance(error, _Refused) else StatusCode.INVALID_ARGUMENT
            self._relays.refuse(call, code.name, str(error))
            self._relays.hang_up(call)
            return
        answer = self._greetings.to_answer(call.peer, signed, session.hello().pack())
        self._relays.answer(call, answer)
        streams, via = (call.streams["Control"], call.streams["Bulk"]), self._relays.via(call.peer)
        connection = self._adopt(call.peer, session, *streams, via)
        self.spawn(self._until_hung_up(call, connection), f"call of {call.peer}")

    async def _until_hung_up(self, call: Call, connection: _Connection) -> None:
        await connection.over.wait()
        self._relays.hang_up(call)

    # Accepting

    async def _accept_control(self, _: Any, context: Any) -> None:
        await self._accept("Control", context)

    async def _accept_bulk(self, _: Any, context: Any) -> None:
        await self._accept("Bulk", context)

    async def _accept_observer(self, _: Any, context: Any) -> None:
        assert self._observers is not None
        try:
            self._check({key: str(value) for key, value in context.invocation_metadata()})
        except _Refused as refused:
            log.info("refused an observer at %s: %s", context.peer(), refused)
            await context.abort(refused.code, str(refused))
        await self._observers.serve(context)

    async def _accept(self, name: str, context: Any) -> None:
        self._handshakes += 1
        try:
            if name == "Bulk":
                connection, bulk = await self._take_bulk(context)
                over = bulk.over
            else:
                connection = await self._shake_hands(context)
                over = connection.over
        except _Refused as refused:
            forged = refused.code is StatusCode.UNAUTHENTICATED
            level = logging.WARNING if forged else logging.INFO
            log.log(level, "refused a %s stream of %s: %s", name, context.peer(), refused)
            await context.abort(refused.code, str(refused))
            return  # not reached: abort raises
        finally:
            self._handshakes -= 1
        try:
            await over.wait()
            if connection.over.is_set():
                code = StatusCode.ABORTED if connection.is_last else StatusCode.UNAVAILABLE
                await context.abort(code, connection.reason)
        finally:  # cancelled: gRPC's signal that the dialler is gone
            if not over.is_set():
                connection.end("the connection broke")

    async def _shake_hands(self, context: Any) -> _Connection:
        """Accept a dialled connection. Raises _Refused."""
        dialler, signed = await self._hello_of(context)
        hello = self._verified(dialler, signed)
        if (link := self._links.get(dialler)) is not None:
            link.heard()
        async with self._after_own_dial(dialler):
            return await self._welcome(dialler, hello, signed, context)

    async def _hello_of(self, context: Any) -> tuple[str, str]:
        """A dialler that may have a link, and its signed hello. Raises _Refused."""
        if self._handshakes > HANDSHAKE_LIMIT:
            raise _Refused(
                StatusCode.RESOURCE_EXHAUSTED, f"{self.node} is in {HANDSHAKE_LIMIT} handshakes"
            )
        metadata = {key: str(value) for key, value in context.invocation_metadata()}
        return await self._admit(metadata), metadata.get("planaria-link", "")

    async def _take_bulk(self, context: Any) -> tuple[_Connection, _Bulk]:
        """Accept a stream that the dialler adds to the connection. Raises _Refused."""
        dialler, text = await self._hello_of(context)
        link, peer = self._links.get(dialler), self._peers[dialler]
        connection = link.connection if link is not None else None
        if connection is None or connection.heard is None:
            why = f"{self.node} has no connection that {dialler} has dialled"
            raise _Refused(StatusCode.FAILED_PRECONDITION, why)
        try:
            stream = self._greetings.added(dialler, peer.key, text, *connection.heard)
        except ForgedError as why:
            raise _Refused(StatusCode.UNAUTHENTICATED, str(why)) from None
        number = int(stream) if re.fullmatch("[0-9]{1,9}", stream) else 0
        if not connection.may_add(number):
            raise _Refused(
                StatusCode.RESOURCE_EXHAUSTED,
                f"stream {stream[:80]} was there before, or is one more than {MOST_STREAMS}",
            )
        answer = self._greetings.to_answer(dialler, text, "taken")
        metadata = (("planaria-node", self.node), ("planaria-link", answer))
        try:
            await context.send_initial_metadata(metadata)
        finally:
            connection.added()
        return connection, connection.add(number, context, ours=False)

    async def _welcome(self, dialler: str, hello: str, signed: str, control: Any) -> _Connection:
        """Resume the session that the dialler names in its hello, or begin one; `signed` is the
        hello with its signature. Raises _Refused."""
        if self._stopping:
            raise self._stops()
        if dialler not in self._peers:
            raise self._is_no_member(dialler)
        try:
            session = self._resume(dialler, Hello.parse(hello))
        except WireError as error:
            raise _Refused(StatusCode.INVALID_ARGUMENT, str(error)) from None
        answer = session.hello()
        text = self._greetings.to_answer(dialler, signed, answer.pack())
        metadata = (("planaria-node", self.node), ("planaria-link", text))
        await control.send_initial_metadata(metadata)
        if session is not self._session(dialler) or not session.is_newest(answer):
            raise _Refused(StatusCode.ALREADY_EXISTS, "another connection has come up")
        return self._adopt(dialler, session, control, heard=(signed, text))

    def _resume(self, dialler: str, hello: Hello) -> Session:
        """Resume, or begin, a session by a dialler's hello. Raises _Refused, and WireError."""
        session, link = self._session(dialler), self._links.get(dialler)
        try:
            session.check(hello)
        except Outdated as why:
            raise _Refused(
                StatusCode.ALREADY_EXISTS, f"{self.node} has a newer connection: {why}"
            ) from None
        except Forgotten as why:
            raise _Refused(StatusCode.DATA_LOSS, f"{self.node} has no such link: {why}") from None
        except Begun:
            if link is not None:
                link.end(f"{dialler} has lost the link, and dialled anew")
            else:
                del self._begun[dialler]
            if hello.other:  # of a session now over, known from an old hello
                gone = f"{self.node} has no such link any more"
                raise _Refused(StatusCode.DATA_LOSS, gone) from None
            session, link = self._session(dialler), None
        if link is not None:
            link.detach(f"{dialler} dialled anew")
        try:
            session.resume(hello)
        except WireError as error:
            if link is not None:
                link.end(f"{dialler} sent an invalid message: {error}", cause=error.cause)
            raise
        return session

    def _check(self, metadata: dict[str, str]) -> None:
        """Check that the dialler wants this node, and is allowed to. Raises _Refused."""
        protocol = metadata.get("planaria-protocol", "")
        if protocol != str(PROTOCOL):
            raise _Refused(
                StatusCode.FAILED_PRECONDITION,
                f"{self.node} speaks protocol {PROTOCOL}, the dialler {protocol or 'none'}; "
                "install the same version of planaria on both",
            )
        run, peer = unquote(metadata.get("planaria-run", "")), metadata.get("planaria-peer", "")
        if run != self.run:
            raise _Refused(
                StatusCode.PERMISSION_DENIED, f"{self.node} is in run {self.run}, not {run!r}"
            )
        if peer != self.node:
            raise _Refused(StatusCode.NOT_FOUND, f"this is node {self.node}, not {peer!r}")
        if why := self._credentials.check(metadata):
            raise _Refused(StatusCode.UNAUTHENTICATED, why)

    async def _admit(self, metadata: dict[str, str]) -> str:
        """The dialler's id, if it may have a link. Raises _Refused."""
        self._check(metadata)
        dialler = metadata.get("planaria-node", "")
        try:
            async with asyncio.timeout(self.settings.view_wait):
                while dialler not in self._peers and not self._stopping:
                    await self._view_changed.wait()
        except TimeoutError:
            raise _Refused(
                StatusCode.PERMISSION_DENIED,
                f"{dialler!r} is no member of view {self.view}, the newest that {self.node} "
                f"knows; waited {self.settings.view_wait} s for a newer one",
            ) from None
        if self._stopping:
            raise self._stops()
        return dialler

    # Shared

    def _options(self, server: bool = False) -> list[tuple[str, int]]:
        silence = int(self.settings.silence * 1000)
        options = [
            ("grpc.max_receive_message_length", MESSAGE_LIMIT + CARRIED),
            ("grpc.max_send_message_length", MESSAGE_LIMIT + CARRIED),
            ("grpc.keepalive_time_ms", silence),
            ("grpc.keepalive_timeout_ms", silence),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        if server:
            return [
                *options,
                *server_options(open_descriptors()),
                ("grpc.so_reuseport", 0),  # else two nodes could share a port unnoticed
                ("grpc.max_concurrent_streams", 4),
                ("grpc.max_connection_idle_ms", IDLE),
                ("grpc.http2.min_ping_interval_without_data_ms", silence // 2),
                ("grpc.http2.max_ping_strikes", 0),  # a starved peer pings in bursts
            ]
        return [
            *options,
            ("grpc.use_local_subchannel_pool", 1),  # a connection of its own for each channel
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
        ]

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s crashed", task.get_name(), exc_info=error)


@cache
def _teach_malloc() -> None:
    """Raise malloc's threshold: handing freed chunks back to the kernel halves the speed of frames.
    glibc keeps twice the largest block freed so far (mallopt(3), M_MMAP_THRESHOLD; at most 32 MiB
    counts). So this frees one, never touched. Only once: the next one would be kept memory, touched
    in full."""
    bytes(31 << 20)


def _sealed(**body: Any) -> bytes:
    return seal(stage_pb2.Message(**body).SerializeToString())


async def _accepted(call: Any, node: str) -> str:
    """The signed hello of `node`, which has accepted this stream. Raises AioRpcError, _Refused."""
    metadata = dict(await call.initial_metadata())
    if metadata.get("planaria-node") != node:
        await call.read()  # raises the status that the stream ended with
        raise _Refused(StatusCode.NOT_FOUND, f"no node {node} at the other end")
    return str(metadata.get("planaria-link", ""))


def _describe(error: grpc.aio.AioRpcError) -> str:
    if error.code() is StatusCode.ABORTED:
        return f"closed by the peer, which says: {error.details()}"
    if error.code() is StatusCode.INTERNAL:  # a failed write; gRPC gives no reason
        return "the connection broke"
    return f"{error.code().name}: {error.details()}"

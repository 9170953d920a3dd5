"""A link to a peer, and the connections that carry it, one after the other.

A connection has a stream for messages, Control, and Bulk streams for frames. Each has its own
TCP connection, so that a vote never queues behind weights. It has no Bulk stream without frames,
one with frames, and more where one TCP connection can't use the link's capacity (streams.py). When
a stream breaks, the link sleeps until one side has dialled again, and resumes; it is lost when that
takes too long. A link that neither side needs rests (idle_links.py): it has no connection, and
nobody dials before there is something to send.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from planaria.bootstrap.registry_pb2 import SILENT, Cause
from planaria.bootstrap.transport import Broken, Stream
from planaria.node.wire import stage_pb2
from planaria.node.wire.frame_format import (
    Frame,
    WireError,
    pack_chunk,
    parse_chunk,
    parse_message,
    seal,
)
from planaria.node.wire.idle_links import IdleEnd
from planaria.node.wire.relays import KINDS as RELAYED
from planaria.node.wire.round_trip import RoundTrip
from planaria.node.wire.session import Session, Silence
from planaria.node.wire.streams import MOST as MOST_STREAMS

if TYPE_CHECKING:
    from planaria.node.wire.link import Links

log = logging.getLogger(__name__)

FAREWELL: Final = 1.0  # seconds for a peer to read why a link is closed
LONGEST_REASON: Final = 1000  # characters of a farewell
_CLOSES: Final = pack_chunk()  # the last chunk of a Bulk stream


@dataclass(slots=True)
class Traffic:
    """Bytes of messages and chunks, without the overhead of gRPC."""

    bytes_in: int = 0
    bytes_out: int = 0


class LinkOver(Exception):  # noqa: N818 (not an error)
    """The peer has closed the link; the message says why."""


class Link:
    """A session with a peer, from when it is up until it is lost."""

    def __init__(self, links: Links, peer: str, session: Session) -> None:
        self._links, self.settings = links, links.settings
        self.peer, self.session = peer, session
        self.connection: Connection | None = None  # None: the link sleeps, or rests
        self.rests = False
        self.via = ""  # the current or last relay; "": direct
        self.traffic = links.traffic.setdefault(peer, Traffic())
        self._loop = asyncio.get_running_loop()
        self._silence = Silence(self.settings.silence, self.settings.heartbeat, self.now)
        self._stuck = Silence(self.settings.handshake, self.settings.heartbeat, self.now)
        self._idle = IdleEnd(self.settings.rest, self.now)
        self._framed = -math.inf  # when a frame was last sent
        self._reached = False  # whether this side has dialled the peer, and so can again
        self._look = -math.inf  # time of the last check of `_reached`
        self._timer: asyncio.TimerHandle | None = None  # of the next heartbeat
        self.over = asyncio.Event()
        self.reason, self.cause = "", SILENT

    def send(self, message: bytes, arrived: Callable[[], None] | None = None) -> None:
        self.session.send(message, arrived)
        self._sent()

    def send_frame(self, frame: Frame, arrived: Callable[[], None] | None = None) -> None:
        self.session.outbox.push(frame, arrived)
        self._framed = self.now
        self._sent()

    async def deliver(self, frame: Frame) -> None:
        """Send a frame, and wait until the peer has all of it. Raises ConnectionError when the link
        is lost; WireError when the frame can't travel."""
        arrived = asyncio.Event()
        self.send_frame(frame, arrived.set)
        waits = [asyncio.create_task(event.wait()) for event in (arrived, self.over)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not arrived.is_set():
            raise ConnectionError(f"the link to {self.peer} is lost: {self.reason}")

    def _sent(self) -> None:
        """Follows up on a queued message or frame: bounds what waits, and wakes the link."""
        self.used()
        self._links.bound_what_is_held(self, self.settings.held)
        if self.connection is not None:
            self.connection.wake()
        elif not self.over.is_set():
            self.wake()

    def carry_by(self, connection: Connection) -> None:
        """Carry the link by a connection that has begun with hellos of this session."""
        self._awake()
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
        return not (self.session.held or self.via or self._links.needs_connection(self.peer))

    def _rest(self, why: str) -> None:
        """Let the link rest until this side has something to send, or the other one dials."""
        log.info("the link to %s is closed until it is needed: %s", self.peer, why)
        self.rests = True
        self.detach(why)

    def wake(self) -> None:
        if self.rests:
            self._awake()
            self._links.dial_soon(self.peer, first=True)

    def _awake(self) -> None:
        self.heard()
        self.rests = False
        self.watch()

    async def _look_for(self) -> None:
        """Check whether this side could dial a peer that has dialled it."""
        self._reached = await self._links.look_for(self.peer)

    def detach(self, why: str) -> None:
        """Give up the current connection: nothing more is received from it."""
        if self.connection is not None:
            connection, self.connection = self.connection, None
            connection.end(why)

    def broke(self, connection: Connection) -> None:
        """Handle the end of a connection: the link sleeps or rests, unless it is over."""
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
        if self._timer is not None:
            self._timer.cancel()
        if self.connection is not None:
            self.connection.say_farewell(reason)
        self._links.forget(self, report)

    def watch(self) -> None:
        """Check the link each heartbeat, until it rests or is over: after what came meanwhile."""
        if self._timer is None and not (self.rests or self.over.is_set()):
            soon = self._loop.call_soon
            self._timer = self._loop.call_later(self.settings.heartbeat, soon, self._beat)

    def _beat(self) -> None:
        """Check whether the link is silent, carried, and could be dialled, unless it rests."""
        self._timer = None
        if self.rests or self.over.is_set():
            return
        silent = self._silence.tick(self.now)
        if silent is not None and self._idle.rests(self._is_spare(), self.now):
            self._rest(f"silent for {silent:.1f} s")  # the peer may have hung up, and isn't needed
        elif silent is not None:
            self.end(f"silent for {silent:.1f} s")
        elif self.connection is not None:
            self.connection.beat()
            self._check_carried(self.connection)
            self._check_reached()
        self.watch()

    def _check_carried(self, connection: Connection) -> None:
        """End the link if frames are stuck while messages pass."""
        connection.note_streams()
        if connection.carries or not self.session.outbox.frames:
            self._stuck.heard(self.now)
        if (stuck := self._stuck.tick(self.now)) is not None:
            self.end(f"no stream for frames came up in {stuck:.1f} s")

    def _check_reached(self) -> None:
        """Check that this side can dial: a link rests only where either side can wake it, and a
        dialled node may not be able to dial."""
        idle = self._idle.is_spare(self._has_no_use(), self.now)
        if idle and not self._reached and self.now - self._look >= self.settings.rest:
            self._look = self.now
            self._links.spawn(self._look_for(), f"look for {self.peer} on the link to it")


@dataclass(slots=True, eq=False)
class Bulk:
    """A stream of a connection for chunks of frames."""

    number: int
    stream: Stream
    ours: bool = False  # added by this side, which closes it
    closing: bool = False  # no more chunks leave by it
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Connection:
    """The streams to a peer that carry a link, from the handshake until one of them breaks."""

    def __init__(
        self,
        links: Links,
        link: Link,
        streams: Iterable[Stream],
        via: str = "",
        hellos: tuple[str, str] = ("", ""),
        dialled: bool = False,
    ) -> None:
        """`streams`: Control, and the only Bulk stream of a relayed connection. `hellos`: the one
        that dialled and its answer, signed, unless it is relayed. `dialled`: by this side."""
        self._links, self._link, self._session = links, link, link.session
        self.peer = link.peer
        self.via = via
        self._traffic = Traffic() if via else link.traffic  # relayed data count on the relay's link
        self.hellos, self.dialled = hellos, dialled
        self._control, *bulks = streams
        self._bulks = {number: Bulk(number, bulk) for number, bulk in enumerate(bulks)}
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

    def _use(self, bulk: Bulk) -> None:
        """Starts the tasks that send and receive chunks by a stream."""
        self._spawn("_carry", partial(self._carry, bulk), bulk)
        self._spawn("_collect", partial(self._collect, bulk), bulk)

    def _spawn(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]], bulk: Bulk | None = None
    ) -> None:
        name = name.strip("_")
        name_of_task = f"{name} on the link to {self.peer}"
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
            self._links.spawn(self._close(), f"farewell on the link to {self.peer}")

    @property
    def is_last(self) -> bool:
        """Whether the link is over, too."""
        return self._link.over.is_set()

    # Added streams

    @property
    def carries(self) -> bool:
        """Whether a stream for frames is up."""
        return bool(self._carrying())

    def add(self, number: int, stream: Stream, ours: bool) -> Bulk:
        bulk = self._bulks[number] = Bulk(number, stream, ours)
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
        """Notes that an attempt to add a stream has ended, with or without success."""
        self._adding -= 1

    def not_added(self, why: str) -> None:
        """Ends the connection after a failed attempt to add a stream, if it has no other."""
        if not (self._carrying() or self._adding):
            self.end(why)

    def _carrying(self) -> list[Bulk]:
        return [bulk for bulk in self._bulks.values() if not bulk.closing]

    def note_streams(self) -> None:
        """Announce a change in the number of streams that this side wants."""
        if self._own_streams != self._link.streams and not self.over.is_set():
            self._own_streams = self._link.streams
            log.debug("streams for frames to %s: %d", self.peer, self._own_streams)
            self._other_streams.set()
            self.beat()

    def _gone(self, bulk: Bulk) -> None:
        """Remove a closed stream that has carried all its chunks."""
        del self._bulks[bulk.number]
        bulk.over.set()

    async def _close(self) -> None:
        """Ends the connection if the peer doesn't after a farewell."""
        try:
            async with asyncio.timeout(FAREWELL):
                await self.over.wait()
        except TimeoutError:
            log.info("%s did not close the link when told why", self.peer)
            self.end(self._link.reason)

    async def _until_over(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]], bulk: Bulk | None
    ) -> None:
        """Runs one of the connection's tasks; its end or failure ends the connection."""
        try:
            await work()
            if bulk is None or not bulk.closing:
                self.end(f"{self.peer} closed the connection")
        except LinkOver as over:
            self.end(f"{self.peer} closed the link: {over}", lost=True)
        except WireError as error:
            self._refuse(error)
        except Broken as broken:
            self.end(str(broken), lost=broken.code == "ABORTED")
        except asyncio.CancelledError:
            self.end("the connection broke")
        except Exception:
            self._link.end(f"{name} crashed in {self._links.node}, see its log")
            raise

    def _refuse(self, error: WireError) -> None:
        cause = SILENT if self.via else error.cause  # a relay may have changed it
        self._link.end(f"{self.peer} sent an invalid message: {error}", cause=cause)

    async def _read(self, stream: Stream) -> bytes | None:
        """The next item of a stream; None: the stream or the connection has ended."""
        data = await stream.read()
        if self.over.is_set() or data is None:
            return None
        self._link.heard()
        self._traffic.bytes_in += len(data)
        return data

    async def _write(self, stream: Stream, data: bytes) -> None:
        self._traffic.bytes_out += len(data)
        await stream.write(data)

    # Tasks: two, and two for each stream of chunks

    async def _speak(self) -> None:
        """Sends messages, heartbeats and acknowledgements by the Control stream."""
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
        """Reads messages until the peer has closed the connection, even when the link is over."""
        while (data := await self._read(self._control)) is not None:
            try:
                self._hear(data)
            except WireError as error:
                self._refuse(error)

    def _hear(self, data: bytes) -> None:
        """Handles a received message. Raises LinkOver for a farewell, and WireError."""
        message = parse_message(data)
        body = message.WhichOneof("body")
        if body == "farewell":
            raise LinkOver(message.farewell.reason[:LONGEST_REASON])
        if self._link.over.is_set():
            return
        if body == "heartbeat":
            self._hear_heartbeat(message.heartbeat)
            return
        self._link.used()
        if body == "acknowledged":
            for frame in message.acknowledged.received:
                self._session.outbox.acknowledge(frame.frame, frame.bytes, self._link.now)
            self.note_streams()
            self._something_to_carry.set()
            return
        self._session.message_came()
        if self._session.acknowledgement_due:
            self._something_to_say.set()
        if body == "carried":
            carried = message.carried
            self._links.relays.on_frame(self.peer, Frame.parse(carried.head, carried.payload))
        else:
            self._links.events.on_message(self.peer, message, self._link.now)

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

    async def _carry(self, bulk: Bulk) -> None:
        """Sends chunks by a stream until it closes."""
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
            with suppress(Broken):
                await self._write(bulk.stream, _CLOSES)
        else:
            self._gone(bulk)

    def _next_chunk(self, bulk: Bulk) -> bytes | None:
        """The stream's next chunk; streams beyond the number that this side wants get none."""
        carrying, outbox = self._carrying(), self._session.outbox
        streams = min(outbox.streams, len(carrying))
        place = carrying.index(bulk) if bulk in carrying else streams
        chunk = outbox.next(self._link.now, streams, place) if place < streams else None
        self.note_streams()
        return chunk

    async def _collect(self, bulk: Bulk) -> None:
        """Receives chunks by a stream, and hands over the frames that they complete."""
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
            for frame in self._session.inbox.take(chunk):
                if frame.kind in RELAYED:
                    self._links.relays.on_frame(self.peer, frame)
                else:
                    self._links.events.on_frame(self.peer, frame, self._link.now)
                if self._link.over.is_set() or self.over.is_set():
                    break
            self._something_to_say.set()
        if bulk.closing and not self.over.is_set():
            self._gone(bulk)


def _sealed(**body: Any) -> bytes:
    return seal(stage_pb2.Message(**body).SerializeToString())

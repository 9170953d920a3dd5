"""Links: messages and frames from node to node.

A link is two gRPC streams on two connections, so that a vote never queues behind a weight. Either
side may have dialled it; once up, both sides are alike. `Links` keeps those up that the newest view
asks for, and accepts those that members of that view dial.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import quote, unquote

import grpc
from google.protobuf.message import DecodeError
from grpc import StatusCode
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from planaria.bootstrap.credentials import PLAIN, Credentials, add_port
from planaria.bootstrap.credentials import channel as open_channel
from planaria.node.wire import stage_pb2
from planaria.node.wire.chunks import ACKNOWLEDGE_EVERY, Inbox, Outbox
from planaria.node.wire.frames import (
    HEAD_LIMIT,
    PAYLOAD_LIMIT,
    Frame,
    WireError,
    pack_chunk,
    parse_chunk,
)

log = logging.getLogger(__name__)

PROTOCOL: Final = 1
CHUNK_LIMIT: Final = 4 << 20  # bytes; gRPC slows down beyond
MESSAGE_LIMIT: Final = CHUNK_LIMIT + HEAD_LIMIT + 1024  # bytes
QUEUE_LIMIT: Final = 10_000  # control messages that wait for one peer
HANDSHAKE_LIMIT: Final = 1024  # streams without a link, all diallers together
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two dials
FAREWELL: Final = 1.0  # seconds for a peer to read why a link is closed

_SERVICE: Final = "planaria.node.Stage"
_STREAMS: Final = ("Control", "Bulk")


@dataclass(frozen=True)
class LinkSettings:
    """Times in seconds, sizes in bytes."""

    heartbeat: float = 0.5
    silence: float = 3.0  # after which a link counts as lost
    view_wait: float = 2.0  # for the view that makes an unknown dialler a member
    handshake: float = 5.0
    chunk: int = 2 << 20
    window: int = 16 << 20  # unacknowledged, in each direction
    payload: int = PAYLOAD_LIMIT

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
    """A member of a view. `address`: HOST:PORT; empty: it can't be dialled, it only dials."""

    node: str
    address: str


class LinkEvents(Protocol):
    """Told on the event loop, in order; must not block. A link is told of as up, then at most once
    as lost; the messages and frames of its peer come between."""

    def on_message(self, peer: str, message: stage_pb2.Message) -> None: ...

    def on_frame(self, peer: str, frame: Frame) -> None: ...

    def on_link_up(self, peer: str) -> None: ...

    def on_link_lost(self, peer: str, reason: str, unacknowledged: list[Frame]) -> None:
        """`unacknowledged`: frames, queued ones too, that the peer may not have got."""


@dataclass(slots=True)
class Traffic:
    """Bytes of messages and chunks, without gRPC's own."""

    bytes_in: int = 0
    bytes_out: int = 0


class Silence:
    """Decides when a peer has been silent for too long, by the time this node spent listening.

    `tick` is called every `interval` seconds. By how much it comes late, this node was busy and
    could hear nobody; that time doesn't count. All times in seconds, of one clock.
    """

    def __init__(self, limit: float, interval: float, now: float) -> None:
        self._limit, self._interval = limit, interval
        self._heard = now
        self._expected = now + interval

    def heard(self, now: float) -> None:
        self._heard = now

    def tick(self, now: float) -> float | None:
        """How long the silence has been, when that is too long."""
        self._heard = min(now, self._heard + max(0.0, now - self._expected))
        self._expected = now + self._interval
        silent = now - self._heard
        return silent if silent >= self._limit else None


class _Stream(Protocol):
    """What a call and a servicer's context have in common."""

    async def read(self) -> Any: ...

    async def write(self, message: bytes, /) -> None: ...


class _LinkOver(Exception):  # noqa: N818 (not an error)
    """The link is over; says why."""


class _Refused(Exception):  # noqa: N818 (not an error of this node)
    def __init__(self, code: StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class _Link:
    """Two streams to a peer, from the handshake to the end."""

    def __init__(
        self,
        links: Links,
        peer: str,
        dialler: str,
        streams: dict[str, _Stream],
    ) -> None:
        self._links, self._settings = links, links.settings
        self.peer, self.dialler = peer, dialler
        self._control, self._bulk = streams["Control"], streams["Bulk"]
        self._messages: deque[bytes] = deque()
        self._something_to_say, self._something_to_carry = asyncio.Event(), asyncio.Event()
        self.outbox = Outbox(self._settings.chunk, self._settings.window)
        self._inbox = Inbox(self._settings.payload)
        self._farewell: bytes | None = None
        self._traffic = links.traffic.setdefault(peer, Traffic())
        self._loop = asyncio.get_running_loop()
        self._silence = Silence(self._settings.silence, self._settings.heartbeat, self._loop.time())
        self.over = asyncio.Event()
        self.reason = ""

    def start(self) -> None:
        """The tasks end by themselves once the link is over and its streams are closed: gRPC does
        not free what a cancelled read would have returned."""
        for work in (self._speak, self._listen, self._carry, self._collect, self._watch):
            name = f"{work.__name__.strip('_')} on the link to {self.peer}"
            self._links.spawn(self._until_over(work), name)

    def send(self, message: bytes) -> None:
        if len(self._messages) >= QUEUE_LIMIT:
            self.end(f"{self.peer} has not taken the last {QUEUE_LIMIT} messages")
            return
        self._messages.append(message)
        self._something_to_say.set()

    def send_frame(self, frame: Frame, arrived: Callable[[], None] | None = None) -> None:
        self.outbox.push(frame, arrived)
        self._something_to_carry.set()

    def end(self, reason: str, report: bool = True) -> None:
        """The first reason is the one that counts. `report`: to the events."""
        if self.over.is_set():
            return
        self.reason = self.reason or reason
        self.over.set()
        self._something_to_say.set()
        self._something_to_carry.set()
        self._links.forget(self, report)

    async def _until_over(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        reason = f"{work.__name__.strip('_')} crashed in {self._links.node}, see its log"
        try:
            await work()
            reason = f"{self.peer} closed the link"
        except _LinkOver as lost:
            reason = str(lost)
        except WireError as error:
            reason = f"{self.peer} sent what can't be: {error}"
            await self._say_farewell(reason)
        except grpc.aio.AioRpcError as error:
            reason = _describe(error)
        except (grpc.aio.BaseError, asyncio.InvalidStateError, asyncio.CancelledError):
            reason = "the connection broke"
        finally:
            self.end(reason)

    async def _read(self, stream: _Stream) -> bytes | None:
        """None: the stream has ended."""
        data = await stream.read()
        if self.over.is_set() or data is grpc.aio.EOF:
            return None
        assert isinstance(data, bytes)
        self._silence.heard(self._loop.time())
        self._traffic.bytes_in += len(data)
        return data

    async def _write(self, stream: _Stream, data: bytes) -> None:
        self._traffic.bytes_out += len(data)
        await stream.write(data)

    # The five tasks

    async def _speak(self) -> None:
        while not self.over.is_set():
            if self._messages:
                await self._write(self._control, self._messages.popleft())
            else:
                self._something_to_say.clear()
                await self._something_to_say.wait()

    async def _listen(self) -> None:
        while (data := await self._read(self._control)) is not None:
            try:
                message = stage_pb2.Message.FromString(data)
            except DecodeError as error:
                raise WireError(f"a message that is not one of stage.proto's: {error}") from error
            if message.WhichOneof("body") != "heartbeat":
                self._links.events.on_message(self.peer, message)

    async def _carry(self) -> None:
        while not self.over.is_set():
            chunk = self._farewell or self._inbox.acknowledgement() or self.outbox.next()
            self._farewell = None
            if chunk is not None:
                await self._write(self._bulk, chunk)
            else:
                self._something_to_carry.clear()
                await self._something_to_carry.wait()

    async def _collect(self) -> None:
        while (data := await self._read(self._bulk)) is not None:
            chunk = parse_chunk(data)
            if chunk.acknowledged:
                self.outbox.acknowledge(chunk.frame, chunk.acknowledged - 1)
            elif chunk.frame:
                frame = self._inbox.receive(chunk)
                if frame is not None:
                    self._links.events.on_frame(self.peer, frame)
            else:
                raise _LinkOver(
                    f"{self.peer} closed the link: {chunk.head.decode(errors='replace')}"
                )
            self._something_to_carry.set()

    async def _watch(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._settings.heartbeat):
                    await self.over.wait()
                return
            except TimeoutError:
                silent = self._silence.tick(self._loop.time())
            if silent is not None:
                raise _LinkOver(f"silent for {silent:.1f} s")
            if not self._messages:  # else those are the sign of life
                self.send(self._links.heartbeat())

    async def _say_farewell(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._farewell = pack_chunk(head=reason.encode()[:HEAD_LIMIT])
        self._something_to_carry.set()
        try:
            async with asyncio.timeout(FAREWELL):
                await self.over.wait()  # the peer closes when it has read that
        except TimeoutError:
            log.info("%s did not close the link when told why", self.peer)


@dataclass(slots=True, eq=False)
class _Half:
    """The first stream of a link that is being dialled, waiting for the second."""

    name: str
    stream: Any
    link: asyncio.Future[_Link] = field(default_factory=asyncio.Future)


class Links:
    """This node's links. Belongs to the event loop that it is started on."""

    def __init__(
        self,
        run: str,
        node: str,
        events: LinkEvents,
        settings: LinkSettings | None = None,
        credentials: Credentials = PLAIN,
        insecure: bool = False,
    ) -> None:
        self.run, self.node, self.events = run, node, events
        self.settings = settings or LinkSettings()
        self._credentials, self._insecure = credentials, insecure
        self.traffic: dict[str, Traffic] = {}  # by peer, of all its links so far
        self._server: Any = None
        self._view = 0
        self._peers: dict[str, Peer] = {}
        self._linked: frozenset[str] = frozenset()
        self._demanded: set[str] = set()
        self._view_changed = asyncio.Event()
        self._links: dict[str, _Link] = {}
        self._halves: dict[tuple[str, str], _Half] = {}
        self._handshakes = 0
        self._settling: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by peer
        self._stopping = False
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # glibc hands a freed chunk back to the kernel and gets the next one page by page, which
        # halves the speed of frames. It keeps twice the largest block freed so far (mallopt(3),
        # M_MMAP_THRESHOLD; at most 32 MiB counts), so this one, never touched, teaches it.
        bytes(31 << 20)

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
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        port = add_port(server, listen, self._credentials, self._insecure)
        healthy = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        await server.start()
        for name in ("", _SERVICE, self.node):  # the last for whom the registry has lost sight of
            await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._server = server
        return port

    async def stop(self) -> None:
        """Ends all links, which is not reported, and leaves nothing running."""
        self._stopping = True
        self._linked = frozenset()
        self._view_changed.set()
        for half in self._halves.values():
            if not half.link.done():
                half.link.set_exception(self._stops())
        for link in list(self._links.values()):
            link.end(f"{self.node} stops", report=False)
        for task in self._dialling.values():
            task.cancel()
        await asyncio.gather(*self._dialling.values(), return_exceptions=True)
        if self._server is not None:
            await self._server.stop(FAREWELL)
        if self._tasks:
            _, stuck = await asyncio.wait(self._tasks, timeout=FAREWELL)
            for task in stuck:
                log.warning("cancelled %s, which did not end by itself", task.get_name())
                task.cancel()

    def set_peers(self, view: int, peers: Iterable[Peer], linked: Collection[str]) -> None:
        """The members of the newest view (own node included or not), and those of them that need a
        link kept up. Links to others end, unreported. An older view than the last has no effect."""
        if view < self._view or self._stopping:
            return
        self._view = view
        self._peers = {peer.node: peer for peer in peers}
        self._linked = frozenset(linked) & self._peers.keys() - {self.node}
        self._demanded.clear()
        for link in list(self._links.values()):
            if link.peer not in self._peers:
                link.end(f"{link.peer} is no member of view {view}", report=False)
        for node in self._linked:
            if self._dials(node) and node not in self._dialling:
                self._dialling[node] = self.spawn(self._keep_dialled(node), f"dial {node}")
        self._view_changed.set()
        self._view_changed = asyncio.Event()

    def demand(self, node: str) -> None:
        """Dial a member that `set_peers` asked for no link with, whoever has the smaller id. The
        link stays until it breaks; from the next view on it isn't dialled again."""
        known = node in self._peers and node not in self._links and not self._stopping
        if known and self._peers[node].address and node not in self._dialling:
            self._demanded.add(node)
            self._dialling[node] = self.spawn(self._keep_dialled(node), f"dial {node}")

    def send(self, peer: str, item: stage_pb2.Message | Frame) -> bool:
        """Queues it. False: there is no link, it is dropped. Raises WireError for a frame that
        can't travel, and for a message that is too long."""
        link = self._links.get(peer)
        if link is None:
            return False
        if isinstance(item, Frame):
            link.send_frame(item)
            return True
        data = item.SerializeToString()
        if len(data) > MESSAGE_LIMIT:
            raise WireError(f"a message of {len(data)} bytes; at most {MESSAGE_LIMIT}")
        link.send(data)
        return True

    async def deliver(self, peer: str, frame: Frame) -> None:
        """Sends a frame and returns when the peer has all of it. Raises ConnectionError when there
        is no link, or no more; WireError when it can't travel."""
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
        """Those to which there is a link."""
        return sorted(self._links)

    def linked(self, peer: str) -> bool:
        return peer in self._links

    @property
    def bytes_in(self) -> int:
        return sum(traffic.bytes_in for traffic in self.traffic.values())

    @property
    def bytes_out(self) -> int:
        return sum(traffic.bytes_out for traffic in self.traffic.values())

    @property
    def unacknowledged(self) -> int:
        """Bytes of payload in frames handed over, on links that are up; queued ones too."""
        return sum(link.outbox.unacknowledged for link in self._links.values())

    def unacknowledged_by(self, peer: str) -> int:
        """Those bytes on the link to `peer`."""
        link = self._links.get(peer)
        return link.outbox.unacknowledged if link is not None else 0

    # For _Link

    def heartbeat(self) -> bytes:
        return stage_pb2.Message(heartbeat={"view": self._view}).SerializeToString()

    def forget(self, link: _Link, report: bool) -> None:
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            if report:
                self.events.on_link_lost(link.peer, link.reason, link.outbox.unfinished())

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    # Dialling

    def _dials(self, node: str) -> bool:
        """Which side of two dials: the only one that can, else the one with the smaller id."""
        own = self._peers.get(self.node)
        dialable = bool(own.address) if own is not None else self._server is not None
        if not self._peers[node].address:
            if not dialable and self.node < node:
                log.warning(
                    "no link to %s: neither it nor %s has an address; advertise one of them",
                    node,
                    self.node,
                )
            return False
        return not dialable or self.node < node

    async def _keep_dialled(self, node: str) -> None:
        pause, said = FIRST_PAUSE, ""
        try:
            while node in self._demanded or (node in self._linked and self._dials(node)):
                if link := self._links.get(node):  # which the other side dialled
                    await link.over.wait()
                    continue
                try:
                    await self._dial(self._peers[node])
                    pause, why = FIRST_PAUSE, ""
                except grpc.aio.AioRpcError as error:
                    why = _describe(error)
                except _Refused as error:
                    why = str(error)
                if why and why != said and node not in self._links:
                    log.warning("can't link to %s: %s", node, why)
                said = why
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            del self._dialling[node]

    async def _dial(self, peer: Peer) -> None:
        """Returns when the link has been up and is over, or at once when there is one by the other
        side's dial. Raises AioRpcError or _Refused."""
        calls: dict[str, Any] = {}
        channels: list[grpc.aio.Channel] = []
        try:
            async with self._settling[peer.node]:
                if peer.node in self._links:
                    return
                channels += [
                    open_channel(peer.address, self._credentials, self._options()) for _ in _STREAMS
                ]
                calls |= self._call(peer, channels)
                async with asyncio.timeout(self.settings.handshake):
                    for call in calls.values():
                        await _accepted(call, peer.node)
                link = _Link(self, peer.node, self.node, calls)
                self._adopt(link)
            await link.over.wait()
        except TimeoutError:
            raise _Refused(
                StatusCode.DEADLINE_EXCEEDED,
                f"no answer from {peer.address} in {self.settings.handshake} s",
            ) from None
        finally:
            for call in calls.values():
                call.cancel()
            for channel in channels:
                await channel.close()

    def _call(self, peer: Peer, channels: Iterable[grpc.aio.Channel]) -> dict[str, Any]:
        """The streams of a new link, each on a connection of its own."""
        metadata = (
            ("planaria-run", quote(self.run)),
            ("planaria-node", self.node),
            ("planaria-peer", peer.node),
            ("planaria-protocol", str(PROTOCOL)),
            ("planaria-link", secrets.token_hex(8)),
            *self._credentials.metadata,
        )
        return {
            name: channel.stream_stream(f"/{_SERVICE}/{name}")(metadata=metadata)
            for name, channel in zip(_STREAMS, channels, strict=True)
        }

    @asynccontextmanager
    async def _after_own_dial(self, dialler: str) -> AsyncIterator[None]:
        """Of two dials that cross the one by the smaller id becomes the link. So that side lets the
        other's dial wait until its own has come to something: else a link would come up only to be
        replaced, and what it carries would be lost."""
        if self.node > dialler:
            yield
        else:
            async with self._settling[dialler]:
                yield

    def _check_room(self, peer: str, dialler: str) -> None:
        """Of two links to a peer the one dialled by the smaller id stays, of two by the same the
        newer one. Raises _Refused for one that doesn't."""
        if self._stopping:
            raise self._stops()
        if peer not in self._peers:
            raise _Refused(
                StatusCode.PERMISSION_DENIED, f"{peer} is no member of view {self._view}"
            )
        existing = self._links.get(peer)
        if existing is not None and existing.dialler < dialler:
            raise _Refused(
                StatusCode.ALREADY_EXISTS,
                f"{self.node} has a link with {peer} that {existing.dialler} dialled",
            )

    def _stops(self) -> _Refused:
        return _Refused(StatusCode.UNAVAILABLE, f"{self.node} stops")

    def _adopt(self, link: _Link) -> None:
        """Raises _Refused."""
        self._check_room(link.peer, link.dialler)
        if existing := self._links.get(link.peer):
            existing.end(f"{link.dialler} dialled anew")
        self._links[link.peer] = link
        link.start()
        log.info("link to %s is up, dialled by %s", link.peer, link.dialler)
        self.events.on_link_up(link.peer)

    # Accepting

    async def _accept_control(self, _: Any, context: Any) -> None:
        await self._accept("Control", context)

    async def _accept_bulk(self, _: Any, context: Any) -> None:
        await self._accept("Bulk", context)

    async def _accept(self, name: str, context: Any) -> None:
        self._handshakes += 1
        try:
            link = await self._shake_hands(name, context)
        except _Refused as refused:
            log.info("refused a %s stream of %s: %s", name, context.peer(), refused)
            await context.abort(refused.code, str(refused))
            return  # not reached: abort raises
        finally:
            self._handshakes -= 1
        try:
            await link.over.wait()
            await context.abort(StatusCode.ABORTED, link.reason)
        finally:  # cancelled: that is how gRPC tells that the dialler is gone
            link.end("the connection broke")

    async def _shake_hands(self, name: str, context: Any) -> _Link:
        """The link, once both of its streams are here. Raises _Refused."""
        if self._handshakes > HANDSHAKE_LIMIT:
            raise _Refused(
                StatusCode.RESOURCE_EXHAUSTED, f"{self.node} is in {HANDSHAKE_LIMIT} handshakes"
            )
        metadata = {key: str(value) for key, value in context.invocation_metadata()}
        dialler = await self._admit(metadata)
        key = dialler, metadata.get("planaria-link", "")
        half = self._halves.pop(key, None)
        if half is None:
            return await self._wait_for_second(key, _Half(name, context))
        try:
            if half.name == name:
                raise _Refused(StatusCode.INVALID_ARGUMENT, f"a second {name} stream for one link")
            async with self._after_own_dial(dialler):
                self._check_room(dialler, dialler)
                for stream in (half.stream, context):
                    await stream.send_initial_metadata((("planaria-node", self.node),))
                link = _Link(self, dialler, dialler, {half.name: half.stream, name: context})
                self._adopt(link)
        except _Refused as refused:
            if not half.link.done():
                half.link.set_exception(refused)
            raise
        if half.link.done():  # cancelled: the dialler is gone already
            link.end("the connection broke")
        else:
            half.link.set_result(link)
        return link

    async def _wait_for_second(self, key: tuple[str, str], half: _Half) -> _Link:
        self._halves[key] = half
        try:
            async with asyncio.timeout(self.settings.handshake):
                return await half.link
        except TimeoutError:
            raise _Refused(
                StatusCode.DEADLINE_EXCEEDED,
                f"only a {half.name} stream came in {self.settings.handshake} s; a link is two",
            ) from None
        finally:
            if self._halves.get(key) is half:
                del self._halves[key]

    async def _admit(self, metadata: dict[str, str]) -> str:
        """The dialler, when it may have a link. Raises _Refused."""
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
        dialler = metadata.get("planaria-node", "")
        try:
            async with asyncio.timeout(self.settings.view_wait):
                while dialler not in self._peers and not self._stopping:
                    await self._view_changed.wait()
        except TimeoutError:
            raise _Refused(
                StatusCode.PERMISSION_DENIED,
                f"{dialler!r} is no member of view {self._view}, the newest that {self.node} "
                f"knows; waited {self.settings.view_wait} s for a newer one",
            ) from None
        if self._stopping:
            raise self._stops()
        return dialler

    # Shared

    def _options(self, server: bool = False) -> list[tuple[str, int]]:
        silence = int(self.settings.silence * 1000)
        options = [
            ("grpc.max_receive_message_length", MESSAGE_LIMIT),
            ("grpc.max_send_message_length", MESSAGE_LIMIT),
            ("grpc.keepalive_time_ms", silence),
            ("grpc.keepalive_timeout_ms", silence),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        if server:
            return [
                *options,
                ("grpc.so_reuseport", 0),  # else two nodes share a port and nobody notices
                ("grpc.max_concurrent_streams", 4),
                ("grpc.http2.min_ping_interval_without_data_ms", silence // 2),
                ("grpc.http2.max_ping_strikes", 0),  # a peer that was starved pings in bursts
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


async def _accepted(call: Any, node: str) -> None:
    """Returns when `node` has accepted this stream. Raises AioRpcError or _Refused."""
    metadata = dict(await call.initial_metadata())
    if metadata.get("planaria-node") != node:
        await call.read()  # raises the status that the stream ended with
        raise _Refused(StatusCode.NOT_FOUND, f"no node {node} at the other end")


def _describe(error: grpc.aio.AioRpcError) -> str:
    if error.code() is StatusCode.ABORTED:
        return f"closed by the peer, which says: {error.details()}"
    if error.code() is StatusCode.INTERNAL:  # a write that failed; gRPC knows no more
        return "the connection broke"
    return f"{error.code().name}: {error.details()}"

"""The port to the network (bootstrap/transport.py) in memory and in virtual time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Final

from planaria.bootstrap.address import Reach
from planaria.bootstrap.authority import Role, Who
from planaria.bootstrap.transport import Broken, Handler
from planaria.node.wire.link import SERVICE
from simulation.network import BROKEN, Connection, Network
from simulation.world import Process

AGAIN: Final = 1.0
"""Seconds after which a lost first packet is sent again; each further wait is twice as long."""
CONNECT: Final = 20.0
"""Seconds until an attempt to connect is given up."""
LOOK: Final = 0.25
"""Seconds between two checks for a node that doesn't answer."""
ANOTHER: Final = 0.1
"""Probability that another process answers at the address of a dead one."""

GARBLED: Final = {f"{SERVICE}/Control": "control", f"{SERVICE}/Bulk": "bulk"}

_CLOSED: Final = Broken("OK", "")


class End:
    """One end of a stream."""

    def __init__(self, transport: MemoryTransport, method: str) -> None:
        self._transport, self.process = transport, transport.process
        self._method = method
        self.connection: Connection | None = None
        self._came: deque[bytes] = deque()
        self._over: Broken | None = None  # why nothing follows `_came`
        self._reader: asyncio.Future[None] | None = None

    async def read(self) -> bytes | None:
        while not self._came:
            if self._over is not None:
                if self._over is _CLOSED:
                    return None
                raise Broken(self._over.code, self._over.details)
            self._reader = self.process.world.create_future()
            await self._reader
        return self._came.popleft()

    async def write(self, data: bytes, /) -> None:
        if self._over is not None:
            raise Broken("INTERNAL", "the connection broke")
        garble = self._transport.garble
        if garble is not None and self._method in GARBLED:
            data = garble(GARBLED[self._method], data)
        self.send("data", data)

    def send(self, kind: str, content: Any) -> None:
        if self.connection is not None:
            self.connection.send(self.connection.other(self), (kind, content))

    def came(self, kind: str, content: Any) -> None:
        if kind == "data" and self._over is None:
            self._came.append(content)
        elif kind == "over":
            self.broke(content)
        self._wake()

    def broke(self, why: Broken) -> None:
        """Ends this end of the stream: nothing more arrives."""
        if self._over is None:
            self._over = why
            self._wake()
            if self.connection is not None:
                self.connection.close_if_over()

    @property
    def is_over(self) -> bool:
        return self._over is not None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Dialled(End):
    """The dialling end of a stream."""

    def __init__(
        self,
        transport: MemoryTransport,
        address: str,
        method: str,
        metadata: Mapping[str, str],
        seconds: float | None,
    ) -> None:
        super().__init__(transport, method)
        self._unsent: list[bytes] = []  # written before it is connected
        self._address, self._metadata, self._seconds = address, dict(metadata), seconds
        self._answer: asyncio.Future[Mapping[str, str]] = self.process.world.create_future()
        self._began = self.process.world.now
        self.process.after(self.process.world.delay(), self._knock, AGAIN)
        if seconds is not None:
            late = Broken("DEADLINE_EXCEEDED", f"no answer in {seconds:g} s")
            self.process.after(seconds, self.broke, late)

    def _knock(self, again: float) -> None:
        """Delivers the first packet; sends it again later if the host is out of reach."""
        if self._over is not None:
            return
        network, world = self._transport.network, self.process.world
        host = network.hosts.get(self._address)
        acceptor = network.listeners.get(self._address)
        if host is None or not network.reach(self.process.host, host):
            if world.now + again - self._began < CONNECT:
                self.process.after(again, self._knock, 2 * again)
            else:
                self.broke(Broken("UNAVAILABLE", "no answer from the host"))
        elif acceptor is None:
            other = world.chance(ANOTHER)
            why = Broken("NOT_FOUND", "another node") if other else Broken("UNAVAILABLE", "refused")
            self.process.after(world.delay(), self.broke, why)
        else:
            accepted = Accepted(acceptor, self._method, self._metadata, self.process.host)
            if self._seconds is not None:
                accepted.ends = self._began + self._seconds
            self.connection = accepted.connection = Connection(network, self, accepted)
            acceptor.process.after(0.0, accepted.serve, acceptor.handlers[self._method])
            for data in self._unsent:
                self.send("data", data)

    async def accepted(self) -> Mapping[str, str]:
        return await self._answer

    def came(self, kind: str, content: Any) -> None:
        if kind == "accept" and not self._answer.done():
            self._answer.set_result(content)
        super().came(kind, content)

    def broke(self, why: Broken) -> None:
        if not self._answer.done():
            if why is _CLOSED:
                self._answer.set_result({})
            else:
                self._answer.set_exception(Broken(why.code, why.details))
                self._answer.exception()  # perhaps never awaited
        super().broke(why)

    def send(self, kind: str, content: Any) -> None:
        if self.connection is None and kind == "data":
            self._unsent.append(content)
        super().send(kind, content)

    def cancel(self) -> None:
        if self._over is None:
            self.send("over", Broken("CANCELLED", "cancelled by the other end"))
            self.broke(Broken("CANCELLED", "cancelled here"))


class Accepted(End):
    """The accepting end of a stream."""

    caller = Who()

    def __init__(
        self, transport: MemoryTransport, method: str, metadata: Mapping[str, str], peer: str
    ) -> None:
        super().__init__(transport, method)
        self.metadata, self.peer = metadata, peer
        self.ends: float | None = None  # the dialler's deadline
        self._serving: asyncio.Task[None] | None = None
        self._when_over: list[Callable[[], None]] = []

    @property
    def seconds_left(self) -> float | None:
        return None if self.ends is None else max(0.0, self.ends - self.process.world.now)

    def when_over(self, call: Callable[[], None]) -> None:
        self._when_over.append(call)

    def serve(self, handler: Handler) -> None:
        if self._over is None:
            self._serving = self.process.spawn(self._serve(handler))

    async def _serve(self, handler: Handler) -> None:
        status = _CLOSED
        try:
            await handler(self)
        except Broken as broken:
            status = broken
        finally:
            for call in self._when_over:
                call()
        self.send("over", status)
        self.broke(BROKEN)

    async def accept(self, metadata: Mapping[str, str]) -> None:
        if self._over is not None:
            raise Broken(self._over.code, self._over.details)
        self.send("accept", dict(metadata))

    def broke(self, why: Broken) -> None:
        super().broke(why)
        if self._serving is not None:
            self._serving.cancel()


class MemoryChannel:
    def __init__(self, transport: MemoryTransport, address: str) -> None:
        self._transport, self._address = transport, address
        self._streams: list[Dialled] = []

    def stream(self, method: str, metadata: Mapping[str, str] | None = None) -> Dialled:
        return self._dial(method, metadata or {}, None)

    def _dial(self, method: str, metadata: Mapping[str, str], seconds: float | None) -> Dialled:
        stream = Dialled(self._transport, self._address, method, metadata, seconds)
        self._streams = [stream, *(each for each in self._streams if not each.is_over)]
        return stream

    async def call(self, method: str, request: bytes, seconds: float) -> bytes:
        stream = self._dial(method, {}, seconds)
        try:
            with suppress(Broken):  # `read` says why
                await stream.write(request)
            answer = await stream.read()
        finally:
            stream.cancel()
        assert answer is not None
        return answer

    async def close(self) -> None:
        for stream in self._streams:
            stream.cancel()


class MemoryTransport:
    """One process's access to the network, at an address of its own."""

    def __init__(self, network: Network, process: Process, name: str) -> None:
        self.network, self.process, self.name = network, process, name
        self.handlers: dict[str, Handler] = {}
        self._address = ""

    @property
    def garble(self) -> Callable[[str, bytes], bytes] | None:
        return self.network.garbling.get(self.process.host)

    async def not_to_dial(self, address: str) -> str:
        return ""

    def channel(self, address: str, holder: str = Role.NODE) -> MemoryChannel:
        return MemoryChannel(self, address)

    async def is_alive(
        self,
        node: str,
        address: str,
        seconds: float,
        reach: Reach | None = None,
        holder: str = "",
    ) -> bool | None:
        network, world = self.network, self.process.world
        end = world.now + seconds
        await asyncio.sleep(world.delay())
        while True:
            listener, host = network.listeners.get(address), network.hosts.get(address, "")
            reached = not host or network.reach(self.process.host, host)
            if reached and (listener is None or listener.process.responsive):
                await asyncio.sleep(world.delay())
                return listener is not None
            if world.now >= end:
                return None
            await asyncio.sleep(LOOK)

    async def serve(
        self, listen: str, handlers: Mapping[str, Handler], names: Collection[str]
    ) -> int:
        self.handlers, self._address = dict(handlers), listen
        self.network.listeners[listen] = self
        self.network.hosts[listen] = self.process.host
        return 1

    async def stop(self, grace: float) -> None:
        self.network.listeners.pop(self._address, None)

"""The registry's front door: a proxy that limits connections before they reach gRPC.

gRPC has no limits per address. So its server listens on a Unix socket in a private folder. Each
connection that has sent data gets its own connection to that socket, whose name identifies it in
the server's calls. crowd.py decides which connections stay.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import resource
import socket
import tempfile
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from planaria.bootstrap.address import Address, unmapped
from planaria.bootstrap.credentials import not_ours
from planaria.bootstrap.crowd import ConnectionLimits, Crowd

log = logging.getLogger(__name__)

OWN: Final = 100
"""Descriptors reserved for other uses: files, the page's and gRPC's."""
EACH: Final = 3
"""Descriptors per connection: its own, and both ends of the inner one."""
VISITORS: Final = 10
"""Connections for commands and newcomers, in addition to the nodes'."""
MOST: Final = 40_000
"""Maximum number of connections without a descriptor limit."""
LOOK: Final = 1.0
"""Seconds between two checks for silent connections."""
BACKLOG: Final = 4096
AGAIN: Final = 0.01
"""Seconds until a connection to a busy inner server is retried."""
TRIES: Final = 200


def may_open() -> int | None:
    """Raises the descriptor limit as far as allowed, and returns it; None: unlimited."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OWN + EACH * MOST if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return None if soft == resource.RLIM_INFINITY else soft


def room_within(descriptors: int | None) -> ConnectionLimits:
    """Limits for a process with this many descriptors; None: unlimited."""
    connections = MOST if descriptors is None else min(MOST, max(2, (descriptors - OWN) // EACH))
    return ConnectionLimits(connections=connections, strangers=connections // 2)


def room_for(nodes: int, descriptors: int | None) -> tuple[int, str]:
    """A log level and a message about the descriptor limit of a registry of `nodes` nodes."""
    connections = room_within(descriptors).connections
    limit = "any number of" if descriptors is None else descriptors
    said = f"this process may open {limit} files (ulimit -n): room for {connections} connections"
    needed = OWN + EACH * (nodes + VISITORS)
    if descriptors is None or descriptors >= needed:
        return logging.INFO, said
    return logging.WARNING, (
        f"{said}, and others are closed. A run of {nodes} nodes needs {needed}: raise the hard "
        f"limit (ulimit -n {needed}, LimitNOFILE={needed} of systemd, --ulimit nofile={needed} of "
        "Docker), and start the registry again"
    )


class FrontDoor:
    """The proxy. Add the server to `within`, then `open`; `close` after the server has stopped."""

    def __init__(self, room: ConnectionLimits) -> None:
        self.crowd = Crowd(room)
        # Its own thread: pings get through while the registry's loop is busy.
        self._loop = type(asyncio.get_running_loop())()
        self._thread = threading.Thread(target=self._loop.run_forever, name="door", daemon=True)
        self._within = tempfile.TemporaryDirectory(prefix="planaria-", ignore_cleanup_errors=True)
        self._folder = Path(self._within.name)  # mode 0700
        self._open: dict[int, _Outer] = {}
        self._numbers = itertools.count(1)
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._told = 0  # closed connections logged so far

    @property
    def within(self) -> str:
        """The server's listening address, in gRPC's format."""
        return f"unix:{self._folder}/door"

    async def open(self, listen: Address) -> int:
        """Listens and returns the port; port 0: any. Raises OSError."""
        self._thread.start()
        opening = asyncio.run_coroutine_threadsafe(self._listen(listen), self._loop)
        return await asyncio.wrap_future(opening)

    async def close(self) -> None:
        """Closes all connections and stops the thread."""
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        await asyncio.wrap_future(closing)
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()
        self._within.cleanup()

    async def _listen(self, listen: Address) -> int:
        self._spawn(self._look())
        port = listen.port
        for bound in await _bind(listen):
            port = bound.getsockname()[1]
            bound.setblocking(False)
            enter = partial(_Outer, self)
            server = await self._loop.create_server(enter, sock=bound, backlog=BACKLOG)
            self._servers.append(server)
        return port

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._turn_away(list(self._open))
        await asyncio.sleep(0)  # lets the aborts run

    # -- callers, by gRPC peer ---------------------------------------------------------------------

    def outer(self, peer: str) -> str:
        """The caller's address, in gRPC's peer format; empty: it has disconnected."""
        outer = self._open.get(self._number(peer))
        if outer is None:
            return ""
        return f"ipv{6 if ':' in outer.host else 4}:{Address(outer.host, outer.port)}"

    def prove(self, peer: str) -> None:
        """Records that a call on the connection was admitted."""
        self._loop.call_soon_threadsafe(self._prove, self._number(peer))

    def _prove(self, number: int) -> None:
        self.crowd.prove(number)
        if number in self._open:
            self._open[number].read_or_wait()

    def belong(self, peer: str, node: str) -> None:
        """Assigns the connection to a member, so that strangers can't displace it."""
        number, now = self._number(peer), self._loop.time()
        self._loop.call_soon_threadsafe(self.crowd.belong, number, node, now)

    def _number(self, peer: str) -> int:
        last = peer.rpartition("/")[2]
        return int(last) if last.isascii() and last.isdecimal() else 0

    # -- connections -------------------------------------------------------------------------------

    def came(self, outer: _Outer) -> int:
        number = next(self._numbers)
        self._open[number] = outer
        self._turn_away(self.crowd.come(number, outer.host, self._loop.time()))
        return number

    def heard(self, number: int, size: int) -> None:
        self._turn_away(self.crowd.read(number, size, self._loop.time()))

    def gone(self, number: int) -> None:
        self._open.pop(number, None)
        self.crowd.go(number)

    def enter(self, outer: _Outer) -> None:
        """Opens the inner connection after the first data."""
        self._spawn(self._enter(outer))

    async def _enter(self, outer: _Outer) -> None:
        own = self._folder / str(outer.number)
        inner = socket.socket(socket.AF_UNIX)
        try:
            inner.setblocking(False)
            inner.bind(str(own))
            for _ in range(TRIES):
                try:
                    inner.connect(f"{self._folder}/door")
                    break
                except BlockingIOError:
                    await asyncio.sleep(AGAIN)
            else:
                raise TimeoutError("the server within takes no connection")
            own.unlink()
            within, _ = await self._loop.create_unix_connection(lambda: _Inner(outer), sock=inner)
            outer.enter(within)
        except (OSError, asyncio.CancelledError) as error:
            inner.close()
            own.unlink(missing_ok=True)
            outer.abort()
            if isinstance(error, asyncio.CancelledError):
                raise
            log.warning("a connection from %s is closed: %s", outer.host, error)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            self._turn_away(self.crowd.overdue(self._loop.time()))
            turned_away = self.crowd.turned_away
            if turned_away > self._told:
                log.info("%d connections of strangers were closed", turned_away - self._told)
                self._told = turned_away

    def _turn_away(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            outer = self._open.pop(number, None)
            if outer is not None:
                outer.abort()

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Outer(asyncio.Protocol):
    """A connection from outside."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door
        self.host, self.port, self.number = "", 0, 0
        self.inner: asyncio.Transport | None = None
        self.waiting: list[bytes] = []  # data for the inner connection
        self.held = False  # whether the inner connection is congested
        self.gone = False
        self._reading, self._transport = True, cast("asyncio.Transport", None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        host, self.port = (transport.get_extra_info("peername") or ("", 0))[:2]  # empty: closed
        self.host = str(unmapped(host.partition("%")[0]))
        self.number = self._door.came(self)

    def enter(self, inner: asyncio.Transport) -> None:
        """Attaches the inner connection. Not when it is made: uvloop forgets the socket of a
        transport closed by then, and later closes another one with the same descriptor."""
        self.inner = inner
        for data in self.waiting:
            inner.write(data)
        self.waiting.clear()
        if self.gone:
            inner.abort()

    def data_received(self, data: bytes) -> None:
        self._door.heard(self.number, len(data))
        if self.inner is not None:
            self.inner.write(data)
        else:
            if not self.waiting:
                self._door.enter(self)
            self.waiting.append(data)
        self.read_or_wait()

    def read_or_wait(self) -> None:
        """Resumes or pauses reading, by congestion and limits."""
        more = not self.held and self._door.crowd.may_say_more(self.number)
        if more != self._reading and not self._transport.is_closing():
            self._reading = more
            (self._transport.resume_reading if more else self._transport.pause_reading)()

    def say(self, data: bytes) -> None:
        if not self._transport.is_closing():  # true until the loop closes both
            self._transport.write(data)

    def abort(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        """Closes after buffered data is sent."""
        self._transport.close()

    def pause_writing(self) -> None:
        if self.inner is not None:
            self.inner.pause_reading()

    def resume_writing(self) -> None:
        if self.inner is not None and not self.inner.is_closing():
            self.inner.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self._door.gone(self.number)
        if self.inner is not None:
            self.inner.abort()


class _Inner(asyncio.Protocol):
    """The inner end of a proxied connection."""

    def __init__(self, outer: _Outer) -> None:
        self._outer = outer

    def data_received(self, data: bytes) -> None:
        self._outer.say(data)

    def pause_writing(self) -> None:
        self._outer.held = True
        self._outer.read_or_wait()

    def resume_writing(self) -> None:
        self._outer.held = False
        self._outer.read_or_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._outer.close()


async def _bind(listen: Address) -> list[socket.socket]:
    """Binds all addresses of a host, at one port. Raises OSError, which names the remedy."""
    if listen.is_any and socket.has_dualstack_ipv6():
        places = [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")]  # or only IPv4
    else:
        look_up = asyncio.get_running_loop().getaddrinfo
        found = await look_up(*listen, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        places = [(family, str(place[0])) for family, *_, place in found]
    bound: list[socket.socket] = []
    failed: OSError | None = None
    for family, host in dict.fromkeys(places):
        port = bound[0].getsockname()[1] if bound else listen.port
        dual = host == "::"
        try:
            bound.append(socket.create_server((host, port), family=family, dualstack_ipv6=dual))
        except OSError as error:  # for example without IPv6
            failed = error
    if not bound:
        raise OSError(not_ours(listen)) from failed
    return bound

"""Connection limits for a port where gRPC itself accepts connections.

Links carry gigabytes, and a Python proxy would halve their speed. So this module inspects the
port's connections through the process's descriptors: their peers and received bytes. The front
door's rules (crowd.py) decide which to close; it shuts those down, and gRPC sees a closed
connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from planaria.bootstrap.address import Address, unmapped
from planaria.bootstrap.crowd import ConnectionLimits, Crowd
from planaria.bootstrap.front_door import MOST, OWN
from planaria.bootstrap.gate import place_of

log = logging.getLogger(__name__)

LOOK: Final = 0.5
"""Minimum seconds between two inspections, which take at most SHARE of the time."""
SHARE: Final = 0.05
STRANGERS: Final = 256
"""Maximum number of connections of unknown peers."""
DESCRIPTORS: Final = Path("/dev/fd")
_RECEIVED: Final = 128
"""Offset of the received bytes in Linux's struct tcp_info (tcp(7))."""


def room_beside(descriptors: int | None) -> ConnectionLimits:
    """Limits for a process with this many descriptors; None: unlimited."""
    connections = MOST if descriptors is None else min(MOST, max(2, descriptors - OWN))
    return ConnectionLimits(connections=connections, strangers=min(STRANGERS, connections // 2))


class _OpenConnection(NamedTuple):
    number: int
    since: float  # time of the first sighting
    read: int


class Doorkeeper:
    """The limits of one port of this process. Runs on the event loop; inspections use a thread."""

    def __init__(self, room: ConnectionLimits, port: int) -> None:
        self.crowd = Crowd(room)
        self._port = port
        self._known: dict[Address, _OpenConnection] = {}
        self._unwanted: set[int] = set()  # connections to close that are still open
        self._numbers = 0

    async def keep(self) -> None:
        """Enforces the limits until cancelled."""
        clock, took = asyncio.get_running_loop().time, 0.0
        while True:
            await asyncio.sleep(max(LOOK, took / SHARE))
            now = clock()
            found = await asyncio.to_thread(connections, self._port)
            took = clock() - now
            if unwanted := self.saw(found, now):
                log.info("%d connections of strangers are closed", len(unwanted))
                await asyncio.to_thread(shut, self._port, unwanted)

    def prove(self, peer: str, now: float) -> None:
        """Records that a call from gRPC peer `peer` was admitted."""
        if number := self._number(peer, now):
            self.crowd.prove(number)

    def belong(self, peer: str, name: str, now: float) -> None:
        """Assigns the connection to a known peer, so that strangers can't displace it."""
        if number := self._number(peer, now):
            self.crowd.belong(number, name, now)

    def saw(self, found: Mapping[Address, int], now: float) -> set[Address]:
        """Processes an inspection begun at `now`: received bytes by peer address. Returns the peers
        to disconnect."""
        for place in [p for p, one in self._known.items() if p not in found and one.since < now]:
            number = self._known.pop(place).number
            self.crowd.go(number)
            self._unwanted.discard(number)
        for place, size in found.items():
            if place not in self._known:
                self._come(place, now)
            known = self._known[place]
            if size > known.read:
                self._known[place] = known._replace(read=size)
                self._unwanted.update(self.crowd.read(known.number, size - known.read, now))
            if not self.crowd.may_say_more(known.number):
                self.crowd.go(known.number)
                self._unwanted.add(known.number)
        self._unwanted.update(self.crowd.overdue(now))
        return {place for place, known in self._known.items() if known.number in self._unwanted}

    def _number(self, peer: str, now: float) -> int:
        """The number of a peer's connection; 0: not an IP peer."""
        place = place_of(peer)
        if place is None:
            return 0
        place = place._replace(host=unmapped(place.host.partition("%")[0]))
        if place not in self._known:
            self._come(place, now)
        return self._known[place].number

    def _come(self, place: Address, now: float) -> None:
        self._numbers += 1
        self._known[place] = _OpenConnection(self._numbers, now, 0)
        self._unwanted.update(self.crowd.come(self._numbers, place.host, now))


def connections(port: int) -> dict[Address, int]:
    """This process's connections at one of its ports: received bytes by peer address, as far as the
    system reports them."""
    return {place: _received(one) for place, one in _at(port)}


def shut(port: int, places: Set[Address]) -> None:
    """Shuts down the connections at `port` from `places`."""
    for place, one in _at(port):
        if place in places:
            with suppress(OSError):  # already closed
                one.shutdown(socket.SHUT_RDWR)


def _at(port: int) -> Iterator[tuple[Address, socket.socket]]:
    """Sockets on duplicated descriptors, since the originals may be closed and reused."""
    for entry in list(DESCRIPTORS.iterdir()):
        with suppress(OSError), _another(int(entry.name)) as one:
            of_ip = one.family in (socket.AF_INET, socket.AF_INET6)
            if of_ip and one.type == socket.SOCK_STREAM and one.getsockname()[1] == port:
                host, far = one.getpeername()[:2]
                yield Address(unmapped(host.partition("%")[0]), far), one


@contextmanager
def _another(descriptor: int) -> Iterator[socket.socket]:
    """Duplicates a socket descriptor. Raises OSError for other descriptors."""
    own = os.dup(descriptor)
    try:
        one = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    with one:
        yield one


def _received(one: socket.socket) -> int:
    if not hasattr(socket, "TCP_INFO"):
        return 0
    told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED + 8)
    return int.from_bytes(told[_RECEIVED:], sys.byteorder)  # empty on older Linux

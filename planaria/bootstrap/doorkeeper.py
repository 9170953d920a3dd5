"""Who may stay at a port where gRPC itself takes connections: a front door that nothing passes
through.

Links carry gigabytes, and bytes that a process of Python passes on come half as fast. So the
connections of such a port are looked at from beside, among the process's descriptors: where they
are from, how much has come by them. Who stays is decided as at the front door (crowd.py); who has
to go has its connection shut down, and gRPC finds it closed.
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
"""Seconds between two looks, or more: they take a SHARE of the time at most."""
SHARE: Final = 0.05
STRANGERS: Final = 256
"""Connections by which nobody speaks who is known."""
DESCRIPTORS: Final = Path("/dev/fd")
_RECEIVED: Final = 128
"""Where Linux has the bytes that were received in what it says of a connection (tcp(7))."""


def room_beside(descriptors: int | None) -> ConnectionLimits:
    """At a port of a process that may have so many; None: as many as it likes."""
    connections = MOST if descriptors is None else min(MOST, max(2, descriptors - OWN))
    return ConnectionLimits(connections=connections, strangers=min(STRANGERS, connections // 2))


class _OpenConnection(NamedTuple):
    number: int
    since: float  # when it was first seen
    read: int


class Doorkeeper:
    """Of one port of this process. On the event loop, but for the looks."""

    def __init__(self, room: ConnectionLimits, port: int) -> None:
        self.crowd = Crowd(room)
        self._port = port
        self._known: dict[Address, _OpenConnection] = {}
        self._unwanted: set[int] = set()  # that the crowd has no room for, and are still there
        self._numbers = 0

    async def keep(self) -> None:
        """As long as the port is open."""
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
        """A call by the connection with whom gRPC calls so was let in."""
        if number := self._number(peer, now):
            self.crowd.prove(number)

    def belong(self, peer: str, name: str, now: float) -> None:
        """This one, who is known, speaks by it: strangers can't take its place."""
        if number := self._number(peer, now):
            self.crowd.belong(number, name, now)

    def saw(self, found: Mapping[Address, int], now: float) -> set[Address]:
        """At a look that began then: connections, by where they are from, and the bytes that came
        by each. Returns those that have to go."""
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
        """0: it has gone."""
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
    """Those that this process has at a port of its own: where they are from, and the bytes that
    came by each, as far as the system says."""
    return {place: _received(one) for place, one in _at(port)}


def shut(port: int, places: Set[Address]) -> None:
    """Ends the connections at this port that are from there."""
    for place, one in _at(port):
        if place in places:
            with suppress(OSError):  # it has just gone
                one.shutdown(socket.SHUT_RDWR)


def _at(port: int) -> Iterator[tuple[Address, socket.socket]]:
    """Each by a descriptor of its own: the first one may be closed meanwhile, and be another's."""
    for entry in list(DESCRIPTORS.iterdir()):
        with suppress(OSError), _another(int(entry.name)) as one:
            of_ip = one.family in (socket.AF_INET, socket.AF_INET6)
            if of_ip and one.type == socket.SOCK_STREAM and one.getsockname()[1] == port:
                host, far = one.getpeername()[:2]
                yield Address(unmapped(host.partition("%")[0]), far), one


@contextmanager
def _another(descriptor: int) -> Iterator[socket.socket]:
    """Raises OSError for what is no socket."""
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
    return int.from_bytes(told[_RECEIVED:], sys.byteorder)  # of an older Linux: none

"""Admission and eviction of connections, for the front door (front_door.py).

Pure: takes connection numbers, address blocks, bytes and `now`; returns numbers to close. A
connection is a stranger's until a member uses it. Strangers have a limited share. When it is full,
the address block with the most connections loses its oldest unproven one: so other blocks can still
connect, and members keep their connections.
"""

from __future__ import annotations

import heapq
import ipaddress
from dataclasses import dataclass

from planaria.bootstrap.address import plain_ip


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on connections. Times in seconds."""

    connections: int = 20_000
    strangers: int = 10_000  # part of `connections`
    first_word: float = 10.0  # until an admitted call
    idle: float = 60.0  # silence of a stranger
    unproven: int = 256 * 2**10  # bytes before an admitted call; then reading pauses
    of_block: int = 64 * 2**20  # bytes received on a block's open stranger connections
    of_strangers: int = 256 * 2**20  # the same, over all blocks


@dataclass(slots=True, eq=False)
class _Guest:
    block: str
    came: float
    heard: float
    read: int = 0
    proven: bool = False


class Crowd:
    """The open connections. Each method returns the connections to close, and forgets them."""

    def __init__(self, room: ConnectionLimits) -> None:
        self.room = room
        self.turned_away = 0  # connections closed so far, for lack of room or activity
        self._strangers: dict[int, _Guest] = {}  # in the order of arrival
        self._members: dict[int, str] = {}  # node by connection
        self._of: dict[str, int] = {}  # the connection of each member
        self._blocks: dict[str, dict[int, _Guest]] = {}
        self._read: dict[str, int] = {}  # bytes by block
        self._all_read = 0
        self._fullest: list[tuple[int, str]] = []  # heap; stale entries are dropped on access

    def __len__(self) -> int:
        return len(self._strangers) + len(self._members)

    def come(self, number: int, host: str, now: float) -> list[int]:
        """Adds a connection, which may itself be among those to close."""
        guest = self._strangers[number] = _Guest(block_of(host), now, now)
        self._blocks.setdefault(guest.block, {})[number] = guest
        self._note(guest.block)
        full = len(self._strangers) > self.room.strangers or len(self) > self.room.connections
        return self._turn_away([self._least_of(self._fullest_block())]) if full else []

    def read(self, number: int, size: int, now: float) -> list[int]:
        """Records `size` received bytes."""
        guest = self._strangers.get(number)
        if guest is None:
            return []
        guest.heard = now
        guest.read += size
        self._read[guest.block] = self._read.get(guest.block, 0) + size
        self._all_read += size
        if self._read[guest.block] > self.room.of_block:
            return self._turn_away([self._greediest_of(guest.block)])
        if self._all_read > self.room.of_strangers:
            return self._turn_away(
                [self._greediest_of(max(self._read, key=self._read.__getitem__))]
            )
        return []

    def may_say_more(self, number: int) -> bool:
        """Whether more may be read; before an admitted call, bytes are limited."""
        guest = self._strangers.get(number)
        return guest is None or guest.proven or guest.read < self.room.unproven

    def prove(self, number: int) -> None:
        """Records that a call on the connection was admitted."""
        if (guest := self._strangers.get(number)) is not None:
            guest.proven = True

    def belong(self, number: int, node: str, now: float) -> None:
        """Assigns the connection to a member; its former connection becomes a stranger's."""
        guest = self._strangers.get(number)
        if guest is None:
            return
        former = self._of.get(node)
        self.go(number)
        self._members[number], self._of[node] = node, number
        if former is not None:
            del self._members[former]
            self._strangers[former] = _Guest(guest.block, now, now, proven=True)
            self._blocks.setdefault(guest.block, {})[former] = self._strangers[former]
            self._note(guest.block)

    def go(self, number: int) -> None:
        """Removes a closed connection."""
        node = self._members.pop(number, None)
        if node is not None:
            del self._of[node]
        guest = self._strangers.pop(number, None)
        if guest is None:
            return
        there = self._blocks[guest.block]
        del there[number]
        self._all_read -= guest.read
        if there:
            self._read[guest.block] = self._read.get(guest.block, 0) - guest.read
            self._note(guest.block)
        else:
            del self._blocks[guest.block]
            self._read.pop(guest.block, None)

    def overdue(self, now: float) -> list[int]:
        """Closes connections that are silent, or unproven, for too long."""
        return self._turn_away(
            [
                number
                for number, guest in self._strangers.items()
                if now >= guest.heard + self.room.idle
                or (not guest.proven and now >= guest.came + self.room.first_word)
            ]
        )

    def _turn_away(self, numbers: list[int]) -> list[int]:
        for number in numbers:
            self.go(number)
        self.turned_away += len(numbers)
        return numbers

    def _note(self, block: str) -> None:
        heapq.heappush(self._fullest, (-len(self._blocks[block]), block))
        if len(self._fullest) > 4 * len(self._blocks) + 100:
            self._fullest = [(-len(there), block) for block, there in self._blocks.items()]
            heapq.heapify(self._fullest)

    def _fullest_block(self) -> str:
        while True:
            count, block = self._fullest[0]
            if len(self._blocks.get(block, ())) == -count:
                return block
            heapq.heappop(self._fullest)

    def _least_of(self, block: str) -> int:
        """The block's oldest unproven connection, else the one silent for longest."""
        there = self._blocks[block]
        waiting = (number for number, guest in there.items() if not guest.proven)
        return next(waiting, None) or min(there, key=lambda number: there[number].heard)

    def _greediest_of(self, block: str) -> int:
        there = self._blocks[block]
        return max(there, key=lambda number: there[number].read)


def block_of(host: str) -> str:
    """A group of addresses of one likely owner: an IPv4 address, or a /64 of IPv6."""
    ip = plain_ip(host)
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(ip) >> 64 << 64, 64)))
    return str(ip or host)

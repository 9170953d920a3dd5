"""Who of those that have connected stays: the decisions of the front door (front_door.py).

Pure: numbers of connections, blocks of addresses, bytes and `now` in, numbers to close out. A
connection is a stranger's until a member speaks by it. Strangers have a share of the room. When
that is full, the block of addresses that has most of it loses its oldest connection that nothing
has come of: whoever comes from elsewhere is let in, and members have what is theirs.
"""

from __future__ import annotations

import heapq
import ipaddress
from dataclasses import dataclass

from planaria.bootstrap.address import plain_ip


@dataclass(frozen=True)
class ConnectionLimits:
    """How much there is of it. Times in seconds."""

    connections: int = 20_000
    strangers: int = 10_000  # of these, at most
    first_word: float = 10.0  # until a call that is let in
    idle: float = 60.0  # in which a stranger says nothing
    unproven: int = 256 * 2**10  # bytes before a call that is let in; then nothing more is read
    of_block: int = 64 * 2**20  # bytes that came by a block's open connections of strangers
    of_strangers: int = 256 * 2**20  # by all of them


@dataclass(slots=True, eq=False)
class _Guest:
    block: str
    came: float
    heard: float
    read: int = 0
    proven: bool = False


class Crowd:
    """Each method returns the connections that are to be closed, and forgets them."""

    def __init__(self, room: ConnectionLimits) -> None:
        self.room = room
        self.turned_away = 0  # ever, for want of room or of a word
        self._strangers: dict[int, _Guest] = {}  # in the order of coming
        self._members: dict[int, str] = {}  # who speaks
        self._of: dict[str, int] = {}  # the connection of each member
        self._blocks: dict[str, dict[int, _Guest]] = {}
        self._read: dict[str, int] = {}  # by block
        self._all_read = 0
        self._fullest: list[tuple[int, str]] = []  # heap; stale entries are dropped when met

    def __len__(self) -> int:
        return len(self._strangers) + len(self._members)

    def come(self, number: int, host: str, now: float) -> list[int]:
        """It may have to go itself."""
        guest = self._strangers[number] = _Guest(block_of(host), now, now)
        self._blocks.setdefault(guest.block, {})[number] = guest
        self._note(guest.block)
        full = len(self._strangers) > self.room.strangers or len(self) > self.room.connections
        return self._turn_away([self._least_of(self._fullest_block())]) if full else []

    def read(self, number: int, size: int, now: float) -> list[int]:
        """So many bytes have come by it."""
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
        """Before a call of its was let in, it may say only so much."""
        guest = self._strangers.get(number)
        return guest is None or guest.proven or guest.read < self.room.unproven

    def prove(self, number: int) -> None:
        """A call by it was let in."""
        if (guest := self._strangers.get(number)) is not None:
            guest.proven = True

    def belong(self, number: int, node: str, now: float) -> None:
        """This member speaks by it, and by no other any more."""
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
        """It is closed."""
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
        """Those that have said nothing for too long, or nothing of use."""
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
        """The oldest that nothing has come of, else the one that was heard longest ago."""
        there = self._blocks[block]
        waiting = (number for number, guest in there.items() if not guest.proven)
        return next(waiting, None) or min(there, key=lambda number: there[number].heard)

    def _greediest_of(self, block: str) -> int:
        there = self._blocks[block]
        return max(there, key=lambda number: there[number].read)


def block_of(host: str) -> str:
    """Addresses that one owner is likely to have together: an IPv4 address, a /64 of IPv6."""
    ip = plain_ip(host)
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(ip) >> 64 << 64, 64)))
    return str(ip or host)

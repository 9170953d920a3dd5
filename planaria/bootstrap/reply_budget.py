"""Flow control of join replies: limits the bytes in flight.

A reply contains the whole view and stays in memory until it has arrived, however slow the link;
simultaneous joins of a large run would need all at once. Replies are sent in the order of the
nodes' first requests: a node that reconnects keeps its place. Pure: takes and returns call numbers.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection
from typing import Final

MOST_PLACES: Final = 20_000
"""Maximum number of places kept, since nodes that gave up leave theirs."""


class ReplyBudget:
    def __init__(self, room: int) -> None:
        """`room`: bytes in flight; a single reply may exceed it."""
        self.room = room
        self._numbers = itertools.count(1)
        self._places: dict[str, int] = {}  # nodes without a reply yet; the oldest first
        self._waiting: dict[int, str] = {}  # node of each call
        self._order: list[tuple[int, int]] = []  # heap of (place, call); includes ended calls
        self._going: dict[int, tuple[str, int]] = {}  # node and bytes of each call
        self._bytes = 0

    @property
    def waiting(self) -> Collection[str]:
        """The waiting nodes."""
        return self._waiting.values()

    def ask(self, node: str) -> int:
        """Queues a call of `node`; returns its number."""
        call = next(self._numbers)
        self._waiting[call] = node
        heapq.heappush(self._order, (self._places.setdefault(node, call), call))
        if len(self._places) > MOST_PLACES:
            del self._places[next(iter(self._places))]
        return call

    def go(self, size: int) -> list[int]:
        """The calls to answer now, with `size` bytes each."""
        started = list[int]()
        while self._order and (not self._bytes or self._bytes + size <= self.room):
            _, call = heapq.heappop(self._order)
            if (node := self._waiting.pop(call, None)) is not None:
                self._places.pop(node, None)
                self._going[call] = node, size
                self._bytes += size
                started.append(call)
        return started

    def end(self, call: int) -> None:
        """Ends a call, after its reply or a disconnection. Idempotent."""
        self._waiting.pop(call, None)
        _, size = self._going.pop(call, ("", 0))
        self._bytes -= size

    def before(self, node: str) -> str:
        """The node's position in the queue, as text."""
        first = next((other for other, _ in self._going.values()), "nobody")
        position = list(self._places).index(node) if node in self._places else 0
        return (
            f"{self._bytes / 1e6:.1f} MB of replies to other nodes are in flight, the first to "
            f"{first}, with {position} before {node}, which keeps its place"
        )

"""Flow control of join replies: limits the bytes in flight.

A reply contains the whole view and stays in memory until it has arrived, however slow the link;
simultaneous joins of a large run would need all at once. Replies are sent in the order of the
requests. Pure. A call is any hashable object of the caller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

Call = TypeVar("Call", bound=Hashable)


class ReplyBudget(Generic[Call]):
    def __init__(self, room: int) -> None:
        """`room`: bytes in flight; a single reply may exceed it."""
        self.room = room
        self._waiting: OrderedDict[Call, str] = OrderedDict()  # node of each call
        self._going: dict[Call, tuple[str, int]] = {}  # node and bytes of each call
        self._bytes = 0

    @property
    def waiting(self) -> Collection[str]:
        """The nodes whose calls wait for their join replies."""
        return self._waiting.values()

    def ask(self, call: Call, node: str) -> None:
        """Queues a call of `node` for its join reply."""
        self._waiting[call] = node

    def go(self, size: int) -> list[Call]:
        """The calls to answer now, with `size` bytes each."""
        started = list[Call]()
        while self._waiting and (not self._bytes or self._bytes + size <= self.room):
            call, node = self._waiting.popitem(last=False)
            self._going[call] = node, size
            self._bytes += size
            started.append(call)
        return started

    def end(self, call: Call) -> None:
        """Frees the bytes of a call, after its reply or a disconnection. Idempotent."""
        self._waiting.pop(call, None)
        _, size = self._going.pop(call, ("", 0))
        self._bytes -= size

    def before(self, node: str) -> str:
        """What a node's call waits for, for people."""
        first = next((other for other, _ in self._going.values()), "nobody")
        position = list(self._waiting.values()).index(node) if node in self._waiting.values() else 0
        return (
            f"{self._bytes / 1e6:.1f} MB of replies to other nodes are in flight, the first to "
            f"{first}, with {position} before {node}"
        )

"""Who is answered next, of those that have joined: of answers on their way there are only so many
bytes.

An answer has the whole view, and until it has arrived it is in memory, however slow the link; of
those that join a large run at once all would be. So they go in the order in which nodes have asked
first: who hangs up and calls again has the place that it had. Pure: numbers of calls in and out.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection
from typing import Final

MOST_PLACES: Final = 20_000
"""That are kept; who has given up leaves one."""


class ReplyBudget:
    def __init__(self, room: int) -> None:
        """`room`: bytes that may be on their way; a single answer may have more."""
        self.room = room
        self._numbers = itertools.count(1)
        self._places: dict[str, int] = {}  # of nodes that no answer has gone to; the oldest first
        self._waiting: dict[int, str] = {}  # node of each call
        self._order: list[tuple[int, int]] = []  # heap: place, call; also of calls that ended
        self._going: dict[int, tuple[str, int]] = {}  # node, and bytes, of each call
        self._bytes = 0

    @property
    def waiting(self) -> Collection[str]:
        """The nodes that do."""
        return self._waiting.values()

    def ask(self, node: str) -> int:
        """A call of its waits from now on; its number."""
        call = next(self._numbers)
        self._waiting[call] = node
        heapq.heappush(self._order, (self._places.setdefault(node, call), call))
        if len(self._places) > MOST_PLACES:
            del self._places[next(iter(self._places))]
        return call

    def go(self, size: int) -> list[int]:
        """The calls that are to be answered now, with so many bytes each."""
        gone = list[int]()
        while self._order and (not self._bytes or self._bytes + size <= self.room):
            _, call = heapq.heappop(self._order)
            if (node := self._waiting.pop(call, None)) is not None:
                self._places.pop(node, None)
                self._going[call] = node, size
                self._bytes += size
                gone.append(call)
        return gone

    def end(self, call: int) -> None:
        """It has its answer, or has hung up. Ending twice changes nothing."""
        self._waiting.pop(call, None)
        _, size = self._going.pop(call, ("", 0))
        self._bytes -= size

    def before(self, node: str) -> str:
        """For whom it waits, in words."""
        first = next((other for other, _ in self._going.values()), "nobody")
        before = list(self._places).index(node) if node in self._places else 0
        return (
            f"of answers to others {self._bytes / 1e6:.1f} MB are on their way, first that to "
            f"{first}, and {before} are to be told before {node}, which keeps its place"
        )

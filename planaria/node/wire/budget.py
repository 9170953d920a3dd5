"""How many bytes of what peers have sent may wait to be read."""

from __future__ import annotations

from collections import Counter
from typing import Final

ITEM: Final = 1 << 10
"""Bytes that anything takes beside its payload."""
PEERS: Final = 4
"""How many peers may have all that one of them may have, in all."""


class Budget:
    """Bytes by peer, at most `each` of one of them and `PEERS` times that of all.

    What doesn't fit is dropped, at the cost of whoever sent too much: of the peer whose share is
    used up or, where all together have too much, of the one that has most."""

    def __init__(self, each: int) -> None:
        self.each = each
        self._used: Counter[str] = Counter()

    @property
    def used(self) -> int:
        return self._used.total()

    def spend(self, peer: str, size: int) -> str:
        """Something of `size` bytes has come. Empty: it fits. Else who has sent too much: if it is
        `peer` this is to be dropped, else what waits of that one, after which it may fit."""
        if self._used[peer] + size + ITEM > self.each:
            return peer
        if self.used + size + ITEM > PEERS * self.each:
            return max(self._used, key=lambda one: self._used[one])
        self._used[peer] += size + ITEM
        return ""

    def free(self, peer: str, size: int) -> None:
        """It has been read."""
        self._used[peer] -= size + ITEM

    def drop(self, peer: str) -> None:
        """All that waited of this peer is gone."""
        del self._used[peer]

    def clear(self) -> None:
        self._used.clear()

    def sentence(self, peer: str) -> str:
        return f"{peer} has sent more than the {self.each} bytes that may wait here of one peer"

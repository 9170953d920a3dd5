"""The memory for what peers have sent and this node hasn't read yet, in bytes."""

from __future__ import annotations

from collections import Counter
from typing import Final

from planaria.node.wire.frame_format import Frame

ITEM: Final = 1 << 10
"""Bytes of an item's overhead, beside its payload."""
PEERS: Final = 4
"""Budget of all peers together, as a multiple of that of one peer."""


class Budget:
    """Bytes of what peers have sent and nobody has read: at most `each` of one peer, and `PEERS *
    each` of all.

    What doesn't fit is dropped at the expense of one peer: the one whose own share is used up or,
    if all together exceed the total, the one that uses most."""

    def __init__(self, each: int) -> None:
        self.each = each
        self.used = 0  # by all peers
        self._used: Counter[str] = Counter()

    def spend(self, peer: str, size: int) -> str:
        """Account for a received item of `size` bytes from `peer`. Returns "" if it fits, else the
        peer over budget: if that is `peer`, drop the item, else that one's items, and try again."""
        if self._used[peer] + size + ITEM > self.each:
            return peer
        if self.used + size + ITEM > PEERS * self.each:
            return max(self._used, key=lambda other: self._used[other])
        self._used[peer] += size + ITEM
        self.used += size + ITEM
        return ""

    def free(self, peer: str, size: int) -> None:
        """Account for an item of this peer that has been read."""
        self._used[peer] -= size + ITEM
        self.used -= size + ITEM

    def drop(self, peer: str) -> None:
        """Account for the loss of all unread items of this peer."""
        self.used -= self._used.pop(peer, 0)

    def clear(self) -> None:
        self._used.clear()
        self.used = 0

    def why_dropped(self, peer: str) -> str:
        """Why the items of a peer over budget are dropped, for people."""
        return f"{peer} has sent more than the {self.each} bytes that may wait here of one peer"


class HeldFrames(Budget):
    """Frames of an attempt that hasn't begun here yet, within the budget of each peer."""

    def __init__(self, each: int) -> None:
        super().__init__(each)
        self.frames: list[tuple[str, Frame]] = []  # with their senders
        self._refused: set[str] = set()

    def hold(self, peer: str, frame: Frame) -> dict[str, str]:
        """Keep a frame until its attempt begins; those of older attempts make room. Returns the
        peers that flood this node with frames, and a sentence about each. Nothing is kept of them
        until `take`."""
        floods: dict[str, str] = {}
        while peer not in self._refused and (greedy := self.spend(peer, frame.size)):
            ballots = [f.ballot for p, f in [*self.frames, (peer, frame)] if p == greedy]
            stale = [f for p, f in self.frames if p == greedy and f.ballot < max(ballots)]
            self.frames = [(p, f) for p, f in self.frames if p != greedy or f not in stale]
            for old in stale:  # of an attempt that came to nothing
                self.free(greedy, old.size)
            if not stale:
                floods[greedy] = self.why_dropped(greedy)
                self._refused.add(greedy)
                self.frames = [(p, f) for p, f in self.frames if p != greedy]
                self.drop(greedy)
        if peer not in self._refused:
            self.frames.append((peer, frame))
        return floods

    def take(self) -> list[tuple[str, Frame]]:
        """Remove and return all kept frames, with their senders."""
        frames, self.frames = self.frames, []
        self.clear()
        self._refused.clear()
        return frames

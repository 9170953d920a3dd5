"""Restores the order of chunks that arrive by several streams.

Each chunk has a sequence number in its direction of a connection, from 1. An early chunk waits. The
sender has at most a window of payload in flight, and `HEADS` bytes of frames' overhead (chunks.py).
So chunks that wait beyond that are refused, as are duplicates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from planaria.node.wire.budget import ITEM
from planaria.node.wire.frames import Chunk, WireError

HEADS: Final = 1 << 20
"""Bytes of heads of frames in flight; each frame counts `HEAD` more."""
HEAD: Final = 2 * ITEM


class Ordering:
    """Chunk order in one direction of a link."""

    def __init__(self, window: int) -> None:
        """`window`: bytes of payload that the sender may have in flight."""
        self._most = 2 * (window + HEADS)  # since a chunk takes memory of its own
        self._due = 1
        self._early: dict[int, Chunk] = {}
        self._waiting = 0  # bytes

    def take(self, chunk: Chunk) -> Iterator[Chunk]:
        """The chunks that are next in order, given this one. Raises WireError."""
        if chunk.order < self._due or chunk.order in self._early:
            raise WireError(
                f"a chunk in place {chunk.order}, which is taken; the next one is {self._due}"
            )
        self._early[chunk.order] = chunk
        self._waiting += _size(chunk)
        if chunk.order > self._due and self._waiting > self._most:
            raise WireError(
                f"{self._waiting} bytes before the chunk in place {self._due}; at most {self._most}"
            )
        while (due := self._early.pop(self._due, None)) is not None:
            self._due += 1
            self._waiting -= _size(due)
            yield due

    def begin_anew(self) -> None:
        """Restart on a new connection. Waiting chunks are sent again."""
        self._due, self._waiting = 1, 0
        self._early.clear()


def _size(chunk: Chunk) -> int:
    return len(chunk.data) + len(chunk.head) + ITEM

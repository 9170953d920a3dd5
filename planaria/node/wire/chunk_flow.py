"""Frames as chunks, for one direction of a link: order, window, acknowledgements, reassembly.

Pure: chunks in, chunks out. A frame gets its number when its first chunk leaves, so the receiver
sees consecutive new numbers. A more urgent kind overtakes between two chunks. Within a kind frames
keep their order, so at most one frame of each kind is in flight. A new connection resumes at the
inbox's position: chunks lost on the old one are sent again. Each chunk carries its sequence
number from 1 in its direction of a connection, since chunks may arrive by several streams. An early
chunk waits. A sender has at most a window of payload in flight, and `HEADS` bytes of frames'
overhead. So chunks that wait beyond that are refused, as are duplicates.

Copies travel in the background: their chunks leave when background.py grants room. They are
acknowledged at once, since background.py measures how long they have queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from planaria.node.wire.background import FIRST, Background
from planaria.node.wire.budget import ITEM
from planaria.node.wire.frame_format import (
    KINDS,
    Chunk,
    Frame,
    WireError,
    buffers_of,
    check_payload_size,
    pack_chunk,
)
from planaria.node.wire.streams import Streams

ACKNOWLEDGE_EVERY: Final = 2  # chunks, and at each frame's end; a window holds at least as many
BACKGROUND: Final = "copy"
PIECES: Final = FIRST, 128 << 10
"""Least and most bytes of a chunk when several streams share a frame. Each stream then gets two
chunks of it, unless those are too small. Streams differ in speed, and a late chunk on one holds up
what came by the others."""

HEADS: Final = 1 << 20
"""Bytes of heads of frames in flight; each frame counts `HEAD` more."""
HEAD: Final = 2 * ITEM


@dataclass(slots=True, eq=False)
class _Sending:
    frame: Frame
    head: bytes
    rest: deque[memoryview]  # of the payload
    size: int
    arrived: Callable[[], None] | None
    number: int = 0
    sent: int = 0
    acknowledged: int = 0

    @property
    def in_background(self) -> bool:
        return self.frame.kind == BACKGROUND

    @property
    def beside(self) -> int:
        """Bytes of overhead at the receiver, beside the payload."""
        return len(self.head) + HEAD


class ChunkOutbox:
    """A link's frames to send, in chunks of at most `chunk` bytes, at most `window` bytes
    unacknowledged; `background` makes the window of copies. `now` in seconds, of any one clock."""

    def __init__(
        self, chunk: int, window: int, background: Callable[[], Background] = Background
    ) -> None:
        self._chunk, self._window = chunk, window
        self._new_background, self._background = background, background()
        self._queues: dict[str, deque[_Sending]] = {kind: deque() for kind in KINDS}
        self._started: dict[int, _Sending] = {}
        self._last = 0
        self._in_flight = self._copying = self._beside = 0  # bytes; `_copying`: copies
        self._order = 0  # sequence number of the last chunk
        self._streams = Streams()
        self.round_trip = 0.0  # seconds, of this connection; 0: not known
        self.unacknowledged = 0  # bytes of payload, queued ones included
        self.frames = 0  # frames of those bytes

    def push(self, frame: Frame, arrived: Callable[[], None] | None = None) -> None:
        """Queue a frame; `arrived` is called when the peer has acknowledged all of it. Raises
        WireError when the frame can't travel."""
        if frame.kind not in KINDS:
            raise WireError(f"a frame of kind {frame.kind!r}, which is none of {', '.join(KINDS)}")
        sending = _Sending(frame, frame.head(), _rest_of(frame, 0), frame.size, arrived)
        self._queues[frame.kind].append(sending)
        self.unacknowledged += sending.size
        self.frames += 1

    @property
    def streams(self) -> int:
        """How many streams the link wants for its chunks."""
        return self._streams.wanted

    @property
    def rate(self) -> float:
        """Bytes per second that the link has carried; 0: not known."""
        return self._streams.rate(self.round_trip)

    def next(self, now: float, streams: int = 1, place: int = 0) -> bytes | None:
        """The next chunk to send by the stream at index `place` of `streams`; None while nothing is
        queued for it or the window is full."""
        queue = next((queue for queue in self._queues.values() if queue), None)
        if queue is None:
            return None
        sending = queue[0]
        length, most = sending.size - sending.sent, self._chunk
        if sending.in_background:  # a stream in slow start would look like a queue
            streams = min(streams, self._streams.steady)
            if place >= streams:
                return None
        if streams > 1:
            least, largest = PIECES
            most = min(most, largest, max(least, -(-sending.size // (2 * streams))))
        if sending.in_background:
            most = min(most, self._background.room(self._in_flight, now))
            if not most:
                return None
        length = min(length, most)
        if self._in_flight and self._in_flight + length > self._window:
            return None
        first = sending.number == 0
        if first and self._started and self._beside + sending.beside > HEADS:
            return None
        if first:
            self._beside += sending.beside
            self._last += 1
            sending.number = self._last
            self._started[sending.number] = sending
        self._order += 1
        chunk = pack_chunk(
            order=self._order,
            frame=sending.number,
            offset=sending.sent,
            size=sending.size,
            head=sending.head if first else b"",
            data=_take(sending.rest, length),
        )
        sending.sent += length
        self._in_flight += length
        if sending.in_background:
            self._copying += length
            at = sending.number, sending.sent, length
            self._background.sent(*at, self._in_flight, now)
        if sending.sent == sending.size:
            queue.popleft()
        self._update_streams(0, now)
        return chunk

    def acknowledge(self, number: int, received: int, now: float) -> None:
        """Take in a frame's acknowledged bytes. Raises WireError if there can't be as many."""
        others = self._acknowledge(number, received)
        self._background.acknowledged(number, received, now)
        self._update_streams(others, now)

    def _update_streams(self, acknowledged: int, now: float) -> None:
        under_way = self._in_flight - self._copying
        self._streams.update(under_way, acknowledged, now)

    def _acknowledge(self, number: int, received: int) -> int:
        """Frees a frame's acknowledged bytes. Returns their number; 0 for a copy, whose rate
        follows from its window, not from its streams."""
        sending = self._started.get(number)
        if sending is None or not sending.acknowledged <= received <= sending.sent:
            raise WireError(f"{received} bytes of frame {number} acknowledged, which is impossible")
        more = received - sending.acknowledged
        sending.acknowledged = received
        self._in_flight -= more
        if sending.in_background:
            self._copying -= more
        self.unacknowledged -= more
        if received == sending.size:
            del self._started[number]
            self.frames -= 1
            self._beside -= sending.beside
            if sending.arrived is not None:
                sending.arrived()
        return 0 if sending.in_background else more

    def rewind(self, begun: int, partial: Mapping[int, int]) -> None:
        """Resume on a new connection: the peer has the first `begun` frames, but of those in
        `partial` only so many bytes. The rest in flight is lost. Raises WireError when that can't
        be."""
        unbegun = [sending for number, sending in self._started.items() if number > begun]
        received = [sending for number, sending in self._started.items() if number <= begun]
        valid = partial.keys() <= {sending.number for sending in received}
        if not valid or begun + len(unbegun) != self._last or any(s.acknowledged for s in unbegun):
            raise WireError(
                f"{begun} frames begun, but incomplete are {sorted(partial)}, which is impossible"
            )
        for sending in received:
            self._acknowledge(sending.number, partial.get(sending.number, sending.size))
        waiting = {k: [s for s in queue if not s.number] for k, queue in self._queues.items()}
        for sending in unbegun:
            self._beside -= sending.beside
            del self._started[sending.number]
            sending.number = 0
        again = [*self._started.values(), *unbegun]
        for sending in again:
            sending.sent = sending.acknowledged
            sending.rest = _rest_of(sending.frame, sending.sent)
        for kind, queue in self._queues.items():
            queue.clear()
            queue.extend(sending for sending in again if sending.frame.kind == kind)
            queue.extend(waiting[kind])
        self._last = begun
        self._in_flight = self._copying = self._order = 0
        self._background = self._new_background()  # the path may be another one
        self.round_trip = 0.0
        self._streams.begin_anew()

    def unfinished(self) -> list[Frame]:
        """Frames not fully acknowledged: started ones first, then queued ones by urgency."""
        queued = (sending for queue in self._queues.values() for sending in queue)
        return [
            *(sending.frame for sending in self._started.values()),
            *(sending.frame for sending in queued if sending.number == 0),
        ]


def _rest_of(frame: Frame, sent: int) -> deque[memoryview]:
    rest = deque(buffer for buffer in buffers_of(frame.payload) if buffer.nbytes)
    _take(rest, sent)
    return rest


def _take(buffers: deque[memoryview], length: int) -> list[memoryview]:
    """Remove and return the first `length` bytes of `buffers`."""
    parts = []
    while length:
        if buffers[0].nbytes <= length:
            parts.append(buffers.popleft())
        else:
            parts.append(buffers[0][:length])
            buffers[0] = buffers[0][length:]
        length -= parts[-1].nbytes
    return parts


class ChunkOrder:
    """Puts the chunks of several streams in order, in one direction of a link."""

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
        """Drop the waiting chunks, since the peer sends them again on a new connection."""
        self._due, self._waiting = 1, 0
        self._early.clear()


def _size(chunk: Chunk) -> int:
    return len(chunk.data) + len(chunk.head) + ITEM


@dataclass(slots=True, eq=False)
class _Receiving:
    frame: Frame
    payload: memoryview
    received: int = 0


class ChunkInbox:
    """Reassembles frames from chunks; an invalid chunk raises WireError."""

    def __init__(self, payload_limit: int, window: int) -> None:
        self._limit = payload_limit
        self._ordering = ChunkOrder(window)
        self._partial: dict[int, _Receiving] = {}
        self._last = 0
        self._chunks = 0  # since the last acknowledgement
        self._unacknowledged: dict[int, int] = {}  # bytes received but not acknowledged, by frame
        self._due: dict[int, int] = {}

    def take(self, chunk: Chunk) -> Iterator[Frame]:
        """The frames completed by this chunk, from any stream. Raises WireError."""
        for due in self._ordering.take(chunk):
            if (frame := self.receive(due)) is not None:
                yield frame

    def receive(self, chunk: Chunk) -> Frame | None:
        """The frame that this chunk, the next in order, completes, if it does. Raises WireError."""
        receiving = self._partial.get(chunk.frame) or self._begin(chunk)
        if chunk.size != len(receiving.payload) or chunk.offset != receiving.received:
            raise WireError(
                f"a chunk of frame {chunk.frame} at {chunk.offset} of {chunk.size}, where "
                f"{receiving.received} of {len(receiving.payload)} was next"
            )
        end = chunk.offset + len(chunk.data)
        if end > chunk.size or (not chunk.data and chunk.size):
            raise WireError(f"a chunk of {len(chunk.data)} bytes at {chunk.offset} of {chunk.size}")
        receiving.payload[chunk.offset : end] = chunk.data
        receiving.received = end
        complete = end == chunk.size
        at_once = complete or receiving.frame.kind == BACKGROUND
        self._unacknowledged[chunk.frame] = end
        self._chunks += 1
        if at_once or self._chunks >= ACKNOWLEDGE_EVERY:
            self._due.update(self._unacknowledged)
            self._unacknowledged.clear()
            self._chunks = 0
        if not complete:
            return None
        del self._partial[chunk.frame]
        return receiving.frame

    def acknowledged(self) -> dict[int, int]:
        """Removes and returns the acknowledgements to send: bytes of payload so far, by frame."""
        due, self._due = self._due, {}
        return due

    def progress(self) -> tuple[int, dict[int, int]]:
        """What has come, for the hello of a new connection: the number of frames begun, and the
        bytes of each incomplete one. It replaces the acknowledgements that were due."""
        self._ordering.begin_anew()
        self._due.clear()
        self._unacknowledged.clear()
        self._chunks = 0
        return self._last, {
            number: receiving.received for number, receiving in self._partial.items()
        }

    def _begin(self, chunk: Chunk) -> _Receiving:
        """Makes room for a new frame, of which this is the first chunk. Raises WireError."""
        if chunk.frame != self._last + 1:
            raise WireError(
                f"a chunk of frame {chunk.frame}; a new frame would be {self._last + 1}"
            )
        if len(self._partial) == len(KINDS):
            raise WireError(f"more than {len(KINDS)} frames under way, which is one of each kind")
        check_payload_size(chunk.size, self._limit)
        try:
            # Memory is touched only as it is filled: a false size costs nothing.
            payload = np.empty(chunk.size, dtype=np.uint8).data
        except MemoryError as error:
            raise WireError(f"no memory here for a payload of {chunk.size} bytes") from error
        receiving = _Receiving(Frame.parse(chunk.head, payload, self._limit), payload)
        self._last = chunk.frame
        self._partial[chunk.frame] = receiving
        return receiving

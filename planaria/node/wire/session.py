"""A link's session: what was sent and received, independent of connections.

A session outlives its connections. Data in flight may be lost when one breaks. On a new one both
sides say what they have (`Hello`), and resume from there. So every message and every frame arrives
once and in order. Messages are numbered by counting them, frames by chunk_flow.py.

Each side numbers its sessions and its hellos, in ascending order. A hello older than one accepted
before belongs to an outdated dial, and has no effect: dials may cross, and arrive late.

Pure: a connection, here, is whatever takes `next_message` and acknowledgements of chunks in order,
and `outbox.next` in any, until it breaks. On a new one both sides `resume`. From then on, what
arrives on an older one must be dropped.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from xxhash import xxh3_64_hexdigest

from planaria.node.wire.background import Background
from planaria.node.wire.budget import ITEM
from planaria.node.wire.chunk_flow import ChunkInbox, ChunkOutbox
from planaria.node.wire.frame_format import KINDS, UINT64, DamagedError, WireError

ACKNOWLEDGE_EVERY: Final = 64
"""Messages after which the next heartbeat is due at once."""

_HELLO: Final = re.compile(
    rf"\d{{1,20}}( \d{{1,20}}){{4}}( \d+:\d+){{0,{len(KINDS)}}} [0-9a-f]{{16}}"  # the checksum
)


class DialRefused(Exception):  # noqa: N818 (not an error of this node)
    """A dial is refused, or has failed. `code`: the name of a gRPC status."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class Outdated(Exception):  # noqa: N818 (not an error)
    """A hello is outdated, since another dial is newer; nothing has changed."""


class Begun(Exception):  # noqa: N818 (not an error)
    """The peer has given up this session and begun a new one."""


class Forgotten(Exception):  # noqa: N818 (not an error)
    """The peer resumes a session that is over here."""


@dataclass(frozen=True)
class Hello:
    """A side's state of a session, sent on a new connection."""

    session: int  # the sender's number for it
    other: int  # the receiver's; 0: not known yet
    number: int  # of this hello in the session
    messages: int  # received
    frames: int  # received, or partly received
    partial: dict[int, int] = field(default_factory=dict)  # bytes received of incomplete frames

    def pack(self) -> str:
        numbers = self.session, self.other, self.number, self.messages, self.frames
        pairs = (f"{frame}:{received}" for frame, received in self.partial.items())
        text = " ".join([*map(str, numbers), *pairs])
        return f"{text} {xxh3_64_hexdigest(text.encode())}"

    @classmethod
    def parse(cls, text: str) -> Hello:
        """Parse a received hello. Raises WireError."""
        if len(text) > 1000 or not _HELLO.fullmatch(text):
            raise WireError(f"{text[:80]!r} is not a link's hello")
        content, _, checksum = text.rpartition(" ")
        if xxh3_64_hexdigest(content.encode()) != checksum:
            raise DamagedError(f"the checksum of the hello {content[:80]!r} is not that sent")
        words = content.split(" ")
        session, other, number, messages, frames = map(int, words[:5])
        pairs = [word.split(":") for word in words[5:]]
        partial = {int(frame): int(received) for frame, received in pairs}
        hello = cls(session, other, number, messages, frames, partial)
        if not session or max(session, other, number, messages, frames, *partial) >= UINT64:
            raise WireError(f"{text[:80]!r} has a number that no hello of a link has")
        return hello


class Silence:
    """Decides when a peer has been silent for too long, by the time that this node spent listening.

    `tick` is called every `interval` seconds. While a call is late, this node was busy and could
    receive nothing; that time doesn't count. All times in seconds, of one clock.
    """

    def __init__(self, limit: float, interval: float, now: float) -> None:
        self._limit, self._interval = limit, interval
        self._heard = now
        self._expected = now + interval

    def heard(self, now: float) -> None:
        self._heard = now

    def tick(self, now: float) -> float | None:
        """How long the peer has been silent, if that is too long; else None."""
        self._heard = min(now, self._heard + max(0.0, now - self._expected))
        self._expected = now + self._interval
        silent = now - self._heard
        return silent if silent >= self._limit else None


@dataclass(frozen=True)
class SessionBounds:
    """The limits of a link's session, in bytes."""

    chunk: int
    window: int  # of frames in flight
    payload: int  # of one received frame
    messages: int  # unacknowledged
    held: int  # unacknowledged messages and frames


class _SentMessage(NamedTuple):
    message: bytes
    arrived: Callable[[], None] | None


class Session:
    """A link's session at one side: what was sent and received over all connections."""

    def __init__(
        self, number: int, bounds: SessionBounds, background: Callable[[], Background] = Background
    ) -> None:
        """`number`: larger than that of any former session with this peer."""
        self.number, self.other = number, 0
        self.outbox = ChunkOutbox(bounds.chunk, bounds.window, background)
        self.inbox = ChunkInbox(bounds.payload, bounds.window)
        self._bounds = bounds
        self._sent: deque[_SentMessage] = deque()  # on this connection, and not acknowledged
        self._waiting: deque[_SentMessage] = deque()
        self._acknowledged = 0  # messages
        self._message_bytes = 0
        self._received = self._reported = 0  # messages
        self._hello_number = self._peers_hello = 0  # numbers of the newest hellos sent and received

    # --- sending

    def send(self, message: bytes, arrived: Callable[[], None] | None = None) -> None:
        """Queue a message; `arrived` is called when the peer has it."""
        self._waiting.append(_SentMessage(message, arrived))
        self._message_bytes += len(message) + ITEM

    def next_message(self) -> bytes | None:
        if not self._waiting:
            return None
        sending = self._waiting.popleft()
        self._sent.append(sending)
        return sending.message

    @property
    def held(self) -> int:
        """Bytes kept until the peer has acknowledged them."""
        return self._message_bytes + self.outbox.unacknowledged + ITEM * self.outbox.frames

    def why_overfull(self) -> str:
        """Why the link can't be kept; "": it can."""
        if self._message_bytes > self._bounds.messages:
            return f"has not taken the last {self._message_bytes} bytes of messages"
        if self.held > self._bounds.held:
            return f"has not taken the last {self.held} bytes"
        return ""

    # --- receiving

    def message_came(self) -> None:
        self._received += 1

    def acknowledge_messages(self, count: int) -> None:
        """The peer acknowledges `count` messages in all. Raises WireError if that can't be."""
        if not 0 <= count - self._acknowledged <= len(self._sent):
            raise WireError(f"{count} messages acknowledged, which is impossible")
        for _ in range(count - self._acknowledged):
            message, arrived = self._sent.popleft()
            self._message_bytes -= len(message) + ITEM
            if arrived is not None:
                arrived()
        self._acknowledged = count

    def acknowledgement(self) -> int:
        """The number of messages received, for the next heartbeat or hello."""
        self._reported = self._received
        return self._received

    @property
    def acknowledgement_due(self) -> bool:
        return self._received - self._reported >= ACKNOWLEDGE_EVERY

    # --- a new connection

    def hello(self) -> Hello:
        """The hello for a new connection. After it, data of an older connection must be dropped,
        and so must an answer to an older hello."""
        self._hello_number += 1
        frames, partial = self.inbox.progress()
        return Hello(
            self.number, self.other, self._hello_number, self.acknowledgement(), frames, partial
        )

    def is_newest(self, own_hello: Hello) -> bool:
        """Whether this side has made no hello after this one."""
        return own_hello.number == self._hello_number

    def check(self, hello: Hello, answered: Hello | None = None) -> None:
        """Check whether to resume as the peer's hello says; `answered`: this side's hello
        that it answers. Raises Outdated, Begun, Forgotten."""
        if answered is not None and not self.is_newest(answered):
            raise Outdated("another connection has come up")
        if hello.other not in (0, self.number):
            raise Forgotten(f"its session {hello.other} is over")
        if self.other and hello.session > self.other:
            raise Begun("the peer has begun anew")
        if self.other and hello.session != self.other:
            raise Outdated(f"a session {hello.session}, after {self.other}")
        if hello.number <= self._peers_hello:
            raise Outdated(f"hello {hello.number} after {self._peers_hello}")

    def resume(self, hello: Hello, answered: Hello | None = None) -> None:
        """Resume the session by the peer's hello: send again what the peer lacks. Raises as
        `check`, and WireError if that can't be."""
        self.check(hello, answered)
        self.acknowledge_messages(hello.messages)
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        self.outbox.rewind(hello.frames, hello.partial)
        self.other, self._peers_hello = hello.session, hello.number

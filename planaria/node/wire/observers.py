"""Observers: clients of a node that are no members of the run, for example an export.

Each observer has one stream for queries to seats and their answers; a frame travels as a message
`Carried`. It has a name like a seat's for as long as the stream is open. The node itself may be an
observer, without a stream: `Inside`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from planaria.bootstrap.transport import AcceptedStream, Broken
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Frame, WireError, parse_message, seal

log = logging.getLogger(__name__)

MOST: Final = 16
"""Largest number of observers of a node at a time."""
UNREAD: Final = 32 << 20
"""Bytes that may wait for one observer to read them."""
FRAME_LIMIT: Final = 4 << 20
"""Bytes of a frame's payload."""
BANNED: Final = "the run's operator has banned you; ask them to allow you again"


class ObservedSeats(Protocol):
    """The seats of the node, which hear its observers. `now`: by the loop's clock."""

    def on_observer_message(self, observer: str, message: pb.Message, now: float) -> None: ...
    def on_observer_frame(self, observer: str, frame: Frame, now: float) -> None: ...
    def on_observer_gone(self, observer: str) -> None: ...


class Observers:
    """The observers of one node. `seats` hears what they send, on the event loop."""

    seats: ObservedSeats

    def __init__(self) -> None:
        self._open: dict[str, _Answers] = {}
        self._inside: dict[str, Callable[[pb.Message], None]] = {}
        self._numbers = itertools.count(1)
        self._banned: frozenset[str] = frozenset()

    def bar(self, banned: Iterable[str]) -> None:
        """Set the banned instances, and end their streams."""
        self._banned = frozenset(banned)
        for answers in self._open.values():
            if answers.instance in self._banned:
                answers.end(BANNED)

    async def serve(self, stream: AcceptedStream) -> None:
        """Serve one observer until it leaves, or its stream breaks. Raises Broken."""
        instance = stream.caller.instance
        if instance in self._banned:
            raise Broken("PERMISSION_DENIED", BANNED)
        if len(self._open) >= MOST:
            why = f"{MOST} others already read from this node: try again later"
            raise Broken("RESOURCE_EXHAUSTED", why)
        name = f"?{next(self._numbers)}"
        answers = self._open[name] = _Answers(instance)
        log.info("observer %s connected from %s", name, stream.peer)
        listening = asyncio.create_task(self._listen(name, answers, stream))
        try:
            await stream.accept({})  # the observer may send
            while (data := await answers.next()) is not None:
                await stream.write(data)
            if answers.why:
                raise Broken("ABORTED", answers.why)
        finally:
            del self._open[name]
            listening.cancel()
            self.seats.on_observer_gone(name)

    async def _listen(self, name: str, answers: _Answers, stream: AcceptedStream) -> None:
        try:
            while (data := await stream.read()) is not None:
                self.ask(name, parse_message(data))
            answers.end("")
        except WireError as error:
            answers.end(f"invalid request: {error}")
        except Broken:
            answers.end("the stream broke")

    def enter(self, heard: Callable[[pb.Message], None]) -> str:
        """Add an observer in this process; `heard` gets its answers. Returns its name."""
        name = f"?{next(self._numbers)}"
        self._inside[name] = heard
        return name

    def leave(self, name: str) -> None:
        """Remove an observer of this process."""
        del self._inside[name]
        self.seats.on_observer_gone(name)

    def ask(self, name: str, message: pb.Message) -> None:
        """Handle an observer's message. Raises WireError for an invalid frame."""
        now = asyncio.get_running_loop().time()
        if message.WhichOneof("body") == "carried":
            head, payload = message.carried.head, message.carried.payload
            self.seats.on_observer_frame(name, Frame.parse(head, payload, FRAME_LIMIT), now)
        else:
            self.seats.on_observer_message(name, message, now)

    def tell(self, name: str, item: pb.Message | Frame) -> None:
        """Send an answer to an observer; without effect when it has left."""
        heard, answers = self._inside.get(name), self._open.get(name)
        if isinstance(item, Frame):
            if answers is not None and item.size > FRAME_LIMIT:
                answers.end(f"an answer takes {item.size} bytes; at most {FRAME_LIMIT}: ask less")
                return
            sender, item = item.sender, item.in_message()
            item.sender = sender
        if heard is not None:
            heard(item)
        elif answers is not None:
            answers.put(seal(item.SerializeToString()))

    def close(self, why: str) -> None:
        """End the streams of all observers, with this reason."""
        for answers in self._open.values():
            answers.end(why)


class Inside:
    """A node's conversation with itself (see observer_client.py)."""

    def __init__(self, observers: Observers, node: str, address: str) -> None:
        self.node, self.address = node, address
        self.lost = ""
        self._observers, self._name = observers, ""

    def open(self, heard: Callable[[pb.Message], None], _: object) -> None:
        self._name = self._observers.enter(heard)

    def send(self, message: pb.Message) -> bool:
        if not self.lost:
            asyncio.get_running_loop().call_soon(self._ask, message)
        return not self.lost

    def _ask(self, message: pb.Message) -> None:
        if not self.lost:
            self._observers.ask(self._name, message)

    async def close(self) -> None:
        self.lost = "the conversation is over"
        self._observers.leave(self._name)


class _Answers:
    """Answers that wait for one observer to read them."""

    def __init__(self, instance: str) -> None:
        """`instance`: from its certificate; "" without TLS."""
        self.instance = instance
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._news = asyncio.Event()
        self._over = False
        self.why = ""

    def put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._bytes += len(data)
        if self._bytes > UNREAD:
            self.end(f"{self._bytes} bytes wait to be read; at most {UNREAD}")
        self._news.set()

    def end(self, why: str) -> None:
        """End the observer's stream, with this reason; "": the observer has ended it."""
        if not self._over:
            self._over, self.why = True, why
            self._news.set()

    async def next(self) -> bytes | None:
        """The next answer for the observer; None: its stream is over."""
        while not self._over and not self._waiting:
            self._news.clear()
            await self._news.wait()
        if self._over:
            return None
        data = self._waiting.popleft()
        self._bytes -= len(data)
        return data

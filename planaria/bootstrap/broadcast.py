"""What all members get: the newest view, encoded once for many, and wake-ups in turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import repeat
from typing import Any, Final

from planaria.bootstrap.registry_pb2 import JoinReply, NewView, View
from planaria.bootstrap.views import difference, pack, packed

AT_A_TIME: Final = 10  # calls woken per turn of the event loop
MOST_RECENT = 16  # views from which differences are computed


class Broadcast:
    """The newest view as the messages that all members get, each made once."""

    def __init__(self, run_file: str) -> None:
        """`run_file`: the run's TOML, sent to joining nodes."""
        self._run_file, self.newest = run_file, View()
        self._recent: dict[bytes, View] = {}  # by signature, the newest last
        self._encoded: dict[bytes, bytes] = {}  # NewViews of the newest view, by known signature
        self._welcome = b""

    def publish(self, view: View) -> None:
        self.newest, self._welcome = view, b""
        self._encoded.clear()
        if view.number:
            self._recent[view.signature] = view
        while len(self._recent) > MOST_RECENT:
            del self._recent[next(iter(self._recent))]

    def has(self, signature: bytes) -> bool:
        """Whether differences from the view with this signature can be computed."""
        return signature in self._recent

    def news(self, known: bytes) -> bytes:
        """A NewView for a watcher that has the view with the signature `known`; empty: none."""
        if known not in self._encoded:
            message = NewView(whole=self.newest)
            if (former := self._recent.get(known)) is not None:
                shorter = NewView(difference=difference(former, self.newest))
                if shorter.ByteSize() < self.newest.ByteSize():
                    message = shorter
            self._encoded[known] = packed(message).SerializeToString()
        return self._encoded[known]

    def welcome(self) -> bytes:
        """The part of a JoinReply that is equal for all members of the newest view."""
        if not self._welcome:
            view = pack(self.newest.SerializeToString())
            self._welcome = JoinReply(packed=view, run_file=self._run_file).SerializeToString()
        return self._welcome


class Waker:
    """Wakes waiting calls in turn: gRPC accepts one incoming call per turn of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: deque[tuple[asyncio.Future[Any], object]] = deque()
        self._watchers: dict[asyncio.Future[None], None] = {}  # in the order in which they came

    @property
    def busy(self) -> bool:
        return bool(self._due)

    async def next_view(self) -> None:
        """Waits for a new view: until `wake_watchers`."""
        waiting = self._loop.create_future()
        self._watchers[waiting] = None
        try:
            await waiting
        finally:
            self._watchers.pop(waiting, None)

    def wake_watchers(self) -> None:
        watchers, self._watchers = self._watchers, {}
        self.wake(watchers)

    def wake(
        self, futures: Iterable[asyncio.Future[Any]], answers: Iterable[object] = repeat(None)
    ) -> None:
        """Queues waiting calls, given by their futures and results, behind those already due."""
        idle = not self._due
        self._due.extend(zip(futures, answers, strict=False))
        if idle:
            self._wake_some()

    def _wake_some(self) -> None:
        for _ in range(min(AT_A_TIME, len(self._due))):
            future, answer = self._due.popleft()
            if not future.done():
                future.set_result(answer)
        if self._due:
            self._loop.call_soon(self._wake_some)

"""Exchanges: sequential conversations with peers, on an event loop.

An *exchange* is a coroutine that awaits only an `Outcome`: of work in the compute thread, of
another exchange, of a peer's message, or of a timeout. `Exchanges` manages all exchanges of a seat.

An exchange runs at once up to its first wait, so what it posts there precedes in the compute thread
what its starter posts next. It resumes in a callback of the loop, never inside the call that
delivers what it waits for.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from planaria.bootstrap.registry_pb2 import NUMBERS, SILENT, Cause
from planaria.node.ports import Compute, Priority
from planaria.node.wire.budget import PEERS, Budget

if TYPE_CHECKING:
    import asyncio

    from planaria.node.wire.frame_format import Frame

log = logging.getLogger(__name__)

OPEN_LIMIT: Final = 256 << 20
EARLY_ITEMS: Final = 4096
"""Largest number of items of one peer that wait for an exchange to begin."""

T = TypeVar("T")
Key = TypeVar("Key", bound=Any)
"""An inbox's key: a transfer's number, or a ballot."""


class ComplaintError(Exception):
    """An exchange has failed; the message says why. `accused`: the nodes that didn't answer or, for
    any cause but SILENT, that sent invalid data."""

    def __init__(self, reason: str, accused: Collection[str] = (), cause: Cause = SILENT) -> None:
        super().__init__(reason)
        self.accused = sorted(accused)
        self.cause: Cause = cause


class PeerLostError(ComplaintError):
    """The accused can't be reached. The exchange's purpose may still be achieved without them, or
    once others have redone their work."""


class ClosedError(Exception):
    """The result that a task awaits of an exchange won't come; the message says why."""


class Outcome(Generic[T]):
    """A result for which at most one exchange waits."""

    def __init__(self, exchanges: Exchanges) -> None:
        self.exchanges = exchanges
        self.done = False
        self._value: T
        self._error: BaseException | None = None
        self._waiting: Exchange[Any] | None = None

    def fulfil(self, value: T) -> None:
        """Set the outcome's value. Without effect once it is done."""
        if not self.done:
            self._value, self.done = value, True
            self._wake_waiting()

    def fail(self, error: BaseException) -> None:
        """Set the error that the waiting exchange gets. Without effect once this is done."""
        if not self.done:
            self._error, self.done = error, True
            self._wake_waiting()

    def settle(self, result: T | Exception) -> None:
        """Set what some work has returned, or raised."""
        if isinstance(result, Exception):
            self.fail(result)
        else:
            self.fulfil(result)

    def _wake_waiting(self) -> None:
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self.exchanges._resume(waiting)

    def __await__(self) -> Generator[_Wait, None, T]:
        return self.within(math.inf).__await__()

    async def within(self, until: float) -> T:
        """The outcome's result. Raises TimeoutError at the time `until`."""
        if not self.done:
            await _Wait(self, until)
        return self.result()

    def result(self) -> T:
        """The result of an outcome that is done. Raises its error."""
        if self._error is not None:
            raise self._error
        return self._value


class _Wait(NamedTuple):
    """What an exchange yields to its runner: the outcome that it awaits, and until when."""

    outcome: Outcome[Any]
    until: float

    def __await__(self) -> Generator[_Wait, None, None]:
        yield self


class Exchange(Outcome[T]):
    """A conversation that runs or is over; its outcome is what its coroutine returns."""

    def __init__(self, exchanges: Exchanges, work: Coroutine[Any, Any, T]) -> None:
        super().__init__(exchanges)
        self._work = work
        self._running = False
        self._waits: _Wait | None = None
        self._alarm: asyncio.TimerHandle | None = None  # at the end of the wait

    def cancel(self) -> None:
        """Stop the exchange where it waits. Work that it has posted still runs."""
        self.done = True
        self._leave()
        if not self._running:  # else it is closed at its next wait
            self._work.close()

    def _leave(self) -> None:
        if self._waits is not None:
            self._waits.outcome._waiting = None
            self._waits = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _step(self, error: BaseException | None = None) -> None:
        self._leave()
        self._running = True
        try:
            wait = self._work.send(None) if error is None else self._work.throw(error)
        except StopIteration as stop:
            self.fulfil(stop.value)
        except Exception as raised:  # noqa: BLE001 (reported below)
            self.exchanges.crashed(raised)
            self.fail(raised)
        else:
            self._pause(wait)
        finally:
            self._running = False

    def _pause(self, wait: _Wait) -> None:
        if self.done:  # cancelled by code that it called
            self._running = False
            self._work.close()
            return
        self._waits = wait
        if wait.outcome.done:
            self.exchanges._resume(self)
            return
        assert wait.outcome._waiting is None, "two exchanges wait for one outcome"
        wait.outcome._waiting = self
        if wait.until < math.inf:
            self._alarm = self.exchanges._call_at(wait.until, self._expire)

    def _expire(self) -> None:
        if self._waits is not None and not self._waits.outcome.done:  # else it came in time
            self._step(TimeoutError(f"nothing until {self._waits.until:g}"))

    def _go_on(self, wait: _Wait | None) -> None:
        if not self.done and self._waits is wait:
            self._step()


class Exchanges:
    """All exchanges of a seat. `crashed` gets their exceptions."""

    def __init__(
        self,
        compute: Compute,
        loop: asyncio.AbstractEventLoop,
        crashed: Callable[[BaseException], None],
    ) -> None:
        self.crashed = crashed
        self._compute, self._loop = compute, loop
        self._awaited: dict[asyncio.Future[Any], None] = {}  # by tasks
        self._closed = ""  # why

    @property
    def now(self) -> float:
        """Seconds, by the loop's clock."""
        return self._loop.time()

    def close(self, why: str = "the node is over") -> None:
        """Stop all exchanges. Tasks that await one get a ClosedError that says why."""
        self._closed = why
        for future in self._awaited:
            if not future.done():
                future.set_exception(ClosedError(why))

    # --- for callers

    def start(self, work: Coroutine[Any, Any, T]) -> Exchange[T]:
        """Start an exchange: run it up to its first wait. The node crashes with what it raises."""
        exchange = Exchange(self, work)
        exchange._step()
        return exchange

    async def together(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """The results of several exchanges, in their order. When one fails, the others are
        cancelled, and its error is raised."""
        results: dict[int, T] = {}
        over: Outcome[None] = Outcome(self)

        async def part(number: int, work: Coroutine[Any, Any, T]) -> None:
            try:
                results[number] = await work
            except Exception as error:  # noqa: BLE001 (raised again by the caller)
                over.fail(error)
            if len(results) == len(works):
                over.fulfil(None)

        parts = [self.start(part(number, work)) for number, work in enumerate(works)]
        try:
            if parts:
                await over
        finally:
            for exchange in parts:
                exchange.cancel()
        return [results[number] for number in range(len(works))]

    async def compute(self, work: Callable[[], T], priority: Priority = Priority.CONTROL) -> T:
        """Run work in the compute thread. Raises what the work raises."""
        outcome: Outcome[T] = Outcome(self)
        self._compute.post(work, outcome.settle, priority)
        return await outcome

    async def sleep(self, seconds: float) -> None:
        if seconds > 0:
            try:
                await Outcome[None](self).within(self.now + seconds)
            except TimeoutError:
                return

    async def outcome(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of an exchange, for a task of the loop; it is cancelled with the task. Raises
        ClosedError if these are closed before it is over."""
        if self._closed:
            work.close()
            raise ClosedError(self._closed)
        future: asyncio.Future[T] = self._loop.create_future()

        async def converse() -> None:
            try:
                result = await work
            except Exception as error:  # noqa: BLE001 (raised again at the task)
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        exchange = self.start(converse())
        self._awaited[future] = None
        try:
            return await future
        finally:
            del self._awaited[future]
            exchange.cancel()

    def call_soon(self, call: Callable[[], None]) -> None:
        """Make a call in the loop, unless the exchanges are closed by then."""
        self._loop.call_soon(self._call, call)

    def _call_at(self, when: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_at(when, self._call, call)

    def _call(self, call: Callable[[], None]) -> None:
        if not self._closed:
            call()

    def _resume(self, exchange: Exchange[Any]) -> None:
        self.call_soon(partial(exchange._go_on, exchange._waits))


class Lost(NamedTuple):
    """Stands for a lost peer's next item in an inbox: why the link to it is lost."""

    reason: str
    cause: Cause = SILENT  # NUMBERS: it has sent too much, and its items are ignored


class Letter(NamedTuple, Generic[T]):
    """An item received for an exchange."""

    peer: str
    item: T | Lost


class ExchangeInbox(Generic[T]):
    """Items received for one exchange, in order of arrival."""

    def __init__(self, exchanges: Exchanges, limit: int = OPEN_LIMIT) -> None:
        """`limit`: bytes of one peer that may wait to be taken."""
        self._exchanges = exchanges
        self._letters: deque[tuple[Letter[T], int]] = deque()  # with their sizes, -1: free
        self._budget = Budget(limit)
        self._ignored: set[str] = set()  # peers that have sent too much
        self._news: Outcome[None] | None = None
        self._hurried = math.inf  # time of `hurry`

    @property
    def empty(self) -> bool:
        return not self._letters

    def put(self, peer: str, item: T | Lost, size: int = 0) -> None:
        """Add an item. A peer that has sent too much counts as lost, and its items are dropped."""
        if isinstance(item, Lost):
            self._letters.append((Letter(peer, item), -1))
        else:
            while peer not in self._ignored and (greedy := self._budget.spend(peer, size)):
                self._ignore(greedy)
            if peer not in self._ignored:
                self._letters.append((Letter(peer, item), size))
        if self._news is not None:
            self._news.fulfil(None)

    def _ignore(self, peer: str) -> None:
        """Drop what waits of a peer that has sent too much, and what it will send."""
        reason = self._budget.why_dropped(peer)
        log.warning("%s", reason)
        self._letters = deque(entry for entry in self._letters if entry[0].peer != peer)
        self._letters.append((Letter(peer, Lost(reason, NUMBERS)), -1))
        self._budget.drop(peer)
        self._ignored.add(peer)

    def hurry(self) -> None:
        """Limit the waits of `take` from now on, by their patience."""
        self._hurried = min(self._hurried, self._exchanges.now)
        if self._news is not None:
            self._news.fulfil(None)

    async def take(self, until: float = math.inf, patience: float = math.inf) -> Letter[T]:
        """The next item of the inbox. Raises TimeoutError at the time `until`, or `patience`
        seconds after both this call and `hurry`."""
        start = self._exchanges.now
        while not self._letters:  # woken by an item of a peer that is now ignored
            self._news = Outcome(self._exchanges)
            try:
                await self._news.within(min(until, max(start, self._hurried) + patience))
            finally:
                self._news = None
        letter, size = self._letters.popleft()
        if size >= 0:
            self._budget.free(letter.peer, size)
        return letter


class _EarlyFrames(NamedTuple, Generic[Key, T]):
    key: Key
    items: list[tuple[T, int]]  # with their sizes

    @property
    def size(self) -> int:
        return sum(size for _, size in self.items)


class Inboxes(Generic[Key, T]):
    """The inboxes of exchanges of one kind, by key: a transfer's number, or a ballot.

    Items for a finished exchange are dropped. Items for a future one are kept, up to `early_limit`
    bytes of a peer, for the newest key that the peer has used: a peer that uses a newer key has
    given up the older ones. For a running one, up to `open_limit` bytes of a peer wait.
    """

    def __init__(
        self, exchanges: Exchanges, oldest: Key, early_limit: int = 0, open_limit: int = OPEN_LIMIT
    ) -> None:
        self._exchanges = exchanges
        self._oldest = oldest
        self._early_limit, self._open_limit = early_limit, open_limit
        self._open: dict[Key, ExchangeInbox[T]] = {}
        self._early: dict[str, _EarlyFrames[Key, T]] = {}
        self._hurried: Key | None = None  # a key not open yet

    @contextmanager
    def open(self, key: Key) -> Iterator[ExchangeInbox[T]]:
        """A running exchange's inbox. Once closed, items up to this key have no effect."""
        inbox = self._open[key] = ExchangeInbox(self._exchanges, self._open_limit)
        for peer, early in list(self._early.items()):
            if early.key == key:
                for item, size in early.items:
                    inbox.put(peer, item, size)
                del self._early[peer]
        if key == self._hurried:
            inbox.hurry()
        try:
            yield inbox
        finally:
            del self._open[key]

    def put(self, key: Key, peer: str, item: T, size: int = 0) -> None:
        """Deliver an item of `size` bytes from `peer` to the inbox of this key."""
        if (inbox := self._open.get(key)) is not None:
            inbox.put(peer, item, size)
        elif not key < self._oldest and self._early_limit:
            self._keep(key, peer, item, size)

    def _keep(self, key: Key, peer: str, item: T, size: int) -> None:
        """Keep an item until its exchange begins, if there is room."""
        early = self._early.get(peer)
        if early is not None and key < early.key:
            return
        if early is None or early.key < key:
            early = self._early[peer] = _EarlyFrames(key, [])
        waiting = sum(frames.size for frames in self._early.values())
        if (
            early.size + size > self._early_limit
            or waiting + size > PEERS * self._early_limit
            or len(early.items) >= EARLY_ITEMS
        ):
            log.warning("dropped %d bytes from %s: too many wait here already", size, peer)
            return
        early.items.append((item, size))

    def hurry(self, key: Key) -> None:
        """Hurry the exchange of this key, which may have yet to begin."""
        if (inbox := self._open.get(key)) is not None:
            inbox.hurry()
        else:
            self._hurried = key

    def lost(self, peer: str, reason: str) -> None:
        """Report a lost link to all exchanges. Items received from `peer` before remain valid."""
        for inbox in self._open.values():
            inbox.put(peer, Lost(reason))

    def forget(self, before: Key) -> None:
        """Drop items of older keys, now and in future."""
        self._oldest = max(self._oldest, before)
        self._early = {p: e for p, e in self._early.items() if not e.key < self._oldest}


class Hearing:
    """What exchanges of one kind hear from peers, each under its ballot."""

    def __init__(self, exchanges: Exchanges, early_limit: int, open_limit: int) -> None:
        """The limits: as of `Inboxes`."""
        self._exchanges = exchanges
        self._inboxes: Inboxes[Any, Any] = Inboxes(exchanges, (0, 0), early_limit, open_limit)

    def on_frame(self, peer: str, frame: Frame) -> None:
        """Handles a frame for an exchange. It waits if its exchange hasn't started; if that is over
        or void, the frame has no effect."""
        self._inboxes.put(frame.ballot, peer, frame, frame.size)

    def on_peer_lost(self, peer: str, reason: str) -> None:
        """Reports a lost link to all exchanges. Frames that have come before stay valid."""
        self._inboxes.lost(peer, reason)

    def hurry(self, ballot: tuple[int, int]) -> None:
        """Limits an exchange's waits from now on: all of its input has been computed."""
        self._inboxes.hurry(ballot)

    def forget(self, before: tuple[int, int]) -> None:
        """Drops frames of ballots older than `before`, now and in future."""
        self._inboxes.forget(before)

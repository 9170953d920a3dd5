"""Exchanges: sequential conversations with peers, independent of event loop, clock and thread.

An *exchange* is a coroutine that awaits only an `Outcome`: of work in the compute thread, of
another exchange, of a peer's message, or of a timeout. `Exchanges` manages all exchanges of a node.
Its owner calls `run` when notified, and at `wake` at the latest: the daemon from its event loop,
the simulation in virtual time.

An exchange runs at once up to its first wait, so what it posts there precedes in the compute thread
what its starter posts next. It resumes in `run`, never inside the call that delivers what it waits
for.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from planaria.bootstrap.registry_pb2 import NUMBERS, SILENT, Cause
from planaria.node.ports import Compute, Priority
from planaria.node.wire.budget import PEERS, Budget

log = logging.getLogger(__name__)

OPEN_LIMIT: Final = 256 << 20
EARLY_ITEMS: Final = 4096
"""Largest number of items of one peer that wait for an exchange to begin."""

T = TypeVar("T")
Key = TypeVar("Key", bound="Comparable")


class Comparable(Protocol):
    """An inbox's key: a transfer's number, or a ballot."""

    def __lt__(self, other: Any, /) -> bool: ...


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


class Outcome(Generic[T]):
    """A result to come. At most one exchange waits for it."""

    def __init__(self, exchanges: Exchanges) -> None:
        self.exchanges = exchanges
        self.done = False
        self._value: T
        self._error: BaseException | None = None
        self._waiting: Exchange[Any] | None = None

    def fulfil(self, value: T) -> None:
        """Set the value. Without effect once it is done."""
        if not self.done:
            self._value, self.done = value, True
            self._tell()

    def fail(self, error: BaseException) -> None:
        """Set the error, raised in the waiting exchange. Without effect once it is done."""
        if not self.done:
            self._error, self.done = error, True
            self._tell()

    def settle(self, result: T | Exception) -> None:
        """Set what some work has returned, or raised."""
        if isinstance(result, Exception):
            self.fail(result)
        else:
            self.fulfil(result)

    def _tell(self) -> None:
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self.exchanges._resume(waiting)

    def __await__(self) -> Generator[_Wait, None, T]:
        return self.within(math.inf).__await__()

    async def within(self, until: float) -> T:
        """The result. Raises TimeoutError at the time `until`."""
        if not self.done:
            await _Wait(self, until)
        return self.result()

    def result(self) -> T:
        """The result of an outcome that is done. Raises its error."""
        if self._error is not None:
            raise self._error
        return self._value


class _Wait(NamedTuple):
    """Yielded by an exchange to its runner."""

    outcome: Outcome[Any]
    until: float

    def __await__(self) -> Generator[_Wait, None, None]:
        yield self


class Exchange(Outcome[T]):
    """A conversation that runs, or is over."""

    def __init__(self, exchanges: Exchanges, work: Coroutine[Any, Any, T]) -> None:
        super().__init__(exchanges)
        self._work = work
        self._running = False
        self._waits: _Wait | None = None

    def cancel(self) -> None:
        """Stop it where it waits. Work that it has posted still runs."""
        self.done = True
        self._leave()
        if not self._running:  # else it is closed at its next wait
            self._work.close()

    def _leave(self) -> None:
        if self._waits is not None:
            self._waits.outcome._waiting = None
            self._waits = None

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
        self.exchanges._watch(self, wait)


class Exchanges:
    """All exchanges of a node. `soon` is called when `run` has work; `crashed` gets the exceptions
    of exchanges."""

    def __init__(
        self,
        compute: Compute,
        soon: Callable[[], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self.now = 0.0  # seconds of any one clock, at the last event
        self.crashed = crashed
        self._compute, self._soon = compute, soon
        self._ready: deque[Callable[[], None]] = deque()
        self._deadlines: list[tuple[float, int, Exchange[Any], _Wait]] = []
        self._numbers = itertools.count()
        self._closed = False

    # --- for the owner

    def close(self) -> None:
        """Stop all exchanges."""
        self._closed = True
        self._ready.clear()
        self._deadlines.clear()

    @property
    def wake(self) -> float:
        """Time at which `run` is due at the latest; inf: no exchange has a deadline."""
        while self._deadlines and self._deadlines[0][2]._waits is not self._deadlines[0][3]:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    @property
    def idle(self) -> bool:
        """Whether no exchange can resume before an event, or `wake`."""
        return not self._ready

    def at(self, now: float) -> None:
        """Set the time of an event."""
        self.now = max(self.now, now)

    def run(self, now: float) -> None:
        """Resume all exchanges that can go on; expired ones get a TimeoutError."""
        self.at(now)
        self._run_ready()  # events that came before their deadline
        while self.wake <= self.now:
            _, _, exchange, wait = heapq.heappop(self._deadlines)
            exchange._step(TimeoutError(f"nothing until {wait.until:g}"))
            self._run_ready()

    def _run_ready(self) -> None:
        while self._ready:
            self._ready.popleft()()

    # --- for callers

    def start(self, work: Coroutine[Any, Any, T]) -> Exchange[T]:
        """Run the work up to its first wait. The node crashes with what it raises."""
        exchange = Exchange(self, work)
        exchange._step()
        return exchange

    async def together(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """The results of all works, in their order. When one fails, the others are cancelled, and
        its error is raised."""
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

    def call_soon(self, call: Callable[[], None]) -> None:
        """Queue a call for the next `run`."""
        if self._closed:
            return
        if not self._ready:
            self._soon()
        self._ready.append(call)

    # --- for exchanges

    def _resume(self, exchange: Exchange[Any]) -> None:
        self.call_soon(partial(self._go_on, exchange, exchange._waits))

    def _go_on(self, exchange: Exchange[Any], wait: _Wait | None) -> None:
        if not exchange.done and exchange._waits is wait:  # else its deadline came first
            exchange._step()

    def _watch(self, exchange: Exchange[Any], wait: _Wait) -> None:
        if wait.until < math.inf and not self._closed:
            entry = (wait.until, next(self._numbers), exchange, wait)
            if wait.until < self.wake:
                self._soon()
            heapq.heappush(self._deadlines, entry)


class Lost(NamedTuple):
    """Replaces a peer's next item: the link to it is lost, and why."""

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
        """Add an item of `size` bytes. A peer that has sent too much counts as lost, and its
        waiting items are dropped."""
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
        reason = self._budget.sentence(peer)
        log.warning("%s", reason)
        self._letters = deque(entry for entry in self._letters if entry[0].peer != peer)
        self._letters.append((Letter(peer, Lost(reason, NUMBERS)), -1))
        self._budget.drop(peer)
        self._ignored.add(peer)

    def hurry(self) -> None:
        """Start the patience of `take`."""
        self._hurried = min(self._hurried, self._exchanges.now)
        if self._news is not None:
            self._news.fulfil(None)

    async def take(self, until: float = math.inf, patience: float = math.inf) -> Letter[T]:
        """The next item. Raises TimeoutError at the time `until`, or `patience` seconds after both
        this call and `hurry`."""
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
    items: list[T]
    sizes: list[int]


class Inboxes(Generic[Key, T]):
    """The inboxes of exchanges of one kind, by key: a transfer's number, or a ballot.

    Items for a finished exchange are dropped. Items for a future one are kept, up to `early_limit`
    bytes of a peer, for the newest key that the peer has used: a peer that uses a newer key has
    given up the older ones. For a running one, up to `open_limit` bytes of a peer wait.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        oldest: Key,
        early_limit: int = 0,
        open_limit: int = OPEN_LIMIT,
    ) -> None:
        self._exchanges = exchanges
        self._oldest = oldest
        self._early_limit, self._open_limit = early_limit, open_limit
        self._open: dict[Key, ExchangeInbox[T]] = {}
        self._early: dict[str, _EarlyFrames[Key, T]] = {}
        self._hurried: Key | None = None  # a key not open yet

    @contextmanager
    def open(self, key: Key) -> Iterator[ExchangeInbox[T]]:
        """Inbox of a running exchange. Once closed, items up to this key have no effect."""
        inbox = self._open[key] = ExchangeInbox(self._exchanges, self._open_limit)
        for peer, early in list(self._early.items()):
            if early.key == key:
                for item, size in zip(early.items, early.sizes, strict=True):
                    inbox.put(peer, item, size)
                del self._early[peer]
        if key == self._hurried:
            inbox.hurry()
        try:
            yield inbox
        finally:
            del self._open[key]

    def put(self, key: Key, peer: str, item: T, size: int = 0) -> None:
        """Deliver an item of `size` bytes from `peer`."""
        if (inbox := self._open.get(key)) is not None:
            inbox.put(peer, item, size)
        elif not key < self._oldest and self._early_limit:
            self._keep(key, peer, item, size)

    def _keep(self, key: Key, peer: str, item: T, size: int) -> None:
        early = self._early.get(peer)
        if early is not None and key < early.key:
            return
        if early is None or early.key < key:
            early = self._early[peer] = _EarlyFrames(key, [], [])
        waiting = sum(sum(frames.sizes) for frames in self._early.values())
        if (
            sum(early.sizes) + size > self._early_limit
            or waiting + size > PEERS * self._early_limit
            or len(early.items) >= EARLY_ITEMS
        ):
            log.warning("dropped %d bytes from %s: too many wait here already", size, peer)
            return
        early.items.append(item)
        early.sizes.append(size)

    def hurry(self, key: Key) -> None:
        """Hurry the exchange of this key, which may have yet to begin."""
        if (inbox := self._open.get(key)) is not None:
            inbox.hurry()
        else:
            self._hurried = key

    def lost(self, peer: str, reason: str) -> None:
        """Report a lost link. Items received from `peer` before remain valid."""
        for inbox in self._open.values():
            inbox.put(peer, Lost(reason))

    def forget(self, before: Key) -> None:
        """Drop items of older keys, now and in future."""
        self._oldest = max(self._oldest, before)
        self._early = {p: e for p, e in self._early.items() if not e.key < self._oldest}

"""Nodes with one virtual clock, their compute threads, and a network between them."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from planaria.node.ports import Priority
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import Exchange, Exchanges
from planaria.node.wire.frame_format import Frame, buffers_of
from tests.harness.at_rest import check_at_rest

T = TypeVar("T")
Item = pb.Message | Frame


class AtOnce:
    """A compute thread that does each work as soon as it is posted."""

    computed, computing, now = 0, False, 0.0

    def post(
        self, work: Callable[[], T], then: Callable[[T | Exception], None], priority: Priority
    ) -> None:
        try:
            result: T | Exception = work()
        except Exception as error:  # noqa: BLE001 (`then` handles any error)
            result = error
        then(result)


class Thread:
    """A compute thread whose works take `seconds()` each. While it is `held`, it works only when
    `work` is called."""

    held = False

    def __init__(self, nodes: Nodes, seconds: Callable[[], float] = lambda: 0.0) -> None:
        self._nodes, self._seconds = nodes, seconds
        self.posted: list[tuple[Priority, int, Callable[[], None]]] = []
        self._count, self._busy = itertools.count(), False

    def post(
        self, work: Callable[[], T], then: Callable[[T | Exception], None], priority: Priority
    ) -> None:
        task = partial(AtOnce().post, work, then, priority)
        heapq.heappush(self.posted, (priority, next(self._count), task))
        self._begin()

    def work(self) -> None:
        """Does the most urgent work."""
        heapq.heappop(self.posted)[2]()
        self._begin()

    def release(self) -> None:
        self.held = False
        self._begin()

    def _begin(self) -> None:
        if self.posted and not (self._busy or self.held):
            self._busy = True
            self._nodes.after(self._seconds(), self._end)

    def _end(self) -> None:
        self._busy = False
        if self.posted and not self.held:
            self.work()


class Timer:
    """A scheduled call."""

    def __init__(self, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.call = partial(call, *arguments)
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Nodes:
    """The exchanges of several nodes, and their event loop in virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.crashes: list[BaseException] = []  # errors of exchanges; `outcome` raises them, too
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def new(self, compute: Any = None) -> Exchanges:
        """The exchanges of one more node."""
        loop: Any = self
        return Exchanges(compute or AtOnce(), loop, self.crashes.append)

    # --- an event loop, as far as exchanges need one

    def time(self) -> float:
        return self.now

    def call_soon(self, call: Callable[..., object], *arguments: Any) -> Timer:
        return self.call_at(self.now, call, *arguments)

    def call_at(self, when: float, call: Callable[..., object], *arguments: Any) -> Timer:
        timer = Timer(call, arguments)
        heapq.heappush(self._timers, (max(when, self.now), next(self._numbers), timer))
        return timer

    # --- for tests

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        self.call_at(self.now + seconds, call)

    @property
    def next(self) -> float:
        """When the next call is due; inf: never."""
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else math.inf

    def step(self) -> bool:
        """Makes the next call. False: none is left."""
        if self.next == math.inf:
            return False
        self.now, _, timer = heapq.heappop(self._timers)
        timer.call()
        return True

    def catch_up(self) -> None:
        """Makes all calls that are due now."""
        while self.next <= self.now:
            self.step()

    def sleep(self, seconds: float) -> None:
        """Makes all calls of the next `seconds`."""
        over: list[None] = []
        self.after(seconds, lambda: over.append(None))
        while not over:
            self.step()

    def outcome(self, exchange: Exchange[T]) -> T:
        """The result of the exchange. Raises its error, or AssertionError if it waits for ever."""
        while not exchange.done:
            went_on = self.step()
            assert went_on or exchange.done, "everybody waits, and nothing will come"
        return exchange.result()

    def error(self, exchange: Exchange[Any]) -> Exception | None:
        """The error of the exchange, or None."""
        try:
            self.outcome(exchange)
        except Exception as error:  # noqa: BLE001 (the test checks any error)
            return error
        return None

    def run(self, exchanges: Exchanges, work: Coroutine[Any, Any, T]) -> T:
        return self.outcome(exchanges.start(work))


class Sent(NamedTuple):
    time: float
    source: str
    target: str
    item: Item


class Network(Nodes):
    """Nodes that are linked with each other. Copies of items arrive within `latency` seconds, in an
    order drawn from `seed`. `ordered`: each link keeps the order of sending."""

    def __init__(self, seed: int = 0, latency: float = 0.001, ordered: bool = False) -> None:
        super().__init__()
        self.random, self.latency, self.ordered = random.Random(seed), latency, ordered
        self.nodes: dict[str, Any] = {}
        """By name: objects with `on_frame` and `on_message`, as far as they receive either."""
        self.sent: list[Sent] = []
        self.in_flight: list[Sent] = []
        self.held = False  # nothing arrives
        self.faults: dict[str, Callable[[Any], Item | None]] = {}
        """By sender: returns what arrives in place of an item; None: nothing."""
        self.passes: Callable[[str, str, Any], bool] = lambda source, target, item: True
        """Whether an item gets through; asked when it arrives."""

    def slow(self) -> Thread:
        """A compute thread whose works take random times, up to a millisecond."""
        return Thread(self, lambda: self.random.random() / 1000)

    def send(self, source: str, target: str, item: Item) -> bool:
        """Sends an item. False: there is no link."""
        if target not in self.nodes:
            return False
        self.sent.append(Sent(self.now, source, target, item))
        changed = self.faults.get(source, lambda same: same)(item)
        if changed is not None:
            self.in_flight.append(Sent(self.now, source, target, changed))
            self._soon(source, target, self.latency * self.random.random())
        return True

    def _soon(self, source: str, target: str, seconds: float) -> None:
        def deliver() -> None:
            if self.held or not self.in_flight:
                return
            if self.ordered:
                self.deliver(source, target)
            else:
                self._arrive(self.in_flight.pop(self.random.randrange(len(self.in_flight))))

        self.after(seconds, deliver)

    def deliver(self, source: str, target: str) -> None:
        """Delivers the first item on that link, if there is one."""
        for place, sent in enumerate(self.in_flight):
            if sent[1:3] == (source, target):
                self._arrive(self.in_flight.pop(place))
                return

    def _arrive(self, sent: Sent) -> None:
        _, source, target, item = sent
        if target in self.nodes and self.passes(source, target, item):
            self.arrive(source, target, item)

    def arrive(self, source: str, target: str, item: Item) -> None:
        if isinstance(item, Frame):
            self.nodes[target].on_frame(source, copied(item))
        else:
            message = pb.Message.FromString(item.SerializeToString())
            self.nodes[target].on_message(source, message)

    def release(self) -> None:
        self.held = False
        for sent in self.in_flight:
            self._soon(sent.source, sent.target, 0.0)

    def settle(self) -> None:
        """Runs until no call is left, and checks that nothing is in transit."""
        while self.step():
            pass
        check_at_rest(*self.nodes.values())

    def lose(self, node: str) -> None:
        """Removes a node, and tells the others."""
        del self.nodes[node]
        for other in list(self.nodes.values()):
            if hasattr(other, "on_peer_lost"):
                other.on_peer_lost(node, "connection reset")


class VirtualNet:
    """The port `Net` of one node, which records what is sent on the links that are up."""

    def __init__(self, up: set[str]) -> None:
        self.up = up
        self.sent: list[tuple[str, Item]] = []
        self.demanded: list[str] = []

    def send(self, peer: str, item: Item) -> bool:
        if peer in self.up:
            self.sent.append((peer, item))
        return peer in self.up

    def demand(self, peer: str) -> None:
        self.demanded.append(peer)

    def linked(self, peer: str) -> bool:
        return peer in self.up

    def unacknowledged_by(self, peer: str) -> int:
        return 0


def copied(frame: Frame) -> Frame:
    """The frame as it arrives."""
    return Frame.parse(frame.head(), bytearray().join(buffers_of(frame.payload)))


def damaged(frame: Frame) -> Frame:
    """The frame with a flipped bit in its payload."""
    payload = bytearray().join(buffers_of(frame.payload))
    payload[len(payload) // 2] ^= 1
    return replace(frame, payload=(memoryview(payload),))


def with_fields(**fields: object) -> Callable[[Frame], Frame]:
    return lambda frame: replace(frame, fields=frame.fields | fields)


def without_tensors(frame: Frame) -> Frame:
    return replace(frame, descriptors=[], payload=b"")

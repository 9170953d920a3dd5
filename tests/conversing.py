"""Exchanges in virtual time, for tests: the clock jumps as soon as nobody has anything to do; and
links that are not there."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from planaria.node.agent import Agent
from planaria.node.ports import Priority
from planaria.node.transaction.member import MemberPhase
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.budget import ITEM
from planaria.node.wire.exchange import Exchange, Exchanges
from planaria.node.wire.frames import Frame

T = TypeVar("T")


def validate(seat: Agent) -> None:
    """Checks what holds between any two events of an agent. Raises AssertionError."""
    member, attempt = seat.member, seat.attempt
    if member.phase in (MemberPhase.RUNNING, MemberPhase.REDUCING) and member.following is None:
        assert attempt is not None and not attempt.over, f"{member.phase}, but no attempt"
        assert attempt.began == member.began, f"{attempt.began} began, not {member.began}"
        assert attempt.ballot == member.attempt, f"at {attempt.ballot}, not {member.attempt}"
    if seat.reducing.runs:
        voting = member.phase in (MemberPhase.RUNNING, MemberPhase.REDUCING)
        assert voting, f"reduces {seat.reducing.ballot} in {member.phase}"
    assert seat.held.used == sum(frame.size + ITEM for _, frame in seat.held.frames)


class AtOnce:
    """In place of the compute thread: works when it is asked to."""

    computed, computing, now = 0, False, 0.0

    def post(
        self, work: Callable[[], T], then: Callable[[T | Exception], None], priority: Priority
    ) -> None:
        try:
            result: T | Exception = work()
        except Exception as error:  # noqa: BLE001 (whatever it is, it belongs to who waits)
            result = error
        then(result)


class Slow:
    """In place of the compute thread: each work takes a moment that is drawn."""

    def __init__(self, nodes: Nodes, draw: random.Random) -> None:
        self._nodes, self._random = nodes, draw
        self._free = 0.0

    def post(
        self, work: Callable[[], T], then: Callable[[T | Exception], None], priority: Priority
    ) -> None:
        self._free = max(self._free, self._nodes.now) + self._random.random() / 1000
        done = partial(AtOnce().post, work, then, priority)
        self._nodes.after(self._free - self._nodes.now, done)


class Nodes:
    """The exchanges of several nodes, and one clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.crashes: list[BaseException] = []  # what exchanges have raised; `outcome` does, too
        self._all: list[Exchanges] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def new(self, compute: Any = None) -> Exchanges:
        """Of one more node."""
        exchanges = Exchanges(compute or AtOnce(), _nothing, self.crashes.append)
        exchanges.run(self.now)
        self._all.append(exchanges)
        return exchanges

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._numbers), call))

    def step(self) -> bool:
        """Everything that can happen now does; then the clock jumps. False: nothing is left."""
        busy = any(not exchanges.idle or exchanges.wake <= self.now for exchanges in self._all)
        for exchanges in self._all:
            exchanges.run(self.now)
        if busy or not all(exchanges.idle for exchanges in self._all):
            return True
        due = min((exchanges.wake for exchanges in self._all), default=math.inf)
        if self._timers and self._timers[0][0] <= due:
            self.now, _, call = heapq.heappop(self._timers)
            for exchanges in self._all:
                exchanges.at(self.now)
            call()
            return True
        if due == math.inf:
            return False
        self.now = max(self.now, due)
        return True

    def sleep(self, seconds: float) -> None:
        """Everything happens that does in this time."""
        over: list[None] = []
        self.after(seconds, lambda: over.append(None))
        while not over:
            self.step()

    def outcome(self, exchange: Exchange[T]) -> T:
        """Raises what the exchange raised, or AssertionError when it waits for ever."""
        while not exchange.done:
            went_on = self.step()
            assert went_on or exchange.done, "everybody waits, and nothing will come"
        return exchange.result()

    def error(self, exchange: Exchange[Any]) -> Exception | None:
        """What the exchange raised."""
        try:
            self.outcome(exchange)
        except Exception as error:  # noqa: BLE001 (whatever it is, the test looks at it)
            return error
        return None

    def run(self, exchanges: Exchanges, work: Coroutine[Any, Any, T]) -> T:
        return self.outcome(exchanges.start(work))


def _nothing() -> None:
    """`step` looks by itself whether there is something to run."""


class VirtualNet:
    """Links that are up or not, and what was sent on them."""

    def __init__(self, up: set[str]) -> None:
        self.up = up
        self.sent: list[tuple[str, pb.Message | Frame]] = []
        self.demanded: list[str] = []

    def send(self, peer: str, item: pb.Message | Frame) -> bool:
        if peer in self.up:
            self.sent.append((peer, item))
        return peer in self.up

    def demand(self, peer: str) -> None:
        self.demanded.append(peer)

    def linked(self, peer: str) -> bool:
        return peer in self.up

    def unacknowledged_by(self, peer: str) -> int:
        return 0

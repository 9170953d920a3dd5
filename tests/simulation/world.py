"""Virtual time, and processes that stand still or die, all from one seed, in one thread."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any


class World:
    """The clock and the events to come."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.straggling = self.random.choice([0.0, 0.03, 0.1])  # share of what takes long
        self.now = 0.0
        self.trace: deque[str] = deque(maxlen=400)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def after(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        event = (self.now + delay, next(self._numbers), call, arguments)
        heapq.heappush(self._events, event)

    def step(self) -> None:
        self.now, _, call, arguments = heapq.heappop(self._events)
        call(*arguments)

    def say(self, who: str, what: str) -> None:
        self.trace.append(f"{self.now:9.3f} {who:>8} {what}")

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def delay(self) -> float:
        """Seconds that something takes through the network: mostly a few ms, at times a second."""
        usual = 0.002 + self.random.expovariate(200.0)
        return usual + self.random.uniform(0.0, 1.5) if self.chance(self.straggling) else usual


class Process:
    """A process on a host: runs, stands still while the host is frozen, or is dead."""

    def __init__(self, world: World, host: str) -> None:
        self.world, self.host = world, host
        self.alive = True
        self.frozen_since: float | None = None
        self.thawed_at = -1.0
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def responsive(self) -> bool:
        return self.alive and self.frozen_since is None

    def after(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        self.world.after(delay, self.run, call, *arguments)

    def run(self, call: Callable[..., None], *arguments: Any) -> None:
        """At once, or when it is no longer frozen."""
        if not self.alive:
            return
        if self.frozen_since is not None:
            self._waiting.append((call, arguments))
        else:
            call(*arguments)

    def freeze(self) -> None:
        self.frozen_since = self.world.now

    def thaw(self) -> None:
        """Everything that came meanwhile is processed now, in the order in which it came."""
        self.frozen_since = None
        self.thawed_at = self.world.now
        waiting, self._waiting = self._waiting, []
        for call, arguments in waiting:
            self.after(0.0, call, *arguments)

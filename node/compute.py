"""The compute thread: all torch work of a node, one task at a time, most urgent first."""

from __future__ import annotations

import asyncio
import enum
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Priority(enum.IntEnum):
    """Backward before forward, so that 1F1B emerges; what everybody waits for before both, and what
    fills the bubbles behind them."""

    CONTROL = 0
    BACKWARD = 1
    FORWARD = 2
    BACKGROUND = 3


class ComputeThread:
    """Tasks of equal priority run in the order in which they were posted."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.busy_seconds = 0.0
        self.busy_since: float | None = None
        self._tasks: list[tuple[Priority, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(
        self, task: Callable[[], T], priority: Priority = Priority.CONTROL
    ) -> asyncio.Future[T]:
        """The future has the task's result or exception; call it on the event loop."""
        future: asyncio.Future[T] = self.loop.create_future()

        def work() -> None:
            try:
                result = task()
            except Exception as error:  # noqa: BLE001 (whatever it is, it belongs to who waits)
                self._tell(_fail, future, error)
            else:
                self._tell(_fulfil, future, result)

        with self._wake:
            heapq.heappush(self._tasks, (priority, next(self._numbers), work))
            self._wake.notify()
        return future

    def stop(self) -> None:
        """Forget what waits; what runs is let finish."""
        with self._wake:
            self._stopped = True
            self._tasks.clear()
            self._wake.notify()
        self._thread.join()

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call, *arguments)

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._tasks and not self._stopped:
                    self._wake.wait()
                if self._stopped:
                    return
                _, _, task = heapq.heappop(self._tasks)
            self.busy_since = time.monotonic()
            task()
            self.busy_seconds += time.monotonic() - self.busy_since
            self.busy_since = None


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _fulfil(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)

"""The compute thread: all torch work of a node, one task at a time, most urgent first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from planaria.node.ports import Priority

T = TypeVar("T")


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

    def post(
        self, work: Callable[[], T], then: Callable[[T | Exception], None], priority: Priority
    ) -> None:
        """`then` gets what the work returned or raised, on the event loop."""

        def task() -> None:
            try:
                result: T | Exception = work()
            except Exception as error:  # noqa: BLE001 (whatever it is, it belongs to who waits)
                result = error
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(then, result)

        with self._wake:
            heapq.heappush(self._tasks, (priority, next(self._numbers), task))
            self._wake.notify()

    def run(
        self, work: Callable[[], T], priority: Priority = Priority.CONTROL
    ) -> asyncio.Future[T]:
        """The future has the work's result or exception; call it on the event loop."""
        future: asyncio.Future[T] = self.loop.create_future()
        self.post(work, partial(_settle, future), priority)
        return future

    def stop(self) -> None:
        """Forget what waits; what runs is let finish."""
        with self._wake:
            self._stopped = True
            self._tasks.clear()
            self._wake.notify()
        self._thread.join()

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


def _settle(future: asyncio.Future[T], result: T | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)

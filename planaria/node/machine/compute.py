"""The compute thread: all torch work of a node, one task at a time, most urgent first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from planaria.node.machine.hang_watch import Hang, HangWatch
from planaria.node.ports import Priority

T = TypeVar("T")

END = 2.0
"""Seconds without processor time after which a stopped thread counts as hanging."""
LONGEST = 30.0
"""Seconds for the current task to end when the thread is stopped."""


_here = threading.local()


@contextmanager
def waiting_for_disk() -> Iterator[None]:
    """Exclude this block from computing time: a slow disk is no hanging device. Outside a compute
    thread it does nothing."""
    watch: HangWatch | None = getattr(_here, "watch", None)
    if watch is None:
        yield
        return
    began = time.monotonic()
    watch.waits = True
    try:
        yield
    finally:
        watch.waited(time.monotonic() - began)


class ComputeThread:
    """A thread that runs tasks by priority; equal ones run in the order of `post`."""

    def __init__(
        self, name: str, loop: asyncio.AbstractEventLoop, watch: HangWatch | None = None
    ) -> None:
        self.loop = loop
        self.watch = watch or HangWatch(first=math.inf)
        self._busy_seconds = 0.0
        self._busy_since: float | None = None
        self._done = self._looks = 0
        self._clock: int | None = None  # of the thread's processor time
        self._thread_time = 0.0
        self._tasks: list[tuple[Priority, int, str, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def now(self) -> float:
        return self.loop.time()

    @property
    def computed(self) -> int:
        """Grows with each task that is done, and while the thread takes processor time."""
        return self._done + self._looks

    @property
    def computing(self) -> bool:
        return not self.watch.waits and (self._busy_since is not None or bool(self._tasks))

    def busy_seconds(self, now: float) -> float:
        """Seconds that the thread has computed so far; `now`: time.monotonic()."""
        since = self._busy_since
        return self._busy_seconds + (now - since if since is not None else 0.0)

    def post(
        self, work: Callable[[], T], then: Callable[[T | Exception], None], priority: Priority
    ) -> None:
        """Queue `work`; `then` gets its result or exception, on the event loop."""

        def task() -> None:
            try:
                result: T | Exception = work()
            except Exception as error:  # noqa: BLE001 (`then` gets it, whatever it is)
                result = error
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(then, result)

        with self._wake:
            heapq.heappush(self._tasks, (priority, next(self._numbers), kind_of(work), task))
            self._wake.notify()

    def run(
        self, work: Callable[[], T], priority: Priority = Priority.CONTROL
    ) -> asyncio.Future[T]:
        """Queue `work`, and return a future of its outcome. Call it on the event loop."""
        future: asyncio.Future[T] = self.loop.create_future()
        self.post(work, partial(_settle, future), priority)
        return future

    def find_hang(self) -> Hang | None:
        """The compute thread's hanging task, if any. To be called on the event loop, at each of its
        ticks."""
        thread = self._processor_time()
        if thread is not None and thread > self._thread_time:
            self._thread_time = thread
            self._looks += 1
        return self.watch.find_hang(time.monotonic(), thread)

    def _processor_time(self) -> float | None:
        """The compute thread's processor time in seconds; None: unknown, or the thread is over."""
        if self._clock is None:
            return None
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            return None

    def stop(self, seconds: float = END) -> bool:
        """Drop queued tasks, and wait for the current one. False: it took no processor time for
        these seconds, or takes too long; then only the end of the process ends it."""
        with self._wake:
            self._stopped = True
            self._tasks.clear()
            self._wake.notify()
        until = time.monotonic() + LONGEST
        while True:
            before = self._processor_time()
            self._thread.join(seconds)
            computes = before is not None and before != self._processor_time()
            if not self._thread.is_alive() or not computes or time.monotonic() > until:
                return not self._thread.is_alive()

    def _work(self) -> None:
        _here.watch = self.watch
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        while True:
            with self._wake:
                while not self._tasks and not self._stopped:
                    self._wake.wait()
                if self._stopped:
                    return
                _, _, kind, task = heapq.heappop(self._tasks)
            self._busy_since = began = time.monotonic()
            self.watch.began(kind, began)
            task()
            ended = time.monotonic()
            self.watch.ended(ended)
            self._done += 1
            self._busy_seconds += ended - began
            self._busy_since = None


def _settle(future: asyncio.Future[T], result: T | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def kind_of(work: Callable[..., Any]) -> str:
    """The kind of a task: the name of the function that it calls."""
    while isinstance(work, partial):
        work = work.func
    return getattr(work, "__name__", type(work).__name__).strip("_")

"""Virtual time, and processes that stand still or die, all from one seed, in one thread.

The world is the event loop of all processes: coroutines run in it as they ship. Each task, timer
and callback belongs to the process in whose context it was made. While that process is frozen they
wait; when it is dead they never run.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any

from planaria.bootstrap.transport import Broken

RUNNING: ContextVar[Process | None] = ContextVar("process", default=None)
"""The process to which what runs now belongs."""

OPEN: list[World] = []
"""Worlds not closed yet."""


class Handle:
    """A callback to come."""

    __slots__ = ("_arguments", "_call", "_context", "_when", "is_cancelled")

    def __init__(
        self, when: float, call: Callable[..., object], arguments: tuple[Any, ...], context: Context
    ) -> None:
        self._when, self._call, self._arguments, self._context = when, call, arguments, context
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self._when

    def __call__(self) -> None:
        if self.is_cancelled:
            return
        process = self._context.get(RUNNING)
        if process is None:
            self._context.run(self._call, *self._arguments)
        elif process.responsive:
            self._context.run(self._call, *self._arguments)
            process.check()
        else:
            process.hold(self)


class _Never(asyncio.Future[None]):
    """A task that is begun when its world is over."""

    def set_name(self, name: str) -> None:
        """It has none."""


class World(asyncio.AbstractEventLoop):
    """The clock and the events to come."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.straggling = self.random.choice([0.0, 0.03, 0.1])  # share of what takes long
        self.now = 0.0
        self.trace: deque[str] = deque(maxlen=400)
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._soon: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        """What is to be called now, after the events that were to come now before."""
        self.tasks: dict[asyncio.Task[Any], None] = {}  # not over; those of the dead, too
        self._closed = False
        OPEN.append(self)

    def after(self, delay: float, call: Callable[..., object], *arguments: Any) -> None:
        self._call_at(self.now + delay, call, arguments)

    def _call_at(
        self, when: float, call: Callable[..., object], arguments: tuple[Any, ...]
    ) -> None:
        if when <= self.now:
            self._soon.append((call, arguments))
        else:
            heapq.heappush(self._events, (when, next(self._numbers), call, arguments))

    def run_until(self, end: float) -> None:
        """Up to the first event at `end` or later."""
        asyncio._set_running_loop(self)
        try:
            while self.now < end:
                if self._soon and not (self._events and self._events[0][0] <= self.now):
                    call, arguments = self._soon.popleft()
                else:
                    self.now, _, call, arguments = heapq.heappop(self._events)
                call(*arguments)
        finally:
            asyncio._set_running_loop(None)

    def say(self, who: str, text: str) -> None:
        self.trace.append(f"{self.now:9.3f} {who:>8} {text}")

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def delay(self) -> float:
        """Seconds that something takes through the network: mostly a few ms, at times a second."""
        usual = 0.002 + self.random.expovariate(200.0)
        return usual + self.random.uniform(0.0, 1.5) if self.chance(self.straggling) else usual

    # --- the event loop

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return self._closed

    def call_at(  # type: ignore[override]
        self, when: float, call: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Handle(when, call, args, context or copy_context())
        self._call_at(when, handle, ())
        return handle

    def call_soon(  # type: ignore[override]
        self, call: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Handle(self.now, call, args, context or copy_context())
        self._soon.append((handle, ()))
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, call: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        return self.call_at(self.now + delay, call, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, call: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        """At once: time stands still while a thread works."""
        future = self.create_future()
        try:
            future.set_result(call(*arguments))
        except Exception as error:  # noqa: BLE001 (whoever awaits it gets it)
            future.set_exception(error)
        return future

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, work: Coroutine[Any, Any, Any], *, name: str = "", context: Context | None = None
    ) -> asyncio.Task[Any]:
        if self._closed:
            work.close()
            return _Never(loop=self)  # type: ignore[return-value]
        assert (context or copy_context()).get(RUNNING) is not None, "a task of no process"
        task = asyncio.Task(work, loop=self, name=name or "task", context=context)
        self.tasks[task] = None
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Broken):
            raise error

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Tasks of dead processes are never over."""

    def close(self) -> None:
        """End what is left. Else it would end, and run its last lines, when it is collected, in the
        middle of another world."""
        self._closed = True
        asyncio._set_running_loop(self)
        try:
            while self.tasks:
                task, _ = self.tasks.popitem()
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                while inspect.getcoroutinestate(work := task.get_coro()) != inspect.CORO_CLOSED:
                    with suppress(BaseException):
                        work.close()
        finally:
            asyncio._set_running_loop(None)
        self._events.clear()
        self._soon.clear()
        OPEN.remove(self)


class Process:
    """A process on a host: runs, stands still while the host is frozen, or is dead."""

    def __init__(self, world: World, host: str) -> None:
        self.world, self.host = world, host
        self.alive = True
        self.frozen_since: float | None = None
        self.thawed_at = -1.0
        self.check: Callable[[], None] = lambda: None
        """Called after whatever it does."""
        self._waiting: list[Callable[[], object]] = []
        self._context = copy_context()
        self._context.run(RUNNING.set, self)

    @property
    def responsive(self) -> bool:
        return self.alive and self.frozen_since is None

    def after(self, delay: float, call: Callable[..., object], *arguments: Any) -> Handle:
        return self.world.call_later(delay, call, *arguments, context=self._context.copy())

    def spawn(self, work: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        return self.world.create_task(work, name=name, context=self._context.copy())

    def run(self, call: Callable[..., object], *arguments: Any) -> None:
        """At once, or when it is no longer frozen."""
        Handle(self.world.now, call, arguments, self._context.copy())()

    def hold(self, handle: Callable[[], object]) -> None:
        """Keep what comes while it is frozen; nothing once it is dead."""
        if self.alive:
            self._waiting.append(handle)

    def freeze(self) -> None:
        self.frozen_since = self.world.now

    def thaw(self) -> None:
        """Everything that came meanwhile is processed now, in the order in which it came."""
        self.frozen_since = None
        self.thawed_at = self.world.now
        waiting, self._waiting = self._waiting, []
        for handle in waiting:
            self.world.after(0.0, handle)

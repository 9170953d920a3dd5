"""Virtual time, and processes that freeze or die, all from one seed, in one thread.

The world is the event loop of all processes: production coroutines run in it unchanged. Each task,
timer and callback belongs to the process in whose context it was made. While that process is frozen
they wait; once it is dead they never run.
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
"""The process whose code runs now."""

OPEN: list[World] = []
"""Worlds that are not closed yet."""


class Handle:
    """A scheduled callback."""

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
    """A future in place of a task that is created after its world was closed. It never ends."""

    def set_name(self, name: str) -> None:
        """Does nothing: it has no name."""


class World(asyncio.AbstractEventLoop):
    """An event loop with a virtual clock and the scheduled calls of all processes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.straggling = self.random.choice([0.0, 0.03, 0.1])  # share of long delays
        self.now = 0.0
        self.trace: deque[str] = deque(maxlen=400)
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._soon: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        """Calls that are due now, and run after the events that are due now."""
        self.tasks: dict[asyncio.Task[Any], None] = {}  # unfinished, also of dead processes
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
        """Runs all events before `end`, and the first one at `end` or later."""
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
        """Seconds of a delivery through the network: mostly a few ms, at times a second."""
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
        """Makes the call at once: time stands still while a thread works."""
        future = self.create_future()
        try:
            future.set_result(call(*arguments))
        except Exception as error:  # noqa: BLE001 (it goes to the future)
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
        """Ignores reports: tasks of dead processes never end."""

    def close(self) -> None:
        """Ends the tasks that are left. Otherwise the garbage collector would end them, and so run
        their last lines, in the middle of another world."""
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
    """A process on a host: it runs, is frozen, or is dead."""

    def __init__(self, world: World, host: str) -> None:
        self.world, self.host = world, host
        self.alive = True
        self.frozen_since: float | None = None
        self.thawed_at = -1.0
        self.check: Callable[[], None] = lambda: None
        """Called after each callback of the process."""
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
        """Makes the call at once, or when the process is no longer frozen."""
        Handle(self.world.now, call, arguments, self._context.copy())()

    def hold(self, handle: Callable[[], object]) -> None:
        """Keeps a callback for a frozen process; drops it if the process is dead."""
        if self.alive:
            self._waiting.append(handle)

    def freeze(self) -> None:
        self.frozen_since = self.world.now

    def thaw(self) -> None:
        """Ends the freeze, and runs all callbacks that it kept, in order."""
        self.frozen_since = None
        self.thawed_at = self.world.now
        waiting, self._waiting = self._waiting, []
        for handle in waiting:
            self.world.after(0.0, handle)

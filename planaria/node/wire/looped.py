"""A node's exchanges on its event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from planaria.node.ports import Compute
from planaria.node.wire.exchange import Exchanges

T = TypeVar("T")


class ClosedError(Exception):
    """What was waited for doesn't come any more; the message says why."""


class LoopedExchanges(Exchanges):
    """They run when there is something to run; the loop's clock is theirs."""

    def __init__(
        self,
        compute: Compute,
        loop: asyncio.AbstractEventLoop,
        crashed: Callable[[BaseException], None],
    ) -> None:
        super().__init__(compute, self._run_soon, crashed)
        self._loop = loop
        self._soon_handle: asyncio.Handle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._awaited: set[asyncio.Future[Any]] = set()  # by tasks
        self._why_closed = ""
        self.at(loop.time())

    def close(self, why: str = "the node is over") -> None:
        """None of them goes on, and who waits for one gets a ClosedError that says why."""
        super().close()
        self._why_closed = why
        for future in self._awaited:
            if not future.done():
                future.set_exception(ClosedError(why))
        for handle in (self._soon_handle, self._alarm):
            if handle is not None:
                handle.cancel()

    async def outcome(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of an exchange, for a task of the loop; it is given up when the task is.
        Raises ClosedError if these are closed, or are before it is over."""
        if self._closed:
            work.close()
            raise ClosedError(self._why_closed)
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

        self.at(self._loop.time())
        exchange = self.start(converse())
        self._awaited.add(future)
        try:
            return await future
        finally:
            self._awaited.remove(future)
            exchange.cancel()

    def _run_soon(self) -> None:
        if self._soon_handle is None and not self._closed:
            self._soon_handle = self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._soon_handle = None
        self.run(self._loop.time())
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self.wake < math.inf and not self._closed:
            self._alarm = self._loop.call_at(self.wake, self._run)

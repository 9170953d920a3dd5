"""An event loop whose clock jumps to the next timer as soon as nothing else is ready."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "everybody waits, and nothing will come"
            self.now += timeout
        return events


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time; no task may be left running."""
    selector = _Selector()

    def loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now  # type: ignore[method-assign]
        return loop

    async def alone() -> T:
        result = await work
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(alone())

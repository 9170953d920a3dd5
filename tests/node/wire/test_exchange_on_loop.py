from __future__ import annotations

import asyncio
import threading

import pytest
import virtual_time

from planaria.node.machine.compute import ComputeThread
from planaria.node.ports import Priority
from planaria.node.wire.exchange import ClosedError, Exchanges, Outcome
from tests.harness.network import AtOnce


def on_loop() -> Exchanges:
    def crashed(error: BaseException) -> None:
        raise AssertionError from error

    return Exchanges(AtOnce(), asyncio.get_running_loop(), crashed)


async def test_what_is_computed_in_the_thread_goes_on_in_the_loop() -> None:
    loop = asyncio.get_running_loop()
    over: asyncio.Future[list[str]] = loop.create_future()
    compute = ComputeThread("works-here", loop)
    exchanges = Exchanges(compute, loop, over.set_exception)

    async def work() -> None:
        names = [threading.current_thread().name]
        names.append(await exchanges.compute(lambda: threading.current_thread().name))
        with pytest.raises(ZeroDivisionError):
            await exchanges.compute(lambda: 1 // 0)
        over.set_result([*names, threading.current_thread().name])

    try:
        exchanges.start(work())
        here = threading.current_thread().name
        assert await over == [here, "works-here", here]
    finally:
        await asyncio.to_thread(compute.stop)


async def test_the_most_urgent_work_comes_first_and_equals_in_order() -> None:
    loop = asyncio.get_running_loop()
    compute = ComputeThread("test", loop)
    started, go_on = threading.Event(), threading.Event()
    done: list[object] = []

    def busy() -> None:
        started.set()
        go_on.wait()

    try:
        compute.post(busy, done.append, Priority.CONTROL)
        await asyncio.to_thread(started.wait)
        last = compute.run(lambda: "d", Priority.BACKGROUND)
        for name, priority in (
            ("c", Priority.FORWARD),
            ("a", Priority.CONTROL),
            ("b", Priority.BACKWARD),
        ):
            compute.post(lambda name=name: name, done.append, priority)  # type: ignore[misc]
        go_on.set()
        assert await last == "d"
        assert done == [None, "a", "b", "c"]
    finally:
        await asyncio.to_thread(compute.stop)


def test_time_that_passes_wakes_them_in_its_order() -> None:
    woken = []

    async def main() -> None:
        exchanges = on_loop()
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def work(seconds: float) -> None:
            await exchanges.sleep(seconds)
            woken.append((seconds, exchanges.now))
            if len(woken) == 3:
                over.set_result(None)

        for seconds in (5.0, 2.0, 9.0):
            exchanges.start(work(seconds))
        await over

    virtual_time.run(main())
    assert woken == [(2.0, 2.0), (5.0, 5.0), (9.0, 9.0)]


def test_none_goes_on_once_they_are_closed() -> None:
    async def main() -> bool:
        exchanges = on_loop()
        outcome: Outcome[None] = Outcome(exchanges)

        async def work(outcome: Outcome[None]) -> None:
            await outcome.within(5.0)
            raise AssertionError

        exchanges.start(work(outcome))
        exchanges.start(work(Outcome(exchanges)))
        outcome.fulfil(None)
        exchanges.close()
        await asyncio.sleep(6.0)
        return True

    assert virtual_time.run(main())


def test_a_task_that_waits_for_an_exchange_is_told_and_gives_it_up() -> None:
    async def main() -> list[str]:
        exchanges, outcomes = on_loop(), []

        async def work(seconds: float) -> str:
            try:
                await exchanges.sleep(seconds)
                return f"done at {exchanges.now:g}" if seconds < 5 else str(1 // 0)
            finally:
                outcomes.append(f"over {seconds:g}")

        outcomes.append(await exchanges.outcome(work(2.0)))
        with pytest.raises(ZeroDivisionError):
            await exchanges.outcome(work(5.0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await exchanges.outcome(work(9.0))
        return outcomes

    assert virtual_time.run(main()) == ["over 2", "done at 2", "over 5", "over 9"]


def test_who_waits_for_an_exchange_that_is_closed_is_told_why() -> None:
    async def main() -> float:
        exchanges, loop = on_loop(), asyncio.get_running_loop()
        loop.call_later(2.0, exchanges.close, "its seat was given back")
        for _ in ("begun before", "asked for afterwards"):
            with pytest.raises(ClosedError, match="its seat was given back"):
                await exchanges.outcome(exchanges.sleep(30.0))
        return loop.time()

    assert virtual_time.run(main()) == 2.0

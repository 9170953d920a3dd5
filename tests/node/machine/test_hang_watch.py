"""Detection of hanging tasks of the compute thread, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import threading
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.machine.compute import ComputeThread, kind_of, waiting_for_disk
from planaria.node.machine.hang_watch import FLOOR, HELD_UP, KNOWN, STILL, TIMES, Hang, HangWatch
from planaria.node.ports import Priority

LOOK = 0.05


class Watched:
    """A watch in virtual time, with a look at it every LOOK seconds while time passes."""

    def __init__(self, first: float = 60.0) -> None:
        self.watch, self.now = HangWatch(first), 100.0
        self.hang: Hang | None = None

    def passes(self, seconds: float) -> Hang | None:
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK
            self.hang = self.watch.find_hang(self.now)
        return self.hang

    def does(self, task: str, seconds: float, times: int = 1) -> None:
        for _ in range(times):
            self.watch.began(task, self.now)
            assert self.passes(seconds) is None
            self.watch.ended(self.now)


def test_a_task_that_takes_much_longer_than_such_tasks_hangs() -> None:
    watched = Watched()
    watched.does("forward", 0.1, KNOWN)
    watched.does("apply", 3.0, KNOWN)
    watched.watch.began("forward", watched.now)
    assert watched.passes(FLOOR - 0.1) is None
    hang = watched.passes(0.2)
    assert hang is not None
    assert hang.task == "forward"
    assert hang.usual == pytest.approx(0.1)
    assert "at `forward`, which takes 0.1 s" in str(hang)
    watched.watch.ended(watched.now)
    assert watched.passes(1.0) is None
    watched.watch.began("apply", watched.now)
    assert watched.passes(TIMES * 3.0 - 0.2) is None, "each kind has its own bound"
    assert watched.passes(0.4) is not None


def test_short_tasks_do_not_make_a_long_one_of_their_kind_hang() -> None:
    """Embedding and head, or two seats, may take turns in the thread."""
    watched = Watched()
    watched.does("forward", 30.0)
    for _ in range(9):
        watched.does("forward", 0.1, 4)
        watched.does("forward", 30.0)
    watched.watch.began("forward", watched.now)
    assert watched.passes(TIMES * 30.0 - 0.2) is None
    assert watched.passes(0.4) is not None


def test_who_never_did_such_a_task_has_more_time() -> None:
    watched = Watched(first=60.0)
    watched.does("backward", 0.1, KNOWN)
    watched.does("forward", 20.0, KNOWN - 1)
    watched.watch.began("forward", watched.now)
    assert watched.passes(59.0) is None
    hang = watched.passes(1.1)
    assert hang is not None
    assert hang.usual == 0.0


def test_a_thread_that_takes_processor_time_is_slow_and_hangs_once_it_takes_none() -> None:
    watch, thread = HangWatch(first=FLOOR), 7.0
    watch.began("forward", 0.0)
    for tick in range(1, 200):  # on a processor that ten processes share
        thread += LOOK / 10
        assert watch.find_hang(tick * LOOK, thread) is None
    assert watch.slow is not None
    assert (watch.slow.task, round(watch.slow.seconds)) == ("forward", 10)
    still = [watch.find_hang(tick * LOOK, thread) for tick in range(200, 245)]
    assert still[round(STILL / LOOK) - 3] is None
    assert still[-1] is not None
    assert watch.slow is None
    watch.ended(13.0)
    watch.began("forward", 20.0)
    assert watch.find_hang(20.5, thread) is None


@pytest.mark.parametrize("spins", [True, False])
def test_a_thread_that_takes_ever_more_processor_time_hangs_if_its_device_makes_it_spin(
    spins: bool,
) -> None:
    watch = HangWatch(first=FLOOR, spins=spins)
    watch.began("forward", 0.0)
    looks = [watch.find_hang(tick * LOOK, tick * LOOK) for tick in range(1, 110)]
    assert looks[90] is None
    assert (looks[-1] is not None) == spins
    assert (watch.slow is None) == spins


def test_nothing_hangs_where_nothing_is_done() -> None:
    watched = Watched()
    watched.does("forward", 0.1, KNOWN)
    assert watched.passes(100.0) is None


def test_a_task_that_waits_for_a_disk_does_not_hang_however_long_it_takes() -> None:
    """Time spent waiting for a disk doesn't count as usual time of such tasks, either."""
    watched = Watched()
    for _ in range(KNOWN):
        watched.watch.began("apply", watched.now)
        watched.passes(0.1)
        watched.watch.waits = True
        assert watched.passes(100.0) is None
        watched.watch.waited(100.0)
        assert watched.passes(0.1) is None
        watched.watch.ended(watched.now)
    watched.watch.began("apply", watched.now)
    watched.watch.waits = True
    watched.passes(100.0)
    watched.watch.waited(100.0)
    assert watched.passes(FLOOR - 0.1) is None
    hang = watched.passes(0.2)
    assert hang is not None, "once the disk has answered, it is the device"
    assert hang.usual == pytest.approx(0.2, abs=0.1)


@given(st.floats(HELD_UP + 0.01, 1e4))
def test_a_process_that_was_held_up_is_no_hanging_thread(seconds: float) -> None:
    watched = Watched()
    watched.does("forward", 0.1, KNOWN)
    watched.watch.began("forward", watched.now)
    watched.passes(0.5)
    watched.now += seconds  # stopped, suspended, starved: nobody looks
    assert watched.passes(FLOOR - 0.2) is None
    assert watched.passes(0.4) is not None, "but it may hang besides"


def test_tasks_are_of_a_kind_by_the_function_that_they_call() -> None:
    def relearn(rate: float) -> None: ...

    class Work:
        def _forward(self) -> None: ...

    assert kind_of(partial(partial(relearn, 0.1))) == "relearn"
    assert kind_of(Work()._forward) == "forward"
    assert kind_of(Work) == "Work"


async def test_a_thread_that_hangs_is_seen_and_left_behind() -> None:
    """The event loop goes on meanwhile, and stopping the thread doesn't block."""
    loop, hangs, begun = asyncio.get_running_loop(), threading.Event(), threading.Event()

    def forward() -> None:
        begun.set()
        hangs.wait()

    compute = ComputeThread("test", loop, HangWatch(first=0.0, floor=0.0))
    try:
        compute.post(forward, lambda _: None, Priority.FORWARD)
        await asyncio.to_thread(begun.wait)
        hang = compute.find_hang()
        assert hang is not None
        assert hang.task == "forward"
        assert not compute.stop(0.0)
    finally:
        hangs.set()
    assert compute.stop(60.0)


async def test_a_thread_that_still_computes_is_waited_for(monkeypatch) -> None:
    """A thread may take long on a machine that has much else to do."""
    begun, done, looks = threading.Event(), threading.Event(), itertools.count()

    def task() -> None:
        begun.set()
        done.wait()

    def processor_time() -> float:
        if (look := next(looks)) > 6:
            done.set()
        return look / 1e3

    compute = ComputeThread("test", asyncio.get_running_loop())
    compute.post(task, lambda _: None, Priority.CONTROL)
    await asyncio.to_thread(begun.wait)
    monkeypatch.setattr(compute, "_processor_time", processor_time)
    assert compute.stop(0.0)
    assert next(looks) > 6


async def test_a_thread_that_waits_for_a_disk_is_not_computing() -> None:
    loop, asked, answers = asyncio.get_running_loop(), threading.Event(), threading.Event()
    answered, done = threading.Event(), threading.Event()

    def apply() -> None:
        with waiting_for_disk():
            asked.set()
            answers.wait()
        answered.set()
        done.wait()

    compute = ComputeThread("test", loop, HangWatch(first=0.0, floor=0.0))
    try:
        compute.post(apply, lambda _: None, Priority.CONTROL)
        compute.post(lambda: None, lambda _: None, Priority.CONTROL)
        await asyncio.to_thread(asked.wait)
        assert compute.find_hang() is None
        assert not compute.computing, "its driver would take it to stand still"
        answers.set()
        await asyncio.to_thread(answered.wait)
        assert compute.computing
        hang = compute.find_hang()
        assert hang is not None
        assert hang.task == "apply"
    finally:
        answers.set()
        done.set()
    await compute.run(lambda: None)
    assert compute.stop(60.0)


def test_elsewhere_waiting_for_a_disk_is_nothing_to_be_noted() -> None:
    with waiting_for_disk():
        pass

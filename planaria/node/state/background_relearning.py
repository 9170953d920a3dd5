"""Background relearning: the rest of a lesson, learned in the gaps of the pipeline while training.

A guessed stage may train as soon as the guess is good enough. The rest of its lesson is learned on
a copy of its weights; the weights stay as they are while a step runs. The learned change is added
with the step's commit. A ready node says how many updates it offers, and makes no more until they
are in the weights, or the next attempt begins.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from planaria.node.ports import Priority
from planaria.node.report.events import Event, RelearnedBeside
from planaria.node.transaction.member import MemberSide
from planaria.node.transaction.relearning_progress import RelearningProgress, other_holder
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import Exchange, Exchanges
from planaria.recovery.relearning import ratio

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.node.state.relearn import Lesson, RelearningCourse


class BackgroundRelearning:
    """The rest of one lesson. Belongs to the compute thread, except where stated otherwise."""

    def __init__(self, lesson: Lesson, course: RelearningCourse, done: pb.Relearned) -> None:
        self.lesson, self.course, self.done = lesson, course, done
        terms = course.terms
        self.progress = RelearningProgress(
            course.updates, done.updates, terms.each_step, terms.within
        )
        self.left = self.progress.left  # updates left after the last commit; for the event loop
        self.steps = 0  # likewise: steps with such updates in their gaps
        self.updates = 0  # likewise: updates added in these steps
        self.seconds = 0.0  # of computing
        self.over = False  # no more updates are made

    def update(self) -> bool:
        """Make one update, if it is time for it. Returns whether it was."""
        progress = self.progress
        if self.over or not progress.may_update:
            return False
        started, number = time.perf_counter(), progress.entered + progress.made
        inputs = self.lesson.start(self.course.piece(number), with_start=True)
        rate = self.course.rate(number, progress.gone)
        self.lesson.end(self.course.piece(number), inputs, None, rate)
        progress.made += 1
        self.seconds += time.perf_counter() - started
        return True

    def update_if_due(self) -> bool:
        return self.progress.is_due and self.update()

    def offer(self) -> tuple[int, int]:
        """How many updates may enter the weights, and how many are left then. No more are made
        until the commit, and none at all once the learned weights aren't finite."""
        made = self.progress.offer()
        self.over = self.over or not self.lesson.is_finite()
        return (0, 0) if self.over else (made, self.progress.left_then)

    def goes_on(self) -> None:
        """Withdraws the offer of updates: another attempt begins, or the same by another plan."""
        self.progress.goes_on()

    def take_change(self, fixed: int) -> Tensor | None:
        """The learned change, to be added to the weights with a step: float32 [n], or None. Call
        `renew` next."""
        self.progress.commit(fixed)
        return self.lesson.changed() if fixed else None

    def renew(self) -> None:
        self.left, self.steps = self.progress.left, self.progress.steps
        self.updates = self.progress.entered - self.done.updates
        self.lesson.renew()

    def residual(self) -> float:
        """Residual error of the stage as it is, over the newest pairs."""
        error = norm = 0.0
        for piece in self.course.newest:
            result = self.lesson.end(piece, self.lesson.start(piece, True), None, None)
            assert result.error is not None
            error, norm = error + result.error, norm + result.norm
        return ratio(error, norm)


class GapRelearning:
    """Runs a seat's relearning task in the gaps of its attempts, and reports its end. Its methods
    are called on the event loop's thread."""

    def __init__(
        self, member: MemberSide, exchanges: Exchanges, tell: Callable[[Event], None]
    ) -> None:
        self._member, self._exchanges, self._tell = member, exchanges, tell
        self.task: BackgroundRelearning | None = None
        self._running: Exchange[None] | None = None  # in the gaps of the attempt

    def begin(self, task: BackgroundRelearning | None) -> None:
        self.task, self._member.relearning = task, 0 if task is None else task.left

    def attempt_begins(self, begin: pb.Begin) -> None:
        """Runs background relearning in an attempt that begins or goes on. If another node is to
        have the stage's weights, too, the task ends."""
        if self.task is None:
            return
        if other := other_holder(begin, self._member.node, self._member.stage):
            self.end(f"{other} has the stage, too")
            return
        if self._running is not None:
            self._running.cancel()
        self._running = self._exchanges.start(self._run(self.task))

    async def _run(self, task: BackgroundRelearning) -> None:
        await self._exchanges.compute(task.goes_on)
        while await self._exchanges.compute(task.update, Priority.BACKGROUND):
            pass

    async def offer(self, all_home: Awaitable[None]) -> tuple[int, int]:
        """The updates that may enter with the step, and how many are left then. There are gaps
        until `all_home`."""
        task = self.task
        if task is None:
            return 0, 0
        await all_home
        while await self._exchanges.compute(task.update_if_due):
            pass
        offered = await self._exchanges.compute(task.offer)
        if task.over and task is self.task:
            self.end("what it has learned is not finite")
        return offered

    def end(self, why: str) -> None:
        if self.task is not None:
            self._report(self.task, math.nan, why)
            self.task.over, self.task, self._member.relearning = True, None, 0

    async def committed(self, task: BackgroundRelearning) -> None:
        """Reports, after a commit, relearning that is finished."""
        if task is not self.task:
            return
        self._member.relearning = task.left
        if task.left == 0:
            self.task = None
            residual = await self._exchanges.compute(task.residual, Priority.BACKGROUND)
            self._report(task, residual)

    def _report(self, task: BackgroundRelearning, residual: float, why: str = "") -> None:
        event = RelearnedBeside(
            stage=self._member.stage,
            step=self._member.committed + 1,
            residual=residual,
            updates=task.updates,
            left=task.left,
            steps=task.steps,
            seconds=task.seconds,
            reason=why,
        )
        self._tell(event)

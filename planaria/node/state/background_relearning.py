"""Background relearning: the rest of a lesson, learned in the gaps of the pipeline while training.

A guessed stage may train as soon as the guess is good enough. The rest of its lesson is learned on
a copy of its weights; the weights stay as they are while a step runs. The learned change is added
with the step's commit. A ready node says how many updates it offers, and makes no more until they
are in the weights, or the next attempt begins.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from planaria.node.transaction.relearning_progress import RelearningProgress
from planaria.node.wire import stage_pb2 as pb
from planaria.recovery.relearning import ratio

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.node.state.relearn import Course, Lesson


class BackgroundRelearning:
    """The rest of one lesson. Belongs to the compute thread, except where stated otherwise."""

    def __init__(self, lesson: Lesson, course: Course, done: pb.Relearned) -> None:
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
        """How many updates may enter, and how many are left then. No more are made until the
        commit, and none at all once the learned weights aren't finite."""
        made = self.progress.offer()
        self.over = self.over or not self.lesson.is_finite()
        return (0, 0) if self.over else (made, self.progress.left_then)

    def goes_on(self) -> None:
        """Withdraw the offer: another attempt begins, or the same with another plan."""
        self.progress.goes_on()

    def enters(self, fixed: int) -> Tensor | None:
        """The change to add to the weights after the step's update: float32 [n], or None. Call
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

"""What is left of a lesson when training goes on, learned in the gaps of the pipeline.

A stage that was guessed may train as soon as the guess is good enough. The rest of its lesson is
learned on a copy of its weights, which stay as they are while a step runs. What that has changed
enters with the step's commit: when the node is ready it says how many updates those are, and makes
no more until they are in the weights, or the next attempt begins.
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
    """One lesson's. All of it belongs to the compute thread, but for what is said otherwise."""

    def __init__(self, lesson: Lesson, course: Course, told: pb.Relearned) -> None:
        self.lesson, self.course, self.told = lesson, course, told
        terms = course.terms
        self.tally = RelearningProgress(course.updates, told.updates, terms.each_step, terms.within)
        self.left = self.tally.left  # when the last commit was applied; for the event loop
        self.steps = 0  # likewise, in whose gaps it was done
        self.updates = 0  # likewise, that have entered beside them
        self.seconds = 0.0  # of computing
        self.over = False  # none is to be made any more

    def update(self) -> bool:
        """One more, if it is time for it; whether it was."""
        tally = self.tally
        if self.over or not tally.may_update:
            return False
        started, number = time.perf_counter(), tally.entered + tally.made
        given = self.lesson.start(self.course.piece(number), with_start=True)
        rate = self.course.rate(number, tally.gone)
        self.lesson.end(self.course.piece(number), given, None, rate)
        tally.made += 1
        self.seconds += time.perf_counter() - started
        return True

    def update_if_due(self) -> bool:
        return self.tally.is_due and self.update()

    def offer(self) -> tuple[int, int]:
        """How many updates may enter, and how many are left then. No more are made until that is
        decided, and none at all once what has come of them is not finite."""
        made = self.tally.offer()
        self.over = self.over or not self.lesson.is_finite()
        return (0, 0) if self.over else (made, self.tally.left_then)

    def goes_on(self) -> None:
        """Another attempt begins, or the same with another plan: it is offered anew."""
        self.tally.goes_on()

    def enters(self, fixed: int) -> Tensor | None:
        """What is to be added to the weights once the step has changed them: float32 [n]. `renew`
        is to follow."""
        self.tally.commit(fixed)
        return self.lesson.changed() if fixed else None

    def renew(self) -> None:
        self.left, self.steps = self.tally.left, self.tally.steps
        self.updates = self.tally.entered - self.told.updates
        self.lesson.renew()

    def residual(self) -> float:
        """Of the stage as it is, over the newest pairs."""
        error = norm = 0.0
        for piece in self.course.newest:
            result = self.lesson.end(piece, self.lesson.start(piece, True), None, None)
            assert result.error is not None
            error, norm = error + result.error, norm + result.norm
        return ratio(error, norm)

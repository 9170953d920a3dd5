"""Replicas of each stage, as far as what they average goes: the daemon's reduction, in one process.

The weights of replicas are the same bits, so they are here once. What each would have is its own
gradient, of its share of the window, and what it holds back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch

from planaria.node.averaging.coding import Coding, ReductionRound, feeds_back
from planaria.node.averaging.error_feedback import ErrorFeedback
from planaria.node.averaging.reduction import Reduction
from planaria.node.run_file import WireSection
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import tensors
from planaria.node.wire.frames import Frame
from planaria.node.wire.lowrank import Shape


class Stage(Protocol):
    optimizer: StageOptimizer


class Replicas:
    """A number of replicas of each stage."""

    def __init__(
        self,
        count: int,
        wire: WireSection,
        stages: Sequence[Stage],
        shapes: Iterable[Iterable[Shape]],
        feedback: bool,
    ) -> None:
        """`shapes`: of the parameters of each stage. Without `feedback`, what a codec leaves out is
        lost."""
        self.names = [f"replica-{number:03}" for number in range(count)]
        self.sent = 0  # bytes, by all of them
        self._codings = [Coding.of_run(tensors, wire, stage_shapes) for stage_shapes in shapes]
        self._stages, self._feedback = stages, feedback
        self._rows = [
            [torch.zeros_like(stage.optimizer.gradient) for stage in stages] for _ in self.names
        ]
        self._held_back = [[ErrorFeedback() for _ in stages] for _ in self.names]

    def state(self) -> tuple[int, list[list[torch.Tensor | None]]]:
        """What `put` takes."""
        rows = [
            [None if feedback.row is None else feedback.row.clone() for feedback in feedbacks]
            for feedbacks in self._held_back
        ]
        return self.sent, rows

    def put(self, state: tuple[int, list[list[torch.Tensor | None]]]) -> None:
        self.sent, rows = state
        for feedbacks, stage_rows in zip(self._held_back, rows, strict=True):
            for feedback, row in zip(feedbacks, stage_rows, strict=True):
                feedback.row = None if row is None else row.to(self._rows[0][0].device)

    def forget(self, stage: int) -> None:
        """Drops the error feedback of a stage whose nodes are lost or went back."""
        for feedbacks in self._held_back:
            feedbacks[stage].drop()

    def held_back(self, stage: int) -> float:
        """Norm of the sum of all replicas' error feedback of a stage."""
        rows = [row for feedbacks in self._held_back if (row := feedbacks[stage].row) is not None]
        return float(torch.linalg.vector_norm(torch.stack(rows).sum(dim=0))) if rows else 0.0

    @contextmanager
    def computing(self, microbatch: int) -> Iterator[None]:
        """Collects gradients for the replica that has this microbatch."""
        rows = self._rows[microbatch % len(self.names)]
        with ExitStack() as stack:
            for stage, row in zip(self._stages, rows, strict=True):
                stack.enter_context(stage.optimizer.accumulating_into(row))
            yield

    def average(self, step: int, microbatches: int) -> None:
        """Averages the replicas' gradients into those of the stages, and zeroes the replicas'."""
        ballot = Ballot(1, step)
        for number, stage in enumerate(self._stages):
            rows = [rows[number] for rows in self._rows]
            held_back = [feedbacks[number] for feedbacks in self._held_back]
            now = self._codings[number].at(step)
            self._reduce(ballot, now, rows, held_back, microbatches)
            stage.optimizer.gradient.copy_(rows[0])
            for row, feedback in zip(rows, held_back, strict=True):
                row.zero_()
                if self._feedback:
                    feedback.commit(ballot)

    def _reduce(
        self,
        ballot: Ballot,
        coding: Coding,
        rows: Sequence[torch.Tensor],
        held_back: Sequence[ErrorFeedback],
        microbatches: int,
    ) -> None:
        count = len(rows)
        reductions = {
            name: Reduction(
                ReductionRound(name, ballot, self.names, window=microbatches),
                row,
                range(number, microbatches, count),
                coding,
                feedback if feeds_back(coding.codec) else None,
            )
            for number, (name, row, feedback) in enumerate(
                zip(self.names, rows, held_back, strict=True)
            )
        }
        sent: deque[tuple[str, str, Frame]] = deque()
        for name, reduction in reductions.items():
            sent += [(name, *item) for item in reduction.start()]
            for piece in range(reduction.pieces):
                sent += [(name, *item) for item in reduction.contribute(piece)]
        while sent:
            source, target, frame = sent.popleft()
            self.sent += frame.size
            sent += [(target, *item) for item in reductions[target].absorb(source, frame)]

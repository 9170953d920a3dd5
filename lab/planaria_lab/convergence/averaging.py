"""Averaging between the replicas of each stage, by the daemon's reduction, in one process.

Replicas that average in each step have bit-equal weights, so these exist only once here. Each
replica has its own gradient, of its share of the window, and its own error feedback. Pipelines that
average after several steps have weights of their own (`Rounds`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from planaria.node.averaging.coding import Coding, ReductionRound, has_error_feedback
from planaria.node.averaging.error_feedback import ErrorFeedback
from planaria.node.averaging.reduction import Reduction
from planaria.node.run_file import WireSection
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import tensors
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.lowrank import Shape


class Stage(Protocol):
    """A stage that averages."""

    optimizer: StageOptimizer


class Replicas:
    """The gradients and the error feedback of all replicas of each stage."""

    def __init__(
        self,
        count: int,
        wire: WireSection,
        stages: Sequence[Stage],
        shapes: Iterable[Iterable[Shape]],
        feedback: bool,
    ) -> None:
        """`count`: replicas of each stage. `shapes`: of each stage's parameters. Without
        `feedback`, what a codec leaves out is lost."""
        self.names = [f"replica-{number:03}" for number in range(count)]
        self.sent = 0  # bytes, by all replicas
        self._codings = [Coding.of_run(tensors, wire, stage_shapes) for stage_shapes in shapes]
        self._stages, self._feedback = stages, feedback
        self._rows = [
            [torch.zeros_like(stage.optimizer.gradient) for stage in stages] for _ in self.names
        ]
        self._held_back = [[ErrorFeedback() for _ in stages] for _ in self.names]

    def state(self) -> tuple[int, list[list[torch.Tensor | None]]]:
        """Return a copy of the state, for `put`."""
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

    def forget(self, stage: int, lost: int | None = None) -> None:
        """Drop the error feedback of a stage in all replicas, or only in replica `lost`."""
        for feedbacks in self._held_back if lost is None else [self._held_back[lost]]:
            feedbacks[stage].drop()

    def held_back(self, stage: int) -> float:
        """Return the norm of the sum of all replicas' error feedback of a stage."""
        rows = [row for feedbacks in self._held_back if (row := feedbacks[stage].row) is not None]
        return float(torch.linalg.vector_norm(torch.stack(rows).sum(dim=0))) if rows else 0.0

    @contextmanager
    def computing(self, microbatch: int) -> Iterator[None]:
        """Collect gradients for the replica that computes this microbatch."""
        rows = self._rows[microbatch % len(self.names)]
        for stage, row in zip(self._stages, rows, strict=True):
            stage.optimizer.accumulate_into(row)
        try:
            yield
        finally:
            for stage in self._stages:
                stage.optimizer.accumulate_into(stage.optimizer.gradient)

    def put_gradient(self, replica: int, stage: int, gradient: torch.Tensor) -> None:
        """Replace the gradient that this replica has collected by `gradient`, float32 [n]."""
        self._rows[replica][stage].copy_(gradient)

    def average(self, step: int, microbatches: int, present: Sequence[int] | None = None) -> None:
        """Sum the gradients of all or of the `present` replicas into those of the stages, and set
        the replicas' gradients to zero."""
        ballot = Ballot(1, step)
        members = range(len(self.names)) if present is None else present
        names = [self.names[replica] for replica in members]
        for number, stage in enumerate(self._stages):
            rows = [self._rows[replica][number] for replica in members]
            held_back = [self._held_back[replica][number] for replica in members]
            now = self._codings[number].at(step)
            self._reduce(ballot, now, names, rows, held_back, microbatches)
            stage.optimizer.gradient.copy_(rows[0])
            for row, feedback in zip(rows, held_back, strict=True):
                row.zero_()
                if self._feedback:
                    feedback.commit(ballot)

    def _reduce(
        self,
        ballot: Ballot,
        coding: Coding,
        names: Sequence[str],
        rows: Sequence[torch.Tensor],
        held_back: Sequence[ErrorFeedback],
        microbatches: int,
    ) -> None:
        count = len(rows)
        reductions = {
            name: Reduction(
                ReductionRound(name, ballot, names, window=microbatches),
                row,
                range(number, microbatches, count),
                coding,
                feedback if has_error_feedback(coding.codec) else None,
            )
            for number, (name, row, feedback) in enumerate(zip(names, rows, held_back, strict=True))
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


class Rounds:
    """Pipelines that train apart and average after each round of steps (DiLoCo, Douillard et al.
    2023, arXiv 2311.08105, Algorithm 1).

    After a round, each stage averages its pipelines' differences from the weights at the round's
    start, by the reduction of `Replicas`. The mean is the gradient of the outer optimizer:
    Nesterov momentum, as in torch's SGD. Each pipeline keeps the moments of its inner optimizer.
    """

    def __init__(
        self, replicas: Replicas, pipelines: Sequence[Sequence[Stage]], lr: float, momentum: float
    ) -> None:
        """`lr`, `momentum`: of the outer optimizer."""
        self.present = list(range(len(pipelines)))  # pipelines that train in this round
        self.start = [stage.optimizer.weights.clone() for stage in pipelines[0]]
        self.velocity = [torch.zeros_like(weights) for weights in self.start]
        self.samples = [[0] * len(self.start) for _ in pipelines]
        """By pipeline and stage: samples of this round whose gradients only these weights have."""
        self._replicas, self._pipelines = replicas, pipelines
        self._lr, self._momentum = lr, momentum

    def state(self) -> tuple[Any, ...]:
        """Return a copy of the state, for `put`."""
        flats = [[flat.clone() for flat in flats] for flats in (self.start, self.velocity)]
        return [*self.present], *flats, [[*counts] for counts in self.samples]

    def put(self, state: tuple[Any, ...]) -> None:
        self.present, start, velocity, self.samples = state
        for flat, saved in zip([*self.start, *self.velocity], [*start, *velocity], strict=True):
            flat.copy_(saved)

    def trained(self, pipeline: int, samples: int) -> None:
        """Count the samples of a step in every stage of a pipeline."""
        self.samples[pipeline] = [count + samples for count in self.samples[pipeline]]

    def take_lost(self, pipeline: int, stage: int) -> int:
        """Drop the error feedback of a lost node, and its count of samples. Return that count: the
        samples whose gradients for this stage are lost."""
        self._replicas.forget(stage, pipeline)
        lost, self.samples[pipeline][stage] = self.samples[pipeline][stage], 0
        return lost

    @torch.no_grad()
    def meet(self, step: int, microbatches: int) -> None:
        """End the round after `step`: average, and take an outer step. A pipeline lost in this
        round returns, with the moments of the first present pipeline."""
        for pipeline in self.present:
            for number, stage in enumerate(self._pipelines[pipeline]):
                difference = (self.start[number] - stage.optimizer.weights) / len(self.present)
                self._replicas.put_gradient(pipeline, number, difference)
        self._replicas.average(step, microbatches, self.present)
        for number, stages in enumerate(zip(*self._pipelines, strict=True)):
            self._step(self.start[number], self.velocity[number], stages[0].optimizer.gradient)
            source = stages[self.present[0]].optimizer
            for pipeline, stage in enumerate(stages):
                if pipeline not in self.present:
                    stage.optimizer.load(source.state(), source.steps)
                stage.optimizer.weights.copy_(self.start[number])
        self.present = list(range(len(self._pipelines)))
        self.samples = [[0] * len(self.start) for _ in self._pipelines]

    def _step(self, weights: torch.Tensor, velocity: torch.Tensor, gradient: torch.Tensor) -> None:
        velocity.mul_(self._momentum).add_(gradient)
        weights.sub_((gradient + self._momentum * velocity) * self._lr)
        gradient.zero_()

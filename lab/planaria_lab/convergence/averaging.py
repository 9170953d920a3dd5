"""Replicas of each stage, as far as what they average goes: the daemon's reduction, in one process.

The weights of replicas that average in each step are the same bits, so they are here once. What
each would have is its own gradient, of its share of the window, and what it holds back. Pipelines
that meet after several steps have weights of their own (`Rounds`).
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

    def forget(self, stage: int, lost: int | None = None) -> None:
        """Drops the error feedback of a stage whose nodes are lost or went back, or of the lost
        one."""
        for feedbacks in self._held_back if lost is None else [self._held_back[lost]]:
            feedbacks[stage].drop()

    def held_back(self, stage: int) -> float:
        """Norm of the sum of all replicas' error feedback of a stage."""
        rows = [row for feedbacks in self._held_back if (row := feedbacks[stage].row) is not None]
        return float(torch.linalg.vector_norm(torch.stack(rows).sum(dim=0))) if rows else 0.0

    @contextmanager
    def computing(self, microbatch: int) -> Iterator[None]:
        """Collects gradients for the replica that has this microbatch."""
        rows = self._rows[microbatch % len(self.names)]
        for stage, row in zip(self._stages, rows, strict=True):
            stage.optimizer.accumulate_into(row)
        try:
            yield
        finally:
            for stage in self._stages:
                stage.optimizer.accumulate_into(stage.optimizer.gradient)

    def put_gradient(self, replica: int, stage: int, gradient: torch.Tensor) -> None:
        """Takes float32 [n] as what this replica has collected."""
        self._rows[replica][stage].copy_(gradient)

    def average(self, step: int, microbatches: int, present: Sequence[int] | None = None) -> None:
        """Sums the gradients of all or of the `present` replicas into those of the stages, and
        zeroes the replicas'."""
        ballot = Ballot(1, step)
        some = range(len(self.names)) if present is None else present
        names = [self.names[replica] for replica in some]
        for number, stage in enumerate(self._stages):
            rows = [self._rows[replica][number] for replica in some]
            held_back = [self._held_back[replica][number] for replica in some]
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
    """Pipelines that train apart and meet after each round of steps (DiLoCo, Douillard et al. 2023,
    arXiv 2311.08105, Algorithm 1).

    Where they meet, each stage averages its pipelines' differences from the weights that the round
    began with, by the reduction of `Replicas`. The outer optimizer, Nesterov's as torch's SGD has
    it, takes the mean for a gradient. Moments of the inner optimizers stay each pipeline's own.
    """

    def __init__(
        self, replicas: Replicas, pipelines: Sequence[Sequence[Stage]], lr: float, momentum: float
    ) -> None:
        """`lr`, `momentum`: of the outer optimizer."""
        self.present = list(range(len(pipelines)))  # pipelines that train in this round
        self.start = [stage.optimizer.weights.clone() for stage in pipelines[0]]
        self.velocity = [torch.zeros_like(weights) for weights in self.start]
        self.samples = [[0] * len(self.start) for _ in pipelines]
        """Of this round, by pipeline and stage: those whose gradients are in the stage's weights
        only there."""
        self._replicas, self._pipelines = replicas, pipelines
        self._lr, self._momentum = lr, momentum

    def state(self) -> tuple[Any, ...]:
        """What `put` takes."""
        flats = [[flat.clone() for flat in flats] for flats in (self.start, self.velocity)]
        return [*self.present], *flats, [[*counts] for counts in self.samples]

    def put(self, state: tuple[Any, ...]) -> None:
        self.present, start, velocity, self.samples = state
        for flat, saved in zip([*self.start, *self.velocity], [*start, *velocity], strict=True):
            flat.copy_(saved)

    def trained(self, pipeline: int, samples: int) -> None:
        """Counts the samples of a step."""
        self.samples[pipeline] = [count + samples for count in self.samples[pipeline]]

    def take_lost(self, pipeline: int, stage: int) -> int:
        """Forgets what a lost node held beside its state. Returns the number of samples of which
        this stage's gradients are lost with it."""
        self._replicas.forget(stage, pipeline)
        lost, self.samples[pipeline][stage] = self.samples[pipeline][stage], 0
        return lost

    @torch.no_grad()
    def meet(self, step: int, microbatches: int) -> None:
        """Ends the round after `step`. A pipeline that was lost in it comes back, with the moments
        of the first that is present."""
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

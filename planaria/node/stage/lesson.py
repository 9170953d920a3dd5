"""Arithmetic of a relearning stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from planaria.node.model.modules import BodyStage, copy_with
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.state.boundary import BoundaryPair, FetchedTensors
from planaria.node.state.relearn import PairSlice, PairSliceResult
from planaria.node.wire.frame_format import Frame, NonFiniteError
from planaria.node.wire.tensors import decode
from planaria.recovery.learner import Learner, Muon, error_gradient, squared_distance
from planaria.recovery.relearning import pull


class StageLesson:
    """A `Lesson` with torch: a copy of the stage learns from fetched tensors, by Muon.

    Made in the compute thread, when the estimate is in place. `lost`: the stages that relearn
    together.
    """

    def __init__(
        self,
        stage: BodyStage,
        optimizer: StageOptimizer,
        fetched: FetchedTensors,
        lost: Collection[int],
        bf16: bool,
    ) -> None:
        self._optimizer, self._fetched = optimizer, fetched
        self._device = optimizer.weights.device
        self._copy = optimizer.weights.clone()
        learning = copy_with(stage, self._copy)
        self._learner = Learner(learning, 0.0, bf16, Muon(learning, pull(lost)))

    def start(self, piece: PairSlice, with_start: bool) -> list[torch.Tensor]:
        x = self._part(self._fetched.inputs, piece)
        return [x, x] if with_start else [x]

    def pass_on(self, inputs: list[torch.Tensor], lr: float | None) -> list[torch.Tensor]:
        x, *start = self._here(inputs)
        return [self._forward(x, lr), *start]

    def pass_back(self, gradient: torch.Tensor) -> torch.Tensor:
        return self._learner.backward(gradient.to(self._device))

    def end(
        self, piece: PairSlice, inputs: list[torch.Tensor], norm: float | None, lr: float | None
    ) -> PairSliceResult:
        x, *start = self._here(inputs)
        output = self._part(self._fetched.outputs, piece)
        if start:
            norm = squared_distance(output, start[0])
        assert norm is not None, "in its first round the run's input comes along"
        result = self._forward(x, lr)
        if lr is None:
            return PairSliceResult([], norm, squared_distance(result, output))
        return PairSliceResult(
            [self._learner.backward(error_gradient(result, output, norm))], norm, None
        )

    def finish(self, undo: bool) -> None:
        if undo:
            self._optimizer.load([("weights", self._optimizer.weights)], 0)
        else:
            self._optimizer.weights.copy_(self._copy)

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self._copy).all())

    def changed(self) -> torch.Tensor:
        return self._copy.sub_(self._optimizer.weights)

    def renew(self) -> None:
        self._copy.copy_(self._optimizer.weights)

    def _forward(self, x: torch.Tensor, lr: float | None) -> torch.Tensor:
        if lr is None:
            return self._learner.measure(x)
        self._learner.lr = lr
        return self._learner.forward(x)

    def _here(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(self._device) for tensor in tensors]

    def _part(self, tensors: Mapping[BoundaryPair, torch.Tensor], piece: PairSlice) -> torch.Tensor:
        return tensors[piece.pair][piece.first : piece.end].to(self._device).float()


def boundary_tensor(frame: Frame) -> torch.Tensor:
    """A frame's boundary tensor, bf16 [B, T, crossing] on the CPU. Raises WireError for a damaged
    or non-finite frame."""
    parts = decode(frame.descriptors, frame.payload)
    if not all(torch.isfinite(part).all() for part in parts):
        raise NonFiniteError("it is not finite")
    return torch.cat([part.to(torch.bfloat16) for part in parts], dim=-1)

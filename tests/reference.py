"""A reference for losses: one process that trains as a swarm of one node a stage does.

It has a node's stages, windows, codecs and optimizer, and no network, replicas or recovery.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from planaria.node.data.corpus import TRAIN, UNSCORED, VALIDATION
from planaria.node.data.mixture import (
    Data,
    count_scored,
    inputs_and_targets,
    training_windows,
)
from planaria.node.data.windows import microbatch_ids
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.model.learning_rate import rate_of
from planaria.node.model.modules import EmbeddingStage
from planaria.node.model.shape import ModelConfig
from planaria.node.run_file import RunFile
from planaria.node.stage.initial import InitialStages
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.stage.own_code import load_checked
from planaria.node.stage.work import join_features, split_features
from planaria.node.wire.frame_format import Codec
from planaria.node.wire.tensors import decode, encode
from planaria.recovery.orders import order, window_orders


class Boundary(torch.autograd.Function):
    """An activation as the next stage receives it, and its gradient as the stage before does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: RunFile, config: ModelConfig) -> Tensor:
        ctx.run, ctx.config = run, config
        return _received(x, "activation", run.wire.activations, config)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        codec = ctx.run.wire.gradients
        return _received(gradients[0], "gradient", codec, ctx.config), None, None


def _received(x: Tensor, kind: str, codec: Codec, config: ModelConfig) -> Tensor:
    figures, *beside = split_features(x, config, kind)
    return join_features([*decode(*encode([figures], codec)), *beside], config)


class Reference:
    """All stages of a resolved run; `step` trains them for one step."""

    def __init__(self, run: RunFile, data: Data) -> None:
        self.data = data
        self.config = run.config_for(data.vocabulary)
        origin = run.model.origin
        checkpoint = None if origin is None else Checkpoint.open(Path(origin))
        own = None if self.config.own is None else load_checked(run, self.config)
        beginning = InitialStages(run, self.config, checkpoint, own)
        self.stages = [beginning.stage(stage) for stage in range(self.config.stages + 1)]
        cpu = torch.device("cpu")
        self.optimizers = [StageOptimizer.of_run(stage, cpu, run) for stage in self.stages]
        self.committed = 0
        self.change(run)

    def change(self, run: RunFile) -> None:
        """Sets the run's settings from the next step on."""
        self.run = run
        self.windows = training_windows(self.data, run.seed, self.config.context, run.batches)

    def step(self) -> float:
        """Trains the next step; returns its mean loss, nats a scored token."""
        training, number = self.run.training, self.committed + 1
        ids = self.windows.ids(number)
        scored = max(1, count_scored(self.data, self.config.context, ids))
        swapped = self.run.policy.swapped
        losses = []
        orders = window_orders(number, training.microbatches, self.config.stages, swapped)
        for microbatch, visits in enumerate(orders):
            loss = self._loss(visits, TRAIN, microbatch_ids(ids, microbatch, training.microbatch))
            (loss / scored).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        norm = math.sqrt(math.fsum(optimizer.squared_norm() for optimizer in self.optimizers))
        for optimizer in self.optimizers:
            optimizer.step(rate_of(number, self.run), min(1.0, training.clip / (norm + 1e-6)))
            optimizer.zero_gradient()
        self.committed = number
        return math.fsum(losses) / scored

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss of the run's validation microbatches, nats a scored token."""
        training, context = self.run.training, self.config.context
        wanted = range(training.validation_microbatches * training.microbatch)
        ids = self.data.validation_ids(context, wanted)
        loss = self._loss(order(0, self.config.stages, swapped=False), VALIDATION, ids)
        _, targets = inputs_and_targets(self.data, VALIDATION, context, ids)
        return loss.item() / max(1, int((targets != UNSCORED).sum()))

    def _loss(self, visits: Sequence[int], split: str, ids: NDArray[np.int64]) -> Tensor:
        """The sum of losses over all scored tokens of these samples."""
        ends, context = self.stages[0], self.config.context
        assert isinstance(ends, EmbeddingStage)
        arrays = inputs_and_targets(self.data, split, context, ids, self.config.block_causal)
        inputs, targets, *begins = map(torch.from_numpy, arrays)
        bf16 = self.run.training.precision == "bf16"
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            x = ends.embed(inputs, *begins)
            for stage in visits:
                x = self.stages[stage](Boundary.apply(x, self.run, self.config))
            return ends.loss(Boundary.apply(x, self.run, self.config), targets)


def train(run: RunFile, data: Data) -> Iterator[float]:
    """Yields the losses of an undisturbed run, step by step."""
    reference = Reference(run, data)
    for _ in range(run.steps):
        yield reference.step()

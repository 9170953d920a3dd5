"""The stage behind a node's own, as its twin computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from planaria.node.run_file import RunFile
from planaria.node.stage.model import EmbeddingStage, build_stage
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.stage.shape import ModelConfig

Forward: TypeAlias = Callable[[Tensor], Tensor]


def build(
    stage: int, config: ModelConfig, run: RunFile, device: torch.device
) -> tuple[StageOptimizer, Forward]:
    """`stage` as it is at step 0, and its forward pass: float [B, T, dim] to the same, or to
    the logits, float [B, T, vocabulary], of stage 0. For the compute thread."""
    module = build_stage(config, stage, run.seed).to(device)
    optimizer = StageOptimizer(module, device)
    compute: Forward = module.logits if isinstance(module, EmbeddingStage) else module
    if run.training.compile:
        compute = torch.compile(compute)

    @torch.no_grad()
    def forward(x: Tensor) -> Tensor:
        y = compute(x)
        if y.is_cuda:  # else what is urgent would wait behind many of these
            torch.cuda.synchronize(y.device)
        return y

    return optimizer, forward

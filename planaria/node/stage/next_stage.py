"""The stage behind a node's own, as its twin computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from planaria.node.stage.initial import Beginning
from planaria.node.stage.lora import Frozen
from planaria.node.stage.model import EmbeddingStage
from planaria.node.stage.optimizer import StageOptimizer

Forward: TypeAlias = Callable[[Tensor], Tensor]


def build(stage: int, beginning: Beginning, device: torch.device) -> tuple[StageOptimizer, Forward]:
    """`stage` as it is at step 0, and its forward pass: float [B, T, dim] to the same, or to
    the logits, float [B, T, vocabulary], of stage 0. For the compute thread. Raises
    NotHereError."""
    module, training = beginning.stage(stage).to(device), beginning.run.training
    if training.lora is not None:
        Frozen(module, bf16=training.precision == "bf16")
    optimizer = StageOptimizer.of_run(module, device, beginning.run)
    compute: Forward = module.logits if isinstance(module, EmbeddingStage) else module
    if training.compile:
        compute = torch.compile(compute)

    @torch.no_grad()
    def forward(x: Tensor) -> Tensor:
        y = compute(x)
        if y.is_cuda:  # else what is urgent would wait behind many of these
            torch.cuda.synchronize(y.device)
        return y

    return optimizer, forward

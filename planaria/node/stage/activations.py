"""Memory of a microbatch on a stage's device.

It follows from the run file and the model's shape: what autograd keeps for the daemon's blocks.
Tests compare it with torch's allocations.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from planaria.node.model.modules import parameter_shapes
from planaria.node.model.shape import ModelConfig
from planaria.node.run_file import RunFile

VALUE: Final = torch.float32.itemsize
HALF: Final = torch.bfloat16.itemsize


def saved(run: RunFile, config: ModelConfig, stage: int) -> int:
    """Bytes that a microbatch keeps from its forward to its backward pass."""
    row = VALUE * run.training.microbatch * config.context * config.crossing
    if stage == 0:  # tokens and their embedding
        return row + run.training.microbatch * (config.context + 1) * torch.int64.itemsize
    if run.training.recompute:
        return row * (len(config.layers_of(stage)) + 1)
    return len(config.layers_of(stage)) * _block(run, config) + row


def _block(run: RunFile, config: ModelConfig) -> int:
    """Bytes that autograd keeps of one block: inputs of norms and matrices, q, k, v, outputs of
    attention and the SwiGLU. Under autocast, half as wide, and a cast of each matrix besides."""
    tokens = run.training.microbatch * config.context
    keys = config.kv_heads * config.head_dim
    small = config.heads + 2
    if run.training.precision == "float32":
        return VALUE * tokens * (8 * config.dim + 2 * keys + 4 * config.hidden + small)
    whole_width = VALUE * tokens * (4 * config.dim + small)
    cast = HALF * _matrices(config) // config.cut[0]
    return whole_width + HALF * tokens * (7 * config.dim + 2 * keys + 4 * config.hidden) + cast


@cache
def _matrices(config: ModelConfig) -> int:
    """Number of values in stage 1's matrices."""
    return sum(shape.numel() for shape in parameter_shapes(config, 1) if len(shape) == 2)


def working(run: RunFile, config: ModelConfig, stage: int) -> int:
    """Temporary bytes of a backward pass: gradients of what was saved, and of a matrix; with
    recomputation a block's activations. At stage 0: the head's, and its loss.

    Under autocast a matrix's gradient exists twice, half as wide and as float32, its conversion. A
    processor without bfloat16 instructions computes it in float32, while it still keeps the cast of
    the matrix; others take less.
    """
    tokens, half = run.training.microbatch * config.context, run.training.precision == "bf16"
    values = config.dim * (config.hidden if stage else config.vocabulary)
    matrix = (VALUE + HALF if half else VALUE) * values
    if stage == 0:
        logits = VALUE * tokens * config.vocabulary
        kept, cast = (logits // 2, HALF * values) if half else (logits, 0)
        return max(3 * logits, kept + matrix) + cast + 4 * VALUE * tokens * config.dim
    again = _block(run, config) if run.training.recompute else 0
    return VALUE * tokens * (2 * config.hidden + config.dim) + matrix + again

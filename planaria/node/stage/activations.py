"""Memory of a microbatch on a stage's device.

It follows from the run file and the model's shape: what autograd keeps for the daemon's blocks.
Tests compare it with torch's allocations. `narrow`: frozen parameters are exact in bf16, so that
a run that computes in bf16 keeps them so (model/lora.py).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

from planaria.node.model.shape import PROJECTIONS, VALUE, Base, ModelConfig, named_shapes
from planaria.node.run_file import RunFile

HALF: Final = 2
"""Bytes of a bfloat16."""
TOKEN: Final = 8
"""Bytes of a token's id."""
*_, GATE, UP, DOWN = PROJECTIONS
GATES: Final = (GATE, UP)


def saved_bytes(run: RunFile, config: ModelConfig, stage: int, narrow: bool = False) -> int:
    """Bytes that a microbatch keeps from its forward to its backward pass."""
    row = VALUE * run.training.microbatch * config.context * config.crossing
    if stage == 0:  # tokens and their embedding
        return row + run.training.microbatch * (config.context + 1) * TOKEN
    layers = len(config.layers_of(stage))
    if run.training.recompute:
        return row * (layers + 1)
    return layers * _block_bytes(run, config, stage, narrow) + row


def _block_bytes(run: RunFile, config: ModelConfig, stage: int, narrow: bool) -> int:
    """Bytes that autograd keeps of a stage's block: inputs of norms and of trained matrices, q, k,
    v, outputs of attention and the SwiGLU. Of a frozen norm it keeps the input alone, not its
    result. Under autocast most is half as wide, each matrix has a cast of its input, and all
    float32 matrices are cast, too."""
    tokens, half = run.training.microbatch * config.context, run.training.precision == "bf16"
    keys, queries = config.kv_heads * config.head_dim, config.heads * config.head_dim
    lora = config.lora
    targets = PROJECTIONS if lora is None else lora.targets
    readers = [sum(name in targets for name in names) for names in (PROJECTIONS[:3], GATES)]
    inputs = sum(readers if half else map(bool, readers))
    width = 2 * queries + 2 * keys + (3 + (DOWN in targets)) * config.hidden + inputs * config.dim
    norms = VALUE * tokens * ((4 if lora is None else 2) * config.dim + config.heads + 2)
    casts, layers = 0, len(config.layers_of(stage))
    if lora is not None:
        width += len(targets) * lora.rank
        casts = config.trained_in(stage) // layers
    if lora is None or not (narrow or lora.base):
        casts += _matrix_values(config, stage) // layers
    return norms + (HALF * (tokens * width + casts) if half else VALUE * tokens * width)


@cache
def _matrix_values(config: ModelConfig, stage: int) -> int:
    """Number of values in a stage's matrices, fused ones of experts too."""
    shapes = named_shapes(config, stage).values()
    return sum(math.prod(shape) for shape in shapes if len(shape) > 1)


def working_bytes(run: RunFile, config: ModelConfig, stage: int, narrow: bool = False) -> int:
    """Temporary bytes of a backward pass: gradients of what was saved, and of a matrix; with
    recomputation a block's activations. At stage 0: the head's, and its loss.

    Under autocast a matrix's gradient exists twice, half as wide and as float32, its conversion. A
    processor without bfloat16 instructions computes it in float32, while it still keeps the cast of
    the matrix; others take less. A frozen matrix has no gradient, and a packed one is unpacked.
    """
    tokens, half = run.training.microbatch * config.context, run.training.precision == "bf16"
    values = config.dim * (config.hidden if stage else config.vocabulary)
    matrix = (VALUE + HALF if half else VALUE) * values
    if config.lora is not None:
        matrix = _unpacking_bytes(config.base_of(stage), half) * values
    if stage == 0:
        logits = VALUE * tokens * config.vocabulary
        kept, cast = (logits // 2, HALF * values) if half else (logits, 0)
        cast = 0 if narrow and config.lora is not None else cast
        return max(3 * logits, kept + matrix) + cast + 5 * VALUE * tokens * config.dim
    again = _block_bytes(run, config, stage, narrow) if run.training.recompute else 0
    hidden = 2 if config.lora is None else 3
    return VALUE * tokens * (hidden * config.hidden + config.dim) + matrix + again


def _unpacking_bytes(base: Base | None, half: bool) -> int:
    """Temporary bytes of a value of a packed matrix that is unpacked."""
    match base:
        case "int8":
            return 2 * VALUE
        case "nf4":  # by bitsandbytes
            return HALF if half else VALUE
        case "bf16":
            return 0 if half else VALUE
    return 0

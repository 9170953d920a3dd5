"""Computes the maximum memory of a node of a stage, by purpose.

It follows from the run file, the model's shape and the nodes of each stage. Activations are those
that autograd keeps for the daemon's blocks; tests compare them with what torch allocates. All else
follows from what the daemon's modules say that they keep. With adapters, only these have gradients,
moments, copies and saves. `narrow`: the frozen weights are exact in bf16 (model/lora.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from planaria.node.averaging.coding import has_error_feedback
from planaria.node.model.shape import (
    BYTES_OF_BASE,
    VALUE,
    ModelConfig,
    named_shapes,
)
from planaria.node.run_file import RunFile
from planaria.node.stage.activations import saved_bytes, working_bytes
from planaria.node.state.copies import layout_of, snapshot_section
from planaria.node.state.twin import next_stage
from planaria.node.transaction.in_flight_window import most_out
from planaria.node.wire.frame_format import crossing_bytes
from planaria.recovery.policy import holder_count
from planaria.recovery.snapshot_pace import MOST
from planaria_lab.simulator.swarm import (
    base_bytes,
    held_at,
    kept_bytes,
    parameters,
    snapshot_bytes,
)

TAKEN = torch.int64.itemsize
"""Bytes of a row's mark in a snapshot or copy: the number of its step."""
FOLLOWED = 2
"""Steps whose gradients are kept for a newcomer; one of them is on its way."""
SOURCES = 2
"""Number of stages from whose weights a guess is made."""


@dataclass(frozen=True)
class Bytes:
    """Bytes on the device, and in the host's memory. A node that computes on a CPU has both in the
    host's memory."""

    device: float = 0.0
    host: float = 0.0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host)

    @property
    def both(self) -> float:
        return self.device + self.host


def needed(
    run: RunFile,
    config: ModelConfig,
    stage: int,
    replicas: Sequence[int],
    saves: bool = False,
    narrow: bool = False,
) -> dict[str, Bytes]:
    """Purpose -> bytes that a node of `stage` needs, without the memory of libraries.

    `replicas`: numbers of nodes of stages 0, 1, .., L. The nodes of a stage count as equally fast:
    a faster one would get more microbatches, and keep more frames and boundary tensors. `saves`:
    the node is started with --save-dir. Not included are the bytes of `at_a_loss`, and frames that
    wait for a link (at most 16 MiB a link).
    """
    gradient = VALUE * parameters(config, stage)
    under_way_here = under_way(run, config, stage, replicas)
    parts = {
        "model": Bytes(gradient + config.state_bytes(stage)),
        "activations": Bytes(under_way_here * saved_bytes(run, config, stage, narrow)),
        "working space": Bytes(working_bytes(run, config, stage, narrow)),
    }
    if config.lora is not None:
        half = narrow and run.training.precision == "bf16"
        parts["base"] = Bytes(_base(config, stage, half))
        loading = _loading(config, stage) - whole(parts).device
        parts["loading"] = Bytes(max(0.0, loading))
    if replicas[stage] > 1:
        parts["averaging"] = Bytes(host=2 * gradient)
        if has_error_feedback(run.wire.averaging):  # the old error feedback, and the new
            parts["held back"] = Bytes(2 * gradient)
        if run.recovery.masking != "abort":
            parts["masking"] = Bytes(gradient)
    if run.recovery.masking != "abort":
        frames = _frames_kept(run, config, stage, replicas)
        parts["masking"] = parts.get("masking", Bytes()) + Bytes(host=frames)
    if run.recovery.relearn.passes and run.policy.relearns:
        parts["boundary"] = Bytes(host=_boundary(run, config, _share(run, replicas[stage])))
    parts |= _policy(run, config, stage)
    if saves:
        parts["saves"] = Bytes(host=_writes(run, config, stage))
    return {name: size for name, size in parts.items() if size.both}


def at_a_loss(run: RunFile, config: ModelConfig, stage: int) -> dict[str, Bytes]:
    """Occasion -> bytes that a node of `stage` needs temporarily, in addition to `needed`.

    One occasion is a newcomer that copies the node's state (node/state/feeding.py); frozen weights
    count as they are sent. The other is relearning, after the node has guessed its stage.
    """
    gradient = VALUE * parameters(config, stage)
    copied = config.state_bytes(stage) + FOLLOWED * gradient
    parts = {"a newcomer": Bytes(host=base_bytes(config, stage) + copied)}
    if stage and run.recovery.relearn.passes and run.policy.guesses:
        weights = 4 if stage == 1 else 3  # a copy, its gradient, its momentum; the guess of stage 1
        learned = _boundary(run, config, run.training.microbatches)
        parts["relearning"] = Bytes(weights * gradient, SOURCES * gradient + learned)
    return parts


@cache
def _base(config: ModelConfig, stage: int, half: bool) -> int:
    """Bytes of the frozen weights. `half`: matrices that aren't packed are in bf16."""
    matrices, packed, vectors = _frozen(config, stage)
    packed_bytes = int(BYTES_OF_BASE[config.base_of(stage)] * packed)
    return packed_bytes + VALUE * vectors + (2 if half else VALUE) * matrices


@cache
def _loading(config: ModelConfig, stage: int) -> int:
    """Bytes of a stage while it is read: all in float32, except for packed matrices. The largest
    matrix takes two more bytes for each value, when it is converted to bf16 or hashed."""
    matrices, packed, vectors = _frozen(config, stage)
    shapes = named_shapes(config, stage).values()
    largest = max(math.prod(shape) for shape in shapes if len(shape) > 1)
    packed_bytes = int(BYTES_OF_BASE[config.base_of(stage)] * packed)
    return packed_bytes + VALUE * (matrices + vectors) + 2 * largest


def _frozen(config: ModelConfig, stage: int) -> tuple[int, int, int]:
    """Numbers of frozen values: in matrices that aren't packed, in packed ones, and in vectors."""
    shapes = named_shapes(config, stage).values()
    packed = config.packed_in(stage)
    matrices = sum(math.prod(shape) for shape in shapes if len(shape) > 1) - packed
    return matrices, packed, config.values_in(stage) - matrices - packed


def whole(parts: Mapping[str, Bytes]) -> Bytes:
    """The sum of all parts."""
    return sum(parts.values(), Bytes())


# --- a step


def _share(run: RunFile, replicas: int) -> int:
    """Maximum number of microbatches of a step that one of equal replicas computes."""
    return -(-run.training.microbatches // replicas)


def under_way(run: RunFile, config: ModelConfig, stage: int, replicas: Sequence[int]) -> int:
    """Maximum number of microbatches whose activations a node holds at a time. All microbatches in
    flight may wait for their backward pass at one stage."""
    out = replicas[0] * most_out(run.training.in_flight, config.stages)
    return min(_share(run, replicas[stage]), -(-out // replicas[stage]))


# --- kept for a loss


def _frames_kept(run: RunFile, config: ModelConfig, stage: int, replicas: Sequence[int]) -> int:
    """Bytes of the frames of a step that a node keeps to send them again, if their receiver has
    replicas or a twin (node/transaction/attempt.py). These are activations to the next stage, and
    gradients to the stage before; with swapped orders to any stage."""
    ring = config.stages + 1
    swapped = run.policy.swapped and max(replicas) > 1
    total = 0
    for direction, size in zip((1, -1), _crossing(run, config), strict=True):
        other = (stage + direction) % ring
        has_twin = run.policy.twins and other > 0
        if swapped or has_twin or replicas[other] > 1:
            total += size
    return total * _share(run, replicas[stage])


def _crossing(run: RunFile, config: ModelConfig) -> tuple[int, int]:
    """Bytes of an activation and of a gradient of a microbatch, as sent between stages."""
    return crossing_bytes(config, run.training.microbatch * config.context, run.wire)


def _boundary(run: RunFile, config: ModelConfig, microbatches: int) -> int:
    """Bytes of the tensors that crossed both boundaries of a stage. Those of the last steps count
    as kept for relearning, those of the step under way as sent."""
    tokens = run.training.microbatch * config.context
    crossed, _ = _crossing(run, config)
    kept_size = kept_bytes(config, tokens, run.wire)
    return 2 * microbatches * (run.recovery.relearn.steps * kept_size + crossed)


def _policy(run: RunFile, config: ModelConfig, stage: int) -> dict[str, Bytes]:
    """Purpose -> bytes that the policy needs at a node: checkpoints, a twin, or snapshots that it
    sends and holds (node/state/)."""
    policy, stages = run.policy, config.stages
    if policy.checkpoints:
        return {"checkpoint": Bytes(host=_writes(run, config, stage))}
    if policy.twins:
        other_stage = next_stage(stage, stages)
        gradient = VALUE * parameters(config, other_stage)
        twin = gradient + config.state_bytes(other_stage) + base_bytes(config, other_stage)
        return {"redundant": Bytes(twin, gradient)}
    first = run.recovery.snapshot.first
    size = _sent(run, config, stage) if policy.sends(stage, first) else Bytes()
    for other_stage in held_at(stage, stages):
        if policy.sends(other_stage, first):
            size += _held(run, config, other_stage)
    return {"snapshot": size}


def _sent(run: RunFile, config: ModelConfig, stage: int) -> Bytes:
    """Bytes that the sender of a stage's snapshot needs, while it sends an update."""
    if not parameters(config, stage):
        return Bytes()
    holders = holder_count(stage, config.stages)
    snapshot, weights = snapshot_section(run, config), VALUE * parameters(config, stage)
    largest = max(snapshot.fraction, MOST)  # share of the first updates
    restored = largest * weights * (1 if snapshot.codec == "none" else 2)
    update = largest * snapshot_bytes(run, config, stage)
    kept = holders * (weights + TAKEN * _rows(config, stage))
    return Bytes(kept + restored, update)


def _held(run: RunFile, config: ModelConfig, stage: int) -> Bytes:
    """Bytes that the holder of a stage's snapshot needs, while an update arrives."""
    if not parameters(config, stage):
        return Bytes()
    marks = TAKEN * _rows(config, stage)
    snapshot = snapshot_section(run, config)
    whole = config.state_bytes(stage) if snapshot.moments else VALUE * parameters(config, stage)
    largest = max(snapshot.fraction, MOST)  # share of the first updates
    values = 0 if snapshot.codec == "none" else largest * whole
    arriving = largest * snapshot_bytes(run, config, stage)
    return Bytes(host=whole + marks + arriving + values)


@cache
def _rows(config: ModelConfig, stage: int) -> int:
    """Number of blocks of a stage's snapshot."""
    return layout_of(config, stage).blocks


def _writes(run: RunFile, config: ModelConfig, stage: int) -> int:
    """Bytes of the saves or checkpoints that are being written."""
    return run.saves.in_flight * config.state_bytes(stage)

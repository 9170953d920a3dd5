"""States of small models, and saves of them in one folder for each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from planaria.node.model.shape import ModelConfig
from planaria.node.state.save_file import Contents, SaveFile
from planaria.node.state.saves import Saves, find_saves
from planaria.node.state.stage_state import TENSORS, StageState, StateId
from planaria.node.wire import stage_pb2 as pb


def model(layers: int, stages: int, **changes: Any) -> ModelConfig:
    figures: dict[str, Any] = {
        "vocabulary": 11,
        "dim": 4,
        "heads": 2,
        "kv_heads": 1,
        "context": 4,
        "hidden": 6,
        "layers": layers,
        "stages": stages,
        **changes,
    }
    return ModelConfig(**figures, rope_theta=1e4, norm_eps=1e-5, learning_rate=1e-3)


def flat(values: int) -> Contents:
    """Return the contents of a save of a stage with one parameter, a vector of `values`."""
    return Contents({"flat": [values]}, {})


def opened(folder: Path, run: str, config: ModelConfig, stage: int) -> Saves:
    return Saves(folder, run, stage, 9, Contents.of(config, stage))


def state(config: ModelConfig, stage: int, step: int = 8, **changes: Any) -> StageState:
    """Return a stage's state, whose tensors are drawn with a seed from step and stage."""
    size = config.trained_in(stage)
    drawn = torch.Generator().manual_seed(100 * step + stage)
    scales = [1.0] * (config.stages + 1)
    last = pb.Commit(
        step=step, ballot=pb.Ballot(view=2, attempt=step), clip_scale=scales, lr_scale=scales
    )
    names = TENSORS[: config.tensors_in(stage)]
    made = StageState(
        id=StateId.after(last, stage, 1, step),
        tensors={name: torch.rand(size, generator=drawn) for name in names},
        omega=1.0 + stage,
        boosted_at=0,
        last=last,
        optimizer_step=step,
    )
    return replace(made, **changes)


def saved(
    folder: Path, config: ModelConfig, steps: Sequence[int] = (8,), run: str = "old", **changes: Any
) -> list[SaveFile]:
    """Save each stage at each of `steps`, in the folder of a node of its own."""
    for stage in range(config.stages + 1):
        for step in steps:
            node = folder / f"{stage}.0"
            opened(node, run, config, stage).write(state(config, stage, step, **changes))
    return find_saves(folder)

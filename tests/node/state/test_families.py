"""Recovery of stages with tensors that LLaMA 2 lacks: biases, norms of q and k, tied heads."""

from __future__ import annotations

import pytest
import torch

from planaria.node.model.modules import Stage, build_stage
from planaria.node.model.shape import ModelConfig
from planaria.node.run_file import loads
from planaria.node.stage.initial import InitialStages
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.state.copies import layout_of
from planaria.recovery import checkfree
from planaria.recovery.snapshot import HeldSnapshot, SentSnapshot, decode
from tests.node.stage.shapes import LLAMA3, QWEN2, QWEN3

RUN = loads('[training]\noptimizer = "adamw"')
CPU = torch.device("cpu")
NEW = pytest.mark.parametrize("config", [LLAMA3, QWEN2, QWEN3], ids=["llama3", "qwen2", "qwen3"])


def trained(config: ModelConfig, stage: int) -> tuple[Stage, StageOptimizer]:
    """Return a stage and its optimizer after one update, which changes every value."""
    module = build_stage(config, stage, seed=0)
    optimizer = StageOptimizer.of_run(module, CPU, RUN)
    generator = torch.Generator().manual_seed(stage)
    optimizer.gradient.normal_(generator=generator)
    optimizer.step(0.1)
    return module, optimizer


@NEW
def test_checkfree_averages_each_tensor_with_its_like(config: ModelConfig) -> None:
    (before, first), (after, second) = (trained(config, stage) for stage in (1, 3))
    sources = [
        checkfree.GuessSource(1, first.weights, 3.0),
        checkfree.GuessSource(3, second.weights, 1.0),
    ]
    weights, _ = checkfree.guess(2, "checkfree", sources)
    module, optimizer = trained(config, 2)
    optimizer.load([("weights", weights)], 0)
    like = dict(before.named_parameters()), dict(after.named_parameters())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter, 0.75 * like[0][name] + 0.25 * like[1][name])


@NEW
@pytest.mark.parametrize("stage", [0, 2])
def test_a_running_snapshot_has_all_of_it(config: ModelConfig, stage: int) -> None:
    _, optimizer = trained(config, stage)
    layout = layout_of(config, stage)
    assert layout.values == len(optimizer.weights) == config.parameters[bool(stage)]
    flats = [tensor for _, tensor in optimizer.state()]
    sent, held = SentSnapshot(layout, 0.25, "none", True), HeldSnapshot(layout, 3)
    for step in range(1, 5):
        update = sent.take(step, flats)
        args = update.payload, update.blocks, update.tensors, update.codec
        held.overlay(step, *decode(layout, *args))
    assert all(map(torch.equal, held.tensors, flats))


@NEW
@pytest.mark.parametrize("stage", [0, 2])
def test_a_twin_is_updated_as_the_stage_is(config: ModelConfig, stage: int) -> None:
    _, optimizer = trained(config, stage)
    twin = StageOptimizer.of_run(InitialStages(RUN, config).stage(stage), CPU, RUN)
    twin.gradient.copy_(optimizer.gradient)
    twin.step(0.1)
    assert twin.digest() == optimizer.digest()

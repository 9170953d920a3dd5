"""Adapters in a stage."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from planaria.node.model.lora import Frozen, add_adapters, initial_adapters
from planaria.node.model.modules import BodyStage, build_stage, copy_with
from planaria.node.model.shape import (
    ADAM_BYTES,
    VALUE,
    Lora,
    ModelConfig,
    matrix_names,
    trained_shapes,
)
from planaria.node.stage.optimizer import StageOptimizer
from tests.node.stage.shapes import FAMILIES, GROUPED

CPU = torch.device("cpu")
LORA = Lora(rank=3, alpha=6.0, targets=("q_proj", "o_proj", "down_proj"))
ADAPTED = replace(GROUPED, lora=LORA)


def stage_of(config: ModelConfig, stage: int = 2) -> BodyStage:
    module = add_adapters(
        build_stage(config, stage, 5), config, stage, initial_adapters(config, stage, 5)
    )
    assert isinstance(module, BodyStage)
    return module


def some_input(config: ModelConfig) -> torch.Tensor:
    return torch.randn(2, 9, config.dim, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_a_stage_with_new_adapters_computes_what_it_did(config) -> None:
    config = replace(config, lora=replace_targets(matrix_names(config)))
    x = some_input(config)
    assert torch.equal(stage_of(config)(x), build_stage(config, 2, 5)(x))


def replace_targets(targets: list[str]) -> Lora:
    return LORA._replace(targets=tuple(targets))


def test_only_adapters_are_trained_and_lie_as_they_are_said_to() -> None:
    module = stage_of(ADAPTED)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = StageOptimizer(module, CPU)
    shapes = trained_shapes(ADAPTED, 2)
    assert list(shapes)[:2] == [
        "model.layers.2.self_attn.q_proj.lora_A.weight",
        "model.layers.2.self_attn.q_proj.lora_B.weight",
    ]
    assert [tuple(p.shape) for p in module.parameters() if p.requires_grad] == [*shapes.values()]
    assert len(optimizer.weights) == ADAPTED.trained[1] == 2 * 3 * (48 + 48 + 48 + 48 + 80 + 48)
    module(some_input(ADAPTED)).square().sum().backward()
    optimizer.step(1e-2)
    moved = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if name.endswith("lora_B")}  # A only if B isn't 0


def test_an_adapter_adds_a_matrix_of_low_rank() -> None:
    module = stage_of(ADAPTED)
    weights = torch.randn(ADAPTED.trained[1], generator=torch.Generator().manual_seed(2))
    StageOptimizer(module, CPU).weights.copy_(weights)
    plain = build_stage(GROUPED, 2, 5)
    at = 0
    parts = {}
    for name, shape in trained_shapes(ADAPTED, 2).items():
        parts[name] = weights[at : at + shape[0] * shape[1]].view(shape)
        at += shape[0] * shape[1]
    for name, a in parts.items():
        if name.endswith("lora_A.weight"):
            b = parts[name.replace("lora_A", "lora_B")]
            local = name.removeprefix("model.").removesuffix(".lora_A.weight")
            _, layer, rest = local.split(".", 2)
            owner = plain.get_submodule(f"layers.{int(layer) - 2}.{rest}")
            owner.weight.data += 6.0 / 3 * b @ a
    x = some_input(ADAPTED)
    torch.testing.assert_close(module(x), plain(x), rtol=1e-4, atol=1e-4)


def test_a_stage_is_looked_at_with_other_adapters_and_nothing_is_copied() -> None:
    module = stage_of(ADAPTED)
    base = Frozen(module, bf16=False)
    assert base.size == ADAPTED.parameters[1]
    weights = torch.randn(ADAPTED.trained[1], generator=torch.Generator().manual_seed(2))
    other = copy_with(module, weights)
    own = {p.data_ptr() for p in module.parameters() if not p.requires_grad}
    assert own == {p.data_ptr() for p in other.parameters() if not p.requires_grad}
    StageOptimizer(module, CPU).weights.copy_(weights)
    x = some_input(ADAPTED)
    assert torch.equal(module(x), other(x))


def rounded(module: nn.Module) -> nn.Module:
    """Round all parameters to bf16, as in a checkpoint in bf16."""
    for parameter in module.parameters():
        parameter.data = parameter.bfloat16().float()
    return module


def passed(module: nn.Module, config: ModelConfig, bf16: bool) -> list[torch.Tensor]:
    """Return a stage's output, and the gradients of its input and its adapters."""
    if isinstance(module, BodyStage):
        x = some_input(config).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            y = module(x)
        y.square().sum().backward()
        return [y, x.grad, *(p.grad for p in module.parameters() if p.requires_grad)]
    tokens = torch.arange(18).view(2, 9)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        x = module.embed(tokens)
        loss = module.loss(x.requires_grad_(), tokens)
    loss.backward()
    return [x, loss, x.grad]


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_a_base_that_is_bf16_anyway_lies_so_and_nothing_changes(config, stage) -> None:
    """Results are the same under autocast, as the stage trains, and without, as it validates."""
    config = replace(config, lora=replace_targets(matrix_names(config)))
    initial = initial_adapters(config, stage, 5)
    noise = torch.rand(initial.shape, generator=torch.Generator().manual_seed(2))
    made = []
    for small in (False, True):
        module = rounded(build_stage(config, stage, 5))
        base = Frozen(add_adapters(module, config, stage, initial + 0.1 * noise), bf16=small)
        kinds = {p.dtype for p in module.parameters() if p.dim() > 1 and not p.requires_grad}
        assert kinds == {torch.bfloat16 if small else torch.float32}
        made.append(
            [
                base.words().between(0, base.size),
                *passed(module, config, True),
                *passed(module, config, False),
            ]
        )
    for usual, other in zip(*made, strict=True):
        assert usual.dtype == other.dtype
        assert torch.equal(usual, other)


def test_a_base_that_bf16_would_change_stays_as_it_is() -> None:
    module = stage_of(ADAPTED)
    exact = torch.cat([p.detach().flatten() for p in build_stage(GROUPED, 2, 5).parameters()])
    base = Frozen(module, bf16=True)
    assert torch.equal(base.words().between(0, base.size), exact)
    base.put(exact.bfloat16().float())
    assert module.layers[0].self_attn.q_proj.base.weight.dtype == torch.bfloat16
    frozen = [p for p in module.parameters() if not p.requires_grad]
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in frozen), "no more is kept"
    base.put(exact)  # a peer may send other values
    assert torch.equal(base.words().between(0, base.size), exact)
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_initial_adapters_follow_from_seed_and_stage() -> None:
    initial = initial_adapters(ADAPTED, 2, 5)
    assert torch.equal(initial, initial_adapters(ADAPTED, 2, 5))
    assert not torch.equal(initial, initial_adapters(ADAPTED, 2, 6))
    assert not torch.equal(initial, initial_adapters(ADAPTED, 1, 5))
    a = initial[: 3 * 48]
    assert 0.9 < a.abs().max() * 48**0.5 <= 1
    assert initial_adapters(ADAPTED, 0, 5).numel() == 0


def test_memory_is_that_of_weights_and_of_what_trains_adapters() -> None:
    ends, body = ADAPTED.parameters
    assert ADAPTED.bytes_of(0) == VALUE * ends
    assert ADAPTED.bytes_of(1) == VALUE * body + ADAM_BYTES * ADAPTED.trained[1]
    assert list(map(GROUPED.bytes_of, (0, 1))) == [ADAM_BYTES * ends, ADAM_BYTES * body]

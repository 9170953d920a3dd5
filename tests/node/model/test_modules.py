from __future__ import annotations

import platform
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from planaria.node.model import modules, shape
from planaria.node.model.modules import BodyStage, EmbeddingStage, LlamaBody, LlamaEnds
from planaria.node.model.shape import ModelConfig
from planaria.node.run_file import ModelSection
from planaria.node.stage.optimizer import StageOptimizer
from tests.harness.processors import printed
from tests.node.stage.shapes import FAMILIES, GROUPED, QWEN2, QWEN3


def build(config: ModelConfig, seed: int = 0) -> tuple[EmbeddingStage, list[BodyStage]]:
    ends = modules.build_stage(config, 0, seed)
    assert isinstance(ends, EmbeddingStage)
    bodies = []
    for stage in range(1, config.stages + 1):
        body = modules.build_stage(config, stage, seed)
        assert isinstance(body, BodyStage)
        bodies.append(body)
    return ends, bodies


def through(bodies: list[BodyStage], x: torch.Tensor) -> torch.Tensor:
    for body in bodies:
        x = body(x)
    return x


def hidden(ends: EmbeddingStage, bodies: list[BodyStage], tokens: torch.Tensor) -> torch.Tensor:
    return through(bodies, ends.embed(tokens))


def test_a_document_is_computed_as_if_it_were_alone() -> None:
    """A document's place in its sample doesn't matter. Gradients are the same, too."""
    apart = replace(QWEN3, attn_mask_type="block_causal")
    tokens, lengths = some_tokens(apart, 24)[:1], [5, 1, 11, 7]
    begins = torch.zeros(1, 24, dtype=torch.bool)
    begins[0, [5, 6, 17]] = True
    ends, bodies = build(apart)
    loss = ends.loss(through(bodies, ends.embed(tokens, begins)), tokens)
    loss.backward()
    other_ends, others = build(QWEN3)
    parts = tokens.split(lengths, dim=1)
    losses = [other_ends.loss(hidden(other_ends, others, part), part) for part in parts]
    wanted = sum(losses)
    assert isinstance(wanted, torch.Tensor)
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    for module, other in zip([ends, *bodies], [other_ends, *others], strict=True):
        for mine, alone in zip(module.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, alone.grad, rtol=1e-4, atol=1e-6)
    as_one = ends.logits(through(bodies, ends.embed(tokens)))
    torch.testing.assert_close(as_one, other_ends.logits(hidden(other_ends, others, tokens)))


FORMS = FAMILIES | {"subspace": replace(GROUPED, subspace=8)}


@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("stage", [0, 1])
def test_an_empty_stage_is_one_like_all_others_but_for_its_weights(config, stage) -> None:
    pair = [modules.build_stage(config, stage, 3), modules.empty_stage(config, stage)]
    built, empty = (StageOptimizer(module, torch.device("cpu")) for module in pair)
    assert not empty.weights.any()
    empty.load(built.state(), 0)
    assert empty.digest() == built.digest()
    tokens = some_tokens(config, 8)
    for module in pair:
        if isinstance(module, EmbeddingStage):
            module.loss(module.embed(tokens), tokens).backward()
        else:
            module(torch.ones(2, 8, config.crossing)).square().sum().backward()
    assert built.gradient.any()
    assert torch.equal(empty.gradient, built.gradient)


def some_tokens(config: ModelConfig, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(config.vocabulary, (2, length), generator=generator)


def parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        ends, body = LlamaEnds(config), LlamaBody(config, 1)
    return sum(p.numel() for p in ends.parameters()) + config.stages * sum(
        p.numel() for p in body.parameters()
    )


def test_a_token_sees_only_those_before_it() -> None:
    ends, bodies = build(GROUPED)
    tokens = some_tokens(GROUPED, 12)
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % GROUPED.vocabulary
    with torch.no_grad():
        a, b = hidden(ends, bodies, tokens), hidden(ends, bodies, changed)
    torch.testing.assert_close(a[:, :6], b[:, :6])
    assert not torch.allclose(a[:, 6:], b[:, 6:])


def test_biases_start_at_zero_and_norms_at_one() -> None:
    for config, name in ((QWEN2, "q_proj.bias"), (QWEN3, "q_norm.weight")):
        state = modules.build_stage(config, 1, seed=0).state_dict()
        values = state[f"layers.1.self_attn.{name}"]
        assert torch.equal(values, torch.full_like(values, float(name == "q_norm.weight")))


def test_a_tied_head_is_one_tensor_with_the_gradient_of_both_ends() -> None:
    untied, tied = (replace(GROUPED, tied=tied) for tied in (False, True))
    tokens = some_tokens(GROUPED, 12)
    (untied_ends, bodies), (tied_ends, _) = build(untied), build(tied)
    assert untied_ends.lm_head is not None
    untied_ends.lm_head.weight.data.copy_(untied_ends.embed_tokens.weight.data)
    assert list(shape.named_shapes(tied, 0)) == ["model.embed_tokens.weight", "model.norm.weight"]
    for ends in (tied_ends, untied_ends):
        ends.loss(hidden(ends, bodies, tokens), tokens).backward()
    wanted, head = untied_ends.embed_tokens.weight.grad, untied_ends.lm_head.weight.grad
    assert wanted is not None and head is not None
    torch.testing.assert_close(tied_ends.embed_tokens.weight.grad, wanted + head)


def test_the_head_computes_scored_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, bodies = build(GROUPED)
    tokens = some_tokens(GROUPED, 8)
    targets = torch.where(torch.arange(8) % 3 == 1, tokens, -100)
    x = hidden(ends, bodies, tokens).detach().requires_grad_()
    wanted = F.cross_entropy(ends.logits(x).mT, targets, reduction="sum")
    (gradient,) = torch.autograd.grad(wanted, x)
    shapes, whole = [], ends.logits

    def logits(x: torch.Tensor) -> torch.Tensor:
        shapes.append(x.shape)
        return whole(x)

    monkeypatch.setattr(ends, "logits", logits)
    loss = ends.loss(x, targets)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(torch.autograd.grad(loss, x), (gradient,))
    assert shapes == [(1, len(tokens) * 3, GROUPED.dim)]


def test_losses_of_microbatches_add_up() -> None:
    ends, bodies = build(GROUPED)
    tokens = some_tokens(GROUPED, 24)
    x = hidden(ends, bodies, tokens)
    parts = [ends.loss(x[i : i + 1], tokens[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(parts[0] + parts[1], ends.loss(x, tokens))


def test_recomputing_gives_the_same_gradients() -> None:
    _, bodies = build(GROUPED)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 24, GROUPED.dim, generator=generator)
    results = []
    for recompute in (False, True):
        bodies[0].recompute = recompute
        bodies[0].zero_grad()
        given = x.clone().requires_grad_()
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: (saved.append(t.numel()), t)[1], lambda t: t
        ):
            y = bodies[0](given)
        y.square().sum().backward()
        assert given.grad is not None
        gradients = [p.grad for p in bodies[0].parameters()]
        results.append((sum(saved), y.detach(), given.grad, *gradients))
    (kept, *plain), (kept_less, *again) = results
    assert kept_less < kept / 4
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


def test_too_many_tokens_are_refused() -> None:
    _, bodies = build(GROUPED)
    with pytest.raises(ValueError, match="25 tokens don't fit in the context of 24"):
        bodies[0](torch.zeros(1, 25, GROUPED.dim))


def test_initial_weights_follow_from_seed_stage_and_layer() -> None:
    before = torch.random.get_rng_state()
    first = modules.build_stage(GROUPED, 2, seed=7).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    second = modules.build_stage(GROUPED, 2, seed=7).state_dict()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])

    q = "layers.0.self_attn.q_proj.weight"
    others = [
        modules.build_stage(GROUPED, 2, seed=8).state_dict()[q],
        modules.build_stage(GROUPED, 1, seed=7).state_dict()[q],
        first["layers.1.self_attn.q_proj.weight"],
    ]
    assert not any(torch.equal(first[q], other) for other in others)

    deeper = replace(GROUPED, layers=12, stages=6)
    assert torch.equal(modules.build_stage(deeper, 2, seed=7).state_dict()[q], first[q])


def test_initial_weights_have_the_stated_spread() -> None:
    config = shape.model_config(ModelSection(preset="mini"), 2048)
    state = modules.build_stage(config, 1, seed=0).state_dict()
    assert state["layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    residual = 0.02 / 16**0.5
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert state[f"layers.1.{name}.weight"].std().item() == pytest.approx(residual, rel=0.02)
    assert torch.equal(state["layers.1.input_layernorm.weight"], torch.ones(128))
    ends = modules.build_stage(config, 0, seed=0).state_dict()
    assert ends["lm_head.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert not torch.equal(ends["lm_head.weight"], ends["embed_tokens.weight"])


def test_other_instruction_sets_make_the_same_weights_and_updates() -> None:
    script = (
        "import torch, planaria.node.model.modules as m, planaria.node.stage.optimizer as o\n"
        "from planaria.node.run_file import ModelSection\n"
        "from planaria.node.model.shape import model_config\n"
        "torch.set_num_threads(1)\n"
        "s = m.build_stage(model_config(ModelSection(preset='mini'), 99), 1, 5)\n"
        "a = o.StageOptimizer(s, torch.device('cpu'))\n"
        "for i in range(3):\n"
        "    a.gradient.copy_(torch.arange(len(a.gradient)).sub(1000).mul(0.001 + i))\n"
        "    a.step(1e-3, clip_scale=0.3)\n"
        "print(a.digest().hex(), a.squared_norm(), torch.backends.cpu.get_cpu_capability())\n"
    )

    own, plain = printed(script), printed(script, ATEN_CPU_CAPABILITY="default")
    if platform.machine() == "x86_64":
        assert plain[2:] == ["DEFAULT"]
    assert own[:2] == plain[:2]


@pytest.mark.parametrize(
    ("preset", "vocabulary", "millions"),
    [
        ("tiny", 2048, 0.525),
        ("mini", 2048, 2.62),
        ("midi", 2048, 7.87),
        ("small", 32_000, 83),
        ("medium", 32_000, 468),
        ("large", 32_000, 1742),
    ],
)
def test_presets_have_their_parameters(preset: str, vocabulary: int, millions: float) -> None:
    config = shape.model_config(ModelSection(preset=preset), vocabulary)
    assert parameters(config) == pytest.approx(millions * 1e6, rel=0.005)


@pytest.mark.parametrize(
    ("preset", "dim", "heads", "layers", "context"),
    [
        ("small", 512, 8, (3,) * 4, 512),
        ("medium", 1024, 16, (4,) * 6, 1024),
        ("large", 2048, 16, (4,) * 6, 4096),
    ],
)
def test_presets_are_table_4_of_the_paper_and_modules_those_of_its_code(
    preset: str, dim: int, heads: int, layers: tuple[int, ...], context: int
) -> None:
    """A block of the published code has four square matrices, three of four times the width, and
    two norms. Its first stage has two tables of 32,000 tokens, and a norm."""
    config = shape.model_config(ModelSection(preset=preset), 32_000)
    assert (config.dim, config.heads, config.kv_heads) == (dim, heads, heads)
    assert (config.cut, config.context) == (layers, context)
    block = 4 * dim**2 + 3 * dim * 4 * dim + 2 * dim
    assert parameters(config) == 2 * 32_000 * dim + dim + sum(layers) * block


def test_stages_divide_the_layers_evenly_or_as_it_is_said() -> None:
    def of(stages: int | tuple[int, ...]) -> shape.ModelConfig:
        return shape.model_config(ModelSection(layers=30, stages=stages), 97)

    assert (of(4).cut, of((8, 8, 8, 6)).cut) == ((7, 7, 8, 8), (8, 8, 8, 6))
    assert [*map(of(4).layers_of, range(4))] == [range(0), range(7), range(7, 14), range(14, 22)]
    first, layer = of(30).parameters
    for stages in (4, (8, 8, 8, 6), (1, 29)):
        config = of(stages)
        assert config.parameters == (first, max(config.cut) * layer)
        assert [config.trained_in(stage + 1) for stage in range(config.stages)] == [
            size * layer for size in config.cut
        ]
        assert sum(map(config.values_in, range(config.stages + 1))) == first + 30 * layer
        body = modules.build_stage(config, 1, seed=0)
        assert isinstance(body, BodyStage)
        assert len(body.layers) == config.cut[0]


def test_overrides_carry_along_what_follows_from_them() -> None:
    config = shape.model_config(ModelSection(preset="mini", stages=2, heads=8, dim=64), 500)
    assert (config.layers, config.cut) == (8, (4, 4))
    assert (config.kv_heads, config.hidden) == (8, 256)
    section = ModelSection(preset="mini", layers=4, kv_heads=2, hidden=100, vocabulary=512)
    config = shape.model_config(section, 500)
    assert (config.cut, config.kv_heads, config.hidden) == ((1, 1, 1, 1), 2, 100)
    assert config.vocabulary == 512


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"preset": "huge"}, "no preset 'huge'; there are large, medium, midi, mini"),
        ({"vocabulary": 99}, "vocabulary = 99 is less than the 100 of the data"),
        ({"layers": 3}, "stages = 4 is more than layers = 3: choose fewer stages, or more"),
        (
            {"stages": (2, 1, 2)},
            r"stages = \[2, 1, 2\] has 5 layers, and the model layers = 4: give numbers of layers",
        ),
        ({"heads": 3}, "dim = 64 must be a multiple of heads = 3"),
        ({"kv_heads": 3}, "heads = 4 must be a multiple of kv_heads = 3"),
        ({"dim": 60}, "dim / heads = 15 must be even"),
        ({"head_dim": 9}, "head_dim = 9 must be even"),
        ({"window": 32}, "context = 64, and the model looks back over 32 tokens"),
        ({"positions": 48}, "context = 64, and the model looks back over 48 tokens"),
    ],
)
def test_impossible_models_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape.model_config(ModelSection(**section), 100)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_parameters_are_counted_without_making_them(config: ModelConfig) -> None:
    ends, bodies = build(config)
    made = [sum(p.numel() for p in module.parameters()) for module in (ends, bodies[0])]
    assert list(config.parameters) == made


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_parameters_lie_in_the_order_of_the_module(config: ModelConfig) -> None:
    ends, bodies = build(config)
    for stage, module in enumerate([ends, *bodies]):
        shapes = shape.named_shapes(config, stage)
        parameters = dict(module.named_parameters())
        assert list(shapes.values()) == [parameter.shape for parameter in parameters.values()]
        for name, own in zip(shapes, parameters, strict=True):
            assert name.endswith(own.split(".", 2)[2] if stage else own)
    blocks = [name.split(".")[2] for name in shape.named_shapes(config, 2)]
    assert sorted(set(blocks)) == ["2", "3"]


def test_figures_must_be_positive() -> None:
    with pytest.raises(ValueError, match="context = 0 must be greater than 0"):
        replace(GROUPED, context=0)


def test_a_stage_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no stage 4: the model has stages 0 to 3"):
        modules.build_stage(GROUPED, 4, seed=0)

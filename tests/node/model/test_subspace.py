"""LLaMA models whose residual stream lies in a subspace, so that little crosses a boundary."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from planaria.node.model import modules as model
from planaria.node.model.modules import BodyStage, EmbeddingStage
from planaria.node.model.shape import ModelConfig, named_shapes
from planaria.node.model.subspace import basis, subspace_of
from planaria.node.run_file import RunFileError, WireSection, loads
from planaria.node.stage.work import frame_forms, join_features, split_features
from planaria.node.wire.frame_format import Codec, crossing_bytes
from planaria.node.wire.tensors import decode, encode
from tests.node.model.test_modules import build, hidden, parameters, some_tokens, through
from tests.node.stage.shapes import GROUPED

RANK = 5
NARROW = replace(GROUPED, subspace=RANK)


def as_a_whole(config: ModelConfig, modules: list[EmbeddingStage | BodyStage]) -> None:
    """Replace the modules, of a model in a subspace, by those of the same model without one."""
    subspace, whole = subspace_of(config), replace(config, subspace=None)
    assert subspace is not None
    for stage, narrow in enumerate(modules):
        wide = model.empty_stage(whole, stage)
        pairs = zip(narrow.parameters(), wide.parameters(), strict=True)
        for name, (mine, its) in zip(named_shapes(config, stage), pairs, strict=True):
            its.data.copy_(subspace.folded(name, mine.detach()))
        modules[stage] = wide


@pytest.mark.parametrize("mask", ["causal", "block_causal"])
def test_it_is_a_model_without_one(mask: str) -> None:
    config = replace(NARROW, attn_mask_type=mask)
    tokens = some_tokens(config, 24)
    begins = torch.zeros_like(tokens, dtype=torch.bool)
    begins[:, 7] = True
    ends, bodies = build(config)
    with torch.no_grad():
        crossed = ends.embed(tokens, begins)
        assert crossed.shape[-1] == config.crossing == RANK + 3 + (mask == "block_causal")
        logits = ends.logits(through(bodies, crossed))
        modules: list[EmbeddingStage | BodyStage] = [ends, *bodies]
        as_a_whole(config, modules)
        whole, *wide = modules
        assert isinstance(whole, EmbeddingStage)
        wanted = whole.logits(through(wide, whole.embed(tokens, begins)))  # type: ignore[arg-type]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


def bytes_of(config: ModelConfig, codec: Codec) -> int:
    """Return the bytes of six tokens' activations."""
    activations, _ = crossing_bytes(config, 6, WireSection(activations=codec))
    return activations


@pytest.mark.parametrize("codec", ["none", "bf16", "fp16", "int8", "int4"])
def test_what_crosses_says_which_tokens_in_every_codec(codec: Codec) -> None:
    config = replace(NARROW, vocabulary=70_000)
    subspace = subspace_of(config)
    assert subspace is not None
    tokens = torch.tensor([[0, 255, 256, 65_535, 65_536, 69_999]])
    crossed = subspace.with_digits(tokens, torch.randn(1, 6, RANK))
    sent = encode(split_features(crossed, config, "activation"), codec)
    assert [sizes.form for sizes in sent[0]] == frame_forms(
        replace(config, context=6), 1, codec, "activation"
    )
    assert sum(sizes.size for sizes in sent[0]) == bytes_of(config, codec)
    _, fixed, _ = subspace.split(join_features(decode(*sent), config))
    assert torch.equal(fixed, subspace.embedding[tokens])
    for nonsense in (-1.0, 1e30, float("nan")):
        subspace.split(torch.full_like(crossed, nonsense))


def test_backwards_only_figures_matter() -> None:
    ends, bodies = build(NARROW)
    tokens = some_tokens(NARROW, 12)
    crossed = bodies[0](ends.embed(tokens)).detach().requires_grad_()
    ends.loss(through(bodies[1:], crossed), tokens).backward()
    assert crossed.grad is not None
    assert crossed.grad[..., :RANK].abs().min() > 0
    assert not crossed.grad[..., RANK:].any()


def test_recomputing_and_looking_give_the_same() -> None:
    tokens, (ends, bodies) = some_tokens(NARROW, 12), build(NARROW)
    x = ends.embed(tokens).detach()
    wanted = bodies[0](x)
    bodies[0].recompute = True
    assert torch.equal(bodies[0](x.requires_grad_()), wanted)
    for stage, module in enumerate((ends, bodies[0])):
        flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
        looked = model.copy_with(model.empty_stage(NARROW, stage), flat)
        if isinstance(looked, EmbeddingStage):
            assert torch.equal(looked.embed(tokens), x)
        else:
            assert torch.equal(looked(x), wanted)


def test_its_figures_are_as_stated() -> None:
    first, body = NARROW.parameters
    assert parameters(NARROW) == first + NARROW.stages * body
    rows = basis(NARROW.dim, RANK)
    torch.testing.assert_close(rows @ rows.T, torch.eye(RANK))
    written = build(NARROW)[1][0].state_dict()["layers.0.self_attn.o_proj.weight"]
    added = (rows.T @ written).std().item()
    assert added == pytest.approx(0.02 / (2 * NARROW.layers) ** 0.5, rel=0.2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[model]\nsubspace = 65", "subspace = 65 is more than dim = 64: give less"),
        ("[model]\nsubspace = 8\ntied = true", "subspace can't be combined with tied = true"),
        ("[model]\nsubspace = 8\nmodule = 'a:b'", "subspace can't be combined with module = a:b"),
        ("[model]\nsubspace = 8\nfrom = 'llama'", "llama writes into all of its residual stream"),
    ],
)
def test_what_it_does_not_go_with_is_said(text: str, why: str) -> None:
    with pytest.raises(RunFileError, match=why):
        loads(text)


def test_without_it_all_of_the_stream_crosses() -> None:
    assert subspace_of(GROUPED) is None
    ends, bodies = build(GROUPED)
    assert hidden(ends, bodies, some_tokens(GROUPED, 4)).shape[-1] == GROUPED.dim

"""Stages that compute with the code of transformers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.node.hugging_face.adapters import export_writer
from planaria.node.hugging_face.begin_from_model import with_model, with_model_here
from planaria.node.model import decoder_trial
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.model.config import UnsupportedModelError
from planaria.node.model.decoder import (
    Decoder,
    DecoderError,
    config_of,
    decoder_of,
    document_positions,
)
from planaria.node.model.lora import add_adapters, initial_adapters
from planaria.node.model.modules import build_stage, copy_with, empty_stage
from planaria.node.model.quantized import QuantizedLinear, slots, words_of
from planaria.node.model.shape import Base, Lora
from planaria.node.run_file import RunFile, RunFileError, from_fields, override
from planaria.node.stage.activations import saved_bytes
from planaria.node.stage.initial import InitialStages
from planaria.node.stage.own_code import OwnCodeError, load_checked

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 6},
    "gpt2": {},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "mlp_only_layers": [2],
    },
    "granite": {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {},
}
"""Models with windows, added positions, experts, multipliers, and layers without RoPE."""


def content(kind: str, **others: Any) -> dict[str, Any]:
    return {"model_type": kind, **SIZES, **FAMILIES.get(kind, {}), **others}


def of(kind: str, **others: Any) -> Decoder:
    return Decoder(json.dumps(content(kind, **others)))


def saved(folder: Path, kind: str, **others: Any) -> Any:
    """Save a model of transformers, with weights that aren't initial ones, and return it."""
    model = decoder_trial.small_model(of(kind, **others), {})
    model.save_pretrained(folder)
    return model


def run_of(folder: Path, key: str = "from", **model: Any) -> RunFile:
    fields = {key: str(folder), "stages": 2, "context": 24, **model}
    return with_model_here(from_fields({"model": fields}))


@pytest.mark.parametrize(
    ("kind", "packed"),
    [*((kind, False) for kind in FAMILIES), ("gemma3_text", True), ("mixtral", True)],
)
def test_stages_compute_what_the_whole_model_does(kind: str, packed: bool) -> None:
    decoder = of(kind)
    half = decoder.layers // 2
    assert decoder_trial.whole_and_cut(decoder, [half, half], packed)[:2] == (0.0, 0.0)
    decoder_trial.try_cut(decoder, [1, decoder.layers - 1], packed)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("gemma3_text", "layer_types", ["full_attention"] * 6),
        ("smollm3", "no_rope_layers", [1, 1, 1, 1]),
        ("granite", "embedding_multiplier", 1.0),
    ],
)
def test_a_stage_that_computes_otherwise_is_refused(monkeypatch, kind, key, value) -> None:
    """Stages are built here from a config with other flags."""

    def other(decoder: Decoder, layers: range, base: Base | None = None) -> Any:
        changed = Decoder(json.dumps(decoder.config.to_dict() | {key: value}))
        return build(changed, layers, base)

    build = Decoder.build
    monkeypatch.setattr(Decoder, "build", other)
    with pytest.raises(DecoderError, match=r"stages, computes logits that differ by .* at most"):
        decoder_trial.try_cut(of(kind), [2, 2], block_causal=False)


def test_documents_that_a_class_does_not_keep_apart_are_refused() -> None:
    decoder_trial.try_cut(of("opt"), [2, 2], block_causal=False)
    with pytest.raises(DecoderError, match="kept apart, computes logits of a token that depend on"):
        decoder_trial.try_cut(of("opt"), [2, 2], block_causal=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "no_such"}, '"no_such": transformers .* has no such decoder'),
        ({"auto_map": {"AutoModel": "x.Y"}}, "needs code of its own, which is not loaded"),
        ({"quantization_config": {"bits": 4}}, "its weights are quantized"),
        ({"output_router_logits": True}, "the router's auxiliary loss needs all layers at once"),
        ({"text_config": {"a": 1}}, "save its text model alone"),
    ],
)
def test_what_is_not_computed_is_refused_in_words(tmp_path, changes, words) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content("mixtral") | changes))
    with pytest.raises(DecoderError, match=words):
        decoder_of(tmp_path)
    with pytest.raises(UnsupportedModelError, match=words):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_a_run_from_a_folder_has_its_weights_and_reads_those_of_a_stage(
    tmp_path, monkeypatch, kind
) -> None:
    model = saved(tmp_path, kind)
    run = run_of(tmp_path)
    own = load_checked(run, run.config)
    checkpoint = Checkpoint.open(tmp_path)
    tokens = decoder_trial.SHOWN
    read: list[range] = []
    reads = Decoder.read
    monkeypatch.setattr(Decoder, "read", lambda *given: read.append(given[2]) or reads(*given))
    stages = [InitialStages(run, run.config, checkpoint, own).stage(stage) for stage in (1, 2, 0)]
    assert [*map(tuple, read)] == [(0,), (1,), (2,), (3,), ()]
    *bodies, ends = stages
    x = ends.embed(tokens)
    for body in bodies:
        x = body(x)
    assert torch.equal(ends.logits(x), model(tokens).logits)
    flat = torch.cat([part.detach().flatten() for part in bodies[0].parameters()])
    again = copy_with(empty_stage(run.config, 1, own), flat)
    assert torch.equal(again(ends.embed(tokens)), bodies[0](ends.embed(tokens)))


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_a_router_whose_bias_no_stage_would_have_is_refused(bias: float, tmp_path: Path) -> None:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    figures = {"moe_intermediate_size": 16, "head_dim": 8, "n_group": 1, "topk_group": 1}
    model = decoder_trial.small_model(of("glm4_moe", **experts, **figures), {})
    for name, part in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            part[1] = bias
    model.save_pretrained(tmp_path)
    if bias:
        with pytest.raises(
            RunFileError, match=r"gate\.e_score_correction_bias have values of thei"
        ):
            run_of(tmp_path)
    else:
        assert run_of(tmp_path).model.content


def test_a_router_whose_bias_gets_no_gradient_is_for_adapters_only(tmp_path: Path) -> None:
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
    saved(tmp_path, "ernie4_5_moe", **experts)
    with pytest.raises(RunFileError, match=r"correction_bias get no gradient, .*set training"):
        run_of(tmp_path)
    fields = {"from": str(tmp_path), "stages": 2, "context": 24}
    lora = {"lora": {"rank": 2, "targets": ["q_proj"]}}
    assert with_model_here(from_fields({"model": fields, "training": lora})).model.content


def test_recomputed_activations_give_the_same_gradients(tmp_path) -> None:
    saved(tmp_path, "gemma3_text")
    run = run_of(tmp_path)
    body = build_stage(run.config, 2, 0, load_checked(run, run.config))
    gradients = []
    for body.recompute in (False, True):
        x = torch.ones(1, 12, 32, requires_grad=True)
        body.zero_grad()
        body(x).square().sum().backward()
        gradients.append([x.grad, *(part.grad for part in body.parameters())])
    assert all(map(torch.equal, *gradients))


def test_new_weights_follow_from_seed_stage_and_layer(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content("gemma3_text")))
    run = run_of(tmp_path, "config")
    own = load_checked(run, run.config)
    first, same, other = (build_stage(run.config, 1, seed, own) for seed in (3, 3, 4))
    pairs = zip(first.parameters(), same.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.layers[0].mlp.up_proj.weight, other.layers[0].mlp.up_proj.weight)
    assert first.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not first.layers[0].input_layernorm.weight.any()  # Gemma adds 1
    assert not any(part.any() for part in empty_stage(run.config, 1, own).parameters())


def test_casts_of_experts_count_among_saved_bytes(tmp_path) -> None:
    """Under autocast, autograd keeps a cast of each expert that has been used."""
    (tmp_path / "config.json").write_text(json.dumps(content("mixtral", intermediate_size=4096)))
    run = override(run_of(tmp_path, "config"), training__precision="bf16", training__microbatch=1)
    experts = [shape for _, shape in run.config.own.of_layer(0) if len(shape) == 3]
    assert len(experts) == 2
    assert saved_bytes(run, run.config, 1) > 2 * sum(map(math.prod, experts))


def test_another_process_that_takes_it_in_says_what_is_wrong(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content("opt")))
    model = {"config": str(tmp_path), "stages": 2, "context": 24}
    model["attn_mask_type"] = "block_causal"
    refusal = r"model\.config = .*: OPTForCausalLM of .* with documents kept apart, computes logits"
    with pytest.raises(RunFileError, match=refusal):
        with_model(from_fields({"model": model}))


def test_another_version_of_transformers_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content("gpt2")))
    run = run_of(tmp_path, "config")
    config = run.config
    changed = config.own._replace(source="transformers 4")
    with pytest.raises(OwnCodeError, match="is computed by transformers 4: install"):
        load_checked(run, replace(config, own=changed))


def test_adapters_need_linear_modules(tmp_path) -> None:
    saved(tmp_path / "gpt2", "gpt2")
    fields = {"model": {"from": str(tmp_path / "gpt2"), "stages": 2, "context": 24}}
    lora = {"training": {"lora": {"targets": ["c_attn"]}}}
    with pytest.raises(RunFileError, match="is called c_attn; this model has none"):
        with_model_here(from_fields(fields | lora))
    saved(tmp_path / "granite", "granite")
    fields["model"]["from"] = str(tmp_path / "granite")
    run = with_model_here(from_fields(fields | {"training": {"lora": {"rank": 2}}}))
    own = load_checked(run, run.config)
    adapters = initial_adapters(run.config, 1, 0)
    stage = add_adapters(build_stage(run.config, 1, 0, own), run.config, 1, adapters)
    trained = [name for name, part in stage.named_parameters() if part.requires_grad]
    assert len(trained) == 2 * 7 * 2
    x = torch.ones(1, 5, 32)
    assert torch.equal(stage(x), build_stage(run.config, 1, 0, own)(x))


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "qwen3_moe"])
def test_what_a_base_packs_is_what_is_a_linear_module(kind) -> None:
    config = replace(config_of(of(kind)), lora=Lora(2, 4.0, (), "nf4"))
    stage = of(kind).stage(config.layers_of(1), False, "nf4")
    packed = [part for part in slots(stage) if isinstance(part, QuantizedLinear)]
    assert config.packed_in(1) == sum(part.shape.numel() for part in packed)
    assert (kind == "gpt2") == (not packed)


def test_positions_begin_anew_with_each_document() -> None:
    begins = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 1, 1, 0]])
    assert document_positions(begins).tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 1]]


@pytest.mark.parametrize(
    ("kind", "training"),
    [
        ("gpt2", {}),
        ("gemma3_text", {"lora": {"rank": 2, "base": "nf4"}}),
        ("mixtral", {"lora": {"rank": 2, "base": "nf4", "targets": ["q_proj"]}}),
    ],
)
def test_a_stage_is_read_for_others_as_it_is_made_here(
    tmp_path, kind: str, training: dict[str, Any]
) -> None:
    saved(tmp_path, kind)
    model = {"from": str(tmp_path), "stages": 2, "context": 24}
    run = with_model_here(from_fields({"model": model, "training": training}))
    own = load_checked(run, run.config)
    beginning = InitialStages(run, run.config, Checkpoint.open(tmp_path), own)
    for stage in range(3):
        expected = torch.cat([words_of(slot) for slot in slots(beginning.base(stage))])
        words, cuts = beginning.words(stage), [*range(0, len(expected), 999), len(expected)]
        given = torch.cat([words.between(*cut) for cut in pairwise(cuts)])
        assert torch.equal(given.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(
    ("kind", "targets", "names"),
    [
        ("qwen3_moe", ("q_proj", "up_proj", "down_proj"), "of up_proj, down_proj for those"),
        ("qwen3_moe", ("q_proj",), ""),
        ("granite", ("q_proj", "up_proj"), ""),
    ],
)
def test_adapters_that_peft_takes_for_those_of_experts_are_named(
    kind: str, targets: tuple[str, ...], names: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config_of(of(kind)), lora=Lora(2, 4.0, targets))
    export_writer(RunFile(), config, False, "org/name")
    assert caplog.text.count("--merged") == bool(names)
    assert names in caplog.text

"""Tests of exported folders in transformers, and of folders that transformers wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from planaria.node.hugging_face.card import model_card
from planaria.node.hugging_face.export import (
    ExportError,
    ModelParts,
    Vocabulary,
    export,
    weight_files,
)
from planaria.node.hugging_face.whole_model import WholeModel
from planaria.node.model.config import UnsupportedModelError
from planaria.node.model.layout import Weight, model_weights
from planaria.node.model.modules import build_stage, copy_with, empty_stage
from planaria.node.model.shape import ModelConfig
from planaria.node.run_file import RunFile
from tests.node.data.test_tokenizer import AROUND, NAMED, TEXTS, documents, prepared, write
from tests.node.stage.shapes import FAMILIES, GROUPED, QWEN2

CPU = torch.device("cpu")
CONFIGS = pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
FILE = 100_000
"""The most bytes of a shard, so small that there are several."""


def some_weights(config: ModelConfig) -> dict[int, torch.Tensor]:
    """Return the stages' flat weights, not initial ones, which leave attention nearly uniform."""
    generator = torch.Generator().manual_seed(4)
    flat = {}
    for stage in range(config.stages + 1):
        parameters = list(build_stage(config, stage, seed=0).parameters())
        for parameter in parameters:
            with torch.no_grad():
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5, generator=generator)
                else:
                    parameter.mul_(8.0)
        flat[stage] = torch.cat([parameter.detach().flatten() for parameter in parameters])
    return flat


def exported(folder: Path, config: ModelConfig, **how: Any) -> dict[int, torch.Tensor]:
    flat = some_weights(config)

    def read(stage: int, first: int, count: int) -> torch.Tensor:
        return flat[stage][first : first + count]

    model = ModelParts(config, read, how.pop("vocabulary", None), "# a model\n")
    export(folder, model, **how)
    return flat


def some_tokens(config: ModelConfig, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(config.vocabulary, (2, length), generator=generator)


def logits_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of the folder's model in transformers."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        logits: torch.Tensor = model(tokens).logits
    return logits


def transformers_model(config: ModelConfig) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM  # takes five seconds

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= config.rope_scaling.figures
    of_family: dict[str, Any] = {
        "llama": {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias},
        "mistral": {"sliding_window": config.window},
        "qwen2": {"max_window_layers": config.layers},
        "qwen3": {"max_window_layers": config.layers, "head_dim": config.head_dim},
    }[config.family]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            config.family,
            vocab_size=config.vocabulary,
            hidden_size=config.dim,
            intermediate_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.positions or config.context,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=config.tied,
            bos_token_id=None,
            eos_token_id=None,
            initializer_range=0.2,
            **of_family,
        )
    )
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5)
    return model.eval()


@CONFIGS
@pytest.mark.parametrize("length", [24, 7])
def test_what_is_exported_gives_the_same_logits_in_transformers(tmp_path, config, length) -> None:
    from transformers import AutoModelForCausalLM

    exported(tmp_path / "out", config, most=FILE)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    tokens = some_tokens(config, length)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        wanted = loaded.eval()(tokens).logits
    assert type(loaded).__name__.lower() == f"{config.family}forcausallm"
    assert loaded.dtype == torch.float32
    assert wanted.std() > 0.5
    got = WholeModel.load(tmp_path / "out", CPU).logits(tokens)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


@CONFIGS
def test_heads_of_any_width_are_exported(tmp_path, config) -> None:
    config = replace(config, width_of_head=10)
    exported(tmp_path / "out", config)
    tokens = some_tokens(config, 24)
    got = WholeModel.load(tmp_path / "out", CPU).logits(tokens)
    torch.testing.assert_close(got, logits_of(tmp_path / "out", tokens), rtol=0, atol=1e-4)


def test_a_model_in_a_subspace_is_one_without_in_transformers(tmp_path) -> None:
    config = replace(GROUPED, subspace=5)
    flat = exported(tmp_path / "out", config)
    ends, *bodies = (copy_with(empty_stage(config, of), flat[of]) for of in flat)
    tokens = some_tokens(config, 24)
    x = ends.embed(tokens)
    for body in bodies:
        x = body(x)
    wanted = logits_of(tmp_path / "out", tokens)
    torch.testing.assert_close(ends.logits(x), wanted, rtol=1e-4, atol=1e-4)
    written = load_file(tmp_path / "out/model.safetensors").values()
    card = model_card(RunFile(), config, 1, "", {})
    assert f"model of {sum(tensor.numel() for tensor in written):,} parameters" in card


@CONFIGS
def test_names_shapes_and_config_are_those_that_transformers_writes(tmp_path, config) -> None:
    from safetensors import safe_open

    exported(tmp_path / "ours", config)
    theirs = transformers_model(config)
    theirs.save_pretrained(tmp_path / "theirs")
    shapes = []
    for folder in ("ours", "theirs"):
        with safe_open(tmp_path / folder / "model.safetensors", framework="pt") as file:
            names = file.keys()
            shapes.append({name: file.get_slice(name).get_shape() for name in names})
    assert shapes[0] == shapes[1]
    configs = {
        name: json.loads((tmp_path / name / "config.json").read_text())
        for name in ("ours", "theirs")
    }
    del configs["theirs"]["transformers_version"]
    configs["theirs"]["initializer_range"] = configs["ours"]["initializer_range"]
    assert configs["theirs"].items() <= configs["ours"].items()


@CONFIGS
def test_a_model_of_transformers_gives_its_logits_and_loss_here(tmp_path, config) -> None:
    reference = transformers_model(config)
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    tokens = some_tokens(config, 24)
    with torch.no_grad():
        wanted = reference(tokens, labels=tokens)
    model = WholeModel.load(tmp_path, CPU)
    assert replace(config, stages=1, context=24, learning_rate=1.0) == replace(
        model.config, context=24, positions=config.positions
    )
    torch.testing.assert_close(model.logits(tokens), wanted.logits, rtol=0, atol=1e-4)
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    assert loss / (2 * 23) == pytest.approx(wanted.loss.item(), abs=1e-4)


def test_in_bfloat16_it_is_half_as_large(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    flat = exported(tmp_path / "half", GROUPED, dtype="bf16")
    exported(tmp_path / "whole", GROUPED)
    half, whole = (
        (tmp_path / name / "model.safetensors").stat().st_size for name in ("half", "whole")
    )
    assert 0.5 < half / whole < 0.51
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert loaded.dtype == torch.bfloat16
    norm = loaded.state_dict()["model.norm.weight"]
    weight = next(w for w in model_weights(GROUPED) if w.name == "model.norm.weight")
    kept = flat[0][weight.first : weight.first + weight.size]
    assert torch.equal(norm, kept.bfloat16())


def test_each_weight_is_in_one_place() -> None:
    those = model_weights(GROUPED)
    assert len({weight.name for weight in those}) == len(those)
    for stage in range(GROUPED.stages + 1):
        at = 0
        for weight in sorted((w for w in those if w.stage == stage), key=lambda w: w.first):
            assert weight.first == at
            at += weight.size
        assert at == GROUPED.parameters[bool(stage)]


def test_a_file_of_weights_is_no_larger_than_it_may_be_unless_a_tensor_is() -> None:
    those = [Weight(str(n), 0, 0, (count,)) for n, count in enumerate((3, 1, 9, 2, 2, 2))]
    sizes = [[weight.size for weight in file] for file in weight_files(those, 4, 16)]
    assert sizes == [[3, 1], [9], [2, 2], [2]]


def test_the_tokenizer_goes_along(tmp_path) -> None:
    from transformers import AutoTokenizer

    tokenizer = Tokenizer(WordLevel({"<end>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "mine.json"))
    exported(tmp_path / "out", GROUPED, vocabulary=Vocabulary(tmp_path / "mine.json", 0))
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("b a b")["input_ids"] == [2, 1, 2]
    assert (loaded.eos_token, loaded.eos_token_id) == ("<end>", 0)
    assert loaded.model_max_length == GROUPED.context
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 0


def test_transformers_reads_another_tokenizer_of_a_qwen2_model_as_it_is(tmp_path) -> None:
    """Its AutoTokenizer would make a Qwen2Tokenizer, with other tokens."""
    from transformers import AutoTokenizer

    file = write(tmp_path / "from", "sentencepiece", **NAMED)
    exported(tmp_path / "out", QWEN2, vocabulary=Vocabulary(file, 2))
    text = "hello, about planarians"
    own = Tokenizer.from_file(str(file))
    for trust in (None, True):
        loaded = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=trust)
        assert loaded(text).input_ids == own.encode(text).ids
        assert len(loaded) == own.get_vocab_size()


@pytest.mark.parametrize("how", [{}, {"bos": "yes"}, {"bos": "no"}, {"end_token": "<end>"}])
@pytest.mark.parametrize("around", AROUND)
def test_what_is_exported_begins_and_ends_texts_as_the_data_does(
    how: dict[str, Any], around: str | None, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    model = write(tmp_path / "from", "sentencepiece", around, **NAMED, model_max_length=7).parent
    (model / "special_tokens_map.json").write_text(json.dumps(NAMED))
    (model / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    (model / "generation_config.json").write_text('{"eos_token_id": [2], "top_k": 5}')
    corpus = prepared(tmp_path, model / "tokenizer.json", **how)
    (corpus.path / "chat_template.jinja").write_text("what it was trained by")
    end = corpus.index.end_of_document
    vocabulary = Vocabulary(corpus.path / "tokenizer.json", end, model)
    exported(tmp_path / "out", GROUPED, vocabulary=vocabulary)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out", split_special_tokens=True)
    known = [
        [*ids, *([] if ids[-1] == end else [end])] for ids in (loaded(t).input_ids for t in TEXTS)
    ]
    assert sorted(known) == sorted(documents(corpus))
    assert loaded.eos_token_id == end
    assert (loaded.chat_template, loaded.model_max_length) == ("what it was trained by", 7)
    files = ("config.json", "generation_config.json")
    files_read = [json.loads((tmp_path / "out" / name).read_text()) for name in files]
    assert [each["eos_token_id"] for each in files_read] == (
        [2, [2]] if end == 2 else [[3, 2], [3, 2]]
    )
    assert files_read[1]["top_k"] == 5


def test_a_folder_that_is_taken_stays_as_it_is(tmp_path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ExportError, match="exists already: choose another folder"):
        exported(tmp_path, GROUPED)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_current_folder_is_taken_even_if_it_is_empty(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match="exists already: choose another folder"):
        exported(Path(), GROUPED)


def test_what_fails_half_way_leaves_nothing(tmp_path) -> None:
    def read(stage: int, first: int, count: int) -> torch.Tensor:
        if stage == 2:
            raise RuntimeError("gone")
        return torch.zeros(count)

    with pytest.raises(RuntimeError, match="gone"):
        export(tmp_path / "out", ModelParts(GROUPED, read), most=FILE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"model_type": "gpt2"}, r"it lacks transformer\.ln_f\.bias, "),
        ({"model_type": "no_such"}, 'model_type = "no_such": transformers .* has no such decoder'),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({"attention_bias": True}, r"lacks model\.layers\.0\.self_attn\.k_proj\.bias, "),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights = "),
        ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE scaled .longrope."),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "RoPE of several kinds"),
        ({"rope_scaling": {"type": "yarn"}}, "KeyError: 'factor'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "KeyError: 'factor'"),
        ({"partial_rotary_factor": 0.5}, "RoPE of a part of each head"),
        ({"num_local_experts": 8}, "num_local_experts = 8; supported are llama"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = "),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers with a sliding window"),
        ({"head_dim": 16}, r"has shape \[48, 48\] instead of \[96, 48\]"),
        ({"model_type": "qwen3"}, r"lacks model\.layers\.0\.self_attn\.k_norm\.weight, "),
        ({"vocab_size": None}, "can't be read as a model's config"),
        ({"num_hidden_layers": 7}, r"lacks model\.layers\.6\..* and 6 more"),
        ({"num_hidden_layers": 5}, r"it has model\.layers\.5\..* which the model of its config"),
        ({"vocab_size": 98}, r"has shape \[97, 48\] instead of \[98, 48\]"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_with_what_it_has(tmp_path, changed, why) -> None:
    exported(tmp_path / "out", GROUPED)
    path = tmp_path / "out/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(UnsupportedModelError, match=why):
        WholeModel.load(tmp_path / "out", CPU)


@pytest.mark.parametrize(
    ("changed", "warning"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1 is ignored"),
        ({"max_position_embeddings": None}, "no max_position_embeddings: 2048 is assumed"),
    ],
)
def test_what_is_ignored_or_assumed_is_said(tmp_path, caplog, changed, warning) -> None:
    from transformers import AutoModelForCausalLM

    exported(tmp_path, GROUPED)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | changed
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    tokens = some_tokens(GROUPED, 24)
    model, reference = (
        WholeModel.load(tmp_path, CPU),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    )
    assert warning in caplog.text
    assert model.config.positions == reference.config.max_position_embeddings
    with torch.no_grad():
        wanted = reference.eval()(tokens).logits
    torch.testing.assert_close(model.logits(tokens), wanted, rtol=0, atol=1e-4)


def test_a_folder_without_a_model_is_refused(tmp_path) -> None:
    with pytest.raises(UnsupportedModelError, match="planaria export"):
        WholeModel.load(tmp_path, CPU)

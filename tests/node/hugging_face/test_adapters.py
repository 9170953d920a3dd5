"""Tests of exported adapters, apart or merged into the weights of their model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from planaria.node.data.progress import untracked
from planaria.node.hugging_face.adapters import base_name, export_writer, with_origin
from planaria.node.hugging_face.begin_from_model import public_name, with_model
from planaria.node.hugging_face.card import model_card
from planaria.node.hugging_face.export import ExportError, ModelParts
from planaria.node.hugging_face.whole_model import WholeModel
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.model.config import UnsupportedModelError
from planaria.node.model.lora import initial_adapters
from planaria.node.model.modules import EmbeddingStage, copy_with
from planaria.node.model.shape import ModelConfig
from planaria.node.run_file import RunFile, from_fields, override
from planaria.node.stage.initial import InitialStages
from tests.node.hugging_face.test_folders import exported, logits_of, some_tokens
from tests.node.stage.shapes import GROUPED, QWEN2

TARGETS = ["q_proj", "k_proj", "down_proj"]


def of_model(folder: Path, config: ModelConfig = GROUPED) -> RunFile:
    exported(folder, config)
    lora = {"rank": 4, "alpha": 6.0, "targets": TARGETS}
    return with_model(from_fields({"model": {"from": str(folder)}, "training": {"lora": lora}}))


def trained(config: ModelConfig) -> dict[int, torch.Tensor]:
    """Return adapters of each stage that differ from their initial values."""
    generator = torch.Generator().manual_seed(7)
    adapters = {}
    for stage in range(config.stages + 1):
        flat = initial_adapters(config, stage, 0)
        adapters[stage] = flat + 0.1 * torch.randn(len(flat), generator=generator)
    return adapters


def write(out: Path, run: RunFile, into_weights: bool, base: str = "", stages: int = 0) -> None:
    """Export adapters in the run's stages, or in so many."""
    config = replace(run.config, stages=stages or run.config.stages)
    flat, base = trained(config), base_name(run, base)
    card = model_card(run, config, 7, "", {}, into_weights, base)
    model = ModelParts(config, lambda of, at, n: flat[of][at : at + n], card=card)
    export_writer(run, config, into_weights, base)(out, model, "fp32", untracked)


def test_they_are_called_as_peft_calls_them(tmp_path) -> None:
    """The names are those that peft 0.21's `save_pretrained` wrote for LlamaForCausalLM."""
    write(tmp_path / "apart", of_model(tmp_path / "base"), False)
    shapes = {"self_attn.q_proj": (48, 48), "self_attn.k_proj": (16, 48), "mlp.down_proj": (48, 80)}
    wanted = {}
    for layer in range(6):
        for module, (rows, columns) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            wanted[f"{name}.lora_A.weight"] = (4, columns)
            wanted[f"{name}.lora_B.weight"] = (rows, 4)
    tensors = load_file(tmp_path / "apart" / "adapter_model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == wanted
    config = json.loads((tmp_path / "apart" / "adapter_config.json").read_text())
    figures = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6.0}
    assert config | figures == config
    assert config["target_modules"] == TARGETS


def test_a_merged_model_adds_what_the_adapters_do(tmp_path) -> None:
    run = of_model(tmp_path / "base")
    write(tmp_path / "merged", run, True)
    flat, x = trained(run.config), some_tokens(run.config, 20)
    checkpoint = Checkpoint.open(tmp_path / "base")
    begun = InitialStages(run, run.config, checkpoint)
    ends, *body = (copy_with(begun.stage(of), flat[of]) for of in flat)
    assert isinstance(ends, EmbeddingStage)
    with torch.inference_mode():
        logits = ends.logits(reduce(lambda x, stage: stage(x), body, ends.embed(x)))
    merged = WholeModel.load(tmp_path / "merged", torch.device("cpu")).logits(x)
    before = WholeModel.load(tmp_path / "base", torch.device("cpu")).logits(x)
    torch.testing.assert_close(logits, merged, rtol=1e-4, atol=1e-4)
    assert (merged - before).abs().max() > 0.1


@pytest.mark.parametrize("stages", [1, 6])
def test_adapters_saved_in_other_stages_than_the_run_files_are_merged(
    stages: int, tmp_path: Path
) -> None:
    run = of_model(tmp_path / "base")
    write(tmp_path / "merged", run, True, stages=stages)
    layer = "model.layers.5.mlp.down_proj.weight"
    merged, base = (
        load_file(tmp_path / of / "model.safetensors")[layer] for of in ("merged", "base")
    )
    assert not torch.equal(merged, base)


@pytest.mark.parametrize("config", [GROUPED, QWEN2], ids=["llama", "qwen2"])
def test_peft_takes_them_and_has_the_logits_of_the_merged_model(tmp_path, config) -> None:
    import peft  # a slow import
    from transformers import AutoModelForCausalLM

    run = of_model(tmp_path / "base", config)
    write(tmp_path / "apart", run, False, base=str(tmp_path / "base"))
    write(tmp_path / "merged", run, True)
    tokens = some_tokens(config, 20)
    ours = WholeModel.load(tmp_path / "merged", torch.device("cpu")).logits(tokens)
    for folder in ("merged", "apart"):
        theirs = logits_of(tmp_path / folder, tokens)
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=4, lora_alpha=6.0, target_modules=TARGETS, task_type="CAUSAL_LM")
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "theirs")
    ours_and_theirs = [
        {n: t.shape for n, t in load_file(tmp_path / of / "adapter_model.safetensors").items()}
        for of in ("apart", "theirs")
    ]
    assert ours_and_theirs[0] == ours_and_theirs[1]


def test_adapters_are_said_to_be_none_of_their_own_model(tmp_path) -> None:
    run = of_model(tmp_path / "base")
    write(tmp_path / "apart", run, False)
    card = (tmp_path / "apart" / "README.md").read_text()
    assert 'base_model: "base"\nlibrary_name: peft' in card
    assert "| adapters | LoRA, rank 4, alpha 6, of q_proj, k_proj, down_proj |" in card
    with pytest.raises(UnsupportedModelError, match="has adapters but no model: `planaria exp"):
        Checkpoint.open(tmp_path / "apart")


@pytest.mark.parametrize("name", ["1000", "@run", "base: best", "base #2", 'it\'s "the" one'])
def test_a_card_names_its_base_model_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    run = of_model(tmp_path / "base")
    data = ModelCard(model_card(run, run.config, 7, "", {}, base=name)).data
    assert (data.base_model, data.library_name) == (name, "peft")


def test_weights_that_adapters_go_into_have_to_be_those_of_the_run(tmp_path) -> None:
    run = of_model(tmp_path / "base")
    exported(tmp_path / "other", QWEN2)
    with pytest.raises(ExportError, match="holds another model than that; name the folder"):
        export_writer(with_origin(run, tmp_path / "other"), run.config, True, "")
    assert run.model.content is not None
    changed = override(run, model__content=(*run.model.content[:-1], "0" * 32))
    with pytest.raises(ExportError, match="holds another model than that; name the folder"):
        write(tmp_path / "merged", changed, True)
    assert not (tmp_path / "merged").exists()
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ExportError, match=r"name the folder of the model .* or leave --merged out"):
        export_writer(run, run.config, True, "")
    export_writer(with_origin(run, tmp_path / "moved"), run.config, True, "")
    shutil.rmtree(tmp_path / "moved")
    write(tmp_path / "apart", run, False)  # needs no weights of the model


def test_a_run_without_adapters_has_none_to_merge() -> None:
    run = from_fields({})
    with pytest.raises(ExportError, match="this run trains all weights, so leave it out"):
        export_writer(run, run.config, True, "")
    with pytest.raises(ExportError, match="this run began from no checkpoint"):
        with_origin(run, Path("anywhere"))


@pytest.mark.parametrize("into_weights", [False, True])
@pytest.mark.parametrize(
    ("folder", "given", "name"),
    [
        ("hub/models--org--SmolLM2-135M/snapshots/93efa2f", "", "org/SmolLM2-135M"),
        ("smollm", "", "smollm"),
        ("smollm", "org/SmolLM2-135M", "org/SmolLM2-135M"),
    ],
)
def test_no_path_of_this_machine_is_published(
    tmp_path, caplog, folder, given, name, into_weights
) -> None:
    run = of_model(tmp_path / folder)
    write(tmp_path / "out", run, into_weights, given)
    assert f"| began from | {name} |" in (tmp_path / "out" / "README.md").read_text()
    for file in (tmp_path / "out").iterdir():
        assert str(tmp_path).encode() not in file.read_bytes()
    if not into_weights:
        config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == name
        assert ("--base ORG/NAME" in caplog.text) == ("/" not in name)


def test_a_model_of_the_hub_is_called_as_there() -> None:
    assert public_name("org/name@v2") == "org/name"
    with pytest.raises(ExportError, match="--base a/b: this run began from no checkpoint; leave"):
        base_name(from_fields({}), "a/b")

"""Tests of runs that begin from a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from planaria.bootstrap.registry_pb2 import CHECKSUM
from planaria.node.data.corpus import Corpus, CorpusError
from planaria.node.hugging_face import begin_from_model
from planaria.node.hugging_face.begin_from_model import check_targets, find_tokenizer, with_model
from planaria.node.hugging_face.whole_model import WholeModel
from planaria.node.launch.resolve import resolve
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.model.config import UnsupportedModelError
from planaria.node.model.shape import FINE_TUNING, ModelConfig, model_config, named_shapes
from planaria.node.run_file import RunFile, RunFileError, dumps, from_fields, loads
from planaria.node.stage.initial import InitialStages, NotHereError
from planaria.node.stage.torch_stage import TorchStage
from planaria.node.state.serving import StateService
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.exchange import ComplaintError
from tests.harness.network import Nodes
from tests.node.hugging_face.test_folders import exported, logits_of, some_tokens
from tests.node.stage.shapes import FAMILIES, GROUPED, QWEN2

WEIGHTS = "model.safetensors"
CONFIGS = pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)


def run_from(folder: Path, **model: Any) -> RunFile:
    return from_fields({"model": {"from": str(folder), **model}})


def set_value(folder: Path, name: str, value: float) -> None:
    """Set the value in row 3, column 4 of a weight in the folder's file."""
    tensors = load_file(folder / WEIGHTS)
    tensors[name][3, 4] = value
    save_file(tensors, folder / WEIGHTS)


def of(run: RunFile) -> ModelConfig:
    assert run.model.vocabulary is not None
    return model_config(run.model, run.model.vocabulary)


@CONFIGS
def test_a_run_has_the_shape_and_each_stage_the_weights_of_the_checkpoint(tmp_path, config) -> None:
    flat = exported(tmp_path / "out", config, most=100_000)
    run = with_model(run_from(tmp_path / "out", stages=3, context=24))
    positions = config.positions or config.context
    assert of(run) == replace(config, positions=positions, learning_rate=FINE_TUNING)
    assert loads(dumps(run)) == with_model(run) == run
    beginning = InitialStages(run, of(run), Checkpoint.open(tmp_path / "out"))
    for stage, wanted in flat.items():
        weights = [p.detach().flatten() for p in beginning.stage(stage).parameters()]
        assert torch.equal(torch.cat(weights), wanted)


@CONFIGS
def test_a_config_alone_gives_the_shape_of_a_model_with_new_weights(tmp_path, config) -> None:
    exported(tmp_path, config)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    run = with_model(from_fields({"model": {"config": str(tmp_path), "stages": 3, "context": 24}}))
    rate = of(RunFile(model=run.model)).learning_rate
    assert of(run) == replace(config, positions=of(run).positions, learning_rate=rate)
    assert run.model.content is None
    with pytest.raises(RunFileError, match=r"^model\.from = .*safetensors is missing: "):
        with_model(run_from(tmp_path, stages=3))
    with pytest.raises(RunFileError, match="and from, module or preset are two models: leave one"):
        run_from(tmp_path, config=str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_two_bytes_are_read_as_they_are(tmp_path, dtype) -> None:
    exported(tmp_path, QWEN2)
    file = tmp_path / WEIGHTS
    halves = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(halves, file)
    checkpoint = Checkpoint.open(tmp_path)
    for name, tensor in halves.items():
        values = torch.from_numpy(checkpoint.read(name)).view(tensor.shape)
        assert torch.equal(values, tensor.float())


def test_what_a_stage_begins_with_is_what_the_run_began_from(tmp_path) -> None:
    exported(tmp_path, GROUPED)
    run = with_model(run_from(tmp_path, stages=3, context=24))
    set_value(tmp_path, "model.layers.2.mlp.up_proj.weight", 1e-3)
    beginning = InitialStages(run, of(run), Checkpoint.open(tmp_path))
    beginning.stage(1)
    with pytest.raises(NotHereError, match="is not the checkpoint that the run begins"):
        beginning.stage(2)
    with pytest.raises(NotHereError, match="is not on this machine"):
        InitialStages(run, of(run)).stage(1)
    module, weightless = InitialStages(run, of(run)).stage_or_zeros(1)
    assert weightless
    assert not any(parameter.any() for parameter in module.parameters())


def test_weights_that_a_peer_gives_are_those_of_the_checkpoint(tmp_path) -> None:
    exported(tmp_path, GROUPED)
    run = with_model(run_from(tmp_path, stages=3, context=24))
    cpu = torch.device("cpu")
    beginning = InitialStages(run, of(run), Checkpoint.open(tmp_path))
    giver = TorchStage(0, beginning, cpu)
    taker = TorchStage(2, InitialStages(run, of(run)), cpu)
    assert (giver.origin, giver.weightless, taker.origin, taker.weightless) == (1, 0, 0, 1)
    state = giver.initial_state(2, 0)
    sync = pb.Sync(method="origin", sources=[pb.Source(node="a", stage=2)])
    taker.put_in_place(sync, [state])
    reference = TorchStage(2, beginning, cpu)
    assert taker.digest() == reference.digest()
    state.tensors["weights"][7] += 1e-3
    with pytest.raises(
        ComplaintError, match="the weights of stage 2 from a are not those"
    ) as caught:
        taker.put_in_place(sync, [state])
    assert (caught.value.accused, caught.value.cause) == (["a"], CHECKSUM)
    assert taker.digest() == reference.digest()
    with pytest.raises(ComplaintError, match="is not on this machine"):
        taker.initial_state(2, 0)


def test_who_has_the_checkpoint_gives_it_though_it_joins_a_run_that_has_begun(tmp_path) -> None:
    exported(tmp_path, GROUPED)
    run = with_model(run_from(tmp_path, stages=3, context=24))
    cpu, here = torch.device("cpu"), InitialStages(run, of(run), Checkpoint.open(tmp_path))
    late = TorchStage(1, here, cpu, begun=True)
    assert (late.origin, late.weightless) == (True, False)
    taker = TorchStage(2, InitialStages(run, of(run)), cpu, begun=True)
    assert (taker.origin, taker.weightless) == (False, True)
    set_value(tmp_path, "model.layers.0.mlp.up_proj.weight", 1e-3)
    assert not TorchStage(1, here, cpu, begun=True).origin, "that is another checkpoint"


@pytest.mark.parametrize("base", [None, "nf4"])
def test_of_a_stage_that_a_peer_gives_it_reads_a_tensor_at_a_time(
    tmp_path, monkeypatch, base
) -> None:
    exported(tmp_path, GROUPED)
    fields = {"model": {"from": str(tmp_path), "stages": 3, "context": 24}}
    run = with_model(from_fields(fields | {"training": {"lora": {"rank": 4, "base": base}}}))
    cpu = torch.device("cpu")
    giver = TorchStage(0, InitialStages(run, run.config, Checkpoint.open(tmp_path)), cpu)
    taker = TorchStage(2, InitialStages(run, run.config), cpu)
    state, read = giver.checkpoint_state(2), []
    reading = Checkpoint.reading
    monkeypatch.setattr(
        Checkpoint, "reading", lambda *given: read.append(given[3]) or reading(*given)
    )
    assert state.read is not None
    cuts = [*range(0, taker.lacking, 37), taker.lacking]
    weights = torch.cat([state.read(start, stop) for start, stop in pairwise(cuts)])
    assert read == [*named_shapes(run.config, 2)]
    taker.take_frozen_weights(weights, "a")
    assert not taker.weightless
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(NotHereError, match="can't be read"):
        state.read(0, 8)


def test_who_can_not_read_the_checkpoint_any_more_has_none(tmp_path) -> None:
    exported(tmp_path, GROUPED)
    run = with_model(run_from(tmp_path, stages=3, context=24))
    nodes, sent, here = Nodes(), [], InitialStages(run, of(run), Checkpoint.open(tmp_path))
    giver = TorchStage(0, here, torch.device("cpu"))
    seat = SimpleNamespace(
        **{"stage": 0, "run": run, "config": of(run), "arithmetic": giver, "tensors": tensors},
        exchanges=nodes.new(),
        send=lambda peer, item: sent.append(item),
        member=SimpleNamespace(origin=giver.origin, weightless=False, hang=""),
    )
    service = StateService(seat)
    request = {"kind": "origin", "stage": 2}
    service.on_message("b", pb.Message(state_request=pb.StateRequest(**request)))
    service.on_message("b", pb.Message(shard_request=pb.ShardRequest(**request, size=8)))
    nodes.catch_up()
    assert sent[0].state_manifest.error == "" and sent[1].kind == "state" and seat.member.origin
    (tmp_path / WEIGHTS).unlink()
    shard = pb.ShardRequest(**request, size=8, offset=4 * of(run).values_in(2) - 8)
    service.on_message("b", pb.Message(shard_request=shard))
    nodes.catch_up()
    assert "can't be read" in sent[2].shard_refusal.reason
    assert not seat.member.origin, "another node is to give it"


def test_a_large_model_has_time_to_be_read_and_that_is_said(tmp_path, monkeypatch, caplog) -> None:
    exported(tmp_path, GROUPED)
    with (tmp_path / "further.safetensors").open("wb") as file:
        file.truncate(43 * 10**9)  # a sparse file
    limits: list[float] = []
    monkeypatch.setattr(
        begin_from_model, "completed_by", lambda module, run, seconds: limits.append(seconds) or run
    )
    lora = {"training": {"lora": {"base": "nf4"}}}
    with caplog.at_level("INFO"):
        with_model(from_fields({"model": {"from": str(tmp_path)}} | lora))
    assert limits[0] > 3600
    assert f"reading {tmp_path}, from which the run begins (43.0 GB)" in caplog.text


def test_stages_and_context_follow_from_the_model_unless_they_are_said(tmp_path) -> None:
    exported(tmp_path, GROUPED)
    run = with_model(run_from(tmp_path))
    assert (run.model.stages, run.config.cut, run.model.context) == (4, (1, 1, 2, 2), 24)
    assert with_model(run_from(tmp_path, stages=[1, 3, 2])).config.cut == (1, 3, 2)
    with pytest.raises(RunFileError, match=r"stages = \[3, 2\] has 5 layers, and the model layers"):
        with_model(run_from(tmp_path, stages=[3, 2]))
    with pytest.raises(RunFileError, match="context = 25, and the model looks back over 24"):
        with_model(run_from(tmp_path, context=25))


def test_targets_that_the_model_lacks_are_refused_before_weights_are_read(
    tmp_path, monkeypatch
) -> None:
    exported(tmp_path, GROUPED)
    monkeypatch.setattr(Checkpoint, "digest", lambda *_: pytest.fail("weights were read"))
    fields = {"model": {"from": str(tmp_path)}, "training": {"lora": {"targets": ["c_attn"]}}}
    with pytest.raises(RunFileError, match="is called c_attn; this model has q_proj, k_proj"):
        with_model(from_fields(fields))


def test_targets_may_be_in_any_stage_of_a_model_of_unlike_layers(caplog) -> None:
    parts = {
        "source": "theirs",
        "ends": [["embed_tokens.weight", [32, 8]]],
        "block": [["conv.in_proj.weight", [8, 8]]],
        "others": [[["attention.q_proj.weight", [8, 8]], ["experts", [4, 8, 8]]]],
        "kinds": [0, 1],
    }
    model = {"module": "their:model", "layers": 2, "stages": 2, "dim": 8, "heads": 1}
    lora = {"targets": ["q_proj"], "base": "nf4"}
    check_targets(from_fields({"model": model | {"parts": parts}, "training": {"lora": lora}}))
    assert "256 of the 320 values of stage 2 stay as they are" in caplog.text


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"dim": 64}, "model.dim = 64: the model in .* has 48; leave model.dim out"),
        ({"family": "qwen2"}, "model.family = qwen2: the model in .* has llama"),
        ({"vocabulary": 512}, "model.vocabulary = 512: .* has 97"),
    ],
)
def test_a_run_file_does_not_contradict_its_checkpoint(tmp_path, model, why) -> None:
    exported(tmp_path, GROUPED)
    with pytest.raises(RunFileError, match=why):
        with_model(run_from(tmp_path, **model))


def test_a_folder_that_is_elsewhere_is_no_error_once_it_is_known_what_it_holds(tmp_path) -> None:
    exported(tmp_path / "out", GROUPED)
    run = with_model(run_from(tmp_path / "out"))
    shutil.rmtree(tmp_path / "out")
    assert with_model(run) == run
    with pytest.raises(RunFileError, match="there is no such folder"):
        with_model(run_from(tmp_path / "out"))


def test_a_name_on_the_hub_that_cannot_be_had_says_how_to_download_it(monkeypatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RunFileError, match="hf download some/model --local-dir FOLDER"):
        with_model(from_fields({"model": {"from": "some/model"}}))


def test_a_tokenizer_is_a_file_or_in_a_folder_or_on_the_hub(tmp_path, monkeypatch) -> None:
    asked = {}

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked[name] = revision, "*.safetensors" in allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CorpusError, match=r"has no tokenizer\.json.*save_pretrained"):
        find_tokenizer(str(tmp_path))
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    for origin in (str(file), str(tmp_path), "some/model", "another/model@v1.0"):
        assert find_tokenizer(origin) == file
    assert asked == {"some/model": (None, False), "another/model": ("v1.0", False)}
    with pytest.raises(CorpusError, match="--tokenizer nowhere: there is no such file or folder"):
        find_tokenizer("nowhere")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"model.layers.0.block_sparse_moe.gate.weight": torch.ones(2)}, "it has model.layers.0.b"),
        ({"model.norm.weight": torch.ones(48, dtype=torch.float64)}, "model.norm.weight is F64"),
        ({"model.norm.weight": torch.ones(47)}, r"shape \[47\] instead of \[48\]"),
    ],
)
def test_a_checkpoint_with_other_tensors_is_refused(tmp_path, changed, why) -> None:
    exported(tmp_path, GROUPED)
    file = tmp_path / WEIGHTS
    save_file(load_file(file) | changed, file)
    with pytest.raises(UnsupportedModelError, match=why):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("form", ["equal", "other head", "head alone", "compiled", "bf16 head"])
def test_embedding_and_head_are_tied_or_not_as_in_transformers(tmp_path, caplog, form) -> None:
    exported(tmp_path, QWEN2)
    file = tmp_path / WEIGHTS
    tensors = load_file(file) | {"model.rotary_emb.inv_freq": torch.ones(4)}
    embedding = tensors["model.embed_tokens.weight"]
    head = -embedding if form == "other head" else embedding.clone()
    if form == "bf16 head":
        head = tensors["model.embed_tokens.weight"] = embedding.bfloat16()
    tensors["lm_head.weight"] = head.clone()
    if form == "head alone":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    tokens = some_tokens(QWEN2, 24)
    wanted = logits_of(tmp_path, tokens)
    if form == "compiled":  # transformers can't read it
        save_file({f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}, file)
    model = WholeModel.load(tmp_path, torch.device("cpu"))
    assert model.config.tied == (form != "other head")
    assert ("both are kept, untied" in caplog.text) != model.config.tied
    torch.testing.assert_close(model.logits(tokens), wanted, rtol=0, atol=1e-4)
    run = with_model(run_from(tmp_path))
    assert run.model.tied == model.config.tied


def test_of_two_models_in_a_folder_it_is_the_one_that_transformers_takes(tmp_path, caplog) -> None:
    exported(tmp_path, GROUPED, most=100_000)
    older = Checkpoint.open(tmp_path).places
    newer = {name: torch.ones(place.shape) for name, place in older.items()}
    save_file(newer, tmp_path / WEIGHTS, metadata={"format": "pt"})
    assert Checkpoint.open(tmp_path).read("model.norm.weight").sum() == 48
    assert "has model.safetensors and model.safetensors.index.json: model.safet" in caplog.text


def as_file(header: dict[str, Any], content: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + content


def tensor(first: int, last: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"abc", "is cut off after 3 of "),
        (b"version https://git-lfs.github.com/spec/v1\nsize 9\n", "is a Git LFS pointer, not"),
        (b"<!doctype html><html></html>", "is not a safetensors file"),
        (as_file({"a": tensor(0, 800, 200)}, bytes(100)), "is cut off after 173 of 873 bytes"),
        (as_file({"a": tensor(0, 8, 2), "b": tensor(0, 8, 2)}, bytes(8)), "is damaged: "),
        (as_file({"a": tensor(4, 12, 2)}, bytes(12)), "offset for tensor `a`"),
        (as_file({"a": tensor(0, 8, 2)}, bytes(12)), "is damaged: .* not fully covered"),
        (as_file({"a": tensor(0, 8, 3)}, bytes(8)), "is damaged: .* invalid shape"),
        (as_file({"a": 3}, b""), "TypeError|'int' object"),
        ((8).to_bytes(8, "little") + b"[" * 8, "has no readable model"),
        ((1 << 20).to_bytes(8, "little") + b"[" * (1 << 20), "has no readable model"),
    ],
)
def test_a_file_that_is_not_whole_is_refused_and_how_to_mend_it(tmp_path, content, why) -> None:
    exported(tmp_path, GROUPED)
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=why) as caught:
        Checkpoint.open(tmp_path)
    if "has no readable model" not in str(caught.value):
        assert f"hf download ORG/NAME --local-dir {tmp_path}" in str(caught.value)


def test_a_shard_that_is_missing_or_no_file_is_named(tmp_path) -> None:
    exported(tmp_path, GROUPED, most=100_000)
    shard = next(tmp_path.glob("model-00002-*"))
    shard.unlink()
    with pytest.raises(UnsupportedModelError, match=f"{shard} is missing: "):
        Checkpoint.open(tmp_path)
    os.mkfifo(shard)
    with pytest.raises(UnsupportedModelError, match=f"{shard} is no regular file: "):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_hidden_layers": 10**9}, "says 1,000,000,000 layers, and it has 57 tensors"),
        ({"num_attention_heads": 10**30}, "num_attention_heads = 10{30} is more than 1073741824"),
        ({"num_attention_heads": 10**9 + 7, "num_key_value_heads": 2}, "be a multiple of kv_h"),
        ({"max_position_embeddings": 10**12}, "is more than 1073741824"),
        ({"padding": "x" * (16 << 20)}, "has more than 16777216 bytes"),
    ],
)
def test_a_config_of_absurd_size_is_refused_at_once(tmp_path, fields, why) -> None:
    exported(tmp_path, GROUPED)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(UnsupportedModelError, match=why):
        Checkpoint.open(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UnsupportedModelError, match="it is no regular file"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, value) -> None:
    exported(tmp_path, GROUPED)
    set_value(tmp_path, "model.layers.4.mlp.up_proj.weight", value)
    why = r"model\.layers\.4\.mlp\.up_proj\.weight has values that aren't finite"
    with pytest.raises(RunFileError, match=why):
        with_model(run_from(tmp_path))


def test_pickled_weights_are_refused(tmp_path) -> None:
    exported(tmp_path, GROUPED)
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pickled.* save it with save_pretrained"):
        Checkpoint.open(tmp_path)


def test_the_data_has_to_be_prepared_with_its_tokenizer(data, tmp_path) -> None:
    model = tmp_path / "model"
    corpus = Corpus.open(data)
    config = replace(GROUPED, vocabulary=corpus.vocabulary + 7)
    exported(model, config)
    run = from_fields({"model": {"from": str(model)}, "data": {"path": str(data)}})
    with pytest.raises(CorpusError, match=r"has no tokenizer\.json.*save_pretrained"):
        resolve(run)
    shutil.copy(data / "tokenizer.json", model)
    resolved = resolve(run)
    assert resolved.model.vocabulary == corpus.vocabulary + 7
    assert resolve(resolved) == resolved
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(tokenizer, indent=3))
    assert resolve(run) == resolved  # the same tokenizer, written anew
    tokenizer["model"]["merges"].pop()
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CorpusError, match=r"another tokenizer than that of .* --tokenizer"):
        resolve(run)


def test_a_tokenizer_larger_than_the_model_is_refused_by_the_tokens_that_are_too_many(
    data, tmp_path
) -> None:
    exported(tmp_path / "model", replace(GROUPED, vocabulary=510))
    shutil.copy(data / "tokenizer.json", tmp_path / "model")
    run = from_fields({"model": {"from": str(tmp_path / "model")}, "data": {"path": str(data)}})
    names = [Corpus.open(data).tokenizer().id_to_token(token) for token in (510, 511)]
    why = rf"512 tokens, 2 more than .* = 510\): {names[0]} \(510\), {names[1]} \(511\)\. .*\(512\)"
    with pytest.raises(CorpusError, match=why):
        resolve(run)

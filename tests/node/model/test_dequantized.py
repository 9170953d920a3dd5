"""Quantized checkpoints, compared with what transformers and bitsandbytes read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from planaria.node.hugging_face.begin_from_model import with_model
from planaria.node.model import checkpoint as module
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.model.config import UnsupportedModelError
from planaria.node.run_file import from_fields
from planaria.node.stage.initial import InitialStages
from tests.node.hugging_face.test_adapters import write
from tests.node.model.test_decoder import saved

if TYPE_CHECKING:  # loading it takes seconds, at each worker
    from transformers import LlamaConfig

Q, NORM = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.input_layernorm.weight"


def llama() -> LlamaConfig:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )


def plain(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    from transformers import LlamaForCausalLM

    torch.manual_seed(3)
    LlamaForCausalLM(llama()).to(dtype).save_pretrained(folder)
    return folder


def quantized(folder: Path, dtype: torch.dtype, **how: Any) -> dict[str, torch.Tensor]:
    """Save a model that bitsandbytes has quantized. Returns its dequantized matrices."""
    from bitsandbytes import functional
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    source = plain(folder / "plain", dtype)
    how = {"llm_int8_skip_modules": ["lm_head"], **how}
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, device_map="cpu", quantization_config=BitsAndBytesConfig(**how)
    )
    model.save_pretrained(folder)
    matrices = {}
    for name, part in model.named_parameters():
        if (state := getattr(part, "quant_state", None)) is not None:
            shape = state.shape
            # bitsandbytes 0.50.2 errs with rows of 160.
            state.shape = torch.Size((shape.numel() // 64, 64))
            matrices[name] = functional.dequantize_4bit(part.data, state).view(shape)
        elif getattr(part, "SCB", None) is not None:
            matrices[name] = functional.int8_vectorwise_dequant(part.data, part.SCB)
    return matrices


@pytest.mark.parametrize(
    ("kind", "double", "dtype"),
    [("nf4", True, torch.float32), ("nf4", False, torch.bfloat16), ("fp4", True, torch.float16)],
)
def test_four_bits_are_those_of_bitsandbytes(tmp_path, monkeypatch, kind, double, dtype) -> None:
    how = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double}
    matrices = quantized(tmp_path, dtype, load_in_4bit=True, **how)
    assert len(matrices) == 14
    monkeypatch.setattr(module, "CHUNK", 4096)
    monkeypatch.setattr("planaria.node.model.dequantized.CHUNK", 4096)
    same_as(tmp_path, matrices)


def test_int8_is_that_of_bitsandbytes(tmp_path) -> None:
    matrices = quantized(tmp_path, torch.float16, load_in_8bit=True)
    assert len(matrices) == 14
    same_as(tmp_path, matrices)


def same_as(folder: Path, matrices: dict[str, torch.Tensor]) -> None:
    """Compare the folder's tensors, bit for bit, with these, or else with those in its file."""
    checkpoint, others = Checkpoint.open(folder), load_file(folder / "model.safetensors")
    for name in checkpoint.names:
        wanted = matrices.get(name, others.get(name))
        values = torch.from_numpy(checkpoint.read(name)).view(wanted.shape)
        assert torch.equal(values, wanted.float()), name


def in_fp8(
    folder: Path, scales: dict[str, tuple[str, tuple[int, int] | None]]
) -> dict[str, torch.Tensor]:
    """Convert matrices of a plain model's layers to FP8, and return their values. `scales` has the
    scales' name and the block (None: the whole matrix), by a part of the matrix's name."""
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors, matrices = load_file(file), {}
    for name in [name for name in tensors if ".layers." in name and tensors[name].dim() == 2]:
        part, block = next((how for end, how in scales.items() if end in name), ("", None))
        if not part:
            continue
        rows, columns = tensors[name].shape
        high, wide = block or (rows, columns)
        codes = (tensors[name].float() * 999).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-rows // high), -(-columns // wide)) / 999
        of_values = torch.kron(scale, torch.ones(high, wide))[:rows, :columns]
        matrices[name] = codes.float() * of_values
        tensors[name] = codes
        tensors[name.removesuffix("weight") + part] = scale if block else scale.view(1)
    save_file(tensors, file, {"format": "pt"})
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    if any(part == "weight_scale" for part, _ in scales.values()):
        method = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    settings = json.loads(config.read_text()) | {"quantization_config": method}
    config.write_text(json.dumps(settings))
    return matrices


BLOCKS: dict[str, tuple[str, tuple[int, int] | None]] = {"_proj": ("weight_scale_inv", (128, 128))}


def test_blocks_in_fp8_are_scaled(tmp_path) -> None:
    same_as(plain(tmp_path), in_fp8(tmp_path, BLOCKS))
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.gate_proj"
    tensors = load_file(file)
    codes = tensors[f"{name}.weight"].view(torch.uint8)
    codes[0, 0], codes[130, 3] = 0x3C, 0xC4  # 1.5 and -3 in the first and the second block
    tensors[f"{name}.weight_scale_inv"] = torch.tensor([[0.25], [0.5]])
    save_file(tensors, file)
    values = Checkpoint.open(tmp_path).read(f"{name}.weight").reshape(160, 64)
    assert (values[0, 0], values[130, 3]) == (0.375, -1.5)


def test_rows_or_the_whole_of_compressed_tensors_are_scaled(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("planaria.node.model.dequantized.CHUNK", 1000)
    same_as(
        plain(tmp_path),
        in_fp8(tmp_path, {"up_proj": ("weight_scale", (1, 160)), "q_proj": ("weight_scale", None)}),
    )


def test_a_run_from_quantized_weights_loads_the_same_bits_and_exports_a_plain_model(
    tmp_path,
) -> None:
    quantized(tmp_path / "base", torch.bfloat16, load_in_4bit=True, bnb_4bit_use_double_quant=True)
    fields = {"model": {"from": str(tmp_path / "base"), "stages": 2, "context": 24}}
    run = with_model(from_fields(fields | {"training": {"lora": {"rank": 4, "base": "nf4"}}}))
    checkpoint = Checkpoint.open(tmp_path / "base")
    for stage in range(3):  # this checks the digest in the run
        InitialStages(run, run.config, checkpoint).stage(stage)
    write(tmp_path / "out", run, True)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    merged, (_, kept) = (
        Checkpoint.open(tmp_path / "out"),
        checkpoint.base_words(run.config, 2, NORM),
    )
    assert (merged.read(NORM) == kept).all()
    assert merged.places[Q].kind == "F32"


def test_stages_of_transformers_have_the_dequantized_weights(tmp_path) -> None:
    saved(tmp_path / "base", "mixtral")
    matrices = in_fp8(tmp_path / "base", BLOCKS | {".w": ("weight_scale_inv", (128, 128))})
    assert any(".experts.3." in name for name in matrices)
    shutil.copytree(tmp_path / "base", tmp_path / "plain")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    whole = {n: matrices.get(n, t) for n, t in tensors.items() if "scale" not in n}
    save_file(whole, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    ours, wanted = Checkpoint.open(tmp_path / "base"), Checkpoint.open(tmp_path / "plain")
    assert ours.config == wanted.config
    for name in wanted.names:
        assert (ours.read(name) == wanted.read(name)).all(), name


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_other_quantizations_are_refused_by_name(tmp_path, method, kind) -> None:
    settings = {"model_type": kind, "quantization_config": {"quant_method": method, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(llama().to_dict() | settings))
    with pytest.raises(UnsupportedModelError, match=f"by {method}.* download the model that it"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "why"),
    [
        (f"{Q}.absmax", lambda part: part[1:], "'absmax': 63"),
        (f"{Q}.quant_map", None, "'quant_map': 16"),
        (Q, lambda part: part[:-1], "'codes': 2047"),
        (f"{Q}.quant_state.bitsandbytes__nf4", lambda part: part[:-1], "no readable model"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, part, change, why) -> None:
    quantized(tmp_path, torch.bfloat16, load_in_4bit=True, bnb_4bit_quant_type="nf4")
    tensors = load_file(tmp_path / "model.safetensors")
    changed = tensors.pop(part)
    if change:
        tensors[part] = change(changed).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=why):
        Checkpoint.open(tmp_path)


def test_another_order_than_rows_is_refused(tmp_path) -> None:
    quantized(tmp_path, torch.float16, load_in_8bit=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{Q}_format"] = torch.tensor(1, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="isn't stored by rows"):
        Checkpoint.open(tmp_path)


def test_scales_that_do_not_fit_are_refused(tmp_path) -> None:
    in_fp8(plain(tmp_path), {"q_proj": ("weight_scale_inv", (64, 16))})
    with pytest.raises(UnsupportedModelError, match="'scales': 4"):
        Checkpoint.open(tmp_path)

"""`config.json`: the shape of a model as Hugging Face's transformers has it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

from planaria.bootstrap.errors import UserError
from planaria.bootstrap.files import read_small
from planaria.node.model.shape import BIASES, Family, ModelConfig, RopeScaling, RopeType

log = logging.getLogger("planaria")

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
ORIGINAL: Final = "original_max_position_embeddings"
ALWAYS: Final[dict[str, Any]] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
}
"""Values common to all supported models."""
OF_FAMILY: Final[dict[Family, dict[str, Any]]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "pretraining_tp": 1},
    "mistral": {"architectures": ["MistralForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False},
}
"""Values common to all models of a family."""
DEFAULTS: Final[dict[Family, dict[str, Any]]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {"max_position_embeddings": 32_768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128},
}
"""Defaults of missing keys (transformers 5.23)."""
HARMLESS: Final = ("architectures", "initializer_range", "pretraining_tp", "use_cache")
"""Keys of these that don't affect the model's output."""
IGNORED: Final = ("attention_dropout",)
"""Keys that affect only training, and are ignored."""
NEVER: Final = (
    *("num_experts", "num_local_experts"),
    "transformers_weights",  # weights in a file of another name
)
"""Keys of unsupported features."""
READ: Final = ("bitsandbytes", "fp8", "compressed-tensors float-quantized")
"""Quantizations that are read (dequantized.py)."""
SUPPORTED: Final = (
    "supported are llama (LLaMA 2 and 3, TinyLlama, SmolLM2), mistral, qwen2 and qwen3, as Hugging "
    "Face's model_type has them, without experts"
)
FIGURES: Final = (
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "sliding_window"),
)
LARGEST: Final = 2**30
"""Upper limit of each of FIGURES."""
YARN: Final = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Optional figures of a YaRN RoPE."""
NO_SENSE: Final = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Exceptions from reading malformed JSON, or figures such as Infinity or 0."""


class UnsupportedModelError(UserError):
    """Error of a checkpoint that can't be used; the message names the unsupported feature."""


def check_not_adapters(folder: Path) -> None:
    """Check that a folder hasn't adapters only. Raises UnsupportedModelError."""
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file():
        raise UnsupportedModelError(
            f"{folder} has adapters but no model: `planaria export --merged` writes a model "
            "that includes them"
        )


def unread_quantization(content: dict[str, Any]) -> str:
    """Why a config.json's quantized weights can't be read; empty: they can, or aren't quantized."""
    if not (quantization := content.get("quantization_config")):
        return ""
    method = str(quantization.get("quant_method"))
    if method == "compressed-tensors":
        method += f" {quantization.get('format')}"
    if method in READ:
        return ""
    return (
        f"quantization_config = {json.dumps(quantization)[:80]}: its weights are quantized by "
        f"{method}, and only {', '.join(READ)} can be read: download the model that it was made "
        "from, which training.lora.base = nf4 or int8 quantizes as it is read"
    )


def is_quantized(folder: Path) -> bool:
    """Whether the weights in a model's folder are quantized already."""
    return bool(_content_of(folder).get("quantization_config"))


def needs_transformers(folder: Path) -> bool:
    """Whether the folder's model is of a named family that planaria has no modules for."""
    kind = _content_of(folder).get("model_type")
    return isinstance(kind, str) and kind not in get_args(Family)


def _content_of(folder: Path) -> dict[str, Any]:
    """The folder's config.json; empty where it can't be read, which is reported later."""
    try:
        return read_json(folder / CONFIG)
    except (OSError, *NO_SENSE):
        return {}


def to_config(config: ModelConfig, dtype: str, end_of_document: int | None) -> dict[str, Any]:
    """The content of a model's `config.json`; `dtype`: float32 or bfloat16. It has the names of
    transformers 5 (dtype, rope_parameters) and the earlier ones (torch_dtype, rope_theta). An own
    architecture's config is for its code only."""
    if config.own is not None and config.own.decoder:
        content = json.loads(config.own.decoder)
        mask = {"attn_mask_type": config.attn_mask_type} if config.block_causal else {}
        end = content.get("eos_token_id") if end_of_document is None else end_of_document
        return {**content, **mask, "dtype": dtype, "torch_dtype": dtype, "eos_token_id": end}
    if config.own is not None:
        figures = ("vocabulary", "dim", "heads", "kv_heads", "layers", "hidden", "context")
        code = {"planaria_module": config.own.module, "source": config.own.source}
        return {**code, "dtype": dtype, **{name: getattr(config, name) for name in figures}}
    scaling = None if config.rope_scaling is None else config.rope_scaling.figures
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta}
    content = {
        "bos_token_id": None,
        "dtype": dtype,
        "eos_token_id": end_of_document,
        "head_dim": config.head_dim,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.positions or config.context,
        "model_type": config.family,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "pad_token_id": None,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "rope_scaling": scaling,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "torch_dtype": dtype,
        "vocab_size": config.vocabulary,
    }
    content |= {name: getattr(config, name) for name in BIASES[config.family]}
    match config.family:
        case "mistral":
            content["sliding_window"] = config.window
        case "qwen2" | "qwen3":
            content["layer_types"] = ["full_attention"] * config.layers
            content["max_window_layers"] = config.layers
            content["sliding_window"] = None
    if config.block_causal:  # not in transformers, so written only if needed
        content["attn_mask_type"] = config.attn_mask_type
    return ALWAYS | OF_FAMILY[config.family] | content


def read_config(folder: Path) -> ModelConfig:
    """The model of a folder's config.json, with one body stage and its maximum context. Raises
    UnsupportedModelError, OSError."""
    path = folder / CONFIG
    try:
        content = read_json(path)
        if module := content.get("planaria_module"):
            raise UnsupportedModelError(
                f"{path}: this model needs its own code, {module}: docs/own-architecture.md says "
                "how to load it; for a running swarm use --join"
            )
        family: Any = content.get("model_type")
        if family not in get_args(Family):
            raise UnsupportedModelError(
                f"{path}: not supported here: model_type = {json.dumps(family)}; {SUPPORTED}"
            )
        if unsupported := _unsupported_features(content, family):
            raise UnsupportedModelError(
                f"{path}: not supported here: {'; '.join(unsupported)}; {SUPPORTED}"
            )
        for key in IGNORED:
            if content.get(key):
                log.warning("%s: %s = %s is ignored", path, key, content[key])
        if "max_position_embeddings" not in content:
            positions = DEFAULTS[family]["max_position_embeddings"]
            log.warning("%s has no max_position_embeddings: %d is assumed", path, positions)
        return _model_config(DEFAULTS[family] | content, family)
    except NO_SENSE as error:
        raise UnsupportedModelError(
            f"{path} can't be read as a model's config: {type(error).__name__}: {error}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of at most 16 MiB. Raises OSError and NO_SENSE."""
    content = json.loads(read_small(path))
    if not isinstance(content, dict):
        raise TypeError(f"{path.name} is not a JSON object")
    return content


def _unsupported_features(content: dict[str, Any], family: Family) -> list[str]:
    """Features of a config.json that aren't supported, in words."""
    usual = ALWAYS | OF_FAMILY[family]
    unsupported = [
        f"{key} = {json.dumps(content[key])}"
        for key, value in usual.items()
        if key not in HARMLESS + IGNORED and (content.get(key, value) or value) != value
    ]
    unsupported += [f"{key} = {json.dumps(content[key])[:80]}" for key in NEVER if content.get(key)]
    if why := unread_quantization(content):
        unsupported.append(why)
    if "sliding_attention" in (content.get("layer_types") or ()):
        unsupported.append("layers with a sliding window beside others")
    rope = _rope_parameters(content)
    if (kind := rope["rope_type"]) not in ("default", *get_args(RopeType)):
        unsupported.append(f"RoPE scaled ({kind})")
    if any(isinstance(value, dict) for value in rope.values()):
        unsupported.append("RoPE of several kinds")
    part = rope.get("partial_rotary_factor", content.get("partial_rotary_factor")) or 1
    if part != 1:
        unsupported.append(f"RoPE of a part of each head (partial_rotary_factor = {part})")
    return unsupported


def _rope_parameters(content: dict[str, Any]) -> dict[str, Any]:
    """A config.json's RoPE parameters with `rope_type` and `rope_theta`, from either version's
    keys, with the precedence of transformers 5.23."""
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", content.get("rope_theta", 10_000.0))
    return {**rope, "rope_type": kind, "rope_theta": theta}


def _rope_scaling(content: dict[str, Any]) -> RopeScaling | None:
    """A config.json's RoPE scaling; None: none. Raises KeyError, TypeError, ValueError."""
    rope, kind = _rope_parameters(content), _rope_parameters(content)["rope_type"]
    if kind == "default":
        return None
    factor = rope["factor"]
    if kind in ("linear", "dynamic"):
        return RopeScaling(kind, float(factor))
    positions = content["max_position_embeddings"]
    original = content.get(ORIGINAL, rope.get(ORIGINAL, positions))
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return RopeScaling(kind, float(factor), int(original), low, high)
    factor = positions / original if factor is None else factor
    figures = {name: float(rope[name]) for name in YARN if rope.get(name)}  # 0 is the default
    truncate = None if rope.get("truncate", True) else False
    return RopeScaling(kind, float(factor), int(original), truncate=truncate, **figures)


def _model_config(content: dict[str, Any], family: Family) -> ModelConfig:
    """The ModelConfig of a config.json. Raises KeyError, TypeError, ValueError."""
    positions = int(content["max_position_embeddings"])
    for name in FIGURES:
        if int(content.get(name) or 0) > LARGEST:
            raise ValueError(f"{name} = {content[name]} is more than {LARGEST}")
    heads, dim = int(content["num_attention_heads"]), int(content["hidden_size"])
    width = content.get("head_dim")
    window = content["sliding_window"] if family == "mistral" else None
    config = ModelConfig(
        vocabulary=int(content["vocab_size"]),
        dim=dim,
        heads=heads,
        kv_heads=int(content.get("num_key_value_heads") or heads),
        layers=int(content["num_hidden_layers"]),
        stages=1,
        context=min(positions, window or positions),
        hidden=int(content["intermediate_size"]),
        rope_theta=float(_rope_parameters(content)["rope_theta"]),
        norm_eps=float(content.get("rms_norm_eps", 1e-6)),
        learning_rate=1.0,
        family=family,
        tied=bool(content.get("tie_word_embeddings", False)),
        width_of_head=None if width in (None, dim / heads) else int(width),
        positions=positions,
        window=window,
        rope_scaling=_rope_scaling(content),
        attn_mask_type="block_causal"
        if content.get("attn_mask_type") == "block_causal"
        else "causal",
    )
    reach = config.reach or positions
    biases: dict[str, Any] = {name: bool(content.get(name)) for name in BIASES[family]}
    return replace(config, context=min(reach, window or reach), **biases)


def special_token_ids(folder: Path) -> dict[str, Any]:
    """Ids of special tokens in a folder's config.json. Raises OSError."""
    content = read_json(folder / CONFIG)
    return {key: content.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def read_stop_tokens(folder: Path) -> list[int]:
    """Stop tokens of transformers' `generate`: those of generation_config.json, else of
    config.json. Raises UnsupportedModelError."""
    files = [folder / name for name in (GENERATION_CONFIG, CONFIG)]
    return next((ids for file in files if file.is_file() and (ids := _eos_ids(file))), [])


def _eos_ids(file: Path) -> list[int]:
    """The `eos_token_id` of a JSON file as a list. Raises UnsupportedModelError."""
    try:
        ids = read_json(file).get("eos_token_id")
    except (OSError, *NO_SENSE) as error:
        raise UnsupportedModelError(f"{file} can't be read: {error}") from error
    return [token for token in (ids if isinstance(ids, list) else [ids]) if type(token) is int]

"""`config.json`: the shape of a model as Hugging Face's transformers has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planaria.node.stage.shape import ModelConfig

CONFIG = "config.json"
ALWAYS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "tie_word_embeddings": False,
    "use_cache": True,
}
"""What is so in each of our models."""


class UnsupportedModelError(Exception):
    """A checkpoint that can't be used here; the message says what it has that we don't."""


def to_config(config: ModelConfig, dtype: str, end_of_document: int | None) -> dict[str, Any]:
    """What `config.json` says; `dtype`: float32 or bfloat16. Transformers reads the names of its
    version 5 (dtype, rope_parameters), others those before (torch_dtype, rope_theta)."""
    return ALWAYS | {
        "bos_token_id": None,
        "dtype": dtype,
        "eos_token_id": end_of_document,
        "head_dim": config.head_dim,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.context,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "pad_token_id": None,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "torch_dtype": dtype,
        "vocab_size": config.vocabulary,
    }


def read_config(folder: Path) -> ModelConfig:
    """Of a model with one body stage, whatever it was trained with. Raises UnsupportedModelError,
    OSError."""
    path = folder / CONFIG
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
        theta = rope.get("rope_theta", said.get("rope_theta", 10_000.0))
        strange = [
            f"{key} = {json.dumps(said[key])}"
            for key, value in ALWAYS.items()
            if key not in ("architectures", "initializer_range", "pretraining_tp", "use_cache")
            and said.get(key, value) != value
        ]
        if (scaling := rope.get("rope_type", rope.get("type", "default"))) != "default":
            strange.append(f"RoPE scaled ({scaling})")
        heads, dim = int(said["num_attention_heads"]), int(said["hidden_size"])
        if (head_dim := said.get("head_dim") or dim // heads) != dim // heads:
            strange.append(f"head_dim = {head_dim}, not {dim} / {heads}")
        if strange:
            raise UnsupportedModelError(f"{path}: not supported here: {'; '.join(strange)}")
        return ModelConfig(
            vocabulary=int(said["vocab_size"]),
            dim=dim,
            heads=heads,
            kv_heads=int(said.get("num_key_value_heads") or heads),
            layers=int(said["num_hidden_layers"]),
            stages=1,
            context=int(said["max_position_embeddings"]),
            hidden=int(said["intermediate_size"]),
            rope_theta=float(theta),
            norm_eps=float(said.get("rms_norm_eps", 1e-6)),
            learning_rate=1.0,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{path} is no model's: {type(error).__name__}: {error}"
        ) from error


def read_end(folder: Path) -> int | None:
    """The token that ends a document; None where the model has none. Raises
    UnsupportedModelError."""
    path = folder / CONFIG
    try:
        end = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path} can't be read: {error}") from error
    return end if isinstance(end, int) else None

"""Small models of several families, in which few sizes are equal."""

from __future__ import annotations

from dataclasses import replace

from planaria.node.model.shape import ModelConfig, RopeScaling

GROUPED = ModelConfig(
    vocabulary=97,
    dim=48,
    heads=6,
    kv_heads=2,
    layers=6,
    stages=3,
    context=24,
    hidden=80,
    rope_theta=500.0,
    norm_eps=1e-5,
    learning_rate=1e-3,
)
MULTI_HEAD = replace(GROUPED, kv_heads=6, rope_theta=10_000.0)
LLAMA3 = replace(GROUPED, tied=True, positions=96, rope_scaling=RopeScaling("llama3", 8, 8, 1, 4))
BIASED = replace(GROUPED, attention_bias=True, mlp_bias=True)
MISTRAL = replace(GROUPED, family="mistral", window=24, positions=96)
QWEN2 = replace(GROUPED, family="qwen2", tied=True, norm_eps=1e-6)
QWEN3 = replace(GROUPED, family="qwen3", width_of_head=16, rope_theta=1e6)
FAMILIES = {
    "multi-head": MULTI_HEAD,
    "grouped-query": GROUPED,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "llama with biases": BIASED,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}

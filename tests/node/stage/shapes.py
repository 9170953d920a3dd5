"""Shapes of models whose every number is another."""

from __future__ import annotations

from dataclasses import replace

from planaria.node.stage.shape import ModelConfig

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

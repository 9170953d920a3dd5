"""GPT-2 (Radford et al. 2019) as an architecture of a run's own: learned positions, LayerNorm with
biases, GELU, and a head that is the embedding once more.

    planaria up examples/gpt2.toml
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from planaria.node.model.shape import ModelConfig


class Ends(nn.Module):
    """Token and position embeddings, the last norm, and the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocabulary, config.dim)
        self.wpe = nn.Embedding(config.context, config.dim)
        self.ln_f = nn.LayerNorm(config.dim)

    def embed(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.wte(tokens) + self.wpe(positions)
        return x

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(self.ln_f(x), self.wte.weight)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.ln_1 = nn.LayerNorm(config.dim)
        self.c_attn = nn.Linear(config.dim, 3 * config.dim)
        self.attn_proj = nn.Linear(config.dim, config.dim)
        self.ln_2 = nn.LayerNorm(config.dim)
        self.c_fc = nn.Linear(config.dim, 4 * config.dim)
        self.mlp_proj = nn.Linear(4 * config.dim, config.dim)
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.c_attn(self.ln_1(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, T, dim / heads]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))
        return out


class GPT2:
    def __init__(self, config: ModelConfig) -> None:
        if config.dim % config.heads:
            raise ValueError(f"dim = {config.dim} is no multiple of heads = {config.heads}")
        self.config = config

    def ends(self) -> nn.Module:
        return Ends(self.config)

    def block(self, layer: int) -> nn.Module:
        return Block(self.config)

    def deviation(self, name: str, shape: tuple[int, ...]) -> float:
        if len(shape) == 1:  # norms start at 1, biases at 0, as they are made
            return 0.0
        residual = name.endswith("_proj.weight")
        return 0.02 / (2 * self.config.layers) ** 0.5 if residual else 0.02


def build(config: ModelConfig) -> GPT2:
    return GPT2(config)

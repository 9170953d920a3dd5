"""A residual stream in a subspace, which reduces the traffic between stages.

A token's features are a fixed embedding plus `rank` figures times a fixed basis. Trained layers
write into the stream through the basis. The trained embedding and the projections out of attention
and MLP have `rank` features in place of `dim`. So the figures and the token's id are sent, without
loss, and backwards the gradients of the figures. A boundary has no weights that can be lost. See
Subspace Networks (arXiv 2506.01260), whose basis is drawn likewise. Theirs moves with the
gradients, and their last block writes into all of the stream, which here would be sent to the head.

Basis and embedding are a function of the model's figures, not of the run's seed: the configuration
suffices to compute them. The id is sent as DIGITS digits to the base BASE, which bf16 and fp16
represent exactly.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

from planaria.node.model.shape import DIGITS, ModelConfig

BASE: Final = 256
SPREAD: Final = 0.02
"""Standard deviation of the fixed embedding's features: that of LLaMA's initial weights."""


class Subspace(nn.Module):
    """A subspace's basis and fixed embedding, buffers that are neither trained nor saved."""

    def __init__(self, vocabulary: int, dim: int, rank: int) -> None:
        super().__init__()
        self.basis: Tensor = nn.Buffer(basis(dim, rank), persistent=False)
        self.embedding: Tensor = nn.Buffer(embedding(vocabulary, dim), persistent=False)

    @property
    def rank(self) -> int:
        return len(self.basis)

    def with_digits(self, tokens: Tensor, figures: Tensor) -> Tensor:
        """Append the digits of tokens int64 [B, T] to figures float [B, T, rank], for a boundary:
        float [B, T, rank + DIGITS]."""
        powers = BASE ** torch.arange(DIGITS, device=tokens.device)
        digits = tokens[..., None] // powers % BASE
        return torch.cat((figures, digits.to(figures.dtype)), dim=-1)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split a boundary's float [B, T, rank + DIGITS] into figures, the tokens' fixed features
        [B, T, dim], and the digits. An invalid id counts as the nearest valid one."""
        figures, digits = x[..., : self.rank], x[..., self.rank : self.rank + DIGITS]
        powers = BASE ** torch.arange(DIGITS, device=x.device)
        tokens = (digits.detach().round().long() * powers).sum(-1)
        valid = tokens.clamp(0, len(self.embedding) - 1)
        return figures, F.embedding(valid, self.embedding), digits

    def stream(self, figures: Tensor, fixed: Tensor) -> Tensor:
        """The residual stream of these figures, float [B, T, dim]."""
        return torch.addmm(fixed.flatten(0, 1), figures.float().flatten(0, 1), self.basis).view_as(
            fixed
        )

    def folded(self, name: str, weight: Tensor) -> Tensor:
        """A parameter as that of a model without the subspace, by transformers' name for it: with
        all of them folded, the model is plain LLaMA."""
        folded: Tensor = weight
        if name.endswith("embed_tokens.weight"):
            folded = self.embedding + weight @ self.basis
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            folded = self.basis.mT @ weight
        return folded


def subspace_of(config: ModelConfig) -> Subspace | None:
    """The model's subspace, on the CPU; None: it writes into all of its stream."""
    if config.subspace is None:
        return None
    with torch.device("cpu"):
        return Subspace(config.vocabulary, config.dim, config.subspace)


@lru_cache(maxsize=4)
def basis(dim: int, rank: int) -> Tensor:
    """The subspace's basis: orthonormal rows, float32 [rank, dim] on the CPU."""
    q, r = torch.linalg.qr(_normal((dim, rank), b"basis"))
    rows: Tensor = (q * r.diagonal().sign()).T.contiguous().float()
    return rows


@lru_cache(maxsize=4)
def embedding(vocabulary: int, dim: int) -> Tensor:
    """The tokens' fixed embedding, float32 [vocabulary, dim] on the CPU."""
    return (SPREAD * _normal((vocabulary, dim), b"embedding")).float()


def _normal(shape: tuple[int, int], purpose: bytes) -> Tensor:
    """Seeded normals in float64: rounded, they are the same with all instruction sets."""
    seed = xxhash.xxh3_64_intdigest(purpose + struct.pack("<QQ", *shape))
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

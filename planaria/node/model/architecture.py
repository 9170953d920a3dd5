"""Interface of a run's own architecture, which `[model] module = "package.module:build"` names.

    def build(config: ModelConfig) -> Architecture

`config` has `vocabulary`, `dim`, `context` (tokens a sample), `layers` and all else that `[model]`
says, with the preset's figures as defaults. `examples/gpt2.py` is an example. An architecture needs
nothing of planaria but this.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn


class Ends(Protocol):
    """Interface of stage 0 of an own architecture, an `nn.Module`. An optional `loss(x, targets)`
    returns the sum of the tokens' losses in nats, a float32 scalar. x is [B, T, dim], targets int64
    [B, T], -100 where none is scored. Default: cross-entropy."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed int64 [B, T], T at most the context, as float [B, T, dim]."""

    def logits(self, x: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] of the last block's output, float [B, T, dim]."""


class Architecture(Protocol):
    """Builder of an own architecture's layers and ends, in float32. Each is built repeatedly, also
    on other machines and on torch's meta device, and must be the same each time."""

    def ends(self) -> nn.Module:
        """Build an Ends. Shared parameters (tied embeddings) are one, by the first name."""

    def block(self, layer: int) -> nn.Module:
        """Build one of the layers 0 to config.layers - 1, a map of float [B, T, dim].

        Parameters have the same names and shapes in all layers, in the same order. So a lost stage
        can be estimated from its neighbours' weights.
        """

    def deviation(self, name: str, shape: tuple[int, ...]) -> float:
        """Standard deviation of the initial normal distribution of the parameter `name` of a block,
        or of the ends. 0 keeps the constructor's values. That is for ones and zeros: random ones
        may differ between kinds of processors."""

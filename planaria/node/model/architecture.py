"""What an architecture of the run's own is, which `[model] module = "package.module:build"` names.

    def build(config: ModelConfig) -> Architecture

`config` has `vocabulary`, `dim`, `context` (tokens a sample), `layers` and whatever else `[model]`
says, with the preset's figures where it doesn't. An example is `examples/gpt2.py`; whoever writes
one needs nothing of planaria's but this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor, nn

from planaria.node.model.shape import ModelConfig


class Ends(Protocol):
    """Stage 0, an `nn.Module`. If it has `loss(x, targets)` too, that is taken: the sum of the
    tokens' losses in nats, a float32 scalar, of x [B, T, dim] and targets int64 [B, T], -100 where
    none is scored; without one it is the cross-entropy of the logits."""

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [B, T], T at most the context, to float [B, T, dim]."""

    def logits(self, x: Tensor) -> Tensor:
        """Float [B, T, dim], as the last block leaves it, to [B, T, vocabulary]."""


class Architecture(Protocol):
    """Its parameters are float32. The same layer or end is built more than once, on other machines
    too, and on torch's meta device, on which it is tried, too; each time it is the same."""

    def ends(self) -> nn.Module:
        """Ends. Parameters may be shared (tied embeddings): they are one, by the first name."""

    def block(self, layer: int) -> nn.Module:
        """Of the layers 0 to config.layers - 1: float [B, T, dim] to the same.

        Parameters have the same names and shapes in all layers, in the same order. So all body
        stages are alike, and one that is lost can be made of its neighbours' weights.
        """

    def deviation(self, name: str, shape: tuple[int, ...]) -> float:
        """Standard deviation of the normal that the parameter `name` of a block, or of the ends, is
        drawn from at first; 0: it begins as the constructor has made it, which is for ones and
        zeros: what it draws may differ from one kind of processor to the next."""


Build: TypeAlias = Callable[[ModelConfig], Architecture]

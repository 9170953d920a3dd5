"""What crosses a boundary between two stages, as the tensors of a frame.

A token's figures travel in a codec of [wire]. The whole numbers beside them, its id in a subspace
and where documents begin, travel as bytes: exactly, whatever the codec. Backwards only the figures
have gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planaria.node.model.shape import ModelConfig
from planaria.node.run_file import WireSection
from planaria.node.wire.frames import Codec, Form, encoded_size

if TYPE_CHECKING:
    from torch import Tensor


def forms(config: ModelConfig, rows: int, codec: Codec, kind: str) -> list[Form]:
    """Of an "activation" or "gradient" of so many samples."""
    figures = Form("float32", (rows, config.context, config.written), codec)
    beside = Form("uint8", (rows, config.context, config.beside))
    return [figures, beside] if config.beside and kind == "activation" else [figures]


def crossing_bytes(config: ModelConfig, tokens: int, wire: WireSection) -> tuple[int, int]:
    """Of the activations of so many tokens, and of their gradients."""
    figures = tokens * config.written
    activations, gradients = (
        encoded_size(figures, "float32", codec) for codec in (wire.activations, wire.gradients)
    )
    return activations + tokens * config.beside, gradients


def kept_bytes(config: ModelConfig, tokens: int, wire: WireSection) -> int:
    """Of the activations of so many tokens, as both sides keep them for the day on which a stage
    relearns (node/state/boundary.py): as they crossed, or in bf16 if that is less."""
    crossed, _ = crossing_bytes(config, tokens, wire)
    narrowed = encoded_size(tokens * config.written, "float32", "bf16") + tokens * config.beside
    return min(crossed, narrowed)


def taken_apart(x: Tensor, config: ModelConfig, kind: str) -> list[Tensor]:
    """Float [B, T, crossing] as the tensors of such a frame."""
    figures, beside = x[..., : config.written], x[..., config.written :]
    return [figures, beside.byte()] if config.beside and kind == "activation" else [figures]


def put_together(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Float [B, T, crossing] of what has been taken apart; a gradient is 0 beside the figures."""
    figures, *beside = parts
    if not config.beside:
        return figures
    x = figures.new_zeros(*figures.shape[:-1], config.crossing)
    x[..., : config.written] = figures
    if beside:
        x[..., config.written :] = beside[0]
    return x

"""Boundary tensors between two stages, as the tensors of a frame.

A token's figures are sent in a codec of [wire]. Its integer features, the id in a subspace and
where documents begin, are sent as bytes: exactly, with any codec. Only the figures have gradients.
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
    """Tensor forms of an "activation" or "gradient" of `rows` samples."""
    figures = Form("float32", (rows, config.context, config.written), codec)
    beside = Form("uint8", (rows, config.context, config.beside))
    return [figures, beside] if config.beside and kind == "activation" else [figures]


def crossing_bytes(config: ModelConfig, tokens: int, wire: WireSection) -> tuple[int, int]:
    """Bytes of the activations of `tokens` tokens, and of their gradients."""
    figures = tokens * config.written
    activations, gradients = (
        encoded_size(figures, "float32", codec) for codec in (wire.activations, wire.gradients)
    )
    return activations + tokens * config.beside, gradients


def kept_bytes(config: ModelConfig, tokens: int, wire: WireSection) -> int:
    """Bytes of the activations of `tokens` tokens, as both sides keep them for relearning
    (node/state/boundary.py): as sent, or in bf16 if that is less."""
    crossed, _ = crossing_bytes(config, tokens, wire)
    narrowed = encoded_size(tokens * config.written, "float32", "bf16") + tokens * config.beside
    return min(crossed, narrowed)


def taken_apart(x: Tensor, config: ModelConfig, kind: str) -> list[Tensor]:
    """Split float [B, T, crossing] into the tensors of such a frame."""
    figures, beside = x[..., : config.written], x[..., config.written :]
    return [figures, beside.byte()] if config.beside and kind == "activation" else [figures]


def put_together(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Inverse of `taken_apart`, float [B, T, crossing]; a gradient is 0 beside the figures."""
    figures, *beside = parts
    if not config.beside:
        return figures
    x = figures.new_zeros(*figures.shape[:-1], config.crossing)
    x[..., : config.written] = figures
    if beside:
        x[..., config.written :] = beside[0]
    return x

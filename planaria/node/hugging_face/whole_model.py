"""A whole model in one process, from a folder in Hugging Face's format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from planaria.node.model.checkpoint import Checkpoint
from planaria.node.model.config import UnsupportedModelError
from planaria.node.model.modules import LlamaBody, LlamaEnds, rope_tables
from planaria.node.model.shape import ModelConfig


class WholeModel:
    """A model's stage 0, and all its layers as one body stage, in float32."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        """Build a whole model with uninitialized weights."""
        self.config, self.device = config, device
        short = replace(config, context=1)  # RoPE's tables are made for each input
        with torch.device("meta"):  # without initial weights
            ends, body = LlamaEnds(config), LlamaBody(short, 1)
        self._ends, self._body = ends.to_empty(device=device), body.to_empty(device=device)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> WholeModel:
        """Load a model's folder. Raises UnsupportedModelError when it doesn't hold one."""
        checkpoint = Checkpoint.open(folder)
        if checkpoint.config.own is not None:
            return _OfTransformers(checkpoint, device)
        model = cls(checkpoint.config, device)
        for name in checkpoint.places:
            module: nn.Module = model._body if ".layers." in name else model._ends
            parameter = module.get_parameter(name.removeprefix("model."))
            try:
                values = torch.from_numpy(checkpoint.read(name))
            except OSError as error:
                raise UnsupportedModelError(f"{folder} can't be read: {error}") from error
            parameter.data.copy_(values.view_as(parameter))
        return model

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """The local model's logits of the next token at each position: int64 [B, T], T at most the
        context, to float32 [B, T, vocabulary]."""
        return self._ends.logits(self._run(tokens)).float()

    @torch.inference_mode()
    def loss(self, inputs: Tensor, targets: Tensor, *begins: Tensor) -> float:
        """The local model's sum of scored losses in nats: int64 [B, T] each. `begins`: which inputs
        begin a document, for a model that keeps documents apart."""
        x = self._run(inputs, *begins)
        return float(self._ends.loss(x, targets.to(self.device)))

    def _run(self, tokens: Tensor, *begins: Tensor) -> Tensor:
        length = tokens.shape[1]
        if not 0 < length <= self.config.context:
            raise ValueError(f"{length} tokens don't fit in the context of {self.config.context}")
        if isinstance(self._body, LlamaBody):
            cos, sin = (table.to(self.device) for table in rope_tables(self.config, length))
            self._body.cos, self._body.sin = nn.Buffer(cos), nn.Buffer(sin)
        x = self._ends.embed(*(each.to(self.device) for each in (tokens, *begins)))
        out: Tensor = self._body(x)
        return out


class _OfTransformers(WholeModel):
    """A whole model that transformers' code computes."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        from planaria.node.model.decoder import DecoderCheckpoint

        assert isinstance(checkpoint, DecoderCheckpoint)
        self.config, self.device = checkpoint.config, device
        decoder, layers = checkpoint.decoder, range(self.config.layers)
        parts = [decoder.stage(part, self.config.block_causal) for part in (range(0), layers)]
        for part, of in zip(parts, (range(0), layers), strict=True):
            tensors = decoder.read(checkpoint.folder, of)
            for name, parameter in part.named_parameters():
                parameter.data.copy_(tensors[name.removeprefix("model.")])
        self._ends, self._body = (part.to(device) for part in parts)  # type: ignore[assignment]

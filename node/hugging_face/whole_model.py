"""A whole model in one process, from a folder in Hugging Face's format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from planaria.node.hugging_face.config import UnsupportedModelError, read_config
from planaria.node.hugging_face.export import INDEX, ONE_FILE
from planaria.node.hugging_face.layout import Weight, weights
from planaria.node.stage.model import BodyStage, EmbeddingStage, rope_tables
from planaria.node.stage.shape import ModelConfig


class WholeModel:
    """Stage 0, and all layers as one body stage, in float32."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        """Its weights are whatever is in memory."""
        self.config, self.device = config, device
        with torch.device("meta"):  # initial weights would only take time
            ends, body = EmbeddingStage(config), BodyStage(config)
        self._ends, self._body = ends.to_empty(device=device), body.to_empty(device=device)
        cos, sin = rope_tables(config)
        self._body.cos, self._body.sin = nn.Buffer(cos.to(device)), nn.Buffer(sin.to(device))

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> WholeModel:
        """Raises UnsupportedModelError when the folder doesn't hold such a model."""
        try:
            model = cls(read_config(folder), device)
            for weight, tensor in _read(folder, weights(model.config)):
                if tuple(tensor.shape) != weight.shape:
                    raise UnsupportedModelError(
                        f"{folder}: {weight.name} has shape {list(tensor.shape)} instead of "
                        f"{list(weight.shape)}"
                    )
                module: nn.Module = model._body if weight.stage else model._ends
                module.get_parameter(weight.name.removeprefix("model.")).data.copy_(tensor)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UnsupportedModelError(
                f"{folder} holds no model that can be read: {error}. Name a folder that `planaria "
                "export` has written"
            ) from error
        return model

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """Of what follows each token: int64 [B, T], T at most the context, to float32 [B, T,
        vocabulary]."""
        x = self._body(self._ends.embed(tokens.to(self.device)))
        return self._ends.logits(x).float()

    @torch.inference_mode()
    def loss(self, tokens: Tensor) -> float:
        """In nats, the sum over all tokens but the first: int64 [B, T + 1]."""
        tokens = tokens.to(self.device)
        x = self._body(self._ends.embed(tokens[:, :-1]))
        return float(self._ends.loss(x, tokens[:, 1:]))


def _read(folder: Path, those: list[Weight]) -> Iterator[tuple[Weight, Tensor]]:
    """Raises OSError, KeyError, SafetensorError, ValueError."""
    if (folder / INDEX).exists():
        where = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    else:
        where = dict.fromkeys((weight.name for weight in those), ONE_FILE)
    for name in sorted({where[weight.name] for weight in those}):
        with safe_open(folder / name, framework="pt") as file:
            for weight in those:
                if where[weight.name] == name:
                    yield weight, file.get_tensor(weight.name)

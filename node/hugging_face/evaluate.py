"""How well a model predicts prepared data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from planaria.node.data.corpus import SPLITS, Corpus, CorpusError, file_checksum
from planaria.node.hugging_face.checkpoint import TOKENIZER
from planaria.node.hugging_face.whole_model import WholeModel
from planaria.node.report.progress import Track, untracked
from planaria.node.stage.shape import LONGEST


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats a token
    tokens: int
    bytes_per_token: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers."""
        return self.loss / math.log(2) / self.bytes_per_token

    def rows(self) -> dict[str, str]:
        return {
            "tokens": f"{self.tokens:,}",
            "loss": f"{self.loss:.4f} nats a token",
            "perplexity": f"{self.perplexity:,.2f}",
            "bits per byte": f"{self.bits_per_byte:.4f}",
        }


class Portion:
    """The first `samples` samples of a split of the prepared folder `data`, or all of them."""

    def __init__(self, data: Path, split: str, context: int, samples: int | None) -> None:
        """Raises CorpusError."""
        if split not in SPLITS:
            raise CorpusError(f"--split {split}: there are {' and '.join(SPLITS)}")
        self.corpus, self._split, self._context = Corpus.open(data), split, context
        there = self.corpus.count(split, context)
        if not there:
            raise CorpusError(
                f"--split {split} of {data} has no {context} tokens, which a sample is"
            )
        self.count = min(samples or there, there)

    def rows(self, first: int, most: int) -> Tensor:
        """At most so many from the first on: int64 [B, context + 1]. Raises CorpusError."""
        rows = range(first, min(first + most, self.count))
        return torch.from_numpy(self.corpus.samples(self._split, self._context, rows))

    def evaluation(self, total: float) -> Evaluation:
        """`total`: the sum of all their tokens' losses."""
        tokens = self.count * self._context
        told = self.corpus.index.splits[self._split]
        return Evaluation(total / tokens, tokens, told.text_bytes / told.tokens)


def evaluate(
    model: WholeModel,
    folder: Path,
    data: Path,
    split: str = "validation",
    samples: int | None = None,
    batch: int = 8,
    track: Track = untracked,
) -> Evaluation:
    """On that portion, whose samples are as long as the model's context, LONGEST tokens at most.
    `folder`: the model's. Raises CorpusError when the data can't be used, or was made with another
    tokenizer."""
    portion = Portion(data, split, min(model.config.context, LONGEST), samples)
    if file_checksum(folder / TOKENIZER) != portion.corpus.index.tokenizer:
        raise CorpusError(
            f"{data} was prepared with another tokenizer than the model's: prepare the text with "
            f"--tokenizer {folder / TOKENIZER}"
        )
    starts = range(0, portion.count, batch)
    total = sum(
        model.loss(portion.rows(first, batch)) for first in track(starts, "evaluating", len(starts))
    )
    return portion.evaluation(total)

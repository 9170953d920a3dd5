"""How well a model predicts prepared data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from planaria.node.data.corpus import SPLITS, Corpus, CorpusError, file_checksum
from planaria.node.hugging_face.export import TOKENIZER
from planaria.node.hugging_face.whole_model import WholeModel
from planaria.node.report.progress import Track, untracked


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


def evaluate(
    model: WholeModel,
    folder: Path,
    data: Path,
    split: str = "validation",
    samples: int | None = None,
    batch: int = 8,
    track: Track = untracked,
) -> Evaluation:
    """On the first `samples` samples of a split of the prepared folder `data`, or all of them, each
    as long as the model's context. `folder`: the model's. Raises CorpusError when it can't be used,
    or was made with another tokenizer."""
    if split not in SPLITS:
        raise CorpusError(f"--split {split}: there are {' and '.join(SPLITS)}")
    corpus, context = Corpus.open(data), model.config.context
    if file_checksum(folder / TOKENIZER) != corpus.index.tokenizer:
        raise CorpusError(
            f"{data} was prepared with another tokenizer than the model's: prepare the text with "
            f"--tokenizer {folder / TOKENIZER}"
        )
    count = min(samples or math.inf, corpus.count(split, context))
    starts = range(0, int(count), batch)
    total = 0.0
    for first in track(starts, "evaluating", len(starts)):
        rows = range(first, min(first + batch, int(count)))
        total += model.loss(torch.from_numpy(corpus.samples(split, context, rows)))
    tokens = int(count) * context
    told = corpus.index.splits[split]
    return Evaluation(total / tokens, tokens, told.text_bytes / told.tokens)

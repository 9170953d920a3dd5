"""Evaluation of a model on prepared data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from planaria.node.data.corpus import SPLITS, UNSCORED, Corpus, CorpusError
from planaria.node.data.mixture import inputs_and_targets
from planaria.node.data.progress import Track, untracked
from planaria.node.data.tokenizer import LONGEST, TOKENIZER, same_tokenizer
from planaria.node.hugging_face.options import EvaluateOptions
from planaria.node.hugging_face.whole_model import WholeModel


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats a token
    tokens: int
    bytes_per_token: float | None  # None: some tokens aren't scored

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Loss in bits per byte of text, which is comparable between tokenizers."""
        if self.bytes_per_token is None:
            return None
        return self.loss / math.log(2) / self.bytes_per_token

    def rows(self) -> dict[str, str]:
        rows = {
            "tokens": f"{self.tokens:,}",
            "loss": f"{self.loss:.4f} nats a token",
            "perplexity": f"{self.perplexity:,.2f}",
        }
        if self.bits_per_byte is not None:
            rows["bits per byte"] = f"{self.bits_per_byte:.4f}"
        return rows


class Portion:
    """The samples to evaluate on: the first `samples` of a split of the prepared folder `data`, or
    all. `apart`: the model keeps documents apart."""

    def __init__(
        self, data: Path, split: str, context: int, samples: int | None, apart: bool
    ) -> None:
        """Open the data to evaluate on. Raises CorpusError."""
        if split not in SPLITS:
            raise CorpusError(f"--split {split}: there are {' and '.join(SPLITS)}")
        self.corpus, self._split, self._context = Corpus.open(data), split, context
        self._apart = apart
        available = self.corpus.count(split, context)
        self.count = min(samples or available, available)
        self._scored = 0

    def rows(self, first: int, most: int) -> tuple[Tensor, ...]:
        """Inputs and targets of up to `most` samples from `first` on, int64 [B, context] each; with
        `apart` also which inputs begin a document. Raises CorpusError."""
        rows = range(first, min(first + most, self.count))
        arrays = inputs_and_targets(self.corpus, self._split, self._context, rows, self._apart)
        self._scored += int((arrays[1] != UNSCORED).sum())
        return tuple(torch.from_numpy(each) for each in arrays)

    def evaluation(self, total: float) -> Evaluation:
        """The evaluation; `total`: sum of the scored losses of all `rows`. Raises CorpusError."""
        if not self._scored:
            raise CorpusError(
                f"none of the tokens in {self.count} samples of {self.corpus.path} is scored: "
                "evaluate more --samples"
            )
        split = self.corpus.index.splits[self._split]
        whole = None if self.corpus.masked else split.text_bytes / split.tokens
        return Evaluation(total / self._scored, self._scored, whole)


def evaluate(
    model: WholeModel, folder: Path, options: EvaluateOptions, track: Track = untracked
) -> Evaluation:
    """Evaluate a local model on samples of its context, at most LONGEST tokens. `folder`: the
    model's. Raises CorpusError when the data can't be used, or was made with another tokenizer."""
    config, data = model.config, options.data
    context, samples = min(config.context, LONGEST), options.samples
    portion = Portion(data, options.split, context, samples, config.block_causal)
    if not same_tokenizer(folder / TOKENIZER, data / TOKENIZER):
        raise CorpusError(
            f"{data} was prepared with another tokenizer than the model's: prepare the text with "
            f"--tokenizer {folder / TOKENIZER}"
        )
    starts = range(0, portion.count, options.batch)
    total = 0.0
    for first in track(starts, "evaluating", len(starts)):
        total += model.loss(*portion.rows(first, options.batch))
    return portion.evaluation(total)

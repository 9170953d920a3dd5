"""Text to tokens, once: `prepare` writes the folder that `Corpus` reads."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from planaria.node.data.corpus import (
    FORMAT,
    SPLITS,
    TRAIN,
    VALIDATION,
    Corpus,
    CorpusError,
    Index,
    Split,
    TokenShard,
    file_checksum,
    load_tokenizer,
    read_index,
)
from planaria.node.data.documents import documents
from planaria.node.report.progress import Track, untracked

END_OF_DOCUMENT = "<|endoftext|>"
END_TOKENS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>", "<|end|>")
SHARD_TOKENS = 64 << 20
TRAINING_CHARACTERS = 1 << 30  # the tokenizer learns from no more than the first so many
BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Recipe:
    """What to prepare, and how. Raises CorpusError for figures that make no sense."""

    inputs: Sequence[str]
    tokenizer: Path | None = None  # a tokenizer.json; None: train one
    vocabulary: int = 2048  # of the tokenizer to train
    validation: float = 0.05  # share of the documents to hold out
    text_field: str = "text"
    separator: str | None = None  # see documents.lines_to_documents

    def __post_init__(self) -> None:
        if not 0 < self.validation < 1:
            raise CorpusError(
                f"--validation is a share between 0 and 1, not {self.validation}: "
                "0.05 holds out one document in twenty"
            )
        if self.vocabulary < 257:
            raise CorpusError(
                f"--vocabulary {self.vocabulary} is too small: 256 bytes and the end of a document "
                "need 257"
            )
        if not self.inputs:
            raise CorpusError("nothing to prepare: name a text file, a folder or a dataset")

    def documents(self) -> Iterator[str]:
        try:
            separator = None if self.separator is None else re.compile(self.separator)
        except re.error as error:
            raise CorpusError(
                f"--document-separator {self.separator!r} is not a regular expression: {error}"
            ) from error
        for source in self.inputs:
            yield from documents(source, self.text_field, separator)


def held_out_rank(ordinal: int, text: str) -> float:
    """A number in [0, 1) that looks random; a document is held out if it is below the share."""
    return xxhash.xxh3_64_intdigest(text.encode(), seed=ordinal) / 2**64


def prepare(
    recipe: Recipe, out: Path, *, force: bool = False, track: Track = untracked
) -> tuple[Corpus, bool]:
    """Write the prepared data to `out`, whole or not at all.

    The inputs are read twice when the tokenizer is trained on them, else once; memory holds one
    batch of documents (and, in training, the tokenizer's counts of words). `track(items,
    description, total)` shows progress. Returns the corpus, and False if `out` held the same
    content already. Raises CorpusError, also when `out` holds something else: then `force` replaces
    it, if it is prepared data.
    """
    existing = _occupant(out)
    temporary = out.absolute().parent / f".{out.name}.{os.getpid()}.tmp"
    replaced = temporary.with_suffix(".old")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process that had our number
    try:
        temporary.mkdir(parents=True)
        count: int | None = None
        if recipe.tokenizer is None:
            tokenizer, count = _train_tokenizer(recipe, track)
            tokenizer.save(str(temporary / "tokenizer.json"))
        else:
            tokenizer = load_tokenizer(recipe.tokenizer)
            shutil.copyfile(recipe.tokenizer, temporary / "tokenizer.json")
        texts = track(recipe.documents(), "writing tokens", count)
        index = _write_splits(texts, tokenizer, recipe.validation, temporary)
        (temporary / "index.json").write_text(index.model_dump_json(indent=1) + "\n")
        if existing is not None and existing.content == index.content:
            return Corpus.open(out), False
        if existing is not None and not force:
            raise CorpusError(
                f"{out} holds other prepared data (content {existing.content[:8]}, this would be "
                f"{index.content[:8]}): choose another --out, or replace it with --force"
            )
        if existing is not None:
            out.rename(replaced)
        temporary.replace(out)  # an empty folder may be there
    except OSError as error:
        raise CorpusError(f"can't write {out}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
    return Corpus.open(out), True


def _occupant(out: Path) -> Index | None:
    """The index of what is at `out`; None for nothing. Raises CorpusError for anything else."""
    if (out / "index.json").is_file():
        return read_index(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise CorpusError(f"{out} is there already and is no prepared data: choose another --out")
    return None


def _train_tokenizer(recipe: Recipe, track: Track) -> tuple[Tokenizer, int | None]:
    """A byte-level BPE from the documents that are not held out; and how many documents in all.

    The count is None when the first TRAINING_CHARACTERS were enough.
    """
    seen, characters = 0, 0

    def training_texts() -> Iterator[str]:
        nonlocal seen, characters
        for text in track(recipe.documents(), "training the tokenizer", None):
            if characters >= TRAINING_CHARACTERS:
                return
            if held_out_rank(seen, text) >= recipe.validation:
                characters += len(text)
                yield text
            seen += 1

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    return tokenizer, seen if characters < TRAINING_CHARACTERS else None


def _end_of_document(tokenizer: Tokenizer) -> int:
    for token in END_TOKENS:
        number = tokenizer.token_to_id(token)
        if number is not None:
            return int(number)
    raise CorpusError(
        f"the tokenizer has no end-of-document token: none of {', '.join(END_TOKENS)}; add one"
    )


def _write_splits(
    texts: Iterable[str], tokenizer: Tokenizer, validation: float, folder: Path
) -> Index:
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" within a text is text
    end = _end_of_document(tokenizer)
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    dtype: Literal["uint16", "uint32"] = "uint16" if vocabulary <= 1 << 16 else "uint32"
    nearest = 1.0
    with ExitStack() as stack:
        writers = {s: stack.enter_context(SplitWriter(folder, s, dtype)) for s in SPLITS}
        for ordinal, batch in _batches(texts):
            encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            for i, (text, encoding) in enumerate(zip(batch, encodings, strict=True), ordinal):
                rank = held_out_rank(i, text)
                nearest = min(nearest, rank)
                split = VALIDATION if rank < validation else TRAIN
                writers[split].write(np.array([*encoding.ids, end]), len(text.encode()))
    splits = {name: writer.split() for name, writer in writers.items()}
    _check_both_sides(splits, nearest)
    index = Index(
        format=FORMAT,
        vocabulary=vocabulary,
        dtype=dtype,
        end_of_document=end,
        tokenizer=file_checksum(folder / "tokenizer.json"),
        splits=splits,
    )
    return index.model_copy(update={"content": index.content_hash()})


def _batches(texts: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Batches of about BATCH_CHARACTERS, each with the ordinal of its first document."""
    ordinal, batch, characters = 0, [], 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield ordinal, batch
            ordinal, batch, characters = ordinal + len(batch), [], 0
    if batch:
        yield ordinal, batch


def _check_both_sides(splits: dict[str, Split], nearest: float) -> None:
    train, held_out = (splits[name].documents for name in SPLITS)
    if train + held_out < 2:
        raise CorpusError(
            f"found {train + held_out} documents, but training and validation need one each: add "
            "text, or say with --document-separator where a document begins"
        )
    if not held_out:
        raise CorpusError(
            f"none of {train} documents was held out for validation: raise --validation above "
            f"{nearest:.3f}, or say with --document-separator where a document begins"
        )
    if not train:
        raise CorpusError(f"all {held_out} documents were held out: lower --validation")


class SplitWriter:
    """Shards of one split, each closed and on disk before the next begins."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self._folder, self._name = folder, name
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shards: list[TokenShard] = []
        self._file: BinaryIO | None = None
        self._hash = xxhash.xxh3_128()
        self._tokens = 0  # in the open shard
        self._documents, self._text_bytes = 0, 0

    def write(self, document: NDArray[np.int64], text_bytes: int) -> None:
        self._documents += 1
        self._text_bytes += text_bytes
        while document.size:
            if self._file is None:
                path = self._folder / f"{self._name}-{len(self._shards):05d}.bin"
                self._file = path.open("wb")
            head, document = np.split(document, [SHARD_TOKENS - self._tokens])
            data = head.astype(self._dtype).tobytes()
            self._file.write(data)
            self._hash.update(data)
            self._tokens += head.size
            if self._tokens == SHARD_TOKENS:
                self._close()

    def _close(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        name = Path(self._file.name).name
        self._shards.append(
            TokenShard(name=name, tokens=self._tokens, checksum=self._hash.hexdigest())
        )
        self._file, self._tokens = None, 0
        self._hash.reset()

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def split(self) -> Split:
        return Split(documents=self._documents, text_bytes=self._text_bytes, shards=self._shards)

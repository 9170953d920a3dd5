"""Prepared data: memory-mapped shards of tokens, with an index. `prepare` (prepare.py) makes it.

A prepared folder holds `index.json`, `tokenizer.json` and, for each split, shards of little-endian
tokens. Every document ends with the end-of-document token, and a split is the concatenation of its
documents, cut into samples without regard to where documents or shards end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from tokenizers import Tokenizer

FORMAT = 1
TRAIN, VALIDATION = SPLITS = "train", "validation"


class CorpusError(ValueError):
    """Data that can't be prepared or read; the message says what is wrong and what to do."""


class TokenShard(BaseModel):
    name: str
    tokens: int
    checksum: str


class Split(BaseModel):
    documents: int
    text_bytes: int
    shards: list[TokenShard]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


class Index(BaseModel):
    """What `index.json` says. Checksums are xxh3_128 in hexadecimal."""

    format: int
    vocabulary: int
    dtype: Literal["uint16", "uint32"]
    end_of_document: int
    tokenizer: str
    splits: dict[str, Split]
    content: str = ""

    def content_hash(self) -> str:
        """A hash of what training depends on: the tokens and the vocabulary."""
        shards = {name: [shard.checksum for shard in self.splits[name].shards] for name in SPLITS}
        fields = [self.format, self.vocabulary, self.dtype, self.end_of_document, shards]
        return xxhash.xxh3_128_hexdigest(json.dumps(fields).encode())

    def misfit(self, content: str, vocabulary: int | None) -> str:
        """Why a run that says this of its data and its model can't train on it, and what to do;
        empty when it can. Unsaid: "" and None."""
        if content and content != self.content:
            return (
                f"is other data than the run's: its content is {self.content}, the run file says "
                f"data.content = {content}. Prepare the same text in the same way, copy the "
                "folder, or take data.content out of the run file"
            )
        if vocabulary is not None and vocabulary < self.vocabulary:
            return (
                f"has {self.vocabulary} different tokens, more than model.vocabulary = {vocabulary}"
                ": leave that out of the run file, or prepare the text with a smaller --vocabulary"
            )
        return ""


class Corpus:
    """Prepared data, memory-mapped. Open it with `Corpus.open`.

    A split is cut into samples that don't overlap: sample i is the tokens i·context to
    (i+1)·context, both included. So its last token is the first of the next sample: an input there,
    only a target here.
    """

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self.index = index
        self.content = index.content
        self.vocabulary = index.vocabulary
        dtype = np.dtype(index.dtype).newbyteorder("<")
        self._shards = {
            name: [np.memmap(path / shard.name, dtype, "r") for shard in split.shards]
            for name, split in index.splits.items()
        }
        self._starts = {
            name: np.cumsum([0, *(shard.tokens for shard in split.shards)])
            for name, split in index.splits.items()
        }

    @classmethod
    def open(cls, path: Path, verify: bool = False) -> Corpus:
        """Checks that every shard is there in its size; with `verify`, also its checksum, and the
        tokenizer's. Raises CorpusError."""
        index = read_index(path)
        itemsize = np.dtype(index.dtype).itemsize
        shards = [shard for split in index.splits.values() for shard in split.shards]
        for shard in shards:
            file = path / shard.name
            if not file.is_file():
                raise CorpusError(f"{file} is missing: {_remedy(path)}")
            if file.stat().st_size != shard.tokens * itemsize:
                raise CorpusError(
                    f"{file} has {file.stat().st_size} bytes where the index says "
                    f"{shard.tokens * itemsize}: {_remedy(path)}"
                )
        if verify:
            checksums = {shard.name: shard.checksum for shard in shards}
            for name, expected in (checksums | {"tokenizer.json": index.tokenizer}).items():
                if file_checksum(path / name) != expected:
                    raise CorpusError(
                        f"{path / name} is damaged, its checksum is wrong: {_remedy(path)}"
                    )
        return cls(path, index)

    def tokenizer(self) -> Tokenizer:
        """Raises CorpusError."""
        return load_tokenizer(self.path / "tokenizer.json")

    def count(self, split: str, context: int) -> int:
        """How many samples of `context` inputs there are. Raises CorpusError when there is none."""
        tokens = int(self._starts[split][-1])
        if tokens <= context:
            raise CorpusError(
                f"the {split} split in {self.path} has {tokens} tokens, but one sample of context "
                f"{context} takes {context + 1}: shorten the context, or prepare more text"
            )
        return (tokens - 1) // context

    def sample(self, split: str, context: int, index: int) -> NDArray[np.int64]:
        """The `context` + 1 tokens of a sample, int64. Raises IndexError, CorpusError."""
        if not 0 <= index < self.count(split, context):
            raise IndexError(f"the {split} split has no sample {index} of context {context}")
        out = np.empty(context + 1, np.int64)
        starts, position, filled = self._starts[split], index * context, 0
        number = int(np.searchsorted(starts, position, side="right")) - 1
        while filled < out.size:  # a sample may go on in the next shard
            offset = position + filled - starts[number]
            part = self._shards[split][number][offset : offset + out.size - filled]
            out[filled : filled + part.size] = part
            filled += part.size
            number += 1
        return out

    def samples(
        self, split: str, context: int, indices: Iterable[int] | NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The samples `indices`, int64 [n, context + 1]. Raises IndexError, CorpusError."""
        rows = [self.sample(split, context, int(index)) for index in indices]
        return np.stack(rows) if rows else np.empty((0, context + 1), np.int64)


def read_index(path: Path) -> Index:
    """The index of the prepared data in the folder `path`. Raises CorpusError."""
    file = path / "index.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        found = fields["format"]
        if found != FORMAT:
            raise CorpusError(
                f"{path} was prepared in format {found}, this planaria reads format {FORMAT}: "
                f"{_remedy(path)}"
            )
        index = Index.model_validate(fields)
    except FileNotFoundError as error:
        raise CorpusError(f"there is no prepared data at {path}: {_remedy(path)}") from error
    except OSError as error:
        raise CorpusError(f"can't read {file}: {error.strerror}") from error
    except (
        ValidationError,
        json.JSONDecodeError,
        UnicodeDecodeError,
        KeyError,
        TypeError,
    ) as error:
        raise CorpusError(f"{file} is damaged ({error}): {_remedy(path)}") from error
    if set(index.splits) != set(SPLITS) or index.content != index.content_hash():
        raise CorpusError(f"{file} is damaged, its content hash is wrong: {_remedy(path)}")
    return index


def _remedy(path: Path) -> str:
    return f"make it with `planaria data prepare INPUT... --out {path}`"


def file_checksum(file: Path) -> str:
    """xxh3_128 of a file, in hexadecimal. Raises CorpusError."""
    digest = xxhash.xxh3_128()
    try:
        with file.open("rb") as data:
            while block := data.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise CorpusError(f"can't read {file}: {error.strerror}") from error
    return digest.hexdigest()


def load_tokenizer(path: Path) -> Tokenizer:
    """A `tokenizer.json`, without truncation and padding. Raises CorpusError."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other kind
        raise CorpusError(
            f"can't read the tokenizer {path}: {error}; give a tokenizer.json as written by the "
            "tokenizers library"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

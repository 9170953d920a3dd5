"""Parts of what is prepared: the tokens of one file each, made by one process, and kept."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from tokenizers import Encoding

from planaria.node.data.chat import Conversation, Template
from planaria.node.data.corpus import (
    SPLITS,
    TRAIN,
    VALIDATION,
    CorpusError,
    RowError,
    Split,
    file_checksum,
    load_tokenizer,
)
from planaria.node.data.places import stamp
from planaria.node.data.recipe import SHOWN, Recipe, mostly_good
from planaria.node.data.rendering import Renderer
from planaria.node.data.shards import SplitWriter
from planaria.node.data.tokenizer import bounds_of, special_tokens_in
from planaria.node.report.progress import Track, untracked

BATCH_CHARACTERS = 1 << 20
FEW = 64
"""So many documents to hold out are counted, and more than that left to their ranks."""
Dtype = Literal["uint16", "uint32"]


class Part(BaseModel):
    """What `part.json` says of the shards beside it."""

    ranks: list[float]  # the FEW least ones of documents, in order
    rows: int  # documents, and bad rows
    bad: list[str]  # the first of them, and why
    splits: dict[str, Split]

    @property
    def documents(self) -> int:
        return sum(split.documents for split in self.splits.values())


class Document(NamedTuple):
    text: str
    scored: list[tuple[int, int]] | None = None  # characters; None: all


class Vocabulary(NamedTuple):
    """Of a tokenizer: how its tokens are written."""

    size: int
    begin: tuple[int, ...]  # of each text
    end_of_document: int

    @property
    def dtype(self) -> Dtype:
        return "uint16" if self.size <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class Tokenizing:
    """How the documents of any file become tokens."""

    recipe: Recipe
    tokenizer: Path
    vocabulary: Vocabulary
    template: Template | None
    folder: Path  # has the parts, each in a folder of its own

    @property
    def masked(self) -> bool:
        return self.template is not None

    def place(self, file: str, first: int) -> Path:
        """Where the part of a file is or will be, as the file is now. Raises CorpusError."""
        recipe = self.recipe
        how = [recipe.validation, *recipe.reading, self.template]
        tokenizer = file_checksum(self.tokenizer), self.vocabulary
        fields = [file, stamp(file), first, *tokenizer, *how]
        return self.folder / _key(fields)

    def count(self, file: str) -> int:
        """The rows of a file, counted once. Raises CorpusError."""
        fields = [file, stamp(file), *self.recipe.reading]
        kept = self.folder / f"{_key(fields)}.count"
        if kept.exists():
            return int(kept.read_text())
        count = sum(1 for _ in self.recipe.documents(file))
        temporary = kept.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(str(count))
        temporary.rename(kept)
        return count

    def write(self, file: str, first: int, track: Track = untracked) -> tuple[Path, Part]:
        """The part of a file whose first row has that ordinal, and where it is: whole or not
        at all. An earlier try may have made it. Raises CorpusError."""
        place = self.place(file, first)
        try:
            return place, Part.model_validate_json((place / "part.json").read_bytes())
        except (OSError, ValidationError):
            shutil.rmtree(place, ignore_errors=True)  # it isn't there, or not whole
        temporary = place.with_suffix(f".{os.getpid()}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            with nullcontext() if self.template is None else Renderer(self.template) as renderer:
                texts = track(rendered(self.recipe, file, renderer), "writing tokens", None)
                part = self._write_splits(texts, temporary, first)
            (temporary / "part.json").write_text(part.model_dump_json())
            temporary.rename(place)
        except OSError as error:
            raise CorpusError(f"can't write {place}: {error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return place, part

    def _write_splits(self, texts: Iterable[Document | RowError], folder: Path, first: int) -> Part:
        """Raises CorpusError, OSError."""
        tokenizer = load_tokenizer(self.tokenizer)
        # "<|endoftext|>" within a text is text; what a chat template makes has special tokens
        tokenizer.encode_special_tokens = not self.masked
        end = self.vocabulary.end_of_document
        ending = str(tokenizer.id_to_token(end))
        begin = () if self.masked else self.vocabulary.begin  # a template writes its own
        dtype = self.vocabulary.dtype
        encode = tokenizer.encode_batch if self.masked else tokenizer.encode_batch_fast
        ranks: list[float] = []
        rows = _Rows(texts, first)
        with ExitStack() as stack:
            writers = {
                name: stack.enter_context(SplitWriter(folder, name, dtype, self.masked))
                for name in SPLITS
            }
            for batch in _batches(rows.good()):
                encodings = encode([one.text for _, one in batch], add_special_tokens=False)
                of_batch = [held_out_rank(ordinal, one.text) for ordinal, one in batch]
                ranks = nsmallest(FEW, ranks + of_batch)
                for (_, document), rank, encoding in zip(batch, of_batch, encodings, strict=True):
                    split = VALIDATION if rank < self.recipe.validation else TRAIN
                    tokens = np.array([*begin, *encoding.ids, end])
                    mask = None if document.scored is None else _mask(encoding, document.scored)
                    if mask is not None and document.text.rstrip().endswith(ending):
                        tokens = tokens[:-1]
                    writers[split].write(tokens, mask, len(document.text.encode()))
        splits = {name: writer.split() for name, writer in writers.items()}
        return Part(ranks=ranks, rows=rows.number, bad=rows.bad, splits=splits)


class _Rows:
    """Counts the rows of a file as they come."""

    def __init__(self, rows: Iterable[Document | RowError], first: int) -> None:
        self._rows, self._first = rows, first
        self.number = 0
        self.bad: list[str] = []

    def good(self) -> Iterator[tuple[int, Document]]:
        """With their ordinals: rows that are left out have some, too."""
        for ordinal, row in enumerate(self._rows, self._first):
            self.number += 1
            if not isinstance(row, RowError):
                yield ordinal, row
            elif len(self.bad) < SHOWN:
                self.bad.append(str(row))


def _key(fields: Sequence[object]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields).encode())


def held_out_rank(ordinal: int, text: str) -> float:
    """A number in [0, 1) that looks random; a document is held out if it is below the share."""
    return xxhash.xxh3_64_intdigest(text.encode(), seed=ordinal) / 2**64


def vocabulary_of(tokenizer: Path, recipe: Recipe) -> Vocabulary:
    """Raises CorpusError."""
    library, folder = load_tokenizer(tokenizer), tokenizer.absolute().parent
    begin, end = bounds_of(library, folder, recipe.bos, recipe.end_token)
    if end is None:
        raise CorpusError(
            f"no file in {folder} says which token ends a document: name it with --end-token; "
            f"{special_tokens_in(library)}"
        )
    return Vocabulary(max(library.get_vocab().values()) + 1, begin, end)


def rendered(recipe: Recipe, file: str, renderer: Renderer | None) -> Iterator[Document | RowError]:
    """The rows of a file. Raises CorpusError."""
    return mostly_good(_rendered(recipe.documents(file), renderer), recipe.skip_bad)


def _rendered(
    rows: Iterable[str | Conversation | RowError], renderer: Renderer | None
) -> Iterator[Document | RowError]:
    """Raises CorpusError."""
    for row in rows:
        if isinstance(row, RowError):
            yield row
        elif isinstance(row, str) and renderer is None:
            yield Document(row)
        elif isinstance(row, Conversation) and renderer is not None:
            yield _render(row, renderer)
        else:
            raise CorpusError(
                "there are texts and records with messages: prepare them apart, and train on both "
                "with [[data.corpora]]"
            )


def _render(conversation: Conversation, renderer: Renderer) -> Document | RowError:
    """Raises CorpusError when the template can't be used any longer."""
    try:
        document = Document(*renderer.render(conversation))
        document.text.encode()
    except RowError as error:
        return error
    except (RecursionError, UnicodeEncodeError) as error:
        return RowError(f"{conversation.place} can't be rendered: {error}")
    return document


def _mask(encoding: Encoding, scored: Iterable[tuple[int, int]]) -> NDArray[np.uint8]:
    """1 for each token with a character of these, uint8 [tokens]; 0 for others."""
    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), np.uint8)
    for begin, end in scored:
        (touched,) = np.nonzero((starts < end) & (ends > begin))
        if touched.size:
            mask[touched[0] : touched[-1] + 1] = 1
    return mask


def _batches(texts: Iterable[tuple[int, Document]]) -> Iterator[list[tuple[int, Document]]]:
    """Documents and their ordinals, in batches of about BATCH_CHARACTERS."""
    batch, characters = [], 0
    for numbered in texts:
        batch.append(numbered)
        characters += len(numbered[1].text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch

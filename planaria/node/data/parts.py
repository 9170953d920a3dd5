"""Parts of prepared data: the tokens of one file each, made by one process, and kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
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
    hash_of,
    load_tokenizer,
)
from planaria.node.data.documents import Row
from planaria.node.data.file_access import file_version
from planaria.node.data.messages import Completion
from planaria.node.data.progress import Track, untracked
from planaria.node.data.recipe import COMPLETIONS, SHOWN, Recipe, limit_bad_rows
from planaria.node.data.shard_writers import SplitWriter
from planaria.node.data.template_process import Renderer
from planaria.node.data.tokenizer import describe_special_tokens, text_bounds

BATCH_CHARACTERS = 1 << 20
FEW = 64
"""Limit of the exact number of held-out documents; a larger number follows from their ranks."""
Dtype = Literal["uint16", "uint32"]


class Part(BaseModel):
    """Content of `part.json` about the shards beside it."""

    ranks: list[float]  # the FEW least ranks of documents, in order
    rows: int  # documents, and rows left out
    bad: int  # rows
    why: list[str]  # reasons for the first of them
    longer: int  # conversations of more tokens than the context
    splits: dict[str, Split]

    @property
    def documents(self) -> int:
        return sum(split.documents for split in self.splits.values())


class Document(NamedTuple):
    text: str
    scored: list[tuple[int, int]] | None = None  # characters; None: all
    open_end: bool = False  # the appended end token is scored, too


class TokenCoding(NamedTuple):
    """How a tokenizer codes texts: its number of tokens, and those around a text."""

    size: int
    begin: tuple[int, ...]  # tokens before each text
    end_of_document: int
    ending: str  # the end-of-document token as text

    @property
    def dtype(self) -> Dtype:
        return "uint16" if self.size <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class Tokenizing:
    """Turns the documents of any input file into tokens, by a recipe."""

    recipe: Recipe
    tokenizer: Path
    vocabulary: TokenCoding
    template: Template | None
    folder: Path  # each part is a folder in it

    @property
    def masked(self) -> bool:
        return self.template is not None

    def part_folder(self, file: str, first: int) -> Path:
        """Folder of an input file's part, as the file is now. Raises CorpusError."""
        recipe = self.recipe
        how = [recipe.validation, recipe.context, recipe.longer, *recipe.reading, self.template]
        tokenizer = file_checksum(self.tokenizer), self.vocabulary
        fields = [file, file_version(file), first, *tokenizer, *how]
        return self.folder / hash_of(fields)

    def count(self, file: str) -> int:
        """Number of rows of an input file, counted once. Raises CorpusError."""
        fields = [file, file_version(file), *self.recipe.reading]
        kept = self.folder / f"{hash_of(fields)}.count"
        if kept.exists():
            return int(kept.read_text())
        count = sum(1 for _ in self.recipe.documents(file))
        temporary = kept.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(str(count))
        temporary.rename(kept)
        return count

    def write(self, file: str, first: int, track: Track = untracked) -> tuple[Path, Part]:
        """Make the part of an input file whose first row has the ordinal `first`, atomically, or
        reuse an earlier attempt's. Returns its folder and the part. Raises CorpusError."""
        place = self.part_folder(file, first)
        try:
            return place, Part.model_validate_json((place / "part.json").read_bytes())
        except (OSError, ValidationError):
            shutil.rmtree(place, ignore_errors=True)  # missing or incomplete
        temporary = place.with_suffix(f".{os.getpid()}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            chat = self.template if self.template != COMPLETIONS else None
            with nullcontext() if chat is None else Renderer(chat) as renderer:
                rows = documents_of(self.recipe, file, self.template, renderer)
                part = self._write_splits(track(rows, "writing tokens", None), temporary, first)
            (temporary / "part.json").write_text(part.model_dump_json())
            temporary.rename(place)
        except OSError as error:
            raise CorpusError(f"can't write {place}: {error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return place, part

    def _write_splits(
        self, documents: Iterable[Document | RowError], folder: Path, first: int
    ) -> Part:
        """Write the shards of a part's two splits. Raises CorpusError, OSError."""
        tokenizer, recipe = load_tokenizer(self.tokenizer), self.recipe
        # "<|endoftext|>" within a text is text; what a chat template makes has special tokens
        tokenizer.encode_special_tokens = not self.masked
        dtype = self.vocabulary.dtype
        encode = tokenizer.encode_batch if self.masked else tokenizer.encode_batch_fast
        ranks: list[float] = []
        rows, longer = _RowCounter(documents, first), 0
        with ExitStack() as stack:
            writers = {
                name: stack.enter_context(SplitWriter(folder, name, dtype, self.masked))
                for name in SPLITS
            }
            for batch in _batches(rows.good()):
                encodings = encode(
                    [document.text for _, document in batch], add_special_tokens=False
                )
                for (ordinal, document), encoding in zip(batch, encodings, strict=True):
                    tokens, mask = self._tokens(document, encoding)
                    if mask is not None and len(tokens) > (recipe.context or len(tokens)):
                        longer += 1
                        if recipe.longer == "leave-out":
                            continue
                    rank = held_out_rank(ordinal, document.text)
                    ranks.append(rank)
                    split = VALIDATION if rank < recipe.validation else TRAIN
                    writers[split].write(tokens, mask, len(document.text.encode()))
                ranks = nsmallest(FEW, ranks)
        return Part(
            ranks=ranks,
            rows=rows.number,
            bad=rows.bad,
            why=rows.why,
            longer=longer,
            splits={name: writer.split() for name, writer in writers.items()},
        )

    def _tokens(
        self, document: Document, encoding: Encoding
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8] | None]:
        """The tokens of a document, and 1 for each that is scored; None: all are. Raises
        CorpusError where the document's end token is split."""
        _, begin, end, ending = self.vocabulary
        if self.template not in (None, COMPLETIONS):
            begin = ()  # the template writes its own
        tokens = np.array([*begin, *encoding.ids, end])
        if document.scored is None:
            return tokens, None
        inner = _mask(encoding, document.scored)
        mask = np.array([*(0 for _ in begin), *inner, document.open_end], np.uint8)
        ended = document.text.rstrip().endswith(ending)
        if ended and end not in encoding.ids:
            raise CorpusError(
                f"a conversation ends with {ending}, which is no special token in "
                f"{self.tokenizer}, so it is split: transformers' "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) makes it one"
            )
        return (tokens[:-1], mask[:-1]) if ended else (tokens, mask)


class _RowCounter:
    """Counts the rows of an input file while they are iterated."""

    def __init__(self, rows: Iterable[Document | RowError], first: int) -> None:
        self._rows, self._first = rows, first
        self.number = self.bad = 0
        self.why: list[str] = []

    def good(self) -> Iterator[tuple[int, Document]]:
        """The good rows with their ordinals, which bad rows count in."""
        for ordinal, row in enumerate(self._rows, self._first):
            self.number += 1
            if not isinstance(row, RowError):
                yield ordinal, row
                continue
            self.bad += 1
            if len(self.why) < SHOWN:
                self.why.append(str(row))


def held_out_rank(ordinal: int, text: str) -> float:
    """A pseudorandom number in [0, 1) of a document, which is held out if it is below the share."""
    return xxhash.xxh3_64_intdigest(text.encode(), seed=ordinal) / 2**64


def token_coding_of(tokenizer: Path, recipe: Recipe) -> TokenCoding:
    """How a tokenizer.json codes texts under this recipe. Raises CorpusError."""
    library, folder = load_tokenizer(tokenizer), tokenizer.absolute().parent
    begin, end = text_bounds(library, folder, recipe.bos, recipe.end_token)
    if end is None:
        raise CorpusError(
            f"no file in {folder} says which token ends a document: name it with --end-token; "
            f"{describe_special_tokens(library)}"
        )
    size = max(library.get_vocab().values()) + 1
    return TokenCoding(size, begin, end, str(library.id_to_token(end)))


def documents_of(
    recipe: Recipe, file: str, template: Template | None, renderer: Renderer | None
) -> Iterator[Document | RowError]:
    """The rows of an input file as documents, all of the template's kind. Raises CorpusError."""
    documents = _as_documents(recipe.documents(file), template, renderer)
    return limit_bad_rows(documents, recipe.skip_bad)


def _as_documents(
    rows: Iterable[Row | RowError], template: Template | None, renderer: Renderer | None
) -> Iterator[Document | RowError]:
    """The rows as documents. Raises CorpusError for a row of another kind."""
    for row in rows:
        match row:
            case RowError():
                yield row
            case str() if template is None:
                yield Document(row)
            case Completion(_, prompt, completion) if template == COMPLETIONS:
                whole = prompt + completion
                yield Document(whole, [(len(prompt), len(whole))], open_end=True)
            case Conversation() if renderer is not None:
                yield _render(row, renderer)
            case _:
                raise CorpusError(
                    "there are documents of several kinds (texts, conversations, prompts with "
                    "completions): prepare each kind apart, and train on all with [[data.corpora]]"
                )


def _render(conversation: Conversation, renderer: Renderer) -> Document | RowError:
    """The document of a conversation. Raises CorpusError when the template is no longer usable."""
    try:
        document = Document(*renderer.render(conversation))
        document.text.encode()
    except RowError as error:
        return error
    except (RecursionError, UnicodeEncodeError) as error:
        return RowError(f"{conversation.place} can't be rendered: {error}")
    return document


def _mask(encoding: Encoding, scored: Iterable[tuple[int, int]]) -> NDArray[np.uint8]:
    """Mask of the tokens with a character in one of these spans: 1 or 0, uint8 [tokens]."""
    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), np.uint8)
    for begin, end in scored:
        (touched,) = np.nonzero((starts < end) & (ends > begin))
        if touched.size:
            mask[touched[0] : touched[-1] + 1] = 1
    return mask


def _batches(texts: Iterable[tuple[int, Document]]) -> Iterator[list[tuple[int, Document]]]:
    """Documents with their ordinals, in batches of about BATCH_CHARACTERS for the tokenizer."""
    batch, characters = [], 0
    for numbered in texts:
        batch.append(numbered)
        characters += len(numbered[1].text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch

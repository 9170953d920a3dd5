"""Prepared data: shards of tokens, with an index. `prepare` (prepare.py) makes it.

A prepared folder holds `index.json`, `tokenizer.json` and, for each split, shards of little-endian
tokens. Every document ends with the end-of-document token. A split is the concatenation of its
documents, cut into samples without regard to where documents or shards end. Data scored in parts,
such as conversations, has masks beside the tokens: shards of one byte for each token, SCORED and
BEGINS.

Samples come only from shards that match the index. Nodes compare the index and ledgers record it
(`Index.content`). Shards are read, not mapped: a shard that is cut short raises an error instead of
ending the process.

A registry reads the index, and has neither numpy nor tokenizers: they are loaded where samples are.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import file_digest
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import xxhash
from pydantic import BaseModel, Field, ValidationError

from planaria.bootstrap.files import read_small
from planaria.node.data.mixture_cycle import Share

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    from planaria.node.data.remote_corpus import ShardElsewhere

log = logging.getLogger("planaria")

FORMAT = 1
SCORED, BEGINS = 1, 2
"""Bits of a mask's byte: its token is scored; a document begins with it."""
UNSCORED = -100
"""Target that isn't scored: `ignore_index` of torch's cross-entropy."""
BLOCK = 1 << 20
"""Bytes read at a time to verify a shard."""
PLACE = "place.json"
"""File that marks a folder as a stand-in for prepared data elsewhere (remote_corpus.py)."""
TRAIN, VALIDATION = SPLITS = "train", "validation"
LARGEST_TOKENIZER = 64 << 20
"""Limit of a tokenizer.json in bytes: the library takes some 15 times as much memory to read it."""


class CorpusError(ValueError):
    """Error of prepared data, or of text to prepare; the message says why and what to do."""


class RowError(CorpusError):
    """Error of one input record that can't be prepared; the message says where it is."""


class TokenShard(BaseModel):
    name: str = Field(pattern=r"^\w[\w.-]*$", max_length=200)  # can't leave its folder
    tokens: int
    checksum: str
    blocks: str  # checksum of the list of block checksums (blocks.py)


class Split(BaseModel):
    documents: int
    text_bytes: int
    shards: list[TokenShard]
    masks: list[TokenShard] | None = None  # None: all tokens are scored
    scored: int | None = None  # tokens

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


class CorpusSource(BaseModel):
    """Which files prepared data was made of, and what was left out."""

    key: str = ""  # equal for equal recipe and files; empty: unknown
    files: int
    bytes: int  # of the files
    rows: int  # documents, and rows that were left out
    left_out: dict[str, tuple[int, int]]  # by reason: count, and bytes as far as known
    context: int | None = None  # tokens of a sample, as far as that was known
    cut: int = 0  # conversations of more tokens


class Index(BaseModel):
    """Content of a prepared folder's `index.json`. Checksums are xxh3_128 in hexadecimal."""

    format: int
    vocabulary: int
    dtype: Literal["uint16", "uint32"]
    end_of_document: int
    begin: tuple[int, ...] = ()  # tokens before each text; a chat template writes a conversation's
    tokenizer: str
    splits: dict[str, Split]
    content: str = ""
    source: CorpusSource | None = None  # training doesn't depend on it

    def content_hash(self) -> str:
        """Hash of what training depends on: tokens, masks and vocabulary."""
        shards = {name: [shard.checksum for shard in self.splits[name].shards] for name in SPLITS}
        figures = self.format, self.vocabulary, self.dtype, self.end_of_document
        fields: list[object] = [*figures, shards]
        if self.masked:
            masks = (self.splits[name].masks or [] for name in SPLITS)
            fields.append([[mask.checksum for mask in each] for each in masks])
        return hash_of(fields)

    @property
    def masked(self) -> bool:
        return any(split.masks is not None for split in self.splits.values())

    def misfit(self, folder: Path, content: str, vocabulary: int | None) -> str:
        """Why a run with this content and vocabulary can't train on the data, and what to do; empty
        when it can. `folder` has the tokenizer; `content` "" and `vocabulary` None: unspecified."""
        if content and content != self.content:
            return (
                f"is other data than the run's: its content is {self.content}, the run file says "
                f"data.content = {content}. Prepare the same text in the same way, copy the "
                "folder, or take data.content out of the run file"
            )
        if vocabulary is not None and vocabulary < self.vocabulary:
            more = range(vocabulary, self.vocabulary)
            return (
                f"has a tokenizer of {self.vocabulary} tokens, {len(more)} more than the model's "
                f"(model.vocabulary = {vocabulary}){_token_names(folder, more)}. Leave "
                "model.vocabulary out of the run file, or prepare the text with a smaller "
                "--vocabulary; a model "
                "that model.from names needs its own tokenizer, or transformers' "
                f"resize_token_embeddings({self.vocabulary})"
            )
        return ""


class _ShardFile:
    """A shard as a local file. The first reader verifies it; concurrent readers wait for that."""

    def __init__(
        self, folder: Path, shard: TokenShard, dtype: str, vocabulary: int, remedy: str
    ) -> None:
        import numpy as np

        self.file, self.shard, self._remedy = folder / shard.name, shard, remedy
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._vocabulary = vocabulary
        self._verifying = threading.Lock()
        self._verified: _Stamp | None = None  # stamp of the file when it matched the index

    def tokens(self, offset: int, count: int) -> NDArray[np.unsignedinteger]:
        """Up to `count` tokens from `offset` on, as far as the shard goes. Raises CorpusError."""
        import numpy as np

        with self._opened() as descriptor:
            data, stamp = self._read(descriptor, offset, count)
            if stamp != self._verified:  # not yet, or the file has changed since
                self._verify(descriptor)
                data, stamp = self._read(descriptor, offset, count)
        if stamp != self._verified:
            raise CorpusError(f"{self.file} changes while it is read: {self._remedy}")
        return np.frombuffer(data, self._dtype)

    def prefetch(self, offset: int, count: int) -> None:
        """Do nothing: the shard is a local file."""

    def verify(self) -> None:
        """Verify the shard's file, unless it is unchanged since then. Raises CorpusError."""
        with self._opened() as descriptor:
            self._verify(descriptor)

    def _verify(self, descriptor: int) -> None:
        """Verify an opened shard's size, checksum and token range. Raises CorpusError, OSError."""
        import numpy as np

        with self._verifying:
            stamp = _stamp_of(descriptor)
            if stamp == self._verified:
                return
            self._check_size(os.fstat(descriptor).st_size)
            digest, highest, at = xxhash.xxh3_128(), 0, 0
            while block := os.pread(descriptor, BLOCK, at):
                digest.update(block)
                tokens = np.frombuffer(block, self._dtype, len(block) // self._dtype.itemsize)
                highest, at = max(highest, int(tokens.max(initial=0))), at + len(block)
            checksum = digest.hexdigest()
            if checksum != self.shard.checksum:
                raise CorpusError(
                    f"{self.file} is damaged: its checksum is {checksum}, the index says "
                    f"{self.shard.checksum}: {self._remedy}"
                )
            if highest >= self._vocabulary:
                raise CorpusError(
                    f"{self.file} has token {highest}, but by its index tokens are below "
                    f"{self._vocabulary}: {self._remedy}"
                )
            self._verified = stamp

    def check(self) -> None:
        """Check that the shard's file exists with its size. Raises CorpusError."""
        if not self.file.is_file():
            raise CorpusError(f"{self.file} is missing: {self._remedy}")
        self._check_size(self.file.stat().st_size)

    def _check_size(self, size: int) -> None:
        expected = self.shard.tokens * self._dtype.itemsize
        if size != expected:
            raise CorpusError(
                f"{self.file} has {size} bytes where the index says {expected}: {self._remedy}"
            )

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the shard's file. Turns errors of reading into CorpusError."""
        try:
            descriptor = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CorpusError(f"can't read {self.file}: {error.strerror}") from error

    def _read(self, descriptor: int, offset: int, count: int) -> tuple[bytes, _Stamp]:
        """Bytes of the shard, and the stamp after them: a write in between changes the stamp."""
        size = self._dtype.itemsize
        return os.pread(descriptor, count * size, offset * size), _stamp_of(descriptor)


_Shard: TypeAlias = "_ShardFile | ShardElsewhere"
_Stamp = tuple[int, int, int, int, int]


def _stamp_of(descriptor: int) -> _Stamp:
    """Stamp of an opened shard's content, as far as the file system tells when it changes."""
    of = os.fstat(descriptor)
    return of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns


class Corpus:
    """Prepared data in one folder. Open it with `Corpus.open`; any thread may read it.

    A split is cut into samples that don't overlap: sample i is the tokens i·context to
    (i+1)·context, both included. Its last token is a target only; the next sample has it as its
    first input.
    """

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self.index = index
        self.content = index.content
        self.vocabulary = index.vocabulary
        self.elsewhere = (path / PLACE).is_file()
        make = self._shard_constructor()

        def each(shards: list[TokenShard], dtype: str, vocabulary: int) -> list[_Shard]:
            return [make(shard, dtype, vocabulary) for shard in shards]

        self._shards = {
            name: each(split.shards, index.dtype, index.vocabulary)
            for name, split in index.splits.items()
        }
        self._masks = {
            name: each(split.masks or [], "uint8", 256) for name, split in index.splits.items()
        }
        self._verifier: threading.Thread | None = None
        self._starts = {
            name: list(accumulate((shard.tokens for shard in split.shards), initial=0))
            for name, split in index.splits.items()
        }

    def _shard_constructor(self) -> Callable[[TokenShard, str, int], _Shard]:
        """Constructor of shards, from an entry, dtype and vocabulary. Raises CorpusError."""
        if self.elsewhere:
            from planaria.node.data.remote_corpus import shard_constructor

            return shard_constructor(self.path)
        return partial(_ShardFile, self.path, remedy=_remedy(self.path))

    @classmethod
    def open(cls, path: Path, verify: bool = False) -> Corpus:
        """Open prepared data. Checks that every shard exists with its size; with `verify`, also all
        checksums, the tokenizer's included. Raises CorpusError."""
        corpus = cls(path, read_index(path))
        for shard in corpus._all_shards():
            shard.check()
        if verify:
            corpus._verify()
            if file_checksum(path / "tokenizer.json") != corpus.index.tokenizer:
                raise CorpusError(
                    f"{path / 'tokenizer.json'} is damaged, its checksum is wrong: {_remedy(path)}"
                )
        return corpus

    def verify_in_background(self) -> None:
        """Verify all local shards in a thread, so that samples seldom wait for it. An error is
        logged, and raised again when a sample of that shard is read."""
        if self._verifier is None and not self.elsewhere:
            self._verifier = threading.Thread(
                target=self._verify_and_log, name="verifying-data", daemon=True
            )
            self._verifier.start()

    def _verify_and_log(self) -> None:
        try:
            self._verify()
        except CorpusError as error:
            log.error("%s", error)

    def _verify(self) -> None:
        for shard in self._all_shards():
            shard.verify()

    def _all_shards(self) -> list[_Shard]:
        files = [*self._shards.values(), *self._masks.values()]
        return [shard for shards in files for shard in shards]

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path / "tokenizer.json")

    def count(self, split: str, context: int) -> int:
        """Number of a split's samples of `context` inputs. Raises CorpusError for none."""
        tokens = int(self._starts[split][-1])
        if tokens <= context:
            raise CorpusError(
                f"the {split} split in {self.path} has {tokens} tokens, but one sample of context "
                f"{context} takes {context + 1}: shorten the context, or prepare more text"
            )
        return (tokens - 1) // context

    def shares(self, context: int) -> list[Share]:
        """The number of training samples, and their turns. Raises CorpusError."""
        return [Share(self.count(TRAIN, context), turns=1)]

    def validation_ids(self, context: int, positions: Iterable[int]) -> NDArray[np.int64]:
        """Ids of the validation samples at these positions, int64, cyclic. Raises CorpusError."""
        import numpy as np

        count = self.count(VALIDATION, context)
        return np.fromiter(positions, np.int64) % count

    def sample(self, split: str, context: int, index: int) -> NDArray[np.int64]:
        """The `context` + 1 tokens of a split's sample, int64. Raises IndexError, CorpusError."""
        return self._sample(self._shards[split], split, context, index)

    def _sample(
        self, shards: Sequence[_Shard], split: str, context: int, index: int
    ) -> NDArray[np.int64]:
        import numpy as np

        if not 0 <= index < self.count(split, context):
            raise IndexError(f"the {split} split has no sample {index} of context {context}")
        pieces = list(self._pieces(shards, split, context, index))
        for shard, offset, count in pieces:  # all at once, before any is awaited
            shard.prefetch(offset, count)
        tokens = [shard.tokens(offset, count) for shard, offset, count in pieces]
        return np.concatenate(tokens, dtype=np.int64)

    def _pieces(
        self, shards: Sequence[_Shard], split: str, context: int, index: int
    ) -> Iterator[tuple[_Shard, int, int]]:
        """Where a sample's tokens are, as it may span shards: shard, offset and count of each."""
        starts, position, end = self._starts[split], index * context, (index + 1) * context + 1
        number = bisect_right(starts, position) - 1
        while position < end:
            count = min(end, starts[number + 1]) - position
            yield shards[number], position - starts[number], count
            position, number = position + count, number + 1

    def by_corpus(
        self, split: str, context: int, indices: Iterable[int] | NDArray[np.int64]
    ) -> Iterator[tuple[Corpus, int]]:
        """The corpus of each sample, this one, and its index: see `Mixture.by_corpus`."""
        return ((self, int(index)) for index in indices)

    def prefetch(self, split: str, context: int, indices: Iterable[int]) -> None:
        """Begin to read remote shards of samples that will soon be asked for. Raises IndexError."""
        of = [self._shards[split], *([self._masks[split]] if self.masked else [])]
        for index in indices:
            for shards in of:
                for shard, offset, count in self._pieces(shards, split, context, int(index)):
                    shard.prefetch(offset, count)

    @property
    def masked(self) -> bool:
        return self.index.masked

    def scored(self, split: str, context: int, index: int) -> NDArray[np.bool_]:
        """Which of a sample's `context` targets are scored, bool. Raises IndexError,
        CorpusError."""
        import numpy as np

        if not self.masked:
            return np.ones(context, np.bool_)
        marks = self._sample(self._masks[split], split, context, index)
        return (marks[1:] & SCORED).astype(np.bool_)

    def begins(self, split: str, context: int, index: int) -> NDArray[np.bool_]:
        """Which of a sample's `context` inputs, its tokens but the last, begin a document. The
        first is unknown: False. Raises IndexError, CorpusError."""
        import numpy as np

        if self.masked:  # the end-of-document token may also be within a document
            marks = self._sample(self._masks[split], split, context, index)
            return (marks[:-1] & BEGINS).astype(np.bool_)
        ends = self.sample(split, context, index)[:-1] == self.index.end_of_document
        begins = np.concatenate(([False], ends[:-1]))
        if self.index.end_of_document in self.index.begin:  # which then ends no document
            begins[1:] &= ~(begins[:-1] & ends[:-1])
        return begins


def read_index(path: Path) -> Index:
    """The index of the prepared data in the folder `path`. Raises CorpusError."""
    file = path / "index.json"
    try:
        fields = json.loads(read_small(file))
        if (format := fields["format"]) != FORMAT:
            raise CorpusError(
                f"{path} was prepared in format {format}, and this planaria reads format {FORMAT}: "
                f"{_remedy(path)}"
            )
        index = Index.model_validate(fields)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorpusError(f"there is no prepared data at {path}: {_remedy(path)}") from error
    except OSError as error:
        raise CorpusError(f"can't read {file}: {error.strerror}") from error
    except (
        ValidationError,
        json.JSONDecodeError,
        UnicodeDecodeError,
        KeyError,
        TypeError,
        RecursionError,
    ) as error:
        raise CorpusError(f"{file} is damaged ({error}): {_remedy(path)}") from error
    damaged = set(index.splits) != set(SPLITS) or index.content != index.content_hash()
    if damaged or not all(_has_its_masks(split, index.masked) for split in index.splits.values()):
        raise CorpusError(f"{file} is damaged, its content hash is wrong: {_remedy(path)}")
    return index


def _has_its_masks(split: Split, masked: bool) -> bool:
    if not masked:
        return split.masks is None
    return [mask.tokens for mask in split.masks or []] == [shard.tokens for shard in split.shards]


def _remedy(path: Path) -> str:
    prepared = any((path / name).exists() for name in ("index.json", "tokenizer.json"))
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not prepared):
        return (
            f"prepare what is there with `planaria data prepare {path} --out ANOTHER_FOLDER`, and "
            "name that folder"
        )
    return f"make it with `planaria data prepare INPUT... --out {path}`"


def hash_of(fields: Sequence[object]) -> str:
    """xxh3_128 of fields in JSON, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(json.dumps(fields).encode())


def file_checksum(file: Path) -> str:
    """xxh3_128 of a file's content, in hexadecimal. Raises CorpusError."""
    try:
        with file.open("rb") as data:
            return file_digest(data, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        raise CorpusError(f"can't read {file}: {error.strerror}") from error


def _token_names(folder: Path, tokens: range) -> str:
    """Names of these tokens, four at most, behind a colon; empty without a readable tokenizer."""
    try:
        tokenizer = load_tokenizer(folder / "tokenizer.json")
    except (CorpusError, ModuleNotFoundError):
        return ""
    names = [f"{tokenizer.id_to_token(token)} ({token})" for token in tokens[:4]]
    return f": {', '.join([*names, '...'][: len(tokens)])}"


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, without truncation and padding. Raises CorpusError."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(read_small(path, LARGEST_TOKENIZER))
    except OSError as error:
        raise CorpusError(f"can't read the tokenizer {path}: {error.strerror}") from error
    except Exception as error:  # the library raises no other kind
        raise CorpusError(
            f"can't read the tokenizer {path}: {error}; give a tokenizer.json as written by the "
            "tokenizers library"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

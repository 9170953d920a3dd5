"""Text to tokens, once: `prepare` writes the folder that `Corpus` reads."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from planaria.node.data.chat import Conversation, Template, template_of
from planaria.node.data.corpus import (
    BEGINS,
    FORMAT,
    MASKED,
    SCORED,
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
from planaria.node.data.rendering import Renderer
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
    chat_template: Path | None = None  # None: the tokenizer's

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

    def documents(self) -> Iterator[str | Conversation]:
        try:
            separator = None if self.separator is None else re.compile(self.separator)
        except re.error as error:
            raise CorpusError(
                f"--document-separator {self.separator!r} is not a regular expression: {error}"
            ) from error
        for source in self.inputs:
            yield from documents(source, self.text_field, separator)

    def template(self) -> Template | None:
        """By which conversations become text; None when there are texts. Raises CorpusError."""
        if not isinstance(next(self.documents(), None), Conversation):
            if self.chat_template is not None:
                raise CorpusError(
                    f"--chat-template {self.chat_template} is for records with messages, and the "
                    "first document is a text"
                )
            return None
        if self.tokenizer is None:
            raise CorpusError(
                "records with messages need the tokenizer of the model that is to learn from them: "
                "give its tokenizer.json with --tokenizer; the chat template is found beside it"
            )
        return template_of(self.tokenizer, self.chat_template)


class Document(NamedTuple):
    text: str
    scored: list[tuple[int, int]] | None = None  # characters; None: all


def _documents(recipe: Recipe, renderer: Renderer | None) -> Iterator[Document]:
    """Raises CorpusError."""
    for one in recipe.documents():
        if isinstance(one, str) and renderer is None:
            yield Document(one)
        elif isinstance(one, Conversation) and renderer is not None:
            yield Document(*renderer.render(one))
        else:
            raise CorpusError(
                "there are texts and records with messages: prepare them apart, and train on both "
                "with [[data.corpora]]"
            )


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
    template = recipe.template()
    try:
        temporary.mkdir(parents=True)
        count: int | None = None
        if recipe.tokenizer is None:
            tokenizer, count = _train_tokenizer(recipe, track)
            tokenizer.save(str(temporary / "tokenizer.json"))
        else:
            tokenizer = load_tokenizer(recipe.tokenizer)
            shutil.copyfile(recipe.tokenizer, temporary / "tokenizer.json")
        with nullcontext() if template is None else Renderer(template) as renderer:
            texts = track(_documents(recipe, renderer), "writing tokens", count)
            masked = template is not None
            index = _write_splits(texts, tokenizer, recipe.validation, temporary, masked)
        written = index.model_dump_json(indent=1, exclude_none=True)
        (temporary / "index.json").write_text(written + "\n")
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
        for text, _ in track(_documents(recipe, None), "training the tokenizer", None):
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
    texts: Iterable[Document], tokenizer: Tokenizer, validation: float, folder: Path, masked: bool
) -> Index:
    # "<|endoftext|>" within a text is text; what a chat template makes has special tokens
    tokenizer.encode_special_tokens = not masked
    end = _end_of_document(tokenizer)
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    dtype: Literal["uint16", "uint32"] = "uint16" if vocabulary <= 1 << 16 else "uint32"
    nearest = 1.0
    with ExitStack() as stack:
        writers = {s: stack.enter_context(SplitWriter(folder, s, dtype, masked)) for s in SPLITS}
        for ordinal, batch in _batches(texts):
            encode = tokenizer.encode_batch if masked else tokenizer.encode_batch_fast
            encodings = encode([one.text for one in batch], add_special_tokens=False)
            for i, (document, encoding) in enumerate(zip(batch, encodings, strict=True), ordinal):
                rank = held_out_rank(i, document.text)
                nearest = min(nearest, rank)
                split = VALIDATION if rank < validation else TRAIN
                tokens = np.array([*encoding.ids, end])
                mask = None if document.scored is None else _mask(encoding, document.scored)
                if mask is not None and encoding.ids[-1:] == [end]:
                    tokens = tokens[:-1]
                writers[split].write(tokens, mask, len(document.text.encode()))
    splits = {name: writer.split() for name, writer in writers.items()}
    _check_both_sides(splits, nearest)
    _check_scored(splits)
    index = Index(
        format=MASKED if masked else FORMAT,
        vocabulary=vocabulary,
        dtype=dtype,
        end_of_document=end,
        tokenizer=file_checksum(folder / "tokenizer.json"),
        splits=splits,
    )
    return index.model_copy(update={"content": index.content_hash()})


def _mask(encoding: Encoding, scored: Iterable[tuple[int, int]]) -> NDArray[np.uint8]:
    """1 for each token with a character of these, uint8 [tokens]; 0 for others."""
    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), np.uint8)
    for begin, end in scored:
        (touched,) = np.nonzero((starts < end) & (ends > begin))
        if touched.size:
            mask[touched[0] : touched[-1] + 1] = 1
    return mask


def _batches(texts: Iterable[Document]) -> Iterator[tuple[int, list[Document]]]:
    """Batches of about BATCH_CHARACTERS, each with the ordinal of its first document."""
    ordinal, batch, characters = 0, [], 0
    for document in texts:
        batch.append(document)
        characters += len(document.text)
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


def _check_scored(splits: dict[str, Split]) -> None:
    for name, split in splits.items():
        if split.scored == 0:
            raise CorpusError(
                f"in the {split.documents} conversations for {name} the assistant says nothing, "
                "and only that is learned from: are there messages with the role assistant?"
            )


class SplitWriter:
    """Shards of one split, and with `masked` their masks."""

    def __init__(self, folder: Path, name: str, dtype: str, masked: bool = False) -> None:
        self._tokens = ShardWriter(folder, name, ".bin", dtype)
        self._masks = ShardWriter(folder, name, ".mask", "uint8") if masked else None
        self._documents, self._text_bytes, self._scored = 0, 0, 0

    def write(
        self, document: NDArray[np.int64], mask: NDArray[np.uint8] | None, text_bytes: int
    ) -> None:
        """`mask`: of its first tokens; those behind them are not scored."""
        self._documents += 1
        self._text_bytes += text_bytes
        self._tokens.write(document)
        if self._masks is not None and mask is not None:
            marks = np.zeros(len(document), np.int64)
            marks[: len(mask)] = SCORED * mask
            marks[:1] |= BEGINS
            self._masks.write(marks)
            self._scored += int(mask.sum())

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._tokens.close()
        if self._masks is not None:
            self._masks.close()

    def split(self) -> Split:
        return Split(
            documents=self._documents,
            text_bytes=self._text_bytes,
            shards=self._tokens.shards,
            masks=None if self._masks is None else self._masks.shards,
            scored=None if self._masks is None else self._scored,
        )


class ShardWriter:
    """Shards, each closed and on disk before the next begins."""

    def __init__(self, folder: Path, name: str, suffix: str, dtype: str) -> None:
        self._folder, self._name, self._suffix = folder, name, suffix
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self.shards: list[TokenShard] = []
        self._file: BinaryIO | None = None
        self._hash = xxhash.xxh3_128()
        self._tokens = 0  # in the open shard

    def write(self, document: NDArray[np.int64]) -> None:
        while document.size:
            if self._file is None:
                name = f"{self._name}-{len(self.shards):05d}{self._suffix}"
                self._file = (self._folder / name).open("wb")
            head, document = np.split(document, [SHARD_TOKENS - self._tokens])
            data = head.astype(self._dtype).tobytes()
            self._file.write(data)
            self._hash.update(data)
            self._tokens += head.size
            if self._tokens == SHARD_TOKENS:
                self.close()

    def close(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        name = Path(self._file.name).name
        self.shards.append(
            TokenShard(name=name, tokens=self._tokens, checksum=self._hash.hexdigest())
        )
        self._file, self._tokens = None, 0
        self._hash.reset()

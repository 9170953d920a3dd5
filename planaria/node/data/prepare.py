"""Text to tokens: `prepare` writes the folder that `Corpus` reads.

Each input file becomes a part (parts.py), independent of process and order. The parts are then
concatenated. So the result is the same with any number of processes.
"""

from __future__ import annotations

import fcntl
import logging
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import TypeAlias

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import planaria
from planaria.bootstrap.files import replace_file
from planaria.node.data.chat import Template
from planaria.node.data.corpus import (
    FORMAT,
    SPLITS,
    TRAIN,
    VALIDATION,
    Corpus,
    CorpusError,
    CorpusSource,
    Index,
    RowError,
    Split,
    file_checksum,
    hash_of,
    read_index,
)
from planaria.node.data.executors import Spread
from planaria.node.data.file_access import Listing, file_size, file_version
from planaria.node.data.parts import (
    FEW,
    Document,
    Part,
    Tokenizing,
    documents_of,
    held_out_rank,
    token_coding_of,
)
from planaria.node.data.progress import Track, untracked
from planaria.node.data.recipe import Recipe, first_reasons
from planaria.node.data.shard_writers import SplitWriter
from planaria.node.data.tokenizer import (
    CONFIG,
    TEMPLATE,
    TOKENIZER,
    chat_templates,
    context_of_model,
    write_tokenizer,
)

log = logging.getLogger("planaria")

Parts: TypeAlias = list[tuple[Path, Part]]
"""Folders and parts of files."""
END_OF_DOCUMENT = "<|endoftext|>"  # of a tokenizer that is trained here
TRAINING_CHARACTERS = 1 << 30  # limit of text to train the tokenizer on


def prepare(
    recipe: Recipe,
    out: Path,
    *,
    spread: Spread | None = None,
    force: bool = False,
    track: Track = untracked,
) -> tuple[Corpus, bool]:
    """Write the prepared data to `out`, atomically.

    Files are read once, once more to train a tokenizer on them, and once more, all but the last,
    when `spread` is given. Memory holds one batch of documents (and, in training, the tokenizer's
    counts of words). Finished parts are kept beside `out` after a failure; the next attempt reuses
    them. `track(items, description, total)` shows progress. Returns the corpus, and False if `out`
    held the same content already. Raises CorpusError, also when `out` holds something else: then
    `force` replaces it, if it is prepared data.
    """
    existing = _existing_index(out)
    listing = recipe.files()
    template = recipe.template(listing.files)
    if template is not None and recipe.tokenizer is not None and recipe.context is None:
        recipe = replace(recipe, context=context_of_model(recipe.tokenizer.absolute().parent))
    key = _source_key(recipe, template, listing.files)
    if key and existing is not None and existing.source and existing.source.key == key:
        return Corpus.open(out), False
    try:
        with _locked_folder(out) as folder:
            whole = folder / "whole"
            tokenizing, parts = _write_fitting(
                recipe, listing.files, template, folder, spread, track
            )
            index = _write_corpus(tokenizing, parts, whole, _source_of(key, recipe, listing, parts))
            if existing is not None and existing.content == index.content:
                for name in (CONFIG, TEMPLATE):  # the part that a model answers by may be new
                    if (whole / name).exists():
                        replace_file(out / name, (whole / name).read_bytes())
                    else:
                        (out / name).unlink(missing_ok=True)
                replaced = existing.model_copy(update={"source": index.source})
                replace_file(out / "index.json", _in_json(replaced))
                return Corpus.open(out), False
            if existing is not None and not force:
                raise CorpusError(
                    f"{out} holds other prepared data (content {existing.content[:8]}, this would "
                    f"be {index.content[:8]}): choose another --out, or replace it with --force"
                )
            if existing is not None:
                out.rename(folder / "replaced")
            whole.replace(out)  # an empty folder may exist
    except OSError as error:
        raise CorpusError(f"can't write {out}: {error}") from error
    return Corpus.open(out), True


def _source_key(recipe: Recipe, template: Template | None, files: Sequence[str]) -> str:
    """Hash of recipe, template, tokenizer and input files, as far as stamps tell; empty for
    datasets, which have none. Raises CorpusError."""
    stamps = [file_version(file) for file in files]
    if not all(stamps):
        return ""
    places = "inputs", "tokenizer", "chat_template"
    how = {name: value for name, value in asdict(recipe).items() if name not in places}
    tokenizer = recipe.tokenizer and [*token_coding_of(recipe.tokenizer, recipe)]
    checksum = recipe.tokenizer and file_checksum(recipe.tokenizer)
    beside = recipe.tokenizer and chat_templates(recipe.tokenizer.absolute().parent)
    fields = [planaria.__version__, how, template, tokenizer, checksum, beside, files, stamps]
    return hash_of(fields)


def _existing_index(out: Path) -> Index | None:
    """Index of the data at `out`; None for nothing. Raises CorpusError for anything else."""
    if (out / "index.json").is_file():
        return read_index(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise CorpusError(f"{out} exists, but isn't prepared data: choose another --out")
    return None


@contextmanager
def _locked_folder(out: Path) -> Iterator[Path]:
    """A locked working folder beside `out`. It is removed on success, or if it has no finished part
    for another attempt. Raises CorpusError."""
    folder = out.absolute().parent / f".{out.name}.parts"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CorpusError(f"another process prepares {out}: wait for it") from error
        kept = False
        try:
            yield folder
        except BaseException as error:
            kept = any(folder.glob("*/part.json"))
            if kept and isinstance(error, CorpusError):
                raise CorpusError(
                    f"{error} (the tokens so far are kept in {folder} for the next try: remove "
                    "that folder to begin anew)"
                ) from error
            raise
        finally:
            if not kept:
                shutil.rmtree(folder, ignore_errors=True)


def _source_of(key: str, recipe: Recipe, listing: Listing, parts: Parts) -> CorpusSource:
    """The index's record of the files that the parts were made of."""
    longer = sum(part.longer for _, part in parts)
    cut = longer if recipe.longer == "cut" else 0
    rows = {
        "bad rows": sum(part.bad for _, part in parts),
        f"conversations of more than {recipe.context} tokens": longer - cut,
    }
    return CorpusSource(
        key=key,
        files=len(listing.files),
        bytes=sum(map(file_size, listing.files)),
        rows=sum(part.rows for _, part in parts),
        left_out=listing.left_out | {reason: (count, 0) for reason, count in rows.items() if count},
        context=recipe.context,
        cut=cut,
    )


def _write_fitting(
    recipe: Recipe,
    files: Sequence[str],
    template: Template | None,
    folder: Path,
    spread: Spread | None,
    track: Track,
) -> tuple[Tokenizing, Parts]:
    """Write all files' parts so that each split has a document. Raises CorpusError, OSError."""
    tokenizing = _make_tokenizing(recipe, files, template, folder, track)
    parts = _write_parts(tokenizing, files, spread, track)
    _check_rows(recipe, parts)
    below = _held_out_below(recipe.validation, [part for _, part in parts])
    if below != recipe.validation:
        fitting = replace(recipe, validation=below)
        tokenizing = _make_tokenizing(fitting, files, template, folder, track)
        parts = _write_parts(tokenizing, files, spread, track)
    return tokenizing, parts


def _make_tokenizing(
    recipe: Recipe, files: Sequence[str], template: Template | None, folder: Path, track: Track
) -> Tokenizing:
    """A converter of documents; trains a missing tokenizer. Raises CorpusError, OSError."""
    if (tokenizer := recipe.tokenizer) is None:
        recipe = replace(recipe, end_token=recipe.end_token or END_OF_DOCUMENT)
        tokenizer = _trained_tokenizer(recipe, files, folder, track)
    return Tokenizing(recipe, tokenizer, token_coding_of(tokenizer, recipe), template, folder)


def _held_out_below(validation: float, parts: Sequence[Part]) -> float:
    """Rank threshold of held-out documents. It is `validation`, unless their number then differs by
    more than half from that share of few documents. Each split gets at least one."""
    documents = sum(part.documents for part in parts)
    held_out = sum(part.splits[VALIDATION].documents for part in parts)
    wanted = min(max(1, round(documents * validation)), documents - 1)
    fits = 2 * abs(held_out - wanted) <= wanted and held_out < documents
    if fits or not 1 <= wanted <= FEW:
        return validation
    ranks = sorted(rank for part in parts for rank in part.ranks)
    return math.nextafter(ranks[wanted - 1], 1.0)


def _write_corpus(tokenizing: Tokenizing, parts: Parts, whole: Path, source: CorpusSource) -> Index:
    """Write all parts' tokens to the folder `whole`. Raises CorpusError, OSError."""
    vocabulary, template = tokenizing.vocabulary, tokenizing.template
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    bounds = vocabulary.end_of_document, vocabulary.begin
    single = template.source if template and not template.for_tools else ""
    write_tokenizer(tokenizing.tokenizer, whole, *bounds, single or None)
    splits = {}
    for name in SPLITS:
        with SplitWriter(whole, name, vocabulary.dtype, tokenizing.masked) as writer:
            for place, part in parts:
                writer.append(part.splits[name], place)
        splits[name] = writer.split()
    if not splits[TRAIN].documents:
        raise CorpusError("all documents were held out: lower --validation")
    _check_scored(splits)
    index = Index(
        format=FORMAT,
        vocabulary=vocabulary.size,
        dtype=vocabulary.dtype,
        end_of_document=vocabulary.end_of_document,
        begin=vocabulary.begin,
        tokenizer=file_checksum(whole / TOKENIZER),
        splits=splits,
        source=source,
    )
    index = index.model_copy(update={"content": index.content_hash()})
    (whole / "index.json").write_bytes(_in_json(index))
    return index


def _in_json(index: Index) -> bytes:
    return index.model_dump_json(indent=1, exclude_none=True).encode() + b"\n"


def _write_parts(
    tokenizing: Tokenizing, files: Sequence[str], spread: Spread | None, track: Track
) -> Parts:
    """Write the parts of all files, in order; which documents are held out depends on how many
    precede them. Raises CorpusError."""
    if len(files) == 1:
        return [tokenizing.write(files[0], 0, track)]
    made: Iterator[tuple[Path, Part]]
    if spread is None:
        made = _write_in_turn(tokenizing, files)
    else:
        counted = spread(tokenizing.count, files[:-1])
        counts = track(counted, "counting documents", len(files) - 1)
        made = spread(tokenizing.write, files, list(accumulate(counts, initial=0)))
    parts = list(track(made, "files become tokens", len(files)))
    for place, _ in parts:
        if not place.is_dir():
            raise CorpusError(
                f"{place} is missing, though a worker has written it: workers of --dask must see "
                "the same files under the same paths"
            )
    return parts


def _write_in_turn(tokenizing: Tokenizing, files: Sequence[str]) -> Iterator[tuple[Path, Part]]:
    first = 0
    for file in files:
        place, part = tokenizing.write(file, first)
        first += part.rows
        yield place, part


def _trained_tokenizer(recipe: Recipe, files: Sequence[str], folder: Path, track: Track) -> Path:
    """Train a byte-level BPE on documents that are not held out. Raises CorpusError, OSError."""
    how = [recipe.vocabulary, recipe.end_token, recipe.validation]
    key = hash_of([*how, *recipe.reading, [(file, file_version(file)) for file in files]])
    trained = folder / f"{key}.tokenizer.json"
    if trained.exists():  # an earlier attempt has trained it
        return trained
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[recipe.end_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = chain.from_iterable(documents_of(recipe, file, None, None) for file in files)
    rows = track(documents, "training the tokenizer", None)
    tokenizer.train_from_iterator(_training_texts(rows, recipe.validation), trainer)
    temporary = trained.with_suffix(".tmp")
    tokenizer.save(str(temporary))
    return temporary.replace(trained)


def _training_texts(rows: Iterable[Document | RowError], validation: float) -> Iterator[str]:
    characters = 0
    for ordinal, row in enumerate(rows):
        if characters >= TRAINING_CHARACTERS:
            return
        if not isinstance(row, RowError) and held_out_rank(ordinal, row.text) >= validation:
            characters += len(row.text)
            yield row.text


def _check_rows(recipe: Recipe, parts: Parts) -> None:
    """Check that few enough input rows are bad, and warn of those. Raises CorpusError."""
    rows = sum(part.rows for _, part in parts)
    documents = sum(part.documents for _, part in parts)
    bad = sum(part.bad for _, part in parts)
    reasons = [reason for _, part in parts for reason in part.why]
    recipe.check_bad_rows(bad, rows, reasons)
    if documents < 2:
        raise CorpusError(
            f"found {documents} documents, but training and validation need one each: add text, or "
            "say with --document-separator where a document begins"
            + (f" (left out: {first_reasons(reasons)})" if reasons else "")
        )
    if reasons:
        log.warning("left out %d of %d rows: %s", bad, rows, first_reasons(reasons))


def _check_scored(splits: dict[str, Split]) -> None:
    for name, split in splits.items():
        if split.scored == 0:
            raise CorpusError(
                f"the assistant says nothing in the {split.documents} conversations for {name}, "
                "but training scores only its text: add messages with the role assistant"
            )

"""Documents, one after the other, from text files, JSONL, Parquet, folders and `datasets`.

They are texts, or conversations, of records with `messages`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from planaria.node.data.chat import Conversation, conversation
from planaria.node.data.corpus import CorpusError
from planaria.node.data.places import files_in, opened
from planaria.node.extras import remedy

TEXT_SUFFIXES = (".txt", ".text")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
SUFFIXES = TEXT_SUFFIXES + JSONL_SUFFIXES + PARQUET_SUFFIXES

CHAPTER = re.compile(r"(?=\s*(CHAPTER\b|Chapter\s+(\d+|[IVXLCDM]+)\b))")
LINES_PER_DOCUMENT = 200
LINES_AT_MOST = 2000


def files_of(source: str) -> list[str]:
    """The files that a source stands for: a file, or a folder's files in the order of their paths,
    here or at a URL; a dataset, `hf:NAME[:CONFIG][@SPLIT]`, counts as one. Raises CorpusError."""
    return [source] if source.startswith("hf:") else files_in(source, SUFFIXES)


def documents(
    file: str, text_field: str = "text", separator: re.Pattern[str] | None = None
) -> Iterator[str | Conversation]:
    """The documents of one of `files_of`; none of them blank. Memory holds one at a time. Raises
    CorpusError.

    `text_field` names the text of a record; `separator` is for text files, see lines_to_documents.
    """
    try:
        for text in _documents(file, text_field, separator):
            if not _blank(text):
                yield text
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{file} is not UTF-8 (byte {error.object[error.start]:#04x}): convert it first"
        ) from error
    except OSError as error:
        raise CorpusError(f"can't read {file}: {error}") from error


def _blank(document: str | Conversation) -> bool:
    return isinstance(document, str) and not document.strip()


def lines_to_documents(
    lines: Iterable[str], separator: re.Pattern[str] | None = None
) -> Iterator[str]:
    """Cut a text into documents at its lines.

    A line whose beginning matches `separator` begins a document; what matched is left out (so a
    lookahead keeps it: `(?=Act )`). Without a separator, documents begin at chapter headings; as
    long as there was none, at the first blank line after LINES_PER_DOCUMENT lines.
    """
    document: list[str] = []
    headings = False
    for line in lines:
        match = (separator or CHAPTER).match(line)
        headings = headings or match is not None
        full = len(document) >= LINES_PER_DOCUMENT and not line.strip()
        full = (full and not headings) or len(document) >= LINES_AT_MOST
        if match is not None or (full and separator is None):
            yield "".join(document).strip("\n")
            document = []
        document.append(line[match.end() :] if match else line)
    yield "".join(document).strip("\n")


def _documents(
    file: str, text_field: str, separator: re.Pattern[str] | None
) -> Iterator[str | Conversation]:
    suffix = Path(file).suffix.lower()
    if file.startswith("hf:"):
        yield from _from_records(_dataset_records(file), text_field)
    elif suffix in TEXT_SUFFIXES:
        with TextIOWrapper(opened(file), encoding="utf-8-sig") as lines:
            yield from lines_to_documents(lines, separator)
    elif suffix in JSONL_SUFFIXES:
        yield from _from_records(_jsonl_records(file), text_field)
    else:
        yield from _from_records(_parquet_records(file, text_field), text_field)


# A record comes with the words that say where it was.
Record = tuple[str, Any]


def _from_records(records: Iterable[Record], text_field: str) -> Iterator[str | Conversation]:
    for place, record in records:
        if isinstance(record, dict) and text_field not in record and "messages" in record:
            yield conversation(place, record)
            continue
        if not isinstance(record, dict) or text_field not in record:
            fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise CorpusError(
                f"{place} has no field {text_field!r} but {fields}: name one with --text-field"
            )
        text = record[text_field]
        if not isinstance(text, str):
            raise CorpusError(f"{place}: {text_field!r} is no text but {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CorpusError(
                f"{place}: {text_field!r} is not valid Unicode, half a surrogate pair at "
                f"character {error.start}"
            ) from error
        yield text


def _jsonl_records(file: str) -> Iterator[Record]:
    with TextIOWrapper(opened(file), encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield f"{file}, line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise CorpusError(f"{file}, line {number} is not JSON: {error}") from error


def _parquet_records(file: str, text_field: str) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise CorpusError(f"can't read {file}: {remedy(error)}") from error
    row = 0
    try:
        with opened(file) as data, pyarrow.parquet.ParquetFile(data) as table:
            names = table.schema_arrow.names
            columns = [text_field] if text_field in names else names
            for batch in table.iter_batches(batch_size=256, columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    yield f"{file}, row {row}", record
    except pyarrow.ArrowException as error:
        raise CorpusError(f"can't read {file}: {error}") from error


def _dataset_records(source: str) -> Iterator[Record]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise CorpusError(f"can't read {source}: {remedy(error)}") from error
    name, _, split = source.removeprefix("hf:").partition("@")
    name, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        for number, row in enumerate(rows):
            yield f"{source}, row {number}", row
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise CorpusError(f"can't read the dataset {source}: {error}") from error

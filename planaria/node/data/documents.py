"""Documents, in sequence, from text files, JSON, Parquet, folders and `datasets`.

A document is a text, or what messages.py makes of records with other fields. A bad row is a
RowError in its place, so the ordinals of documents don't depend on how often a file is read.
"""

from __future__ import annotations

import codecs
import json
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator
from io import SEEK_END, TextIOWrapper
from itertools import chain
from typing import Any, AnyStr, TypeAlias

from planaria.node.data.chat import MARKS, Conversation
from planaria.node.data.corpus import CorpusError, RowError
from planaria.node.data.file_access import PACKED, Listing, files_in, open_file, packing, unpacked
from planaria.node.data.messages import Completion, conversation_of, form_of
from planaria.node.data.options import LONGEST, Form
from planaria.node.machine.extras import remedy

TEXT_SUFFIXES = (".txt", ".text")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
JSON_SUFFIXES = (".json",)
PARQUET_SUFFIXES = (".parquet",)
_PACKABLE = TEXT_SUFFIXES + JSONL_SUFFIXES + JSON_SUFFIXES
SUFFIXES = (
    *_PACKABLE,
    *(suffix + packed for suffix in _PACKABLE for packed in PACKED),
    *PARQUET_SUFFIXES,
)

CHAPTER = re.compile(r"(?=\s*(CHAPTER\b|Chapter\s+(\d+|[IVXLCDM]+)\b))")
LINES_PER_DOCUMENT = 200
LINES_AT_MOST = 2000

ROWS_AT_A_TIME = 4
"""Batch size in Parquet files: few bytes may decompress to a long text, repeatedly."""
LARGE, PACKED_TIGHTLY = 256 << 20, 100
"""Limits of a Parquet row group: decompressed bytes, and their ratio to the file's size. A row
group that exceeds both isn't text."""
_BLOCK = 1 << 16  # characters, of a list

Row: TypeAlias = str | Conversation | Completion


def files_of(source: str) -> Listing:
    """The input files of a source: a file, or a folder's files in the order of their paths, local
    or at a URL. A dataset, `hf:NAME[:CONFIG][@SPLIT]`, counts as one. Raises CorpusError."""
    return Listing([source]) if source.startswith("hf:") else files_in(source, SUFFIXES)


def documents(
    file: str,
    text_field: str = "text",
    separator: re.Pattern[str] | None = None,
    longest: int = LONGEST,
    form: Form | None = None,
) -> Iterator[Row | RowError]:
    """The documents of one input file, none of them blank. Memory holds one at a time. Raises
    CorpusError for a file that can't be read on.

    `text_field`: the field with a record's text; `separator`: for text files, see
    lines_to_documents. A record of more than `longest` bytes is a bad row. `form`: of all records;
    None: each by its fields.
    """
    try:
        for document in _documents(file, text_field, separator, longest, form):
            if not isinstance(document, str) or document.strip():
                yield document
    except UnicodeDecodeError as error:
        raise CorpusError(_describe_not_utf8(file)) from error
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"can't read {file}: {error}") from error


def lines_to_documents(
    lines: Iterable[str | RowError],
    separator: re.Pattern[str] | None = None,
    longest: int = LONGEST,
    place: str = "the text",
) -> Iterator[str | RowError]:
    """Cut a text file into documents at its lines.

    A line whose beginning matches `separator` begins a document; the match is left out (so a
    lookahead keeps it: `(?=Act )`). Without a separator, documents begin at chapter headings;
    before the first heading, at a blank line after LINES_PER_DOCUMENT lines. A RowError among the
    lines is passed on; a document of more than `longest` characters becomes one.
    """
    document: list[str] = []
    characters = first = 0
    headings = False

    def whole() -> str | RowError:
        if characters > longest:
            return too_long_record(f"{place}, from line {first}", longest)
        return "".join(document).strip("\n")

    for number, line in enumerate(lines, 1):
        if isinstance(line, RowError):
            yield line
            continue
        match = (separator or CHAPTER).match(line)
        headings = headings or match is not None
        full = len(document) >= LINES_PER_DOCUMENT and not line.strip()
        full = (full and not headings) or len(document) >= LINES_AT_MOST
        if match is not None or (full and separator is None):
            yield whole()
            document, characters = [], 0
        first = first if characters else number
        text = line[match.end() :] if match else line
        characters += len(text)
        document.append(text if characters <= longest else "")
    yield whole()


def too_long_record(place: str, longest: int) -> RowError:
    return RowError(
        f"{place} has more than {longest} bytes: cut it into several records, or allow more with "
        "--longest-record"
    )


def _documents(
    file: str, text_field: str, separator: re.Pattern[str] | None, longest: int, form: Form | None
) -> Iterator[Row | RowError]:
    """The documents of one input file, by its kind; some may be blank."""
    name = file.lower().removesuffix(packing(file))
    if name.endswith(TEXT_SUFFIXES) and not file.startswith("hf:"):
        with unpacked(file) as data, TextIOWrapper(data, encoding="utf-8-sig") as text:
            lines = (line for _, line in _lines(file, text.readline, longest))
            yield from lines_to_documents(lines, separator, longest, file)
        return
    records: Iterator[Record | RowError]
    if file.startswith("hf:"):
        records = _dataset_records(file)
    elif name.endswith(PARQUET_SUFFIXES):
        records = _parquet_records(file, text_field, form)
    else:
        records = _json_records(file, longest, may_be_list=name.endswith(JSON_SUFFIXES))
    for record in records:
        if isinstance(record, RowError):
            yield record
        else:
            yield _document(*record, text_field, longest, form)


# Place in words, and the record.
Record = tuple[str, Any]


def _document(
    place: str, record: Any, text_field: str, longest: int, form: Form | None
) -> Row | RowError:
    """The document of one record, or the error of a bad one."""
    try:
        if form is None and isinstance(record, dict):
            form = form_of(record, text_field)
        if form is None or form == "text":
            text = _text_of(place, record, text_field)
            return too_long_record(place, longest) if len(text) > longest else text
        if not isinstance(record, dict):
            return RowError(f"{place} is no record with fields but {type(record).__name__}")
        whole = json.dumps(record, ensure_ascii=False, default=str)
        _check_text(f"{place}: the record", whole)
        if any(mark in whole for mark in MARKS):
            return RowError(f"{place} has one of U+FDD0 to U+FDD2, no characters: remove them")
        if len(whole) > longest:
            return too_long_record(place, longest)
        return conversation_of(place, record, form)
    except CorpusError as error:
        return RowError(str(error))
    except RecursionError:
        return RowError(f"{place} is nested too deeply")


def _text_of(place: str, record: Any, text_field: str) -> str:
    """The text in a record's text field. Raises CorpusError."""
    if not isinstance(record, dict) or text_field not in record:
        fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise CorpusError(
            f"{place} has no field {text_field!r} but {fields}: name one with --text-field, or "
            "see the forms of conversations in docs/prepare.md"
        )
    text = record[text_field]
    if isinstance(text, bytes):
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise CorpusError(f"{place}: {text_field!r} is not UTF-8: {error.reason}") from error
    if not isinstance(text, str):
        kind = "null" if text is None else f"no text but {type(text).__name__}"
        raise CorpusError(f"{place}: {text_field!r} is {kind}")
    _check_text(f"{place}: {text_field!r}", text)
    return text


def _check_text(place: str, text: str) -> None:
    """Check that a record's text has no lone surrogate. Raises CorpusError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"{place} is not valid Unicode, half a surrogate pair at character {error.start}"
        ) from error


def _lines(
    file: str, readline: Callable[[int], AnyStr], longest: int
) -> Iterator[tuple[int, AnyStr | RowError]]:
    """The lines of a file, with numbers from 1; one of more than `longest` is an error."""
    number = 0
    while line := readline(longest + 1):
        number += 1
        if len(line) <= longest:
            yield number, line
            continue
        while len(line) > longest and line[-1:] not in ("\n", b"\n"):
            line = readline(longest + 1)
        yield number, too_long_record(f"{file}, line {number}", longest)


def _json_records(file: str, longest: int, may_be_list: bool) -> Iterator[Record | RowError]:
    with unpacked(file) as data:
        head = data.peek(1).removeprefix(codecs.BOM_UTF8).lstrip() if may_be_list else b""
        if head.startswith(b"["):
            with TextIOWrapper(data, encoding="utf-8-sig") as text:
                yield from _list_items(file, text, longest)
            return
        if head.partition(b"\n")[0].strip() == b"{":
            yield RowError(f"{file} is one object in many lines: make it a list, or lines")
            return
        for number, line in _lines(file, data.readline, longest):
            if isinstance(line, RowError):
                yield line
            elif line.strip():
                yield _parse_line(file, number, line)


def _parse_line(file: str, number: int, line: bytes) -> Record | RowError:
    place = f"{file}, line {number}"
    try:
        return place, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        return RowError(_not_utf8(file, number, error.object[error.start]))
    except ValueError as error:  # also an integer of more digits than Python reads
        return RowError(f"{place} is not JSON: {error}")
    except RecursionError:
        return RowError(f"{place} is nested too deeply")


def _list_items(file: str, text: TextIOWrapper, longest: int) -> Iterator[Record]:
    """The items of a file's JSON list, one at a time. Raises CorpusError for an item that isn't
    JSON: the start of the next item is then unknown."""
    decode, number = json.JSONDecoder().raw_decode, 1
    buffer = text.read(_BLOCK)
    at = buffer.index("[") + 1
    while True:
        place = f"{file}, item {number} of the list"
        start = _after_space(buffer, at)
        if number == 1 and buffer[start : start + 1] == "]":
            return
        try:
            item, end = decode(buffer, start)
            end = _after_space(buffer, end)
            behind, why = buffer[end : end + 1], "no comma is behind it"
        except RecursionError as error:
            raise CorpusError(f"{place} is nested too deeply") from error
        except ValueError as error:
            behind, why = "", getattr(error, "msg", str(error))  # its position is the buffer's
        if behind and behind in ",]":
            yield place, item
            if behind == "]":
                return
            at, number = end + 1, number + 1
            continue
        if len(buffer) - at > longest:
            raise too_long_record(place, longest)
        more = "" if behind else text.read(max(_BLOCK, len(buffer) - at))
        if not more:
            raise CorpusError(f"{place} is not JSON: {why}")
        buffer, at = buffer[at:] + more, 0


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _parquet_records(file: str, text_field: str, form: Form | None) -> Iterator[Record | RowError]:
    """The rows of a Parquet file, of texts only their column."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise CorpusError(f"can't read {file}: {remedy(error)}") from error
    row = 0
    try:
        with (
            open_file(file) as data,
            pyarrow.parquet.ParquetFile(data, buffer_size=1 << 20) as table,
        ):
            names = table.schema_arrow.names
            others = dict.fromkeys({*names} - {text_field}, True)
            form = form or form_of(others, text_field) or "text"  # a row's text may be null
            columns = [text_field] if form == "text" and text_field in names else names
            _check_unpacked(file, data.seek(0, SEEK_END), table.metadata)
            for batch in table.iter_batches(batch_size=ROWS_AT_A_TIME, columns=columns):
                for record in _python_rows(batch):
                    row += 1
                    place = f"{file}, row {row}"
                    if isinstance(record, ValueError):
                        yield RowError(f"{place} can't be read: {record}")
                    else:
                        yield place, record
    except pyarrow.ArrowException as error:
        raise CorpusError(f"can't read {file}: {error}") from error


def _python_rows(batch: Any) -> Iterable[Any]:
    """The rows of Arrow's record batch; one that Python can't represent is its error."""
    try:
        return list(batch.to_pylist())
    except (ValueError, OverflowError) as error:
        if len(batch) == 1:
            return [ValueError(str(error))]
        return chain.from_iterable(_python_rows(batch.slice(at, 1)) for at in range(len(batch)))


def _check_unpacked(file: str, size: int, metadata: Any) -> None:
    """Raises CorpusError when a Parquet file of `size` bytes would take far more memory. It reads
    the sizes of row groups, not of columns: pyarrow ends the process where these are damaged."""
    for number in range(metadata.num_row_groups):
        unpacked_size = metadata.row_group(number).total_byte_size
        if unpacked_size > max(LARGE, PACKED_TIGHTLY * size):
            raise CorpusError(
                f"{file} has {size} bytes, and row group {number} unpacks to {unpacked_size}: if "
                "that is meant, write the file anew with smaller row groups"
            )


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


def _describe_not_utf8(file: str) -> str:
    """Message for an input file that isn't UTF-8, with a remedy. Raises CorpusError, OSError."""
    decoder, line, block = codecs.getincrementaldecoder("utf-8")(), 1, b"\n"
    with unpacked(file) as data:
        while block:
            block = data.read(1 << 20)
            try:
                line += decoder.decode(block, final=not block).count("\n")
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                return _not_utf8(file, line, error.object[error.start])
    return f"{file} changes while it is read"


def _not_utf8(file: str, line: int, byte: int) -> str:
    encoding = "UTF-16" if line == 1 and byte in codecs.BOM_UTF16 else "WINDOWS-1252"
    name, packed = shlex.quote(file), packing(file)
    unpacking = {".gz": f"gzip -dc {name} | ", ".zst": f"zstd -dc {name} | "}.get(packed, "")
    return (
        f"{file}, line {line} is not UTF-8 (byte {byte:#04x}): convert the file from the encoding "
        f"that it has, as in: {unpacking}iconv -f {encoding} -t UTF-8"
        f"{'' if packed else f' {name}'} > NEW_FILE"
    )

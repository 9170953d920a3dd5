"""Tests of reading rows and files: compressed, hidden, linked, damaged or endless ones."""

from __future__ import annotations

import codecs
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from planaria.node.data import documents as module
from planaria.node.data.chat import Conversation
from planaria.node.data.corpus import CorpusError, RowError
from planaria.node.data.documents import (
    LINES_PER_DOCUMENT,
    documents,
    files_of,
    lines_to_documents,
)

TEXTS = ["One.", "Zwei, überall.", "三。"]
ROWS = [{"text": text} for text in TEXTS]


def in_lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def zstd(content: bytes) -> bytes:
    """Compress the content in two zstd frames."""
    frames = (pyarrow.compress(part, "zstd", asbytes=True) for part in (content[:9], content[9:]))
    return b"".join(frames)


def in_list(rows: list[Any]) -> bytes:
    return json.dumps(rows, indent=1).encode()


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
@pytest.mark.parametrize(
    ("suffix", "write"),
    [("jsonl", in_lines), ("json", in_lines), ("json", in_list), ("JSON", in_list)],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_json_in_lines_or_a_list_compressed_or_not(
    tmp_path: Path,
    suffix: str,
    write: Callable[[list[Any]], bytes],
    pack: Callable[[bytes], bytes],
    mark: bytes,
) -> None:
    end = {bytes: "", gzip.compress: ".gz", zstd: ".zst"}[pack]
    (tmp_path / f"a.{suffix}{end}").write_bytes(pack(mark + write(ROWS)))
    [file] = files_of(str(tmp_path)).files
    assert list(documents(file)) == TEXTS


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.jsonl.zst", "a.json.gz"])
def test_a_compressed_file_that_is_cut_is_refused(tmp_path: Path, name: str) -> None:
    whole = (gzip.compress if name.endswith("gz") else zstd)(in_lines(ROWS * 50))
    for content in (whole[:-9], b"plain"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CorpusError, match=rf"can't read .*{name}: "):
            list(documents(str(tmp_path / name)))


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
def test_parquet_has_texts_of_any_kind(tmp_path: Path, kind: pyarrow.DataType) -> None:
    rows = [text.encode() for text in TEXTS]
    table = pyarrow.table({"text": pyarrow.array([*rows, None]).cast(kind)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    *texts, bad = documents(str(tmp_path / "a.parquet"))
    assert texts == TEXTS
    assert str(bad).endswith("a.parquet, row 4: 'text' is null")


def test_a_row_of_parquet_without_text_may_be_a_conversation(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "b"}]
    rows = [{"text": "a", "messages": None}, {"text": None, "messages": messages}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    text, conversation = documents(str(tmp_path / "a.parquet"))
    assert text == "a"
    assert isinstance(conversation, Conversation)


def test_a_row_of_parquet_that_is_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    offsets, data = pyarrow.array([0, 1, 2, 3], pyarrow.int32()).buffers()[1], b"a\xffb"
    texts = pyarrow.StringArray.from_buffers(3, offsets, pyarrow.py_buffer(data))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    before, bad, after = documents(str(tmp_path / "a.parquet"))
    assert (before, after) == ("a", "b")
    assert "a.parquet, row 2 can't be read: 'utf-8' codec can't decode byte 0xff" in str(bad)


@pytest.mark.parametrize("items", [[], [1], [{"text": "a" * 100_000}, {"text": "b"}, {"text": 3}]])
def test_lists_of_any_length(tmp_path: Path, items: list[Any]) -> None:
    file = tmp_path / "a.json"
    file.write_text(f" {json.dumps(items)} ")
    assert len(list(documents(str(file)))) == len(items)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'[{"text": "a"}, {"text": ', r"item 2 of the list is not JSON: Expecting value$"),
        (b'[{"text": "a"} {"text": "b"}]', r"item 1 .* is not JSON: no comma"),
        (b'[{"text": "a"}, ' + b"[" * 200_000, "item 2 .* is nested too deeply"),
        (b'[{"text": "' + b"a" * 300_000, "item 1 of the list has more than 100000 bytes"),
        (b'[{"text": "a"},\n{"text": "\xe9"}]', r"a\.json, line 2 is not UTF-8 \(byte 0xe9\)"),
    ],
)
def test_a_list_that_can_not_be_read_on_is_refused(
    tmp_path: Path, content: bytes, why: str
) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CorpusError, match=why):
        list(documents(str(tmp_path / "a.json"), longest=100_000))


def test_an_object_in_many_lines_is_one_bad_row(tmp_path: Path) -> None:
    (tmp_path / "info.json").write_text(json.dumps({"version": 1, "splits": ["train"]}, indent=1))
    [bad] = documents(str(tmp_path / "info.json"))
    assert "info.json is one object in many lines" in str(bad)


CHAT = b'{"messages": [{"role": "user", "content": "%s"}]}'


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (b'{"text": null}', "line 2: 'text' is null"),
        (b'{"text": "\\ud800"}', "line 2: 'text' is not valid Unicode, half a surrogate pair"),
        (CHAT % b"\\ud800", "line 2: the record is not valid Unicode, half a surrogate pair"),
        (b'{"messages": []}', "line 2: 'messages' is no list of messages"),
        (b'{"text": %s}' % (b"1" * 5000), "line 2 is not JSON: Exceeds the limit"),
        (b"[" * 200_000, "line 2 is nested too deeply"),
        (b'{"text": "caf\xe9"}', r"line 2 is not UTF-8 \(byte 0xe9\): convert .*iconv -f WINDOWS"),
        (b'{"text": "%s"}' % (b"a" * 300_000), "line 2 has more than 250000 bytes.*--longest-re"),
        (b'{"body": "a"}', "line 2 has no field 'text' but body: name one with --text-field"),
    ],
)
def test_a_row_that_is_bad_comes_with_its_reason_in_its_place(
    tmp_path: Path, row: bytes, why: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a"}\n' + row + b'\n{"text": "b"}\n')
    before, bad, after = documents(str(file), longest=250_000)
    assert (before, after) == ("a", "b")
    assert isinstance(bad, RowError)
    with pytest.raises(RowError, match=rf"a\.jsonl, {why}"):
        raise bad


def test_the_wrong_byte_is_named_behind_a_byte_order_mark_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"text": "caf\xe9"}\n')
    [bad] = documents(str(tmp_path / "a.jsonl"))
    assert r"line 1 is not UTF-8 (byte 0xe9)" in str(bad)


def test_texts_that_are_too_long_are_bad_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("Chapter 1\n" + "word\n" * 50 + "a" * 300 + "\nChapter 2\n" + "word\n" * 9)
    line, first, second = documents(str(file), longest=200)
    assert "a.txt, line 52 has more than 200 bytes" in str(line)
    assert "a.txt, from line 1 has more than 200 bytes" in str(first)
    assert str(second).startswith("Chapter 2\nword")
    wide, narrow = ["a" * 30 + "\n"] * LINES_PER_DOCUMENT, ["word\n", "\n"] * LINES_PER_DOCUMENT
    first, *rest = lines_to_documents([*wide, *narrow], longest=2000)
    assert "the text, from line 1 has more than 2000 bytes" in str(first)
    assert sum(str(text).count("word") for text in rest) > LINES_PER_DOCUMENT - 5


def test_few_bytes_that_stand_for_much_are_read_a_few_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a" * 500_000] * 300}), file)
    before = pyarrow.total_allocated_bytes()
    assert max(pyarrow.total_allocated_bytes() - before for _ in documents(file)) < 20 << 20
    assert len(list(documents(file, longest=1000))) == 300
    monkeypatch.setattr(module, "LARGE", 1000)
    monkeypatch.setattr(module, "PACKED_TIGHTLY", 5)
    with pytest.raises(CorpusError, match=r"has \d+ bytes, and row group 0 unpacks to \d+"):
        list(documents(file))


def test_folders_and_links_are_followed_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    folder, other = tmp_path / "texts", tmp_path / "other"
    for name in ("a.txt", "._a.txt", ".git/b.txt", "sub/c.txt", "d.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    other.mkdir()
    (other / "e.txt").write_text("e")
    (other / "back").symlink_to(folder)
    (folder / "linked").symlink_to(other)
    (folder / "sub" / "again").symlink_to(folder)
    (folder / "gone.txt").symlink_to(tmp_path / "nothing")
    os.mkfifo(folder / "pipe.txt")
    listing = files_of(str(folder))
    names = [str(Path(file).relative_to(folder)) for file in listing.files]
    assert names == ["a.txt", "linked/e.txt", "sub/c.txt"]
    assert listing.left_out == {
        "hidden files": (2, len("._a.txt.git/b.txt")),
        "files of other kinds": (1, len("d.md")),
        "pipes, devices and links to nothing": (2, 0),
        "folders that are linked once more": (2, 0),
    }


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for name in ("a.jsonl", "zero.txt"):
        with pytest.raises(CorpusError, match=f"{name} is no regular file"):
            files_of(str(tmp_path / name))

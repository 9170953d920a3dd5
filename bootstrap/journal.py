"""The registry's journal: every issued view on disk before anyone hears of it.

A file of records, each `length, CRC-32` (little-endian uint32) and that many bytes. The first is a
JSON header that names the run; the others are `View` messages. A record that a crash left half
written is at the end and is dropped; a view in it was never pushed to anybody.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self
from zlib import crc32

from google.protobuf.message import DecodeError

from planaria.bootstrap.registry_pb2 import View

FORMAT = 1
COMPACT_ABOVE = 64 * 2**20  # bytes, and at least 8 times what compacting leaves
_HEAD = struct.Struct("<II")


class JournalError(Exception):
    """The journal can't be used; the message says why and what to do."""


class Journal:
    """Open for one registry at a time. `view` is the newest one; None: no view was issued yet."""

    def __init__(self, path: Path, run: str, run_file: str) -> None:
        """Opens or creates the file, compacted to its newest view. Raises JournalError when it
        belongs to another run or registry, is damaged, or can't be read or written."""
        self.path = path
        self._header = {
            "format": FORMAT,
            "run": run,
            "run_file": sha256(run_file.encode()).hexdigest(),
        }
        self._file: BinaryIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = path.with_name(path.name + ".lock").open("wb")
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            self._take_lock()
            self.view = self._read()
            self._compact()
        except OSError as error:
            self._lock.close()
            raise _unusable(path, error) from error
        except JournalError:
            self._lock.close()
            raise

    def append(self, view: View) -> None:
        """On disk when this returns. Raises JournalError; the view must then not be pushed."""
        if self._file is None:
            raise JournalError(f"the journal {self.path} is closed")
        try:
            self._file.write(_record(view.SerializeToString()))
            _flush(self._file)
            self.view = view
            if self._file.tell() > max(COMPACT_ABOVE, 8 * self._compacted):
                self._compact()
        except OSError as error:
            raise JournalError(
                f"can't write view {view.number} to the journal {self.path}: {error.strerror}"
            ) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JournalError(
                f"the journal {self.path} is in use by another registry; "
                "stop that one, or choose another --journal"
            ) from error

    def _read(self) -> View | None:
        """The newest view. Raises JournalError, OSError."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        records = _records(content, self.path)
        if not records:  # a journal is never without its header, see _compact
            raise _damaged(self.path, "it does not begin with a header")
        self._check_header(records[0])
        if len(records) == 1:
            return None
        try:
            return View.FromString(records[-1])
        except DecodeError as error:
            raise _damaged(self.path, f"its newest view can't be decoded ({error})") from error

    def _check_header(self, record: bytes) -> None:
        try:
            header = json.loads(record)
        except ValueError as error:
            raise _damaged(self.path, "it does not begin with a header") from error
        if header == self._header:
            return
        wrong = [k for k in self._header if header.get(k) != self._header[k]]
        found = ", ".join(f"{k} = {header.get(k)!r}, not {self._header[k]!r}" for k in wrong)
        raise JournalError(
            f"the journal {self.path} belongs to another run ({found}); use the run file it was "
            "made with, or choose another --journal for this run"
        )

    def _compact(self) -> None:
        """Replaces the file by one with its header and newest view, at once or not at all."""
        new = self.path.with_name(self.path.name + ".new")
        records = [json.dumps(self._header).encode()]
        if self.view is not None:
            records.append(self.view.SerializeToString())
        file = new.open("wb")
        try:
            file.write(b"".join(map(_record, records)))
            _flush(file)
            new.replace(self.path)
            _flush_folder(self.path.parent)
        except OSError:
            file.close()
            raise
        if self._file is not None:
            self._file.close()
        self._file, self._compacted = file, file.tell()


def _unusable(path: Path, error: OSError) -> JournalError:
    why = f"{path.parent} is a file" if isinstance(error, FileExistsError) else error.strerror
    return JournalError(
        f"can't use the journal {path}: {why}; let this user write there, free space, or choose "
        "another --journal"
    )


def _damaged(path: Path, how: str) -> JournalError:
    return JournalError(
        f"the journal {path} is damaged: {how}; move it away, and the registry will learn the "
        "membership from the nodes"
    )


def _record(content: bytes) -> bytes:
    return _HEAD.pack(len(content), crc32(content)) + content


def _records(content: bytes, path: Path) -> list[bytes]:
    """Whole records. Raises JournalError when one is damaged that is not the last."""
    records, at = [], 0
    while at + _HEAD.size <= len(content):
        length, checksum = _HEAD.unpack_from(content, at)
        record = content[at + _HEAD.size : at + _HEAD.size + length]
        at += _HEAD.size + length
        if len(record) < length or (crc32(record) != checksum and at == len(content)):
            break
        if crc32(record) != checksum:
            raise _damaged(path, f"the record at byte {at - length} has another checksum")
        records.append(record)
    return records


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

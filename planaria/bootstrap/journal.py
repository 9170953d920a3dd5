"""The registry's journal: every issued view is written to disk before it is published.

A file of records, each a head and its content. The head, little-endian: the 4 bytes of `MARKER`,
the record's number as uint64, the content's length as uint32 and its CRC-32, and the CRC-32 of
these fields. Record 0 is a JSON header that names the run; the others are `View` messages, the
newest last. Header and first view are written as one file, which replaces the old one atomically;
later views are appended. The run's key signs views (views.py), so file access does not suffice to
forge one.

A crash can leave the last appended record incomplete, and a power cut zeros after it. That tail is
removed. Any other defect is damage: the newest whole view counts, at whatever offset, and the file
is kept under another name. A file cut exactly between two records looks whole: nodes that register
again bring the newer view (membership.py)."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self
from zlib import crc32

from google.protobuf.message import DecodeError

from planaria.bootstrap.identity import Identity
from planaria.bootstrap.registry_pb2 import View
from planaria.bootstrap.secret_files import flush_folder
from planaria.bootstrap.views import is_genuine, sign

log = logging.getLogger(__name__)

FORMAT = 1
MARKER = b"\xb6plJ"
VIEWS_UNREAD = 2**20
"""Upper bound of the views missing from a damaged journal."""
KIND = "registry journal of planaria"
"""Text in the header that identifies the file."""
COMPACT_ABOVE = 64 * 2**20  # bytes; also at least 8 times the compacted size
_HEAD = struct.Struct("<4sQII")
_CHECKSUM = struct.Struct("<I")
_HEAD_BYTES = _HEAD.size + _CHECKSUM.size


class JournalError(Exception):
    """The journal is unusable; the message says why and names the remedy."""


class Journal:
    """A journal, open for one registry at a time. `view`: the newest one; None: none was issued.
    `damage`: the damage found on opening; empty: none."""

    def __init__(self, path: Path, run: str, key: Identity) -> None:
        """Opens or creates the file and compacts it to its newest view; keeps a damaged file as
        NAME.damaged-1, -2, ... Raises JournalError: it belongs to another run or registry, is no
        journal, is not readable or writable, or if the run's `key` has not signed its view."""
        self.path = path
        self._run, self._key = run, key
        self._file: BinaryIO | None = None
        self._behind = False  # the file lacks `view`, and may end with a partial record
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = path.with_name(path.name + ".lock").open("wb")
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            self._take_lock()
            self.view, self.damage = self._read()
            self._compact()
        except OSError as error:
            self._lock.close()
            raise _unusable(path, error) from error
        except JournalError:
            self._lock.close()
            raise

    def append(self, view: View) -> None:
        """Writes and flushes the view. Raises JournalError: the file then holds an older view until
        a later append succeeds."""
        if self._file is None:
            raise JournalError(f"the journal {self.path} is closed")
        self.view = view
        try:
            if self._behind or self._file.tell() > max(COMPACT_ABOVE, 8 * self._compacted):
                self._compact()
            else:
                self._behind = True
                self._file.write(_record(self._next, view.SerializeToString()))
                _flush(self._file)
                self._next += 1
            self._behind = False
        except OSError as error:
            self._behind = True
            raise JournalError(
                f"can't write view {view.number} to the journal {self.path}: {error.strerror}; "
                "free space, or let this user write there"
            ) from error

    def go_on_from(self, last: View, damage: str, reason: str) -> None:
        """Appends a view without members, numbered after `last`, so that new training supersedes
        unsaved steps. A source journal with `damage` may lack views. Raises JournalError."""
        newest = max(last.number, self.view.number if self.view else 0)
        view = View(
            run=self._run,
            number=newest + (VIEWS_UNREAD if damage else 1),
            reason=reason,
            committed=last.committed,
            lineage=last.lineage,
            quarantined=last.quarantined,
        )
        sign(view, self._key, self.view or last)
        self.append(view)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JournalError(
                f"the journal {self.path} is in use by another registry; "
                "stop that one, or choose another --journal"
            ) from error

    def _read(self) -> tuple[View | None, str]:
        """The newest view, and the file's damage. Raises JournalError, OSError."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None, ""
        parsed = _found(self.path, content)
        self._check_run(parsed)
        self._check_signed(parsed.view)
        if parsed.damage:
            return parsed.view, self._keep(content, parsed)
        if parsed.torn:
            log.warning(
                "the journal %s ends with %d bytes of an incomplete record, left by a crash: "
                "removed; nodes that have received its view show it when they reconnect",
                self.path,
                parsed.torn,
            )
        return parsed.view, ""

    def _check_run(self, parsed: _Found) -> None:
        header = parsed.header
        if header is None:  # without a header, only a view names its run
            header = {"run": self._run if parsed.view is None else parsed.view.run}
        if header.get("run") != self._run:
            raise JournalError(
                f"the journal {self.path} belongs to another run (run = {header.get('run')!r}, not "
                f"{self._run!r}); use the run file it was made with, or choose another --journal "
                "for this run"
            )

    def _check_signed(self, view: View | None) -> None:
        if view is None or is_genuine(view, self._key.public, self._run):
            return
        raise JournalError(
            f"view {view.number} in the journal {self.path} is not signed by the run's key: "
            "it was forged or changed, or the registry has another key than before. Give "
            "it the folder with that key (--authority DIR), or restore the journal from a copy; if "
            "it is moved away, the registry learns the membership from its nodes"
        )

    def _keep(self, content: bytes, parsed: _Found) -> str:
        """Moves a damaged file aside; returns a description of the damage. Raises OSError."""
        names = (self.path.with_name(f"{self.path.name}.damaged-{n}") for n in count(1))
        aside = next(name for name in names if not name.exists())
        with aside.open("xb") as file:
            file.write(content)
            _flush(file)
        read = "no view" if parsed.view is None else f"view {parsed.view.number}"
        damage = (
            f"the journal {self.path} is damaged at byte {parsed.end} of {len(content)}: "
            f"{parsed.damage}. It is kept as {aside}; {read} could be read. The registry "
            f"continues from there, and learns newer views from its nodes when they reconnect"
        )
        log.error("%s", damage)
        return damage

    def _compact(self) -> None:
        """Atomically replaces the file by one with its header and newest view."""
        new = self.path.with_name(self.path.name + ".new")
        number = 0 if self.view is None else self.view.number
        header = {"journal": KIND, "format": FORMAT, "run": self._run, "view": number}
        records = [json.dumps(header).encode()]
        if self.view is not None:
            records.append(self.view.SerializeToString())
        file = new.open("wb")
        try:
            file.write(b"".join(_record(n, content) for n, content in enumerate(records)))
            _flush(file)
            new.replace(self.path)
            flush_folder(self.path.parent)
        except OSError:
            _abandon(file)
            raise
        if self._file is not None:
            _abandon(self._file)
        self._file, self._compacted, self._next = file, file.tell(), len(records)


@dataclass(frozen=True)
class _Found:
    """A file's content. It is whole up to byte `end`; after that, `torn` bytes of an unfinished
    record, or `damage`, a description."""

    header: dict[str, object] | None  # None: unreadable
    view: View | None
    end: int
    torn: int = 0
    damage: str = ""
    foreign: bool = False  # the file is no journal


class _Record(NamedTuple):
    at: int
    number: int
    content: bytes

    @property
    def end(self) -> int:
        return self.at + _HEAD_BYTES + len(self.content)


def read_view(path: Path) -> tuple[View, str]:
    """The newest view in a journal of any run, and the file's damage. Without a view, an empty one.
    Raises JournalError."""
    try:
        parsed = _found(path, path.read_bytes())
    except OSError as error:
        raise JournalError(f"can't read the journal {path}: {error.strerror}") from error
    return parsed.view or View(), parsed.damage


def _found(path: Path, content: bytes) -> _Found:
    """Parses a journal. Raises JournalError for another format or another kind of file."""
    parsed = _read(content)
    if (format := (parsed.header or {}).get("format", FORMAT)) != FORMAT:
        raise JournalError(
            f"the journal {path} has format {format}, and this planaria reads format {FORMAT}; use "
            "the planaria that wrote it, or move it away: the registry learns the membership from "
            "its nodes"
        )
    if parsed.foreign:
        raise JournalError(
            f"{path} is no journal of a registry ({len(content)} bytes, beginning with "
            f"{content[:16]!r}); choose another --journal, or move it away"
        )
    return parsed


def _read(content: bytes) -> _Found:
    whole: list[_Record] = []
    beyond: list[_Record] = []  # records after a damaged part
    for record in _intact(content):
        follows = record.at == (whole[-1].end if whole else 0) and record.number == len(whole)
        (whole if follows and not beyond else beyond).append(record)
    if not whole and not beyond and not _resembles(content):
        return _Found(None, None, 0, foreign=True)
    header = _header(whole[0].content) if whole else None
    view, damage = _newest([*whole[1:], *(record for record in beyond if record.number)])
    end = whole[-1].end if whole else 0
    rest = content[end:]
    if header is None:
        damage = "its header can't be read"
    elif header.get("view") and len(whole) == 1:
        damage = "the view that was written with the header can't be read"
    elif rest and not _is_torn(rest, len(whole)):
        damage = (
            f"record {len(whole)} is missing or damaged, and not by a crash while it was written"
        )
    return _Found(header, view, end, 0 if damage else len(rest), damage)


def _intact(content: bytes) -> Iterator[_Record]:
    """Records with valid checksums, at any offset."""
    at = content.find(MARKER)
    while at >= 0:
        head = _head(content, at)
        end = at + 1
        if head is not None:
            body = content[at + _HEAD_BYTES : at + _HEAD_BYTES + head.length]
            if len(body) == head.length and crc32(body) == head.checksum:
                yield (record := _Record(at, head.number, body))
                end = record.end
        at = content.find(MARKER, end)


class _Head(NamedTuple):
    number: int
    length: int
    checksum: int


def _head(content: bytes, at: int) -> _Head | None:
    """The head at byte `at`; None: it is incomplete or damaged."""
    if len(content) < at + _HEAD_BYTES:
        return None
    marker, *fields = _HEAD.unpack_from(content, at)
    (checksum,) = _CHECKSUM.unpack_from(content, at + _HEAD.size)
    if marker != MARKER or checksum != crc32(content[at : at + _HEAD.size]):
        return None
    return _Head(*fields)


def _is_torn(rest: bytes, number: int) -> bool:
    """Whether a power cut while record `number` was appended can leave `rest`."""
    if not rest.strip(b"\0"):
        return True
    if len(rest) < _HEAD_BYTES:
        begun = MARKER + number.to_bytes(8, "little")
        return rest.startswith(begun[: len(rest)])
    head = _head(rest, 0)
    return head is not None and head.number == number and len(rest) < _HEAD_BYTES + head.length


def _resembles(content: bytes) -> bool:
    """Whether a file without a whole record can have been a journal."""
    return (
        not content.strip(b"\0")
        or content.startswith(MARKER[: len(content)])
        or KIND.encode() in content
    )


def _header(content: bytes) -> dict[str, object] | None:
    try:
        header = json.loads(content)
    except ValueError:
        return None
    return header if isinstance(header, dict) else None


def _newest(records: list[_Record]) -> tuple[View | None, str]:
    """The last record that is a view, and the defect of the records after it."""
    problem = ""
    for record in reversed(records):
        try:
            return View.FromString(record.content), problem
        except DecodeError as error:
            problem = problem or f"its record {record.number} is no view ({error})"
    return None, problem


def _unusable(path: Path, error: OSError) -> JournalError:
    why = f"{path.parent} is a file" if isinstance(error, FileExistsError) else error.strerror
    return JournalError(
        f"can't use the journal {path}: {why}; let this user write there, free space, or choose "
        "another --journal"
    )


def _record(number: int, content: bytes) -> bytes:
    head = _HEAD.pack(MARKER, number, len(content), crc32(content))
    return head + _CHECKSUM.pack(crc32(head)) + content


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _abandon(file: BinaryIO) -> None:
    """Closes a file whose last bytes are unneeded or unwritable."""
    try:
        file.close()
    except OSError as error:
        log.debug("closing %s: %s", file.name, error)

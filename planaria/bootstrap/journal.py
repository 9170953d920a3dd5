"""The registry's journal: every issued view is on disk before it is published.

The file has the newest view: `MARKER`, the CRC-32 of the rest as little-endian uint32, and a `View`
message. Each view replaces the file atomically, so a crash leaves this view or the one before it.
The run's key signs views (views.py), so file access does not suffice to forge one. A registry with
an older view, or none, gets the newer one from nodes that register again (membership.py)."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Self
from zlib import crc32

from google.protobuf.message import DecodeError

from planaria.bootstrap.errors import UserError
from planaria.bootstrap.files import replace_file
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.registry_pb2 import View
from planaria.bootstrap.views import is_genuine, sign

MARKER = b"planaria journal 2\n"
CHECKSUM_BYTES = 4


class JournalError(UserError):
    """The journal is unusable; the message says why and names the remedy."""


class Journal:
    """A journal, open for one registry at a time. `view`: the newest one; None: none was issued."""

    def __init__(self, path: Path, run: str, key: Identity) -> None:
        """Raises JournalError: the file belongs to another run or registry, is no journal, is
        damaged, is not readable or writable, or the run's `key` has not signed its view."""
        self.path = path
        self._run, self._key = run, key
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = path.with_name(path.name + ".lock").open("wb")
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.view = self._read()
        except BlockingIOError as error:
            self._lock.close()
            raise JournalError(
                f"the journal {path} is in use by another registry; stop that one, or choose "
                "another --journal"
            ) from error
        except OSError as error:
            self._lock.close()
            raise _unusable(path, error) from error
        except JournalError:
            self._lock.close()
            raise

    def append(self, view: View) -> None:
        """Writes a view to the journal, and flushes it. Raises JournalError: the file then holds an
        older view until a later append succeeds."""
        if self._lock.closed:
            raise JournalError(f"the journal {self.path} is closed")
        self.view = view
        try:
            replace_file(self.path, _file_of(view.SerializeToString()))
        except OSError as error:
            raise JournalError(
                f"can't write view {view.number} to the journal {self.path}: {error.strerror}; "
                "free space, or let this user write there"
            ) from error

    def go_on_from(self, last: View, reason: str) -> None:
        """Appends a view without members, numbered after `last`, so that new training supersedes
        unsaved steps. Raises JournalError."""
        view = View(
            run=self._run,
            number=1 + max(last.number, self.view.number if self.view else 0),
            reason=reason,
            committed=last.committed,
            lineage=last.lineage,
            quarantined=last.quarantined,
            changes=[c for c in last.changes if last.run == self._run and not c.pending],
        )
        sign(view, self._key, self.view or last)
        self.append(view)

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> View | None:
        """The journal's view; None: there is no file. Raises JournalError, OSError."""
        try:
            view = _parse(self.path, self.path.read_bytes())
        except FileNotFoundError:
            return None
        if view.run != self._run:
            raise JournalError(
                f"the journal {self.path} belongs to another run (run = {view.run!r}, not "
                f"{self._run!r}); use the run file it was made with, or choose another --journal "
                "for this run"
            )
        if not is_genuine(view, self._key.public, self._run):
            raise JournalError(
                f"view {view.number} in the journal {self.path} is not signed by the run's key: "
                "it was forged or changed, or the registry has another key than before. Give "
                "it the folder with that key (--authority DIR), or restore the journal from a "
                "copy; if it is moved away, the registry learns the membership from its nodes"
            )
        return view


def read_view(path: Path) -> View:
    """The view in a journal of any run. Raises JournalError."""
    try:
        return _parse(path, path.read_bytes())
    except OSError as error:
        raise JournalError(f"can't read the journal {path}: {error.strerror}") from error


def _parse(path: Path, file: bytes) -> View:
    """The view in a journal's file. Raises JournalError."""
    away = "move it away: the registry learns the membership from its nodes"
    if not file.startswith(MARKER):
        raise JournalError(
            f"{path} is no journal that this planaria reads ({len(file)} bytes, beginning with "
            f"{file[:16]!r}); choose another --journal, or {away}"
        )
    content = file[len(MARKER) + CHECKSUM_BYTES :]
    if file != _file_of(content):
        raise JournalError(f"the journal {path} is damaged; restore it from a copy, or {away}")
    try:
        return View.FromString(content)
    except DecodeError as error:
        raise JournalError(f"the journal {path} has no view ({error}); {away}") from error


def _file_of(content: bytes) -> bytes:
    return MARKER + crc32(content).to_bytes(CHECKSUM_BYTES, "little") + content


def _unusable(path: Path, error: OSError) -> JournalError:
    why = f"{path.parent} is a file" if isinstance(error, FileExistsError) else error.strerror
    return JournalError(
        f"can't use the journal {path}: {why}; let this user write there, free space, or choose "
        "another --journal"
    )

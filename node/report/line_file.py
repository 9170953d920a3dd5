"""A file that lines are appended to, on a disk that may be full or fail for a while."""

from __future__ import annotations

import logging
import os
from collections import deque
from pathlib import Path

log = logging.getLogger("planaria")

MOST_WAITING = 16 * 2**20
"""Bytes of lines that wait in memory for one file, at most."""


class LineFile:
    """Lines go to the operating system at once, or wait, in order, until the disk takes them.

    Of more than `most` bytes the oldest that wait are dropped, and counted, but for the file's very
    first line. `trouble` says what is wrong, empty when all is written. Nothing is raised: a node
    trains on without its files.
    """

    def __init__(self, path: Path, most: int = MOST_WAITING) -> None:
        self.path = path
        self.trouble = ""
        self.dropped = 0
        self._most = most
        self._file: int | None = None
        self._waiting: deque[bytes] = deque()
        self._bytes = 0  # that wait
        self._kept = 1  # of the lines that wait, so many from the first aren't dropped

    def append(self, line: bytes) -> None:
        """`line` ends with a newline."""
        self._waiting.append(line)
        self._bytes += len(line)
        self.flush()
        while self._bytes > self._most and len(self._waiting) > self._kept:
            self._bytes -= len(self._waiting[self._kept])
            del self._waiting[self._kept]
            self.dropped += 1

    def flush(self) -> None:
        """Writes what waits, as far as the disk takes it."""
        try:
            if self._file is None:
                self._file = self._open()
            while self._waiting:
                self._write_first(self._file)
        except OSError as error:
            self._let_go()
            self.trouble = f"can't write {self.path}: {error.strerror}"
        else:
            self.trouble = ""

    def told(self) -> str:
        """Of a file with trouble: what waits, and what comes of it."""
        lost = f", {self.dropped} older ones are lost" if self.dropped else ""
        return f"{self.trouble}; {len(self._waiting)} lines wait in memory{lost}"

    def close(self) -> None:
        """What still waits is lost, and that is said."""
        if self._waiting:
            self.flush()
        if self._waiting:
            log.error("%s, and are lost", self.told())
        self._let_go()

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _write_first(self, file: int) -> None:
        """As much of the first line that waits as there is room for."""
        line = self._waiting[0]
        written = os.write(file, line)
        self._bytes -= written
        if written < len(line):
            self._waiting[0] = line[written:]
            self._kept = 1  # its beginning is in the file
        else:
            self._waiting.popleft()
            self._kept = 0

    def _let_go(self) -> None:
        if self._file is not None:
            try:
                os.close(self._file)
            except OSError as error:
                log.debug("closing %s: %s", self.path, error)
            self._file = None

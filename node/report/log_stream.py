"""A process's log, on its standard error: that may be a pipe that nobody reads, or a file on a disk
that stalls, and who logs doesn't wait for it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from planaria.node.report.line_file import BackgroundLineFile

MOST_LOGGED: Final = 2**20
"""Bytes of lines that wait in memory to be written, at most."""
STANDARD_ERROR: Final = 2


class LogStream(logging.Handler):
    """Lines are written in a thread. Of more than MOST_LOGGED bytes that wait the oldest are
    dropped, and the log says how many. Who ends calls `close` (`logging.shutdown` does)."""

    def __init__(self) -> None:
        super().__init__()
        self._file = _StandardError(Path("standard error"), MOST_LOGGED)

    def emit(self, record: logging.LogRecord) -> None:
        self._file.append(f"{self.format(record)}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """What still waits LAST_WRITES seconds later is lost."""
        self._file.close()
        super().close()


class _StandardError(BackgroundLineFile):
    _told = 0  # lines of which the log says that they are lost
    _in_line = False

    def _open(self) -> int:
        return os.dup(STANDARD_ERROR)

    def _write(self, file: int, piece: bytes) -> int:
        lost = self.waiting.dropped - self._told
        if lost and not self._in_line:
            os.write(file, f"{lost} lines of this log are lost: nobody took them\n".encode())
            self._told += lost
        size = super()._write(file, piece)
        self._in_line = not piece[:size].endswith(b"\n")
        return size

    def _lose(self) -> None:
        """There is nowhere to say it."""

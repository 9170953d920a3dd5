"""A process's log on standard error, as text or JSON. That may be a pipe without a reader, or a
file on a stalled disk: logging calls don't wait for it."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from planaria.bootstrap.escaping import readable, readable_lines
from planaria.node.report.line_file import BackgroundLineFile

MOST_LOGGED: Final = 2**20
"""Limit of the lines that wait in memory to be written, in bytes."""
STANDARD_ERROR: Final = 2
MOST_KEPT: Final = 128 * 2**10
"""Limit of the last lines that are kept in memory for requests, in bytes."""
LONGEST: Final = 4000
"""Limit of one of these in characters; the rest is cut off."""


class LastLines:
    """The last lines of a log, numbered from 1. Threads may add lines while others read."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most, self._bytes, self._last = most, 0, 0
        self._lines: deque[str] = deque()
        self._lock = threading.Lock()

    def add(self, text: str) -> None:
        with self._lock:
            for line in text.split("\n"):
                self._last += 1
                self._lines.append(line[:LONGEST])
                self._bytes += _size(self._lines[-1])
                while self._bytes > self._most:
                    self._bytes -= _size(self._lines.popleft())

    def after(self, number: int, most: int) -> tuple[list[str], int]:
        """The newest `most` of the kept lines after that number, and the number of the last one."""
        with self._lock:
            count = min(most, len(self._lines), max(0, self._last - number))
            return [self._lines[at] for at in range(-count, 0)], self._last


def begin_log(level: str = "info", form: str = "text", name: str = "") -> LastLines:
    """Start this process's log at `level` (debug, info, warning or error); libraries log at least
    at level info. Lines of the form `json` have `name`. Returns the last lines, as they come.
    Without effect if logging is already configured."""
    if logging.root.handlers:
        return LastLines()
    stream = LogStream()
    lowest = logging.getLevelNamesMapping()[level.upper()]
    formatter = TextLines("%(asctime)s %(levelname)s %(message)s")
    stream.setFormatter(formatter if form == "text" else JsonLines(name))
    logging.basicConfig(level=max(lowest, logging.INFO), handlers=[stream])
    logging.getLogger("planaria").setLevel(lowest)
    return stream.last


class TextLines(logging.Formatter):
    """Formatter of text lines. Untrusted text in messages and exceptions begins no line, and moves
    no terminal's cursor."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = readable(record.message)
        return super().formatMessage(record)

    def formatException(self, *of: Any) -> str:  # noqa: N802
        return readable_lines(super().formatException(*of))


class JsonLines(logging.Formatter):
    """Formatter of JSON objects: `time` (RFC 3339, UTC), `level`, `name` if any, `message`, and the
    `traceback` of an exception."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower()}
        if self._name:
            line["name"] = self._name
        line["message"] = readable_lines(record.getMessage())
        if record.exc_info:
            line["traceback"] = readable_lines(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


class LogStream(logging.Handler):
    """Handler that writes in a thread. Beyond MOST_LOGGED bytes the oldest waiting lines are
    dropped, and their number is logged. It must be closed (`logging.shutdown` does)."""

    def __init__(self) -> None:
        super().__init__()
        self.last = LastLines()
        self._file = _StandardError(Path("standard error"), MOST_LOGGED)
        self._file.lost_lines = self._lost_lines

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        self.last.add(text)
        self._file.append(_encoded(text))

    def _lost_lines(self, lines: int) -> bytes:
        text = f"{lines} lines of this log are lost: standard error accepted no writes"
        record = logging.makeLogRecord({"levelname": "WARNING", "msg": text})
        return _encoded(self.format(record))

    def close(self) -> None:
        """Wait LAST_WRITES seconds; remaining lines are lost."""
        self._file.close()
        super().close()


def _size(line: str) -> int:
    return len(line.encode(errors="replace")) + 1


def _encoded(text: str) -> bytes:
    return f"{text}\n".encode(errors="backslashreplace")


class _StandardError(BackgroundLineFile):
    lost_lines: Callable[[int], bytes]
    _lost_logged = 0  # lost lines that the log mentions
    _in_line = False

    def _open(self) -> int:
        return os.dup(STANDARD_ERROR)

    def _write(self, file: int, piece: bytes) -> int:
        newly_lost = self.waiting.dropped - self._lost_logged
        if newly_lost and not self._in_line:
            os.write(file, self.lost_lines(newly_lost))
            self._lost_logged += newly_lost
        size = super()._write(file, piece)
        self._in_line = not piece[:size].endswith(b"\n")
        return size

    def _lose(self) -> None:
        """Do nothing: no other log exists."""

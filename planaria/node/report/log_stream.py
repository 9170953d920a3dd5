"""A process's log, on its standard error: that may be a pipe that nobody reads, or a file on a disk
that stalls, and who logs doesn't wait for it. Lines are for people, or JSON for what collects logs.
"""

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

from planaria.bootstrap.spelling import readable, readable_lines
from planaria.node.report.line_file import BackgroundLineFile

MOST_LOGGED: Final = 2**20
"""Bytes of lines that wait in memory to be written, at most."""
STANDARD_ERROR: Final = 2
MOST_KEPT: Final = 128 * 2**10
"""Bytes of a log's last lines that are in memory for who asks for them."""
LONGEST: Final = 4000
"""Characters of one of these; more is cut off."""


class LastLines:
    """The last lines of a log, numbered from 1 on. Threads may add to them while others look."""

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
        """The newest `most` of those after that number, as far as they are kept, and the number of
        the last one."""
        with self._lock:
            there = min(most, len(self._lines), max(0, self._last - number))
            return [self._lines[at] for at in range(-there, 0)], self._last


def begin_log(level: str = "info", form: str = "text", name: str = "") -> LastLines:
    """This process logs from here on what is of `level` (debug, info, warning or error) or graver;
    of libraries, at least what they inform of. Lines of the form `json` say that `name` said it.
    Returns the last of them, as they come. Without effect where it logs already."""
    if logging.root.handlers:
        return LastLines()
    stream = LogStream()
    least = logging.getLevelNamesMapping()[level.upper()]
    text = TextLines("%(asctime)s %(levelname)s %(message)s")
    stream.setFormatter(text if form == "text" else JsonLines(name))
    logging.basicConfig(level=max(least, logging.INFO), handlers=[stream])
    logging.getLogger("planaria").setLevel(least)
    return stream.last


class TextLines(logging.Formatter):
    """What others have said is in messages and exceptions: it begins no line, and moves no cursor
    of who reads the log at a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = readable(record.message)
        return super().formatMessage(record)

    def formatException(self, *of: Any) -> str:  # noqa: N802
        return readable_lines(super().formatException(*of))


class JsonLines(logging.Formatter):
    """An object a line: `time` (RFC 3339, UTC), `level`, `name` if there is one, `message`, and the
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
    """Lines are written in a thread. Of more than MOST_LOGGED bytes that wait the oldest are
    dropped, and the log says how many. Who ends calls `close` (`logging.shutdown` does)."""

    def __init__(self) -> None:
        super().__init__()
        self.last = LastLines()
        self._file = _StandardError(Path("standard error"), MOST_LOGGED)
        self._file.tell_lost = self._tell_lost

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        self.last.add(text)
        self._file.append(_encoded(text))

    def _tell_lost(self, lines: int) -> bytes:
        told = f"{lines} lines of this log are lost: nobody took them"
        record = logging.makeLogRecord({"levelname": "WARNING", "msg": told})
        return _encoded(self.format(record))

    def close(self) -> None:
        """What still waits LAST_WRITES seconds later is lost."""
        self._file.close()
        super().close()


def _size(line: str) -> int:
    return len(line.encode(errors="replace")) + 1


def _encoded(text: str) -> bytes:
    return f"{text}\n".encode(errors="backslashreplace")


class _StandardError(BackgroundLineFile):
    tell_lost: Callable[[int], bytes]
    _told = 0  # lines of which the log says that they are lost
    _in_line = False

    def _open(self) -> int:
        return os.dup(STANDARD_ERROR)

    def _write(self, file: int, piece: bytes) -> int:
        lost = self.waiting.dropped - self._told
        if lost and not self._in_line:
            os.write(file, self.tell_lost(lost))
            self._told += lost
        size = super()._write(file, piece)
        self._in_line = not piece[:size].endswith(b"\n")
        return size

    def _lose(self) -> None:
        """There is nowhere to say it."""

"""A node's event log: one JSON object a line, written as it happens."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from planaria.node.report import events
from planaria.node.report.line_file import LineFile

log = logging.getLogger("planaria")


class EventLog:
    """Writer of an event log; without a directory `file` is None. `open_file`: file constructor."""

    def __init__(
        self,
        directory: Path | None,
        node: str,
        open_file: Callable[[Path], LineFile] = LineFile,
    ) -> None:
        self.node = node
        self.file: LineFile | None = None
        if directory is not None:
            path = directory / f"events-{node}.jsonl"
            _drop_half_line(path)
            self.file = open_file(path)

    def write(self, event: events.Event, by: str = "", at: float | None = None) -> None:
        """Append an event. `by`: node or seat; empty: this node. `at`: Unix seconds; None: now."""
        if self.file is not None:
            written = events.event_line(event, by or self.node, time.time() if at is None else at)
            self.file.append(json.dumps(written).encode() + b"\n")

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


class LineReader:
    """Reader of lines appended to a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0

    def skip(self) -> None:
        """Skip what the file contains now."""
        self._position = self.path.stat().st_size

    def lines(self) -> Iterator[dict[str, Any]]:
        """New complete lines; the last one may still be incomplete."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield json.loads(line)


def _drop_half_line(path: Path) -> None:
    """Drop an incomplete last line, left by a killed process."""
    try:
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("can't check %s for an incomplete last line: %s", path, error.strerror)

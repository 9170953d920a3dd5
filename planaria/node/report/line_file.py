"""Append-only line files on a disk that may be full, fail or stall for a while.

`WaitingLines` decides what is written next and what is dropped. A `LineFile` writes at once, a
`BackgroundLineFile` in its own thread, so that only that thread waits for the disk.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

log = logging.getLogger("planaria")

MOST_WAITING: Final = 16 * 2**20
"""Limit of the lines that wait in memory for one file, in bytes."""
PIECE: Final = 64 * 2**10
"""Limit of one write in bytes, unless a single line is longer."""
STALLED: Final = 3.0
"""Seconds without progress after which a disk counts as failing."""
WRITE_AGAIN: Final = 1.0
"""Seconds between two attempts after a failed write."""
LAST_WRITES: Final = 5.0
"""Seconds for the remaining lines when a file is closed."""


class WaitingLines:
    """Queue of one file's unwritten lines. One thread may add lines while another writes.

    Beyond `most` bytes the oldest lines are dropped, and counted. The file's very first line, lines
    being written, and the newest stay.
    """

    def __init__(self, most: int = MOST_WAITING) -> None:
        self.dropped = 0
        self.bytes = 0
        self._most = most
        self._lock = threading.Lock()
        self._lines: deque[tuple[bytes, float]] = deque()  # each with its arrival time
        self._first_stays = True  # the first one waiting is the file's first, or partly written
        self._being_written = 0  # number of lines being written

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, line: bytes, now: float) -> None:
        """Queue a line, which ends with a newline."""
        with self._lock:
            self._lines.append((line, now))
            self.bytes += len(line)

    def trim(self) -> None:
        """Drop the oldest waiting lines beyond the limit."""
        with self._lock:
            kept = max(self._being_written, int(self._first_stays))
            while self.bytes > self._most and len(self._lines) > kept + 1:
                self.bytes -= len(self._lines[kept][0])
                del self._lines[kept]
                self.dropped += 1

    def take(self) -> bytes:
        """The next bytes to write; empty: no line waits. `wrote` or `refused` follows."""
        with self._lock:
            size = 0
            for line, _ in self._lines:
                if self._being_written and size + len(line) > PIECE:
                    break
                size += len(line)
                self._being_written += 1
            return b"".join(self._lines[number][0] for number in range(self._being_written))

    def wrote(self, size: int) -> None:
        """Remove `size` written bytes from the waiting lines."""
        with self._lock:
            self._being_written = 0
            self.bytes -= size
            while size:
                line, since = self._lines.popleft()
                self._first_stays = size < len(line)
                if self._first_stays:
                    self._lines.appendleft((line[size:], since))
                    return
                size -= len(line)

    def refused(self) -> None:
        """Keep the lines that were taken: their write failed."""
        with self._lock:
            self._being_written = 0

    def waited(self, now: float) -> float:
        """Age of the oldest waiting line in seconds."""
        with self._lock:
            return now - self._lines[0][1] if self._lines else 0.0


class LineFile:
    """Writes lines at once, or queues them, in order, until the disk accepts them.

    It raises nothing: a node trains on without its files.
    """

    taker = "its disk"

    def __init__(
        self,
        path: Path,
        most: int = MOST_WAITING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.waiting = WaitingLines(most)
        self._clock = clock
        self._error = ""
        self._file: int | None = None

    @property
    def trouble(self) -> str:
        """Why the file can't be written now; empty: it can. A line that waits for STALLED seconds
        is one."""
        waited = self.waiting.waited(self._clock())
        if self._error or waited < STALLED:
            return self._error
        return f"can't write {self.path}: {self.taker} has accepted nothing for {waited:.0f} s"

    @property
    def writing(self) -> bool:
        """Whether lines wait for a disk without known trouble."""
        return bool(self.waiting) and not self.trouble

    def append(self, line: bytes) -> None:
        """Write or queue a line, which ends with a newline."""
        self.waiting.add(line, self._clock())
        self.flush()
        self.waiting.trim()

    def flush(self) -> None:
        """Write queued lines, as far as the disk accepts them."""
        try:
            if self._file is None:
                self._file = self._open()
            while piece := self.waiting.take():
                self.waiting.wrote(self._write(self._file, piece))
        except OSError as error:
            self.waiting.refused()
            self._let_go()
            self._error = f"can't write {self.path}: {error.strerror}"
        else:
            self._error = ""

    def report(self) -> str:
        """The trouble, with the number of waiting and lost lines."""
        dropped = self.waiting.dropped
        lost = f", {dropped} older ones are lost" if dropped else ""
        return f"{self.trouble}; {len(self.waiting)} lines wait in memory{lost}"

    def close(self) -> None:
        """Flush, log a loss of the remaining lines, and close."""
        if self.waiting:
            self.flush()
        if self.waiting:
            self._lose()
        self._let_go()

    def _lose(self) -> None:
        log.error("%s, and are lost", self.report())

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _write(self, file: int, piece: bytes) -> int:
        """Write as much as there is room for. Returns the bytes written."""
        return os.write(file, piece)

    def _let_go(self) -> None:
        if self._file is not None:
            try:
                os.close(self._file)
            except OSError as error:
                log.debug("closing %s: %s", self.path, error)
            self._file = None


class BackgroundLineFile(LineFile):
    """Writes lines in a thread: `append` does not wait for the disk."""

    def __init__(
        self,
        path: Path,
        most: int = MOST_WAITING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(path, most, clock)
        self._news = threading.Event()
        self._closing = False
        name = f"write {path.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def append(self, line: bytes) -> None:
        self.waiting.add(line, self._clock())
        self.waiting.trim()
        self._news.set()

    def close(self) -> None:
        """Wait LAST_WRITES seconds for the thread; remaining lines are lost, which is logged."""
        if self._closing:
            return
        self._closing = True
        self._news.set()
        self._thread.join(LAST_WRITES)
        if self._thread.is_alive():
            self._lose()

    def _run(self) -> None:
        while not self._closing:
            self._news.wait(WRITE_AGAIN if self._error else None)
            self._news.clear()
            if not self._closing:
                self.flush()
        super().close()

"""Child processes in named slots; none of them outlives this process."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""
LOOK = 0.02
"""Seconds between two looks at processes that are to end."""
_PR_SET_PDEATHSIG = 1  # prctl(2)
_PARENT = "PLANARIA_PARENT"  # in a child's environment: the process that started it


class Ended(NamedTuple):
    """A process that ended by itself. `status` as in subprocess: negative for a signal."""

    slot: str
    pid: int
    status: int


class Processes:
    """At most one process in a slot at a time. Each is in a session of its own, so that a Ctrl-C
    reaches this process only; see `follow_parent` for what happens should this process vanish."""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self.logs = logs
        self._environment = {**os.environ, **environment, _PARENT: str(os.getpid())}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._started: Counter[str] = Counter()

    def start(self, slot: str, command: Sequence[str]) -> int:
        """Returns the process's id. Its output goes to the slot's next log. Raises OSError."""
        self._started[slot] += 1
        with self.log(slot).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        self._running[slot] = process
        return process.pid

    def log(self, slot: str) -> Path:
        """Of the newest process in the slot."""
        number = self._started[slot]
        name = slot if slot == "registry" else f"node-{slot}"
        return self.logs / (f"{name}.log" if number <= 1 else f"{name}-{number}.log")

    def running(self) -> dict[str, int]:
        """Slot -> process id, as far as `ended` has not told otherwise."""
        return {slot: process.pid for slot, process in self._running.items()}

    def ended(self) -> list[Ended]:
        """Those that ended by themselves since the last look."""
        ended = [
            Ended(slot, process.pid, status)
            for slot, process in self._running.items()
            if (status := process.poll()) is not None
        ]
        for one in ended:
            del self._running[one.slot]
        return ended

    def kill(self, slot: str) -> int | None:
        """With SIGKILL, at once. Returns the process's id; None: the slot was empty."""
        process = self._running.pop(slot, None)
        if process is None:
            return None
        process.kill()
        process.wait()
        return process.pid

    async def stop(self) -> None:
        """End them all: SIGTERM, a grace period, SIGKILL. The registry is last: nodes leave it."""
        for slots in ([s for s in self._running if s != "registry"], list(self._running)):
            for slot in slots:
                self._running[slot].terminate()
            deadline = time.monotonic() + GRACE
            while slots and time.monotonic() < deadline:
                slots = [slot for slot in slots if self._running[slot].poll() is None]
                await asyncio.sleep(LOOK)
        self.kill_all()

    def kill_all(self) -> None:
        for slot in list(self._running):
            self.kill(slot)


def describe_status(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log, as far as there are any."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(can't read {log}: {error.strerror})"
    return "\n".join(text.splitlines()[-lines:]) or "(empty)"


def follow_parent() -> None:
    """Called first thing by a child: it gets SIGKILL when the process that started it vanishes.
    Done here, not between fork and exec, where a process with threads must not run Python."""
    parent = os.environ.get(_PARENT)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it vanished before that was said
        os._exit(1)

"""Processes of `planaria ARGUMENTS...`, forked from one that has loaded torch. Loading torch takes
more processor time than all that most of these swarms do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path

from planaria.node.machine.processes import (
    PLANARIA,
    die_with_parent,
    ensure_fork_server,
    heed_signals,
    run_planaria,
)

PRELOADED = (
    "planaria.node.local.fork_server",
    *PLANARIA,
    "matplotlib.figure",  # with which each `planaria up` draws losses at its end
    "matplotlib.backends.backend_agg",
)


def begin_fork_server() -> None:
    """Starts this process's fork server, with `PRELOADED`, before any other caller does."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED])
    ensure_fork_server()


class Forked:
    """A forked command, with methods of `subprocess.Popen`."""

    def __init__(
        self,
        output: Path,
        *arguments: str,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        takes_all: bool = False,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Standard output and error go to a file; `environment` is added to this process's.
        Processes that the command starts through `Processes` come from the same fork server: they
        lack `environment`, and don't end with it by SIGKILL. With `takes_all`, as for a user, they
        have it and end. `before` is called first in the command's process."""
        context = multiprocessing.get_context("forkserver")
        begin_fork_server()
        settings = dict(environment or {})
        self._process = context.Process(
            target=_run, args=(output, cwd, settings, takes_all, before, list(arguments))
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status; None: it still runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Waits for the exit status. Raises TimeoutError."""
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise TimeoutError(f"{self.pid} is still there after {timeout} s")
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    output: Path,
    cwd: Path | None,
    environment: dict[str, str],
    takes_all: bool,
    before: Callable[[], None] | None,
    arguments: list[str],
) -> None:
    die_with_parent()
    heed_signals()
    with output.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    os.environ.update(environment)
    if cwd is not None:
        os.chdir(cwd)
    if not takes_all:  # use the fork server that this process was forked from
        forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None
    if before is not None:
        before()
    run_planaria(arguments)

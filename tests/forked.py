"""`planaria ARGUMENTS...` as a process of its own, forked from one that has loaded torch: loading
torch takes more of a processor than all that most of these swarms do."""

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
    "matplotlib.figure",  # of which each `planaria up` draws losses at its end
    "matplotlib.backends.backend_agg",
)


def begin_fork_server() -> None:
    """The one of this process, whoever starts processes later."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED])
    ensure_fork_server()


class Forked:
    """As `subprocess.Popen`."""

    def __init__(
        self,
        output: Path,
        *arguments: str,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        takes_all: bool = False,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Standard output and error go to a file; `environment` is added to this process's. What
        the command starts through `Processes` is forked from where it is: it has no `environment`,
        and isn't ended with it by SIGKILL, unless it `takes_all` with it, as it does for a user.
        `before` is called in its process first."""
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
        """Exit status; None: it is still there."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Raises TimeoutError."""
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
    if not takes_all:  # there is one to fork from, whose address this process knows
        forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None
    if before is not None:
        before()
    run_planaria(arguments)

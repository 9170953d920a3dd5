"""Child processes in named slots; none of them outlives this process."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, NamedTuple

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""
LOOK = 0.02
"""Seconds between two polls of ending processes."""
PLANARIA: Final = (
    "planaria.node.cli",
    "planaria.node.page.serving",
    "planaria.node.serve",
    "planaria.bootstrap.service",
    "torch.fx.experimental.symbolic_shapes",
)
"""Modules that registries and nodes load. Torch loads the last one in the first backward pass, with
sympy: some 500 modules, which each node would load for itself."""
SUPERVISOR: Final = "PLANARIA_SUPERVISOR"
"""Environment variable with the id of the parent process, which restarts this one after a crash."""
NO_OPTIONS: Final = (SUPERVISOR, "PLANARIA_METADATA_ADDRESS")
"""Environment variables with planaria's prefix that are no options."""
ENDING: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
"""Signals that ask a process to end."""
_PR_SET_PDEATHSIG = 1  # prctl(2)
_CLONE_NEWNET = 0x40000000  # setns(2)

Work = Callable[[list[str]], None]


def run_planaria(arguments: list[str]) -> None:
    """Run `python -m planaria ARGUMENTS...` without options from the environment, which are for the
    command that started the swarm."""
    for name in [name for name in os.environ if name.startswith("PLANARIA_")]:
        if name not in NO_OPTIONS:
            del os.environ[name]
    sys.argv = ["planaria", *arguments]
    sys.modules.pop("planaria.__main__", None)  # the fork server's; runpy would warn of it
    runpy.run_module("planaria", run_name="__main__")


class EndedProcess(NamedTuple):
    """A process that ended by itself. `status` as in subprocess: negative for a signal."""

    slot: str
    pid: int
    status: int


class Processes:
    """At most one process per slot at a time; each runs `planaria` with its own arguments.

    They are forked from one process that has loaded the modules `preload`. Torch takes seconds of a
    core to load, too long for a swarm that waits for a replacement. Each has its own session, so
    that Ctrl-C reaches this process only, and default signal handlers. It gets SIGKILL when this
    process vanishes.
    """

    def __init__(
        self,
        logs: Path,
        environment: Mapping[str, str],
        preload: Sequence[str] = (),
        work: Work = run_planaria,
    ) -> None:
        """`environment` is set for this process too, from which the others inherit it."""
        os.environ.update(environment)
        self.logs, self.work = logs, work
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["planaria.node.local.fork_server", *preload])
        self._running: dict[str, BaseProcess] = {}
        self._started: Counter[str] = Counter()

    def start(self, slot: str, arguments: Sequence[str], namespace: Path | None = None) -> int:
        """Start a process, and return its id. Its output goes to the slot's next log. With
        `namespace` it runs in that network namespace, as in /proc/PID/ns/net. Raises OSError."""
        self._started[slot] += 1
        while self.log(slot).exists():  # of a resumed run
            self._started[slot] += 1
        ensure_fork_server()
        process = self._context.Process(
            target=_begin,
            args=(self.log(slot), namespace, self.work, list(arguments)),
            daemon=True,
        )
        process.start()
        assert process.pid is not None
        self._running[slot] = process
        return process.pid

    def log(self, slot: str) -> Path:
        """The log of the newest process in the slot."""
        number = self._started[slot]
        name = slot if slot == "registry" else f"node-{slot}"
        return self.logs / (f"{name}.log" if number <= 1 else f"{name}-{number}.log")

    def running(self) -> dict[str, int]:
        """Slot -> process id, as of the last call of `ended`."""
        return {slot: process.pid or 0 for slot, process in self._running.items()}

    def ended(self) -> list[EndedProcess]:
        """Processes that ended by themselves since the last call."""
        ended = [
            EndedProcess(slot, process.pid or 0, status)
            for slot, process in self._running.items()
            if (status := process.exitcode) is not None
        ]
        for process in ended:
            del self._running[process.slot]
        return ended

    def kill(self, slot: str) -> int | None:
        """Kill the slot's process, and wait for it. Returns the process's id; None: the slot was
        empty."""
        process = self._running.pop(slot, None)
        if process is None:
            return None
        process.kill()
        process.join()
        return process.pid

    async def stop(self, grace: float = GRACE) -> None:
        """Send all processes SIGTERM, and SIGKILL `grace` seconds later. The registry is last:
        nodes leave it."""
        for slots in ([s for s in self._running if s != "registry"], list(self._running)):
            for slot in slots:
                self._running[slot].terminate()
            deadline = time.monotonic() + grace
            while slots and time.monotonic() < deadline:
                slots = [slot for slot in slots if self._running[slot].exitcode is None]
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


def last_lines(log: Path, lines: int = 12) -> str:
    """The last lines of a log, if any."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(can't read {log}: {error.strerror})"
    return "\n".join(text.splitlines()[-lines:]) or "(empty)"


def ensure_fork_server() -> None:
    """Start the fork server with signals blocked: Ctrl-C mustn't end it while it loads modules."""
    resource_tracker.ensure_running()  # would unblock some
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(log: Path, namespace: Path | None, work: Work, arguments: list[str]) -> None:
    """Initialize a forked child process, and run its work."""
    gc.freeze()  # each collection would copy objects loaded before the fork
    os.setsid()
    heed_signals()
    die_with_parent()
    os.environ[SUPERVISOR] = str(os.getppid())
    with log.open("wb") as file:
        for output in (sys.stdout, sys.stderr):
            output.flush()
            os.dup2(file.fileno(), output.fileno())
    if namespace is not None:
        enter_network(namespace)
    work(arguments)


def heed_signals() -> None:
    """Restore default handlers of ignored signals (SIGINT in the background of a script, SIGHUP by
    nohup), and unblock those that the fork server blocks."""
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def die_with_parent() -> None:
    """Send SIGKILL to this process when its parent vanishes (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def enter_network(namespace: Path) -> None:
    """Move the calling thread and its later children into a network namespace (Linux, root). Raises
    OSError."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"can't enter it: {os.strerror(number)}", str(namespace))
    finally:
        os.close(descriptor)

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
"""Seconds between two looks at processes that are to end."""
PLANARIA: Final = (
    "planaria.node.cli",
    "planaria.node.page.serving",
    "planaria.node.serve",
    "planaria.bootstrap.service",
    "torch.fx.experimental.symbolic_shapes",
)
"""What registries and nodes load. The last one is what torch loads in the first backward pass, and
sympy with it: some 500 modules, which each node would load for itself."""
SUPERVISOR: Final = "PLANARIA_SUPERVISOR"
"""Environment variable with the id of the process that started this one, and starts another when
this one crashes."""
NO_OPTIONS: Final = (SUPERVISOR, "PLANARIA_METADATA_ADDRESS")
"""Environment variables of planaria's that stand for no option."""
ENDING: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
"""Signals that ask a process to end."""
_PR_SET_PDEATHSIG = 1  # prctl(2)
_CLONE_NEWNET = 0x40000000  # setns(2)

Work = Callable[[list[str]], None]


def run_planaria(arguments: list[str]) -> None:
    """Runs what `python -m planaria ARGUMENTS...` would, with no options but these: what the
    environment says is for who started the swarm."""
    for name in [name for name in os.environ if name.startswith("PLANARIA_")]:
        if name not in NO_OPTIONS:
            del os.environ[name]
    sys.argv = ["planaria", *arguments]
    runpy.run_module("planaria", run_name="__main__")


class EndedProcess(NamedTuple):
    """A process that ended by itself. `status` as in subprocess: negative for a signal."""

    slot: str
    pid: int
    status: int


class Processes:
    """At most one process in a slot at a time; each runs `planaria` with arguments of its own.

    They are forked from one process that has loaded the modules `preload` (torch takes seconds of a
    core to load, too long for a swarm that waits for a replacement). Each is in a session of its
    own, so that a Ctrl-C reaches this process only, has the signals' defaults, whatever this one
    ignores, and gets SIGKILL should this process vanish.
    """

    def __init__(
        self,
        logs: Path,
        environment: Mapping[str, str],
        preload: Sequence[str] = (),
        work: Work = run_planaria,
    ) -> None:
        """`environment` is set for this process too, from which the others have theirs."""
        os.environ.update(environment)
        self.logs, self.work = logs, work
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["planaria.node.local.fork_server", *preload])
        self._running: dict[str, BaseProcess] = {}
        self._started: Counter[str] = Counter()

    def start(self, slot: str, arguments: Sequence[str], namespace: Path | None = None) -> int:
        """Returns the process's id. Its output goes to the slot's next log. With `namespace` it
        runs in that network namespace, as in /proc/PID/ns/net. Raises OSError."""
        self._started[slot] += 1
        while self.log(slot).exists():  # of a run that goes on
            self._started[slot] += 1
        _ensure_fork_server()
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
        """Slot -> process id, as far as `ended` has not told otherwise."""
        return {slot: process.pid or 0 for slot, process in self._running.items()}

    def ended(self) -> list[EndedProcess]:
        """Those that ended by themselves since the last look."""
        ended = [
            EndedProcess(slot, process.pid or 0, status)
            for slot, process in self._running.items()
            if (status := process.exitcode) is not None
        ]
        for one in ended:
            del self._running[one.slot]
        return ended

    def kill(self, slot: str) -> int | None:
        """Kills with SIGKILL, at once. Returns the process's id; None: the slot was empty."""
        process = self._running.pop(slot, None)
        if process is None:
            return None
        process.kill()
        process.join()
        return process.pid

    async def stop(self, grace: float = GRACE) -> None:
        """End them all: SIGTERM, `grace` seconds, SIGKILL. The registry is last: nodes leave it."""
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


def tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log, as far as there are any."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(can't read {log}: {error.strerror})"
    return "\n".join(text.splitlines()[-lines:]) or "(empty)"


def _ensure_fork_server() -> None:
    """It has signals blocked, so that a Ctrl-C doesn't end it while it loads its modules."""
    resource_tracker.ensure_running()  # would unblock some
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(log: Path, namespace: Path | None, work: Work, arguments: list[str]) -> None:
    """What a child does first."""
    gc.freeze()  # each look at what was loaded before the fork would copy it for this process
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
    """This process no longer ignores what those before it were started to ignore, SIGINT in the
    background of a script, SIGHUP by nohup, nor blocks what its fork server does."""
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def stop_signals() -> asyncio.Future[int]:
    """Done with the number of the first signal that asks this process to end. Ctrl-C and hangup
    don't ask who was started to ignore them, in the background of a script or by nohup."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[int] = loop.create_future()

    def asked(number: int) -> None:
        if not stop.done():
            stop.set_result(number)

    heeded = [n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    for number in (signal.SIGTERM, *heeded):
        loop.add_signal_handler(number, asked, number)
    return stop


def die_with_parent() -> None:
    """This process gets SIGKILL when its parent vanishes (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def enter_network(namespace: Path) -> None:
    """Move the calling thread, and what it starts from now on, into a network namespace (Linux,
    root). Raises OSError."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"can't enter it: {os.strerror(number)}", str(namespace))
    finally:
        os.close(descriptor)

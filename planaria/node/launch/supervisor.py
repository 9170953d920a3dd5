"""`planaria node --restart always`: a process that starts the node, and restarts it after a crash;
with several devices, a node on each.

A node is its child in its own session, so that only the supervisor gets the terminal's signals
(Ctrl-C, hang-up). It passes the first one on as SIGTERM, and ends when all nodes have left. When it
is killed, its nodes are, too (on Linux).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from planaria.bootstrap.address import Address
from planaria.bootstrap.stop_signals import stop_signals
from planaria.node.launch.secret_words import without_secrets
from planaria.node.machine.processes import (
    SUPERVISOR,
    describe_status,
    die_with_parent,
)

log = logging.getLogger("planaria")

CRASHED = 70
"""Exit status (EX_SOFTWARE of sysexits.h) of a node with an error that a restart may mend."""
TRY_AGAIN = 75
"""Exit status (EX_TEMPFAIL) of a node that ended for a temporary reason."""
FINAL = frozenset((0, 1, 2))
"""Statuses after which a restart is useless: stopped on request, refused, or wrong options."""
SLOW = 30.0
"""Seconds beyond its grace before a node gets SIGKILL."""


class Pauses:
    """Pauses between a node's restarts, by exponential backoff: `first` seconds, doubled after each
    attempt that lasted less than a minute, up to `longest`."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._next = first

    def after(self, lasted: float) -> float:
        """Seconds to pause after an attempt that lasted for `lasted` seconds."""
        pause = self._first if lasted >= 60 else self._next
        self._next = min(self._longest, 2 * pause)
        return pause


def is_watched() -> bool:
    """Whether this process has a supervisor; if so, it ends with that from now on."""
    watcher = os.environ.pop(SUPERVISOR, "")
    if not watcher:
        return False
    die_with_parent()
    if watcher != str(os.getppid()):
        raise SystemExit(f"process {watcher}, which started this node, is gone")
    return True


def own_command() -> list[str]:
    """This process's command line without possible secrets, which go into the environment."""
    words, _ = without_secrets(sys.argv[1:])
    return [sys.executable, "-m", "planaria", *words]


def device_commands(
    devices: Sequence[str],
    listen: Address,
    advertise: Address | None,
    save_dir: Path | None,
    metrics: Address | None = None,
) -> dict[str, list[str]]:
    """Command lines of a node on each device, by name: this process's, with options that can't be
    shared replaced. Nonzero ports are counted up; in `save_dir` each node has a folder named after
    its device. Raises AddressError beyond the last port."""
    if len(devices) == 1:
        return {"the node": own_command()}
    commands = {}
    for index, device in enumerate(devices):
        replaced = ["--device", device]
        addresses = ("--listen", listen), ("--advertise", advertise), ("--metrics", metrics)
        for option, address in addresses:
            if address is not None and address.port:
                counted_up = str(address._replace(port=address.port + index))
                replaced += [option, str(Address.parse(counted_up))]
        if save_dir is not None:
            replaced += ["--save-dir", str(save_dir / device.replace(":", "-"))]
        commands[f"the node on {device}"] = [*own_command(), *replaced]
    return commands


async def supervise(nodes: Mapping[str, Sequence[str]], grace: float, again: bool = True) -> int:
    """Run nodes (command lines by name) until all have ended for good: with `again` by FINAL, else
    at once. A signal to this process ends them, with `grace` seconds for each. Returns their
    highest exit status, as a shell has it."""
    stop = stop_signals()

    async def keep(name: str, command: Sequence[str]) -> int:
        status = await _keep_running(name, command, grace, again, stop)
        if len(nodes) > 1 and not stop.done():
            log.warning("%s %s and is not restarted", name, describe_status(status))
        return status

    return max(await asyncio.gather(*(keep(*node) for node in nodes.items())))


async def _keep_running(
    name: str, command: Sequence[str], grace: float, again: bool, stop: asyncio.Future[int]
) -> int:
    _, secrets = without_secrets(sys.argv[1:])
    environment = os.environ | secrets | {SUPERVISOR: str(os.getpid())}
    clock, pauses = asyncio.get_running_loop().time, Pauses(1.0, 60.0)
    while True:
        began = clock()
        node = await asyncio.create_subprocess_exec(
            *command, env=environment, start_new_session=True
        )
        ended = asyncio.create_task(node.wait())
        await asyncio.wait([ended, stop], return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            status = await _stop(node, ended, grace + SLOW)
            stopped_before_start = status == -signal.SIGTERM
            return 0 if stopped_before_start else _as_in_a_shell(status)
        status, lasted = ended.result(), clock() - began
        if status in FINAL or not again:
            return _as_in_a_shell(status)
        pause = pauses.after(lasted)
        log.warning(
            "%s %s after %.0f s; it is restarted in %g s (not with --restart no)",
            name,
            describe_status(status),
            lasted,
            pause,
        )
        await asyncio.wait([stop], timeout=pause)
        if stop.done():
            return _as_in_a_shell(status)


async def _stop(node: asyncio.subprocess.Process, ended: asyncio.Task[int], seconds: float) -> int:
    if not ended.done():
        node.terminate()
        await asyncio.wait([ended], timeout=seconds)
    if not ended.done():
        log.error("node process %d has not ended %.0f s after SIGTERM: SIGKILL", node.pid, seconds)
        node.kill()
    return await ended


def _as_in_a_shell(status: int) -> int:
    return status if status >= 0 else 128 - status

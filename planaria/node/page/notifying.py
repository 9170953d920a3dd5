"""Runs the command of [notify] for events that somebody should hear of."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from planaria.bootstrap.escaping import readable
from planaria.node.machine.processes import describe_status
from planaria.node.page.serving import LocalPage
from planaria.node.report.notifications import Notification, Notifier

log = logging.getLogger("planaria")

LOOKS: Final = 5.0
"""Seconds between two looks at the run."""
LONGEST: Final = 30.0
"""Seconds after which the command is killed."""
LAST: Final = 10.0
"""Seconds that the last commands have when the registry ends."""


@asynccontextmanager
async def notifying(living: LocalPage, command: str) -> AsyncIterator[None]:
    """Run the command, a shell's, for each notification in this block."""
    notifier, running = Notifier(), set[asyncio.Task[None]]()

    def look() -> None:
        for notification in living.news(notifier):
            task = asyncio.ensure_future(run_command(command, notification))
            running.add(task)
            task.add_done_callback(running.discard)

    async def keep_looking() -> None:
        while True:
            await asyncio.sleep(LOOKS)
            look()

    looking = asyncio.ensure_future(keep_looking())
    try:
        yield
    finally:
        looking.cancel()
        look()
        if running:
            await asyncio.wait(running, timeout=LAST)


async def run_command(command: str, notification: Notification) -> None:
    """Run the command with the notification on standard input. If it fails, the log says so,
    without the command, which may contain a secret."""
    try:
        process = await asyncio.create_subprocess_shell(
            command, stdin=PIPE, stdout=DEVNULL, stderr=PIPE, start_new_session=True
        )
    except OSError as error:
        log.warning("can't start the command of [notify]: %s", error.strerror)
        return
    errors, ended = b"", False
    try:
        async with asyncio.timeout(LONGEST):
            _, errors = await process.communicate(notification.as_json())
        ended = True
    except TimeoutError:
        kill_group(process)
        await process.communicate()
    except asyncio.CancelledError:
        kill_group(process)
        raise
    if not ended or process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        why = describe_status(process.returncode or 0) if ended else f"was killed after {LONGEST} s"
        log.warning(
            "the command of [notify] %s (event: %s): %s", why, notification.kind, readable(last)
        )


def kill_group(process: Process) -> None:
    """Kill the command's process, and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)

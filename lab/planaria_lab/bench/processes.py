"""Processes of a benchmark, each with a pipe to the process that started it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

WAIT = 120.0
"""Seconds to wait for an answer; a process that takes longer hangs."""


def start(target: Callable[..., None], *arguments: object) -> tuple[SpawnProcess, Connection]:
    """Start a process, and return it and this end of its pipe. `target` gets the other end as its
    last argument."""
    context = multiprocessing.get_context("spawn")
    own_end, its_end = context.Pipe()
    process = context.Process(target=target, args=(*arguments, its_end), daemon=True)
    process.start()
    its_end.close()
    return process, own_end


def receive(connection: Connection) -> Any:
    """Return the next message of a process. Raises RuntimeError if it has ended, TimeoutError if it
    sends nothing for `WAIT` seconds."""
    if not connection.poll(WAIT):
        raise TimeoutError(f"a process of the benchmark sent nothing for {WAIT:g} s")
    try:
        return connection.recv()
    except EOFError as error:
        raise RuntimeError("a process of the benchmark ended early; its error is above") from error


def ask(connection: Connection) -> Any:
    """Send a message to a process that answers each, and return the answer. Raises as `receive`
    does."""
    connection.send("?")
    return receive(connection)

"""Tests of a registry as a process."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.stop_signals import stop_signals
from planaria.node.run_file import loads
from tests.bootstrap.conftest import identity, joining

TIMEOUT = 60.0  # seconds; reached only by a hang


async def end(process: asyncio.subprocess.Process, number: signal.Signals) -> int:
    process.send_signal(number)
    return await asyncio.wait_for(process.wait(), TIMEOUT)


@asynccontextmanager
async def python(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a registry as a process, and yield it once it listens."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    draining = None
    try:
        async with asyncio.timeout(TIMEOUT):
            output = b""
            while b"listens on" not in (line := await process.stdout.readline()):
                assert line, f"the registry ended before it listened: {output.decode()}"
                output += line
        draining = asyncio.create_task(process.stdout.read())
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if draining is not None:
            await draining


@pytest.mark.parametrize("ignored", [False, True])
async def test_a_registry_heeds_ctrl_c_and_hangup_unless_it_was_started_to_ignore_them(
    ignored: bool,
) -> None:
    """nohup ignores SIGHUP, and a script ignores SIGINT for processes in the background."""
    loop, inherited = asyncio.get_running_loop(), signal.SIG_IGN if ignored else signal.SIG_DFL
    before = {n: signal.signal(n, inherited) for n in (signal.SIGINT, signal.SIGHUP)}
    try:
        stop_signals()
        heeded = [number for number in before if signal.getsignal(number) != inherited]
    finally:
        for number in (*before, signal.SIGTERM):
            loop.remove_signal_handler(number)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heeded == ([] if ignored else [*before])


@pytest.fixture
def port() -> Iterator[int]:
    """Reserve a free port for the test, also for times when no registry listens there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


BARE = """
import sys

absent = ("torch", "datasets", "grpc_reflection", "matplotlib", "pyarrow", "planaria_lab")
sys.modules.update(dict.fromkeys(absent))
from planaria.node.cli import main

main()
"""


async def test_the_command_serves_without_torch_and_extras(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # has no prepared data
    run_file = tmp_path / "run.toml"
    run_file.write_text("[model]\npreset = 'medium'\nvocabulary = 512\n")
    options = ("--listen", f"127.0.0.1:{port}", "--run", str(run_file))
    async with python("-c", BARE, "bootstrap", *options) as process:
        client = RegistryClient([f"127.0.0.1:{port}"])
        run = (await client.describe()).run
        reply = await client.join(joining("a", run=run), identity("a"))
        assert loads(reply.run_file).model.stages == 6
        await client.close()
        assert await end(process, signal.SIGTERM) == 0

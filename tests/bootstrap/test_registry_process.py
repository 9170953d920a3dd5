"""A registry process that is killed, and the one that takes over its journal."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.registry_pb2 import View
from planaria.node.run_file import loads
from tests.bootstrap.conftest import identity, joining, until

TIMEOUT = 60.0  # seconds; only a hanging test gets there

PROGRAM = """
import logging, sys
from pathlib import Path
import uvloop
from planaria.bootstrap.admission import Admission, folder_beside
from planaria.bootstrap.journal import Journal
from planaria.bootstrap.rules import MembershipRules
from planaria.bootstrap.service import RegistryServer, serve

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
path, listen = Path(sys.argv[1]), sys.argv[2]
rules = MembershipRules(run="r", stages=1, lease=60, restart_grace=0.5)
admission = Admission(folder_beside(path), certifies=False)
with Journal(path, "r", admission.key) as journal:
    uvloop.run(serve(RegistryServer(rules, "toml", journal, admission=admission), listen))
"""


async def end(process: asyncio.subprocess.Process, number: signal.Signals) -> int:
    process.send_signal(number)
    return await asyncio.wait_for(process.wait(), TIMEOUT)


@asynccontextmanager
async def python(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that runs a registry, once it listens."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    draining = None
    try:
        async with asyncio.timeout(TIMEOUT):
            said = b""
            while b"listens on" not in (line := await process.stdout.readline()):
                assert line, f"the registry ended before it listened: {said.decode()}"
                said += line
        draining = asyncio.create_task(process.stdout.read())
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if draining is not None:
            await draining


def registry(journal: Path, port: int) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    return python("-c", PROGRAM, str(journal), f"127.0.0.1:{port}")


@pytest.fixture
def port() -> Iterator[int]:
    """A free port that nobody else is given meanwhile, also while no registry listens there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


async def test_killed_and_restarted_view_numbers_grow(tmp_path: Path, port: int) -> None:
    journal = tmp_path / "journal"
    views: asyncio.Queue[View] = asyncio.Queue()
    evicted: list[str] = []
    async with registry(journal, port) as first:
        client = RegistryClient([f"127.0.0.1:{port}"])
        reply = await client.join(joining("a", "a:1"), identity("a"))
        keeping = asyncio.create_task(
            client.keep_membership("a", reply, views.put_nowait, evicted.append)
        )
        other = RegistryClient([f"127.0.0.1:{port}"])
        before = (await other.join(joining("b", "b:1"), identity("b"))).view
        await end(first, signal.SIGKILL)

    async with registry(journal, port) as second:
        after = (await other.join(joining("c", "c:1"), identity("c"))).view
        assert after.number > before.number
        assert [m.node for m in after.members] == ["a", "b", "c"]
        assert after.driver == before.driver == "a"
        async with asyncio.timeout(TIMEOUT):
            numbers = [reply.view.number]
            while numbers[-1] < after.number:
                numbers.append((await views.get()).number)
        assert numbers == sorted(set(numbers))
        assert not evicted
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await client.close()
        await other.close()
        assert await end(second, signal.SIGTERM) == 0


async def test_a_member_says_soon_that_its_registry_does_not_answer_and_when_it_does(
    tmp_path: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with registry(tmp_path / "journal", port) as process:
        client = RegistryClient([f"127.0.0.1:{port}"])
        reply = await client.join(joining("a", "a:1"), identity("a"))
        member = client.keep_membership("a", reply, lambda view: None, lambda why: None)
        keeping = asyncio.create_task(member)
        process.send_signal(signal.SIGSTOP)
        await until(lambda: f"the registry at 127.0.0.1:{port} is away (" in caplog.text)
        process.send_signal(signal.SIGCONT)
        await until(lambda: "the registry is back" in caplog.text)
        assert caplog.text.count("is away (") == 1
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await client.close()


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
    monkeypatch.chdir(tmp_path)  # where no demo has prepared data
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

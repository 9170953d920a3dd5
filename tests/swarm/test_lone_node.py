"""Swarms of one node, real processes: it is killed, cut off from the registry, or can't log."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.neighbours import stages_of
from planaria.bootstrap.registry_pb2 import Description
from planaria.node.launch.own_folders import folder_options
from planaria.node.launch.resolve import resolve
from planaria.node.machine.processes import PLANARIA, Processes
from planaria.node.run_file import dumps
from tests.swarm.small import small

DEADLINE = 120.0  # seconds; only a hanging test gets there


class Place:
    """A registry of a run of three stages, and nodes that choose none."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder = folder
        self.run = resolve(small(swarm__lease=2, data__path=str(data)))
        (folder / "run.toml").write_text(dumps(self.run))
        (folder / "logs").mkdir()
        self.processes = Processes(
            folder / "logs",
            {"OMP_NUM_THREADS": "1"},
            PLANARIA,
        )

    def start_registry(self, listen: str = "127.0.0.1:0") -> None:
        self.processes.start(
            "registry",
            [
                *("bootstrap", "--run", str(self.folder / "run.toml"), "--listen", listen),
                *("--address-file", str(self.folder / "address")),
                *("--journal", str(self.folder / "journal")),
            ],
        )

    def start_node(self, name: str, join: str) -> None:
        node = [
            "node",
            "--join",
            join,
            "--threads",
            "1",
            *self.out(name),
            *folder_options(self.run),
        ]
        self.processes.start(name, node)

    def out(self, name: str) -> list[str]:
        """A folder, and so a key, of its own: another machine."""
        return ["--out", str(self.folder / name), "--save-dir", "none"]

    async def address(self) -> str:
        deadline = time.monotonic() + DEADLINE
        while not (self.folder / "address").exists():
            assert time.monotonic() < deadline, self.processes.log("registry").read_text()
            await asyncio.sleep(0.02)
        return (self.folder / "address").read_text().strip()

    async def logged(self, slot: str, pattern: str) -> re.Match[str]:
        """Waits until the newest process in the slot has said so."""
        deadline, text = time.monotonic() + DEADLINE, ""
        while not (found := re.search(pattern, text)):
            assert time.monotonic() < deadline, f"{slot} hasn't said {pattern!r}:\n{text}"
            await asyncio.sleep(0.02)
            if (log := self.processes.log(slot)).exists():
                text = log.read_text()
        return found


@pytest.fixture
def place(data: Path, tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path, data)
    yield place
    place.processes.kill_all()


async def described(address: str) -> Description:
    client = RegistryClient([address])
    try:
        return await client.describe()
    finally:
        await client.close()


async def heard(address: str, name: str) -> None:
    """Waits until the registry has a report of the node, so that a stream of it is open."""
    async with asyncio.timeout(DEADLINE):
        while not any(  # noqa: ASYNC110  it tells nobody
            one.member.node == name and one.report.memory
            for one in (await described(address)).members
        ):
            await asyncio.sleep(0.02)


async def test_the_replacement_of_a_lone_node_that_is_killed_takes_its_stage(place: Place) -> None:
    place.start_registry()
    address = await place.address()
    place.start_node("first", address)
    await heard(address, (await place.logged("first", "joined as (.*): stage 0 was vacant"))[1])
    place.processes.kill("first")
    place.start_node("second", address)
    await place.logged("second", "joined as .*: stage 0 was vacant")
    description = await described(address)
    assert [stages_of(member) for member in description.view.members] == [[0]]
    assert "no answer to dials by the registry and" in " ".join(description.decisions)


async def committed(address: str, steps: int) -> None:
    async with asyncio.timeout(DEADLINE):
        while not any(  # noqa: ASYNC110  it tells nobody
            seat.committed >= steps
            for member in (await described(address)).members
            for seat in member.report.seats
        ):
            await asyncio.sleep(0.02)


async def test_a_node_whose_log_nobody_reads_trains_and_leaves(place: Place) -> None:
    """Its standard error is a pipe that was full when it began."""
    place.start_registry()
    address = await place.address()
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        os.set_blocking(writer, True)
        command = ["planaria", "node", "--join", address, "--seats", "3", "--threads", "1"]
        node = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *command,
            *place.out("node"),
            *folder_options(place.run),
            stderr=writer,
        )
        try:
            await committed(address, 3)
            node.terminate()
            async with asyncio.timeout(DEADLINE):
                assert await node.wait() == 0
        finally:
            if node.returncode is None:
                node.kill()
    finally:
        os.close(reader)
        os.close(writer)


@asynccontextmanager
async def forwarded(address: str, by: int = 0) -> AsyncIterator[int]:
    """A port (of this number; 0: any) whose connections go to the address, until they are cut."""
    host, port = address.split(":")
    tasks: set[asyncio.Task[None]] = set()

    async def relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
        except ConnectionError:
            pass
        finally:
            sink.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_connection(host, int(port))
        for source, sink in ((reader, inner[1]), (inner[0], writer)):
            tasks.add(asyncio.create_task(relay(source, sink)))

    server = await asyncio.start_server(accept, "127.0.0.1", by)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_lone_node_that_is_cut_off_from_the_registry_is_not_replaced(place: Place) -> None:
    """Its way to the registry is closed; its own port answers. When there is a way again, the
    newcomer gets another stage."""
    place.start_registry()
    address = await place.address()
    async with forwarded(address) as way:
        place.start_node("first", f"127.0.0.1:{way}")
        name = (await place.logged("first", "joined as (.*): stage 0 was vacant"))[1]
        await heard(address, name)
    place.start_node("second", address)
    await place.logged(
        "registry", f"has to wait: these nodes answer a dial, but are not heard: {name} "
    )
    assert [member.node for member in (await described(address)).view.members] == [name]
    async with forwarded(address, by=way):
        await place.logged("second", "joined as .*: stage 1 was vacant")
        assert name in {member.node for member in (await described(address)).view.members}

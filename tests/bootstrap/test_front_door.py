"""The front door with real connections: what strangers do, and what members notice of it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from planaria.bootstrap import service
from planaria.bootstrap.address import Address
from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.crowd import ConnectionLimits
from planaria.bootstrap.front_door import FrontDoor, _Outer, room_within
from planaria.bootstrap.membership import MembershipRules
from planaria.bootstrap.registry_pb2 import Report, View
from tests.bootstrap.conftest import identity, joining

DEADLINE = 120.0  # seconds; only a hanging test gets there
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

PROGRAM = """
import logging, resource, sys
import uvloop
from planaria.bootstrap.membership import MembershipRules
from planaria.bootstrap.service import RegistryServer, serve

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
registry = RegistryServer(MembershipRules(run="r", stages=1, lease=60), "toml")
uvloop.run(serve(registry, "127.0.0.1:0"))
"""


class Echo(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Says by whom it was called."""

    def __init__(self, door: FrontDoor) -> None:
        self.door, self.callers = door, list[str]()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.callers.append(self.door.outer(context.peer()))
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def opened(
    room: ConnectionLimits, listen: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[Echo, int]]:
    door, server = FrontDoor(room), grpc.aio.server()
    echo = Echo(door)
    health_pb2_grpc.add_HealthServicer_to_server(echo, server)
    server.add_insecure_port(door.within)
    await server.start()
    try:
        yield echo, await door.open(Address.parse(listen))
    finally:
        await server.stop(None)
        await door.close()
        assert not Path(door.within.removeprefix("unix:")).parent.exists()


async def check(address: str) -> None:
    async with asyncio.timeout(DEADLINE), grpc.aio.insecure_channel(address) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


@pytest.mark.parametrize(
    ("listen", "dialled", "host"),
    [
        ("127.0.0.1:0", "127.0.0.1", "ipv4:127.0.0.1:"),
        ("0.0.0.0:0", "127.0.0.1", "ipv4:127.0.0.1:"),
        ("localhost:0", "127.0.0.1", "ipv4:127.0.0.1:"),
    ],
)
async def test_the_server_within_knows_who_calls(listen: str, dialled: str, host: str) -> None:
    async with opened(ConnectionLimits(), listen) as (echo, port):
        await check(f"{dialled}:{port}")
        assert echo.callers[0].startswith(host)
        assert echo.door.outer("ipv4:127.0.0.1:1") == echo.door.outer("unix:") == ""


async def closed(connection: socket.socket) -> None:
    """Waits until the other side has closed it."""
    loop = asyncio.get_running_loop()
    with suppress(ConnectionError):
        async with asyncio.timeout(DEADLINE):
            while await loop.sock_recv(connection, 1 << 16):
                pass


async def connected(stack: ExitStack, port: int, source: str = "127.0.0.2") -> socket.socket:
    connection = stack.enter_context(socket.socket())
    connection.setblocking(False)
    connection.bind((source, 0))
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return connection


async def test_who_says_nothing_or_too_little_is_let_go_and_others_are_served() -> None:
    room = ConnectionLimits(connections=20, strangers=10, first_word=0.2)
    with ExitStack() as stack:
        async with opened(room) as (echo, port):
            silent = await connected(stack, port)
            slow = await connected(stack, port)
            slow.send(PREFACE[:5])
            await check(f"127.0.0.1:{port}")
            await closed(silent)
            await closed(slow)
            assert not echo.door._open.keys() - {int(n) for n in echo.door.crowd._strangers}


async def test_what_is_said_before_a_call_is_let_in_is_not_read_without_end() -> None:
    said = bytes(8 << 20)
    heard = bytearray()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            heard.extend(data)
        writer.close()

    door = FrontDoor(ConnectionLimits(unproven=1 << 16))
    within = await asyncio.start_unix_server(hear, door.within.removeprefix("unix:"))
    port = await door.open(Address.parse("127.0.0.1:0"))
    with ExitStack() as stack:
        connection = await connected(stack, port)
        saying = asyncio.create_task(asyncio.get_running_loop().sock_sendall(connection, said))
        async with asyncio.timeout(DEADLINE):
            while door.crowd.may_say_more(1) or not heard:  # noqa: ASYNC110  it tells nobody
                await asyncio.sleep(0.01)
            assert len(heard) < 1 << 20 and not saying.done()
            door.prove("unix:/somewhere/1")
            await saying
            while len(heard) < len(said):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await door.close()
        await closed(connection)
    within.close()


def test_who_goes_while_it_is_let_in_takes_nobodys_descriptor_along() -> None:
    """With uvloop, as registries and nodes have it."""
    pipes: list[int] = []

    async def goes(door: FrontDoor) -> None:
        outer, connection = _Outer(door), Mock(spec=asyncio.Transport)
        connection.get_extra_info.return_value = ("127.0.0.2", 1)
        outer.connection_made(connection)
        outer.connection_lost(None)
        outer.waiting.append(PREFACE)
        entering = asyncio.create_task(door._enter(outer))
        for _ in range(20):
            await asyncio.sleep(0)
            pipes.extend(os.pipe())
        await entering

    async def come_and_go() -> None:
        async with opened(ConnectionLimits()) as (echo, _):
            going = asyncio.run_coroutine_threadsafe(goes(echo.door), echo.door._loop)
            await asyncio.wrap_future(going)

    uvloop.run(come_and_go())
    gc.collect()
    for end in pipes:
        os.close(end)  # raises where that isn't open any more


async def test_300_idle_connections_to_256_descriptors_keep_nobody_out() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "faulthandler", "-c", PROGRAM),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    clients: list[RegistryClient] = []
    with ExitStack() as stack:
        try:
            async with asyncio.timeout(DEADLINE):
                while b"listens on" not in (line := await process.stdout.readline()):
                    assert line, "it has ended"
                port = int(line.rpartition(b":")[2])
                before = await member(clients, port, "before")
                for number in range(300):
                    connection = await connected(stack, port)
                    if number % 3 == 0:  # these take three descriptors each, and trickle
                        with suppress(ConnectionError):
                            connection.send(PREFACE[: 1 + number % 20])
                after = await member(clients, port, "after")
                views = [await before.get()]
                while {one.node for one in views[-1].members} != {"before", "after"}:
                    views.append(await before.get())
                clients[0].report(Report(bytes_in=7, leaving=True))
                while not any(one.leaving for one in (await after.get()).members):
                    pass
        finally:
            await asyncio.gather(*(client.close() for client in clients))
            process.terminate()
            draining = asyncio.create_task(process.stdout.read())
            async with asyncio.timeout(DEADLINE):
                assert await process.wait() == 0
                await draining


async def member(clients: list[RegistryClient], port: int, name: str) -> asyncio.Queue[View]:
    """Joins, and stays for as long as the test; returns the views that it hears of."""
    client, views = RegistryClient([f"127.0.0.1:{port}"]), asyncio.Queue[View]()
    clients.append(client)
    reply = await client.join(joining(name, f"{name}:1"), identity(name))
    views.put_nowait(reply.view)
    keeping = client.keep_membership(name, reply, views.put_nowait, lambda why: None)
    client._tasks.add(asyncio.create_task(keeping))  # ends when it is closed
    return views


def test_a_third_of_the_descriptors_are_connections_half_of_these_strangers() -> None:
    assert room_within(256) == ConnectionLimits(connections=52, strangers=26)
    assert room_within(10) == ConnectionLimits(connections=2, strangers=1)
    assert room_within(None) == room_within(10**9)


async def test_a_registry_with_few_descriptors_says_so_and_how_many_it_needs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for descriptors in (64, 139, None):
        monkeypatch.setattr(service, "may_open", lambda allowed=descriptors: allowed)
        registry = service.RegistryServer(MembershipRules(run="r", stages=2), "")
        await registry.start("127.0.0.1:0")
        await registry.stop()
    said = [(r.levelname, r.getMessage()) for r in caplog.records if "may open" in r.getMessage()]
    few, enough, any_number = said
    assert few[0] == "WARNING" and "may open 64 files (ulimit -n): room for 2 conn" in few[1]
    assert "3 nodes needs 139: raise the hard limit (ulimit -n 139" in few[1]
    assert enough[0] == "INFO" and enough[1].endswith("room for 13 connections")
    assert any_number[0] == "INFO"

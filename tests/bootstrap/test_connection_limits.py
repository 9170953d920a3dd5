"""Tests of limits on strangers' connections, with registry processes that have few descriptors."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import ExitStack, suppress

import pytest

from planaria.bootstrap import service
from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.connection_limits import connections_within, limit_message
from planaria.bootstrap.registry_pb2 import Report, View
from planaria.bootstrap.rules import MembershipRules
from tests.bootstrap.conftest import DEADLINE, identity, joining, registry_process

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

PROGRAM = """
import logging, resource, sys
import uvloop
from planaria.bootstrap.rules import MembershipRules
from planaria.bootstrap.service import RegistryServer, serve

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
registry = RegistryServer(MembershipRules(run="r", stages=1, lease=60), "toml")
uvloop.run(serve(registry, "127.0.0.1:0"))
"""


async def test_300_silent_or_slow_connections_to_256_descriptors_keep_nobody_out() -> None:
    clients: list[RegistryClient] = []
    async with registry_process("-c", PROGRAM) as port, asyncio.timeout(DEADLINE):
        with ExitStack() as stack:
            try:
                before = await member(clients, port, "before")
                for number in range(300):
                    connection = await connected(stack, port)
                    if number % 3 == 0:
                        with suppress(ConnectionError):
                            connection.send(PREFACE[: 1 + number % 20])
                after = await member(clients, port, "after")
                views = [await before.get()]
                while {m.node for m in views[-1].members} != {"before", "after"}:
                    views.append(await before.get())
                clients[0].report(Report(bytes_in=7, leaving=True))
                while not any(m.leaving for m in (await after.get()).members):
                    pass
            finally:
                await asyncio.gather(*(client.close() for client in clients))


async def connected(stack: ExitStack, port: int) -> socket.socket:
    connection = stack.enter_context(socket.socket())
    connection.setblocking(False)
    connection.bind(("127.0.0.2", 0))
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return connection


async def member(clients: list[RegistryClient], port: int, name: str) -> asyncio.Queue[View]:
    """Join as a member for as long as the test, and return a queue of the views received."""
    client, views = RegistryClient([f"127.0.0.1:{port}"]), asyncio.Queue[View]()
    clients.append(client)
    reply = await client.join(joining(name, f"{name}:1"), identity(name))
    views.put_nowait(reply.view)
    keeping = client.keep_membership(name, reply, views.put_nowait, lambda why: None)
    client._tasks[asyncio.create_task(keeping)] = None  # ends with the client
    return views


def test_connections_by_descriptors() -> None:
    assert [connections_within(number) for number in (10, 256, 1024)] == [2, 78, 462]
    assert connections_within(10**9) == 40_000


@pytest.mark.parametrize(
    ("descriptors", "level", "text"),
    [
        (64, logging.WARNING, "3 nodes needs 126: raise the hard limit (ulimit -n 126"),
        (126, logging.INFO, "room for 13 connections"),
    ],
)
def test_few_descriptors_are_a_warning_with_the_number_needed(
    descriptors: int, level: int, text: str
) -> None:
    shown, message = limit_message(3, descriptors)
    assert shown == level
    assert f"may open {descriptors} files (ulimit -n)" in message and text in message


async def test_a_registry_logs_the_limit_for_all_nodes_of_its_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "open_descriptors", lambda: 64)
    registry = service.RegistryServer(MembershipRules(run="r", stages=2), "")
    await registry.start("127.0.0.1:0")
    await registry.stop()
    assert "A run of 3 nodes needs 126" in caplog.text

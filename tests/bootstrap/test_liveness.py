"""Tests of liveness checks against real ports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from planaria.bootstrap.address import Reach
from planaria.bootstrap.client import JoinRefused, RegistryClient
from planaria.bootstrap.credentials import PLAIN
from planaria.bootstrap.grpc_transport import GrpcTransport
from planaria.bootstrap.rules import MembershipRules
from tests.bootstrap.conftest import Place, identity, joining, serving, until
from tests.harness.ports import free_port

LONG = 60.0  # seconds; reached only by a hang


@asynccontextmanager
async def listening(node: str = "") -> AsyncIterator[str]:
    """Run a gRPC server that serves the health of the node, and yield its address."""
    server = grpc.aio.server()
    if node:
        healthy = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        await healthy.set(node, health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize("name", ["a", "b", ""])
async def test_who_serves_its_health_is_there_and_who_else_listens_is_not_the_node(name) -> None:
    async with listening(name) as address:
        assert bool(await GrpcTransport(PLAIN).is_alive("a", address, LONG)) == (name == "a")


async def test_a_port_that_nobody_listens_on_tells_at_once() -> None:
    assert not await GrpcTransport(PLAIN).is_alive("a", free_address(), LONG)


async def test_one_that_takes_connections_and_says_nothing_may_be_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        assert not await GrpcTransport(PLAIN).is_alive("a", f"127.0.0.1:{port}", 0.3)


async def test_a_port_that_takes_connections_and_ends_them_has_nobody_behind_it() -> None:
    """So behaves the forwarder of a container's port when the process in it is gone."""

    async def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with await asyncio.start_server(end, "127.0.0.1", 0) as forwarding:
        port = forwarding.sockets[0].getsockname()[1]
        assert not await GrpcTransport(PLAIN).is_alive("a", f"127.0.0.1:{port}", LONG)


async def test_a_host_that_does_not_exist_is_looked_for_as_long_as_was_asked() -> None:
    assert not await GrpcTransport(PLAIN).is_alive("a", "no-such-host.invalid:1", 0.3)


async def join(place: Place, node: str, address: str, deadline: float = LONG) -> list[str]:
    """Join without keeping the membership, like a node that isn't heard. Return the members."""
    client = RegistryClient([place.address])
    try:
        reply = await client.join(joining(node, address), identity(node), deadline)
        return [member.node for member in reply.view.members]
    finally:
        await client.close()


async def test_a_newcomer_takes_the_place_of_a_lone_node_that_is_gone() -> None:
    async with serving(MembershipRules(run="r", stages=2, lease=0.1)) as place:
        assert await join(place, "old", free_address()) == ["old"]
        await until(lambda: place.registry.machine.isolation.isolated)
        assert await join(place, "new", free_address()) == ["new"]


async def test_a_lone_node_that_answers_is_not_replaced() -> None:
    async with (
        serving(MembershipRules(run="r", stages=2, lease=0.1)) as place,
        listening("old") as address,
    ):
        await join(place, "old", address)
        await until(lambda: place.registry.machine.isolation.isolated)
        with pytest.raises(JoinRefused, match=r"old \(stage 0, .*\) answers a dial"):
            await join(place, "new", free_address(), deadline=0.5)
        assert [member.node for member in place.registry.machine.view.members] == ["old"]


async def test_what_is_near_is_not_dialled_for_who_is_not() -> None:
    came: list[object] = []
    server = await asyncio.start_server(lambda *both: came.append(both), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for host in ("127.0.0.1", "localhost"):
        assert await GrpcTransport(PLAIN).is_alive("a", f"{host}:{port}", LONG, Reach()) is None
    server.close()
    assert not came

"""Fixtures and helpers for a registry in the test's event loop."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message

from planaria.bootstrap.admission import Admission
from planaria.bootstrap.authority import Authority, CertifiedKey, Request, Role, Who
from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.credentials import PLAIN, Certified, Credentials
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.journal import Journal
from planaria.bootstrap.registry_pb2 import JoinReply, JoinRequest, View
from planaria.bootstrap.rules import PROTOCOL, MembershipRules, Resettle
from planaria.bootstrap.service import Limits, RegistryServer
from tests.stubs import RegistryStub

DEADLINE = 120.0  # seconds; reached only by a hang

T = TypeVar("T")
M = TypeVar("M", bound=Message)
RULES = MembershipRules(run="r", stages=2, lease=10, probe_timeout=5, restart_grace=0.2)
RUN_FILE = 'name = "r"\n'
AUTHORITY = Authority.make(0)
KEY = AUTHORITY.identity
"""The run's key, which its registries keep over restarts."""


async def soon(awaited: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaited, DEADLINE)


async def until(condition: Callable[[], Any]) -> None:
    """Poll until the condition holds, for state whose changes set no event."""
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def full_disk(descriptor: int) -> None:
    """Stand-in for `os.fsync` on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def identity(name: str) -> Identity:
    """Return the key of a node, which follows from its name."""
    seed = hashlib.sha256(name.encode()).digest()
    return Identity(Ed25519PrivateKey.from_private_bytes(seed))


def certified(authority: Authority, role: Role, holder: Identity) -> Credentials:
    """Return credentials with a new certificate."""
    request, who = Request.of(holder), Who(role, holder.instance)
    issued = authority.issue(request.request, who, time.time())
    return Credentials.of(Certified(CertifiedKey(request.key, issued, authority.certificate)))


def joining(name: str, address: str = "", run: str = RULES.run, **more: Any) -> JoinRequest:
    """Return a join request, signed by the key of that name."""
    request = JoinRequest(protocol=PROTOCOL, run=run, node=name, address=address, **more)
    request.key = identity(name).public
    return signed(request, name)


def signed(message: M, name: str) -> M:
    identity(name).sign_message(message, RULES.run)
    return message


class Node:
    """A node's client, whose membership a task keeps."""

    def __init__(self, name: str, client: RegistryClient, reply: JoinReply) -> None:
        self.name, self.client, self.reply = name, client, reply
        self.views = [reply.view]
        self.evicted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.measurements: asyncio.Queue[int] = asyncio.Queue()
        self._changed = asyncio.Event()
        callbacks = self._viewed, self.evicted.set_result, self.measurements.put_nowait
        self.keeping = asyncio.create_task(client.keep_membership(name, reply, *callbacks))

    @property
    def view(self) -> View:
        return self.views[-1]

    def _viewed(self, view: View) -> None:
        self.views.append(view)
        self._changed.set()

    async def sees(self, condition: Callable[[View], bool]) -> View:
        """Wait for the first view from now on that fulfils the condition, and return it."""

        async def look() -> View:
            while not condition(self.view):
                self._changed.clear()
                await self._changed.wait()
            return self.view

        return await soon(look())

    async def stop(self) -> None:
        """Stop as a crash does: close connections without leaving."""
        self.keeping.cancel()
        await asyncio.gather(self.keeping, return_exceptions=True)
        await self.client.close()


@dataclass
class Place:
    """A running registry and the nodes started by the test."""

    registry: RegistryServer
    port: int
    nodes: list[Node]
    credentials: Credentials
    opened: AsyncExitStack

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def client(self) -> RegistryClient:
        """Return a client that is closed with the registry, as are `channel` and `stub`."""
        client = RegistryClient([self.address], self.credentials)
        self.opened.push_async_callback(client.close)
        return client

    def channel(self) -> grpc.aio.Channel:
        channel = grpc.aio.insecure_channel(self.address)
        self.opened.push_async_callback(channel.close)
        return channel

    def stub(self) -> Any:
        return RegistryStub(self.channel())

    async def node(self, name: str, stage: int | None = None, address: str = "") -> Node:
        client = RegistryClient([self.address], self.credentials)
        request = joining(name, address or f"{name}:1", stage=stage)
        node = Node(name, client, await client.join(request, identity(name)))
        self.nodes.append(node)
        async with asyncio.timeout(DEADLINE):
            while name not in self.registry._streams:  # noqa: ASYNC110  no event is set
                await asyncio.sleep(0)
        return node


@asynccontextmanager
async def serving(
    rules: MembershipRules = RULES,
    port: int = 0,
    journal: Path | None = None,
    credentials: Credentials = PLAIN,
    limits: Limits | None = None,
    authority: Authority = AUTHORITY,
    resettle: Resettle | None = None,
) -> AsyncIterator[Place]:
    admission = Admission(None, certifies=False)
    admission.authority = authority
    with Journal(journal, rules.run, KEY) if journal else nullcontext() as kept:
        registry = RegistryServer(rules, RUN_FILE, kept, limits or Limits(), admission, resettle)
        port = await registry.start(f"127.0.0.1:{port}", credentials)
        place = Place(registry, port, [], credentials, AsyncExitStack())
        try:
            yield place
        finally:
            for node in place.nodes:
                await node.stop()
            await place.opened.aclose()
            await registry.stop()
            await registry.wait()


@asynccontextmanager
async def registry_process(*arguments: str) -> AsyncIterator[int]:
    """Run a registry as a process of Python with these arguments, and yield its port once it
    listens. In the end it must heed SIGTERM."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "faulthandler", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    draining, output = None, b""
    try:
        while b"listens on" not in (line := await soon(process.stdout.readline())):
            assert line, f"the registry ended before it listened: {output.decode()}"
            output += line
        draining = asyncio.create_task(process.stdout.read())
        yield int(line.rpartition(b":")[2])
        process.terminate()
        assert await soon(process.wait()) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if draining is not None:
            await draining


@pytest.fixture
def serve() -> Callable[..., AbstractAsyncContextManager[Place]]:
    return serving


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with serving() as place:
        yield place

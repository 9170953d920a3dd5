"""Seconds of joins, renewals and links while strangers hold as many connections as they can, and
without strangers.

The strangers first flood the registry: how long does a join take, and how late are members'
renewals? Then they flood a node: how long does a link take to come up? Both are measured with 1,024
descriptors, and with as many as this machine allows.

Registry and node are processes of their own. The strangers are another process, on another address
of loopback. They connect again when they are dropped, and every tenth sends a byte per second.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import statistics
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import uvloop

from planaria.bootstrap.address import Address
from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.registry_pb2 import JoinRequest
from planaria.bootstrap.rules import PROTOCOL, MembershipRules
from planaria.bootstrap.service import RegistryServer
from planaria_lab.bench.handshakes import answering, handshakes
from planaria_lab.bench.processes import receive, start
from planaria_lab.bench.rows import keep

STRANGERS = 10_000
FEW = 1024  # descriptors, the usual soft limit
JOINS = 200  # joins with strangers, and without
GOAL = 1.0  # seconds, for 99 joins of 100
AGAIN = 5.0  # seconds until a stranger that was dropped connects again
FLOODED = 30.0  # seconds that strangers have to connect
START = 60.0  # seconds that a request may take
RULES = MembershipRules("bench", stages=1, lease=5.0, max_replicas=64, joins_per_second=1e6)


@dataclass(frozen=True)
class Joins:
    connections: int  # open connections of strangers, by their count, after each has tried
    median: float  # seconds of a join
    p99: float  # seconds of a join
    silence: float  # longest time in s since a member was heard; renewals are 1 s apart

    def __str__(self) -> str:
        return (
            f"{self.connections:>6,} connections of strangers: a join takes "
            f"{1e3 * self.median:.1f} ms, 99 of 100 under {1e3 * self.p99:.0f} ms; "
            f"no member unheard for {self.silence:.1f} s"
        )


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = STRANGERS if hard == resource.RLIM_INFINITY else min(STRANGERS, hard - 200)
    for descriptors in (FEW, hard):
        print(f"{descriptors:,} descriptors:")
        at_the_registry(most, descriptors)
        at_a_node(most, descriptors)


def at_the_registry(strangers: int, descriptors: int) -> None:
    alone, flooded = asyncio.run(measure(strangers, descriptors))
    print(alone)
    print(flooded)
    print(
        f"ratio of the 99th percentiles: {flooded.p99 / alone.p99:.1f}; "
        f"goal: under {GOAL:g} s, and members heard within the lease of {RULES.lease:g} s"
    )
    keep(
        "strangers",
        at="registry",
        descriptors=descriptors,
        alone=asdict(alone),
        flooded=asdict(flooded),
    )


def at_a_node(strangers: int, descriptors: int) -> None:
    """Measure, print and keep the seconds of a link to a node. Raises as `measure` does."""
    flood = None
    with answering(None, None, descriptors) as address:
        alone = handshakes(None, None, address).links
        try:
            flood, to_flood = start(_flood, Address.parse(address).port, strangers)
            connections = int(receive(to_flood))
            flooded = handshakes(None, None, address).links
        finally:
            if flood is not None:
                flood.kill()
                flood.join()
    medians = [1e3 * statistics.median(took) for took in (alone, flooded)]
    print(
        f"a link to a node comes up in {medians[0]:.1f} ms, and in {medians[1]:.1f} ms "
        f"({1e3 * max(flooded):.0f} ms at most) while strangers have "
        f"{connections:,} connections to it; "
        f"ratio {medians[1] / medians[0]:.1f}"
    )
    keep(
        "strangers",
        at="node",
        descriptors=descriptors,
        connections=connections,
        alone=alone,
        flooded=flooded,
    )


async def measure(strangers: int, descriptors: int) -> tuple[Joins, Joins]:
    """Measure joins without and with strangers. Raises RuntimeError if a process ends early,
    TimeoutError if one hangs."""
    registry, to_registry = start(_serve, descriptors)
    flood = None
    try:
        port = int(receive(to_registry))
        members = [await _member(port, number) for number in range(4)]
        alone = await _joins(port, 0)
        flood, to_flood = start(_flood, port, strangers)
        connections = int(await asyncio.to_thread(receive, to_flood))  # members renew meanwhile
        flooded = await _joins(port, connections)
        for client, keeping in members:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await client.close()
        return alone, flooded
    finally:
        for process in filter(None, (flood, registry)):
            process.kill()
            process.join()


async def _joins(port: int, strangers: int) -> Joins:
    seconds, silence = [], 0.0
    for _ in range(JOINS):
        client, began = RegistryClient([f"127.0.0.1:{port}"]), time.monotonic()
        node = f"n{time.monotonic_ns()}"
        await client.join(_request(node), Identity.generate(), deadline=START)
        seconds.append(time.monotonic() - began)
        described = await client.describe(START)
        members = [
            member for member in described.members if member.member.node.startswith("member")
        ]
        assert len(members) == 4, "a member was evicted"
        silence = max([silence, *(member.since_renewal for member in members)])
        await client.close()
    seconds.sort()
    return Joins(strangers, seconds[JOINS // 2], seconds[JOINS * 99 // 100], silence)


def _request(node: str) -> JoinRequest:
    return JoinRequest(protocol=PROTOCOL, run="bench", node=node, standby=True)


async def _member(port: int, number: int) -> tuple[RegistryClient, asyncio.Task[None]]:
    client, node = RegistryClient([f"127.0.0.1:{port}"]), f"member{number}"
    reply = await client.join(_request(node), Identity.generate())
    keeping = client.keep_membership(node, reply, lambda view: None, lambda why: None)
    return client, asyncio.create_task(keeping)


# -- processes -----------------------------------------------------------------------------------


def _serve(descriptors: int, connection: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    async def serve() -> None:
        registry = RegistryServer(RULES, "")
        connection.send(await registry.start("127.0.0.1:0"))
        await registry.wait()

    uvloop.run(serve())


def _flood(port: int, count: int, connection: Connection) -> None:
    """Be `count` strangers, for ever. Send the number of open connections once all have connected,
    or after `FLOODED` seconds."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(_connect_strangers(port, count, connection))


async def _connect_strangers(port: int, count: int, connection: Connection) -> None:
    tried = asyncio.Semaphore(0)
    connections = 0

    async def stranger(number: int) -> None:
        nonlocal connections
        first = True
        while True:
            try:
                reader, writer = await _connect(port)
            except OSError:
                await asyncio.sleep(1.0)
                continue
            connections += 1
            if first:
                tried.release()
                first = False
            with suppress(OSError):
                while number % 10 == 0 and not (reader.at_eof() or writer.is_closing()):
                    writer.write(b"P")
                    await asyncio.sleep(1.0)
                await reader.read()
            connections -= 1
            writer.close()
            await asyncio.sleep(AGAIN)

    strangers = []
    for number in range(count):
        strangers.append(asyncio.create_task(stranger(number)))
        if number % 100 == 99:
            await asyncio.sleep(0.01)
    with suppress(TimeoutError):
        async with asyncio.timeout(FLOODED):
            for _ in range(count):
                await tried.acquire()
    connection.send(connections)
    await asyncio.gather(*strangers)


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    own = socket.socket()
    try:
        own.setblocking(False)
        own.bind(("127.0.0.2", 0))
        await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", port))
    except OSError:
        own.close()
        raise
    return await asyncio.open_connection(sock=own)


if __name__ == "__main__":
    main()

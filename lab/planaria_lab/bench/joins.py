"""How long 10,000 nodes take to join a run that has none, as fast as its registry lets them, until
each has been told of all; and what that takes of the registry: processor time, bytes, memory.

A real registry process with a journal, over loopback. The nodes are coroutines of two other
processes, many of them on a connection. Each joins by a key of its own, opens its two streams and
renews. What it is told it counts and doesn't apply: that is another machine's work.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from planaria.bootstrap import service
from planaria.bootstrap.client import JOIN, OPTIONS, RENEWALS
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.membership import PROTOCOL
from planaria.bootstrap.registry_pb2 import (
    JoinReply,
    JoinRequest,
    NewView,
    Renewal,
    View,
    WatchRequest,
)
from planaria.bootstrap.views import unpack, unpacked
from planaria_lab.bench.registry import (
    RULES,
    STREAMS_A_CONNECTION,
    _ask,
    _hear,
    _name,
    _start,
    serve,
)
from planaria_lab.bench.rows import keep

SIZES = (1_000, 10_000)
GOAL = 60.0  # seconds, for the largest
PROCESSES = 2
LOOK = 0.1  # seconds between two looks whether all have joined
AGAIN = 0.5  # seconds until who was refused asks again
LATEST = 600.0  # seconds; more means that it hangs
LONG = replace(RULES, lease=60.0, max_replicas=1_000)
"""With the default, 5 s, what 10,000 nodes renew takes most of a core: see bench/registry.py."""


@dataclass(frozen=True)
class Joined:
    nodes: int
    seconds: float  # from the first request until each has the view with all
    views: int  # that were issued meanwhile
    core: float  # CPU seconds of the registry
    answered: int  # bytes, in answers to joins
    told: int  # bytes, in views
    memory: int  # bytes, the most that the registry had

    def __str__(self) -> str:
        return (
            f"{self.nodes:,} nodes: {self.seconds:.1f} s, {self.views} views; at the registry "
            f"{self.core:.1f} CPU s, {self.answered / 1e6:,.0f} MB in answers, "
            f"{self.told / 1e6:,.0f} MB in views, {self.memory / 1e6:,.0f} MB of memory"
        )


def join_all(nodes: int) -> Joined:
    """Raises RuntimeError when a process ends early, TimeoutError when one hangs."""
    with tempfile.TemporaryDirectory() as folder:
        registry, to_registry = _start(_serve, Path(folder) / "journal")
        clients = []
        try:
            port = int(_hear(to_registry))
            shares = [range(first, nodes, PROCESSES) for first in range(PROCESSES)]
            clients = [_start(_join, port, share) for share in shares]
            ends = [connection for _, connection in clients]
            for connection in ends:
                _hear(connection)  # its requests are signed
            cpu, began = float(_ask(to_registry)), time.monotonic()
            told = [_told(one) for one in ends]
            while not _all_have_joined(told, nodes):
                if time.monotonic() > began + LATEST:
                    raise TimeoutError(f"{told}: not all {nodes} nodes, after {LATEST:g} s")
                time.sleep(LOOK)
                told = [_told(one) for one in ends]
            seconds = time.monotonic() - began
            return Joined(
                nodes,
                seconds,
                max(one.newest for one in told),
                float(_ask(to_registry)) - cpu,
                sum(one.answered for one in told),
                sum(one.told for one in told),
                _most_memory(registry.pid),
            )
        finally:
            for process, _ in [*clients, (registry, to_registry)]:
                process.kill()
                process.join()


def main() -> None:
    for nodes in SIZES:
        found = join_all(nodes)
        print(found, flush=True)
        keep("joins", **asdict(found))
    print(f"goal: under {GOAL:g} s; {LONG.joins_per_second:g} a second may join")


def _told(end: Connection) -> _Told:
    return _Told(*map(int, _ask(end).split()))


def _all_have_joined(told: Sequence[_Told], nodes: int) -> bool:
    """And each has a view with all of them."""
    newest = max(one.newest for one in told)
    return sum(one.members for one in told) == nodes and all(one.oldest >= newest for one in told)


def _most_memory(process: int | None) -> int:
    """Bytes."""
    status = Path(f"/proc/{process}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


# -- processes -----------------------------------------------------------------------------------


def _serve(journal: Path, connection: Connection) -> None:
    """The registry's process; answers a question with the CPU seconds it has used."""
    logging.basicConfig(level=logging.ERROR)
    uvloop.run(serve(LONG, journal, connection))


@dataclass
class _Told:
    """Of the nodes of a process."""

    members: int = 0
    oldest: int = 0  # of the views that they have
    newest: int = 0  # with which one of them has joined
    answered: int = 0  # bytes
    told: int = 0

    def __str__(self) -> str:
        return " ".join(map(str, vars(self).values()))


def _join(port: int, nodes: range, connection: Connection) -> None:
    """These nodes, each in its turn; answers a question with what they were told."""
    all_told = _Told()
    have = dict.fromkeys(nodes, 0)

    async def node(index: int, channel: grpc.aio.Channel, key: Identity, ask: JoinRequest) -> None:
        join: Any = channel.unary_unary(
            f"/{service.SERVICE}/Join", request_serializer=JoinRequest.SerializeToString
        )
        keep_alive: Any = channel.stream_stream(
            f"/{service.SERVICE}/KeepAlive", request_serializer=Renewal.SerializeToString
        )
        watch: Any = channel.unary_stream(
            f"/{service.SERVICE}/Watch", request_serializer=WatchRequest.SerializeToString
        )
        await go.wait()
        await asyncio.sleep(index / LONG.joins_per_second)
        while True:
            try:
                answer: bytes = await join(ask, timeout=JOIN)
                break
            except grpc.aio.AioRpcError:  # it is busy, or as many have joined as may in a second
                await asyncio.sleep(AGAIN)
        reply = JoinReply.FromString(answer)
        have[index], signature = reply.view.number, _signature(reply.packed)
        all_told.members += 1
        all_told.newest = max(all_told.newest, have[index])
        all_told.answered += len(answer)

        async def renewals() -> AsyncIterator[Renewal]:
            first = Renewal(node=ask.node, run=LONG.run, shown=have[index])
            key.sign_message(first, LONG.run)
            yield first
            while True:
                await asyncio.sleep(LONG.lease / RENEWALS)
                yield Renewal(node=ask.node)

        heard = keep_alive(renewals())
        await heard.read()
        async for content in watch(WatchRequest(run=LONG.run, known=signature)):
            have[index] = _number(content)
            all_told.told += len(content)

    async def join_in_turn() -> None:
        for start in range(0, len(nodes), STREAMS_A_CONNECTION):
            options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
            for index in nodes[start : start + STREAMS_A_CONNECTION]:
                key = Identity(
                    Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"%d" % index).digest())
                )
                ask = JoinRequest(
                    protocol=PROTOCOL,
                    run=LONG.run,
                    node=_name(index),
                    address=f"10.0.{index // 250}.{index % 250}:7400",
                    speed=1.0,
                    host=f"host-{index:05}",
                    device="cuda:0",
                    key=key.public,
                )
                key.sign_message(ask, LONG.run)
                tasks.append(asyncio.create_task(node(index, channel, key, ask)))
        asyncio.get_running_loop().add_reader(connection.fileno(), answer)
        connection.send("signed")
        await asyncio.gather(*tasks)

    def answer() -> None:
        connection.recv()
        go.set()
        all_told.oldest = min(have.values())
        connection.send(str(all_told))

    tasks: list[asyncio.Task[None]] = []
    go = asyncio.Event()
    uvloop.run(join_in_turn())


@lru_cache(maxsize=2)  # many are told the same
def _signature(packed: bytes) -> bytes:
    return View.FromString(unpack(packed)).signature


@lru_cache(maxsize=64)  # thousands are told the same
def _number(content: bytes) -> int:
    told = unpacked(NewView.FromString(content))
    return told.difference.view.number if told.HasField("difference") else told.whole.number


if __name__ == "__main__":
    main()

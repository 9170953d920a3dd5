"""Seconds in which 10,000 nodes join an empty run, as fast as its registry allows, until each has
the view with all; and the processor time, bytes and memory of the registry for that.

A real registry process with a journal serves on loopback. The nodes are coroutines of two other
processes, and many share a connection. Each joins with a key of its own, opens its two streams and
renews. It counts the bytes of views and doesn't apply them, since another machine would do that.
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
from planaria.bootstrap.registry_pb2 import (
    JoinReply,
    JoinRequest,
    NewView,
    Renewal,
    View,
    WatchRequest,
)
from planaria.bootstrap.rules import PROTOCOL
from planaria.bootstrap.views import unpack, unpacked
from planaria_lab.bench.processes import ask, receive, start
from planaria_lab.bench.registry import RULES, STREAMS_A_CONNECTION, _name, serve
from planaria_lab.bench.rows import keep

SIZES = (1_000, 10_000)
GOAL = 60.0  # seconds, for the largest
PROCESSES = 2
LOOK = 0.1  # seconds between two checks whether all have joined
AGAIN = 0.5  # seconds until a refused node asks again
LATEST = 600.0  # seconds for all joins; a benchmark that takes longer hangs
LONG = replace(RULES, lease=60.0, max_replicas=1_000)
"""With the default lease, 5 s, renewals of 10,000 nodes take most of a core: bench/registry.py."""


@dataclass(frozen=True)
class Joined:
    nodes: int
    seconds: float  # from the first request until each has the view with all
    views: int  # number of the newest view
    core: float  # CPU seconds of the registry
    answered: int  # bytes of answers to joins
    told: int  # bytes of views
    memory: int  # peak bytes of the registry

    def __str__(self) -> str:
        return (
            f"{self.nodes:,} nodes: {self.seconds:.1f} s, {self.views} views; at the registry "
            f"{self.core:.1f} CPU s, {self.answered / 1e6:,.0f} MB in answers, "
            f"{self.told / 1e6:,.0f} MB in views, {self.memory / 1e6:,.0f} MB of memory"
        )


def join_all(nodes: int) -> Joined:
    """Measure the join of `nodes` nodes. Raises RuntimeError if a process ends early, TimeoutError
    if one hangs."""
    with tempfile.TemporaryDirectory() as folder:
        registry, to_registry = start(_serve, Path(folder) / "journal")
        clients = []
        try:
            port = int(receive(to_registry))
            shares = [range(first, nodes, PROCESSES) for first in range(PROCESSES)]
            clients = [start(_join, port, share) for share in shares]
            ends = [connection for _, connection in clients]
            for connection in ends:
                receive(connection)  # the process has signed its requests
            cpu, began = float(ask(to_registry)), time.monotonic()
            counts = [_counts_of(end) for end in ends]
            while not _all_have_joined(counts, nodes):
                if time.monotonic() > began + LATEST:
                    raise TimeoutError(
                        f"not all {nodes} nodes have joined after {LATEST:g} s: {counts}"
                    )
                time.sleep(LOOK)
                counts = [_counts_of(end) for end in ends]
            seconds = time.monotonic() - began
            return Joined(
                nodes,
                seconds,
                max(count.newest for count in counts),
                float(ask(to_registry)) - cpu,
                sum(count.answered for count in counts),
                sum(count.view_bytes for count in counts),
                _most_memory(registry.pid),
            )
        finally:
            for process, _ in [*clients, (registry, to_registry)]:
                process.kill()
                process.join()


def main() -> None:
    for nodes in SIZES:
        joined = join_all(nodes)
        print(joined, flush=True)
        keep("joins", **asdict(joined))
    print(f"goal: under {GOAL:g} s; {LONG.joins_per_second:g} a second may join")


def _counts_of(end: Connection) -> _Counts:
    return _Counts(*map(int, ask(end).split()))


def _all_have_joined(counts: Sequence[_Counts], nodes: int) -> bool:
    """Return whether each node has joined and has a view with all nodes."""
    newest = max(count.newest for count in counts)
    return sum(count.members for count in counts) == nodes and all(
        count.oldest >= newest for count in counts
    )


def _most_memory(process: int | None) -> int:
    """Return the peak resident memory of a process in bytes."""
    status = Path(f"/proc/{process}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


# -- processes -----------------------------------------------------------------------------------


def _serve(journal: Path, connection: Connection) -> None:
    """Run the registry in its process; it answers each question with its CPU seconds so far."""
    logging.basicConfig(level=logging.ERROR)
    uvloop.run(serve(LONG, journal, connection))


@dataclass
class _Counts:
    """What the nodes of one process have received so far."""

    members: int = 0  # nodes that have joined
    oldest: int = 0  # number of the oldest view that a node has now
    newest: int = 0  # number of the newest view in an answer to a join
    answered: int = 0  # bytes of answers to joins
    view_bytes: int = 0

    def __str__(self) -> str:
        return " ".join(map(str, vars(self).values()))


def _join(port: int, nodes: range, connection: Connection) -> None:
    """Run these nodes, each of which joins in its turn; answer each message with their counts."""
    totals = _Counts()
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
            except grpc.aio.AioRpcError:  # the registry is busy, or at its limit of joins a second
                await asyncio.sleep(AGAIN)
        reply = JoinReply.FromString(answer)
        have[index], signature = reply.view.number, _signature(reply.packed)
        totals.members += 1
        totals.newest = max(totals.newest, have[index])
        totals.answered += len(answer)

        async def renewals() -> AsyncIterator[Renewal]:
            first = Renewal(node=ask.node, run=LONG.run, shown=have[index])
            key.sign_message(first, LONG.run)
            yield first
            while True:
                await asyncio.sleep(LONG.lease / RENEWALS)
                yield Renewal(node=ask.node)

        kept_alive = keep_alive(renewals())
        await kept_alive.read()
        async for content in watch(WatchRequest(run=LONG.run, known=signature)):
            have[index] = _number(content)
            totals.view_bytes += len(content)

    async def join_in_turn() -> None:
        for first in range(0, len(nodes), STREAMS_A_CONNECTION):
            options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
            for index in nodes[first : first + STREAMS_A_CONNECTION]:
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
        totals.oldest = min(have.values())
        connection.send(str(totals))

    tasks: list[asyncio.Task[None]] = []
    go = asyncio.Event()
    uvloop.run(join_in_turn())


@lru_cache(maxsize=2)  # many nodes get the same view
def _signature(packed: bytes) -> bytes:
    return View.FromString(unpack(packed)).signature


@lru_cache(maxsize=64)  # thousands of nodes get the same message
def _number(content: bytes) -> int:
    news = unpacked(NewView.FromString(content))
    return news.difference.view.number if news.HasField("difference") else news.whole.number


if __name__ == "__main__":
    main()

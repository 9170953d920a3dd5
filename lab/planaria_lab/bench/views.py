"""Bytes and CPU seconds that one join costs a registry with 100, 1,000 or 10,000 members.

They are compared with those of a registry that sends whole views. Its CPU seconds are also compared
with those of a bare gRPC server that sends as many bytes to as many streams. Also measured: the
time that a view takes at the registry that makes it, and at a member.

A real registry process serves on loopback. Its members are streams of two other processes, each
with a connection of its own, which count the bytes. Of thousands of members only some have a
stream. The cost for all is extrapolated from its growth with the number of streams.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import grpc
import uvloop

from planaria.bootstrap import broadcast, service
from planaria.bootstrap.admission import Admission, folder_beside
from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.journal import Journal
from planaria.bootstrap.registry_pb2 import (
    JoinRequest,
    Member,
    NewView,
    Seat,
    View,
    WatchRequest,
)
from planaria.bootstrap.rules import PROTOCOL
from planaria.bootstrap.views import apply, difference, follows, is_genuine, pack, sign, unpacked
from planaria_lab.bench.processes import WAIT, ask, receive, start
from planaria_lab.bench.registry import KEY, RULES, _name, serve
from planaria_lab.bench.rows import keep

MEMBERS = (100, 1_000, 10_000)
JOINS = 5  # joins one after the other; their mean is given
TOGETHER = 20  # joins at the same time
WATCHING = 3_000  # members with a stream, at most, if the registry sends differences
DIFFERENCE = 400  # bytes of a difference that adds one member
WATCHING_WHOLE = 100  # members with a stream, at most, if the registry sends whole views
GOAL_BYTES, GOAL_SECONDS = 20e6, 0.5  # goals of a join at 10,000 members
TIMES = 20  # repetitions of making and checking a view
OPENED = 200.0  # streams opened per second in each of two processes
AGAIN = 1.0  # seconds until a refused stream is tried again
LOOK = 0.02  # seconds between two checks whether all have the view
LONG = replace(
    RULES,
    lease=3600.0,
    restart_grace=0.1,
    max_replicas=1_000,
    max_nodes=20_000,
    joins_per_second=1e6,
)
"""Rules with a long lease, since members don't renew here: bench/registry.py measures the cost of
renewals. Connections with renewals are never idle long enough to be pinged, so the registry doesn't
ping here, either."""


@dataclass(frozen=True)
class Cost:
    """The cost of one join at the registry."""

    bytes: float  # bytes of messages to members and to the newcomer
    seconds: float  # CPU seconds

    def __str__(self) -> str:
        return f"{self.bytes / 1e6:,.2f} MB, {self.seconds:.3f} CPU s"


@dataclass(frozen=True)
class JoinCost:
    members: int
    alone: Cost
    together: Cost  # one of TOGETHER joins at the same time
    whole: Cost  # a join alone, if the registry sends whole views
    bare: Cost  # of sending to all members, by a server that does nothing else

    def __str__(self) -> str:
        return (
            f"{self.members:,} members: a join costs {self.alone}, one of {TOGETHER} together "
            f"{self.together}; by whole views {self.whole}, "
            f"{self.whole.bytes / self.alone.bytes:,.0f} times the bytes and "
            f"{self.whole.seconds / self.alone.seconds:,.1f} times the CPU; a bare server takes "
            f"{self.bare.seconds:.3f} CPU s to send to all, of which a join alone is "
            f"{self.alone.seconds / self.bare.seconds:.1f} times"
        )


def cost_of_a_join(members: int) -> JoinCost:
    """Measure the cost of a join. Raises RuntimeError if a process ends early, TimeoutError if one
    hangs."""
    watching, few = min(members, WATCHING), min(members, WATCHING_WHOLE)
    alone, together = reckoned(members, watching, partial(measured, members))
    whole, _ = reckoned(members, few, partial(measured, members, whole=True))
    (bare,) = reckoned(members, watching, cost_of_bare_server)
    return JoinCost(members, alone, together, whole, bare)


def reckoned(members: int, watching: int, measure: Callable[[int], list[Cost]]) -> list[Cost]:
    """Extrapolate the costs with `members` streams from those with `watching`, and with a tenth of
    these."""
    few = watching // 10
    pairs = zip(measure(few), measure(watching), strict=True)
    more = (members - watching) / (watching - few)
    return [
        Cost(b.bytes + more * (b.bytes - a.bytes), b.seconds + more * (b.seconds - a.seconds))
        for a, b in pairs
    ]


def measured(members: int, watching: int, whole: bool = False) -> list[Cost]:
    """Measure the costs of a join alone, and of one of `TOGETHER`, with `members` in the view, of
    which `watching` have a stream. `whole`: the registry sends whole views."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        admission = Admission(folder_beside(journal), certifies=False)
        view = members_of(admission.key, members)
        with Journal(journal, LONG.run, admission.key) as file:
            file.append(view)
        registry = start(_serve, journal, whole)
        with _watching(registry, view.signature, watching) as (port, watchers):
            time.sleep(LONG.grace)
            return asyncio.run(_join_often(port, registry[1], watchers))


def cost_of_bare_server(watching: int) -> list[Cost]:
    """Measure the cost of sending a message to all, by a server that does nothing else."""
    server = start(_broadcast)
    began = 0.0
    with _watching(server, b"", watching) as (_, watchers):
        for number in range(JOINS + 2):
            cpu = float(ask(server[1]))  # CPU seconds before this message is sent
            if number == 1:  # the first message has shown that all streams are open
                began = cpu
            while any(_received_by(watcher)[0] <= number for watcher in watchers):
                time.sleep(LOOK)
        sent = sum(_received_by(watcher)[1] for watcher in watchers) / (JOINS + 2)
        return [Cost(sent, (cpu - began) / JOINS)]


@contextmanager
def _watching(
    server: tuple[SpawnProcess, Connection], known: bytes, count: int
) -> Iterator[tuple[int, list[Connection]]]:
    """Start two processes with `count` watchers in all; yield the server's port and their pipes."""
    watchers = []
    try:
        port = int(receive(server[1]))
        for share in filter(None, (count // 2, (count + 1) // 2)):
            watchers.append(start(_watch, port, known, share))
        for _, connection in watchers:
            receive(connection)
        yield port, [connection for _, connection in watchers]
    finally:
        for process, _ in [*watchers, server]:
            process.kill()
            process.join()


async def _join_often(port: int, registry: Connection, watchers: list[Connection]) -> list[Cost]:
    """Measure the costs of a join alone, and of one of `TOGETHER`. The first join is not counted:
    it shows that all streams are open."""
    numbers = itertools.count(1)

    async def join() -> tuple[int, int]:
        client, number = RegistryClient([f"127.0.0.1:{port}"]), next(numbers)
        request = JoinRequest(
            protocol=PROTOCOL, run=LONG.run, node=f"new-{number}", address=f"127.0.0.1:{number}"
        )
        reply = await client.join(request, Identity.generate(), WAIT)
        await client.close()
        number, packed = reply.view.number, pack(reply.view.SerializeToString())
        reply.view.Clear()
        return number, len(packed) + reply.ByteSize()

    async def cost(times: int, together: int) -> Cost:
        cpu, sent, received = (
            float(ask(registry)),
            sum(_received_by(watcher)[1] for watcher in watchers),
            0,
        )
        for _ in range(times):
            joined = await asyncio.gather(*(join() for _ in range(together)))
            received += sum(size for _, size in joined)
            newest = max(number for number, _ in joined)
            while any(_received_by(watcher)[0] < newest for watcher in watchers):  # noqa: ASYNC110  processes
                await asyncio.sleep(LOOK)
        cpu = float(ask(registry)) - cpu
        sent = sum(_received_by(watcher)[1] for watcher in watchers) - sent
        return Cost((sent + received) / times / together, cpu / times / together)

    await cost(1, 1)
    return [await cost(JOINS, 1), await cost(1, TOGETHER)]


def _received_by(watcher: Connection) -> list[int]:
    """Ask a process for the number of the oldest view that one of its members has, and for the
    bytes received."""
    return [int(number) for number in ask(watcher).split()]


@dataclass(frozen=True)
class ViewCost:
    """Milliseconds that a view takes, the shortest of `TIMES` repetitions."""

    nodes: int
    signed: float  # to sign it at the registry, once
    differed: float  # to compute the difference to the view before, at the registry, once
    applied: float  # to apply the difference, at each node
    checked: float  # to check its signature, and that it follows the last view, at each node

    def __str__(self) -> str:
        return (
            f"a view of {self.nodes:,}: {self.signed:.1f} ms to sign, {self.differed:.1f} to find "
            f"the difference, {self.applied:.1f} to apply it, {self.checked:.1f} to check"
        )


def cost_of_a_view(nodes: int) -> ViewCost:
    former, view = members_of(KEY, nodes), members_of(KEY, nodes + 1)
    signed = _shortest(lambda: sign(view, KEY, former))
    change = difference(former, view)
    genuine = _shortest(lambda: is_genuine(view, KEY.public, RULES.run))
    return ViewCost(
        nodes,
        signed,
        _shortest(lambda: difference(former, view)),
        _shortest(lambda: apply(former, change)),
        genuine + _shortest(lambda: follows(view, former)),
    )


def _shortest(action: Callable[[], object]) -> float:
    def once() -> float:
        began = time.perf_counter()
        action()
        return 1000 * (time.perf_counter() - began)

    return min(once() for _ in range(TIMES))


def main() -> None:
    for nodes in MEMBERS:
        cost = cost_of_a_view(nodes)
        print(cost, flush=True)
        keep("views", of="view", **asdict(cost))
    for nodes in MEMBERS:
        join = cost_of_a_join(nodes)
        print(join, flush=True)
        keep("views", of="join", **asdict(join))
    print(f"goal at 10,000: under {GOAL_BYTES / 1e6:g} MB and {GOAL_SECONDS:g} CPU s")


def members_of(key: Identity, nodes: int) -> View:
    """Make the view with `nodes` members that the registry finds in its journal when it starts."""
    stages = RULES.stages + 1
    members = [
        Member(
            node=_name(i),
            address=f"10.0.{i // 250}.{i % 250}:7400",
            seats=[Seat(stage=i % stages)],
            joined=i + 1,
            key=hashlib.sha256(b"%d" % i).digest(),  # never signed with, and all different
            speed=1.0,
            room=1,
            host=f"host-{i:05}",
            device="cuda:0",
            block=f"10.0.{i // 250}.0/24",
        )
        for i in range(nodes)
    ]
    view = View(run=RULES.run, number=nodes, members=members, driver=_name(0))
    sign(view, key, View())
    return view


# -- processes -----------------------------------------------------------------------------------


def _serve(journal: Path, whole: bool, connection: Connection) -> None:
    """Run the registry in its process; it answers each question with its CPU seconds so far.
    `whole`: it sends no differences."""
    logging.basicConfig(level=logging.ERROR)
    service._OPTIONS = tuple(option for option in service._OPTIONS if "keepalive" not in option[0])
    if whole:
        broadcast.MOST_RECENT = 0
    uvloop.run(serve(LONG, journal, connection))


def _broadcast(connection: Connection) -> None:
    """Run the bare server; it answers each question with its CPU seconds so far, and then sends a
    new message to all streams."""
    content, numbers = b"", itertools.count(1)
    waiting: list[asyncio.Future[None]] = []

    async def watch(request: bytes, context: object) -> AsyncIterator[bytes]:
        sent = b""
        while True:
            if sent != content:
                yield (sent := content)
            else:
                waiting.append(asyncio.get_running_loop().create_future())
                await waiting[-1]

    def answer() -> None:
        nonlocal content
        connection.recv()
        connection.send(time.process_time())
        view = View(number=next(numbers), reason=DIFFERENCE * "x")
        content = NewView(whole=view).SerializeToString()
        for waiter in waiting:
            waiter.set_result(None)
        waiting.clear()

    async def serve() -> None:
        server = grpc.aio.server()
        methods: Any = {"Watch": grpc.unary_stream_rpc_method_handler(watch)}
        handler = grpc.method_handlers_generic_handler(service.SERVICE, methods)
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        asyncio.get_running_loop().add_reader(connection.fileno(), answer)
        connection.send(port)
        await server.wait_for_termination()

    uvloop.run(serve())


def _watch(port: int, known: bytes, count: int, connection: Connection) -> None:
    """Run `count` members with a stream of views; answer each question with the number of the
    oldest view that one of them has now, and with the bytes received."""
    have, size = [0] * count, 0

    async def member(index: int, method: grpc.aio.UnaryStreamMultiCallable[Any, bytes]) -> None:
        nonlocal size
        request = WatchRequest(run=LONG.run, known=known)
        while True:
            try:
                async for content in method(request, wait_for_ready=True):
                    news, size = unpacked(NewView.FromString(content)), size + len(content)
                    view = news.difference.view if news.HasField("difference") else news.whole
                    have[index], request.known = view.number, view.signature
            except grpc.aio.AioRpcError:  # too many streams at once for gRPC
                await asyncio.sleep(AGAIN)

    async def watch() -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
        reading, channels = [], []
        for index in range(count):
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
            channels.append(channel)  # garbage collection would end its calls
            method: Any = channel.unary_stream(
                f"/{service.SERVICE}/Watch", request_serializer=WatchRequest.SerializeToString
            )
            reading.append(asyncio.create_task(member(index, method)))
            await asyncio.sleep(1 / OPENED)
        asyncio.get_running_loop().add_reader(connection.fileno(), answer)
        connection.send("open")
        await asyncio.gather(*reading)

    def answer() -> None:
        connection.recv()
        connection.send(f"{min(have)} {size}")

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(watch())


if __name__ == "__main__":
    main()

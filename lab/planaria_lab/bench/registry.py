"""Renewals per second that a registry can take per core. A real registry process serves two client
processes on loopback, which have a KeepAlive stream for each of 5,000 nodes."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from planaria.bootstrap import service
from planaria.bootstrap.admission import Admission, folder_beside
from planaria.bootstrap.client import OPTIONS
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.journal import Journal
from planaria.bootstrap.registry_pb2 import (
    DescribeRequest,
    Description,
    Member,
    Renewal,
    Report,
    Seat,
    SeatReport,
    View,
)
from planaria.bootstrap.rules import MembershipRules
from planaria.bootstrap.service import SERVICE, RegistryServer
from planaria.bootstrap.views import sign
from planaria_lab.bench.processes import ask, receive, start
from planaria_lab.bench.rows import keep

NODES = 5_000
PERIOD = 1.0  # seconds between a node's renewals
SECONDS = 10.0  # measured
STREAMS_A_CONNECTION = 250

KEY = Identity(Ed25519PrivateKey.from_private_bytes(bytes(32)))  # of all nodes
RULES = MembershipRules(run="bench", stages=49, lease=5.0, restart_grace=10.0)


@dataclass(frozen=True)
class RegistryLoad:
    nodes: int
    renewals: float  # per second, sent by all nodes
    core: float  # share of a core that the registry used
    evictions: int
    stale: float  # seconds since the least recent renewal of a node, at the end

    @property
    def per_core(self) -> float:
        """Renewals per second that one core could take."""
        return self.renewals / self.core

    def __str__(self) -> str:
        return (
            f"{self.nodes:,} nodes, {self.renewals:,.0f} renewals/s: {self.core:.2f} of a core, "
            f"{self.evictions} evictions, oldest renewal {self.stale:.1f} s old\n"
            f"{self.per_core:,.0f} renewals/s per core: "
            f"{self.per_core / (self.nodes / PERIOD):.2f} x {self.nodes:,} nodes"
        )


def renewals_per_second_per_core() -> RegistryLoad:
    """Measure the registry's load. Raises RuntimeError if a process ends early, TimeoutError if one
    hangs."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        admission = Admission(folder_beside(journal), certifies=False)
        with Journal(journal, RULES.run, admission.key) as file:
            file.append(_members(admission.key))
        registry, to_registry = start(_serve, journal)
        clients = []
        try:
            port = int(receive(to_registry))
            clients = [start(_renew, port, half) for half in range(2)]
            for _, connection in clients:
                receive(connection)  # the process has opened all its streams
            time.sleep(RULES.grace)  # after that, the registry evicts nodes that don't renew
            before = [float(ask(connection)) for _, connection in clients]
            cpu, began = float(ask(to_registry)), time.monotonic()
            time.sleep(SECONDS)
            cpu = float(ask(to_registry)) - cpu
            seconds = time.monotonic() - began
            sent = sum(float(ask(c)) for _, c in clients) - sum(before)
            described = asyncio.run(_describe(port))
        finally:
            for process, _ in [*clients, (registry, to_registry)]:
                process.kill()
                process.join()
    return RegistryLoad(
        nodes=NODES,
        renewals=sent / seconds,
        core=cpu / seconds,
        evictions=NODES - len(described.members),
        stale=max((m.since_renewal for m in described.members), default=0.0),
    )


def main() -> None:
    load = renewals_per_second_per_core()
    print(load)
    keep("registry", **asdict(load))


def _members(key: Identity) -> View:
    """Make the view with all nodes that the registry finds in its journal when it starts."""
    stages = RULES.stages + 1
    members = [
        Member(
            owner=True,
            node=_name(i),
            address=f"10.0.0.0:{i + 1}",
            seats=[Seat(stage=i % stages)],
            joined=i + 1,
            key=KEY.public,
            speed=1.0,
        )
        for i in range(NODES)
    ]
    view = View(run=RULES.run, number=NODES, members=members, driver=_name(0))
    sign(view, key, View())
    return view


def _name(index: int) -> str:
    return f"{index:012x}"


# -- processes -----------------------------------------------------------------------------------


def _serve(journal: Path, connection: Connection) -> None:
    """Run the registry in its process; it answers each question with its CPU seconds so far."""
    logging.basicConfig(level=logging.WARNING)
    uvloop.run(serve(RULES, journal, connection))


async def serve(rules: MembershipRules, journal: Path, connection: Connection) -> None:
    @asynccontextmanager
    async def answering(registry: RegistryServer) -> AsyncIterator[None]:
        asyncio.get_running_loop().add_reader(
            connection.fileno(), lambda: connection.send((connection.recv(), _cpu())[1])
        )
        connection.send(registry.port)
        yield

    admission = Admission(folder_beside(journal), certifies=False)
    with Journal(journal, rules.run, admission.key) as file:
        registry = RegistryServer(rules, "", file, admission=admission)
        await service.serve(registry, "127.0.0.1:0", parts=[answering])


def _cpu() -> float:
    return time.process_time()


def _renew(port: int, half: int, connection: Connection) -> None:
    """Run half of the nodes; answer each question with the number of renewals that they have
    sent."""
    sent = 0

    async def renewals(index: int) -> AsyncIterator[Renewal]:
        nonlocal sent
        await asyncio.sleep(PERIOD * index / NODES)  # as if nodes had started at different times
        due = time.monotonic()
        first = Renewal(node=_name(index), run=RULES.run)
        KEY.sign_message(first, RULES.run)
        yield first
        while True:
            due = max(due + PERIOD, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            sent += 1
            seat = SeatReport(
                stage=index % (RULES.stages + 1),
                committed=sent,
                phase="forward",
                loss=2.5,
                microbatches=sent,
                tokens_per_second=1e4,
            )
            report = Report(seats=[seat], bytes_in=10 * sent, bytes_out=10 * sent)
            yield Renewal(node=_name(index), report=report)

    async def renew() -> None:
        for first in range(half, NODES, 2 * STREAMS_A_CONNECTION):
            options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
            keep_alive: Any = channel.stream_stream(
                f"/{SERVICE}/KeepAlive", request_serializer=Renewal.SerializeToString
            )
            last = min(NODES, first + 2 * STREAMS_A_CONNECTION)
            opened = [keep_alive(renewals(index)) for index in range(first, last, 2)]
            calls.extend(opened)
            await asyncio.gather(*(call.read() for call in opened))
        asyncio.get_running_loop().add_reader(
            connection.fileno(), lambda: connection.send((connection.recv(), sent)[1])
        )
        connection.send("open")
        await asyncio.Event().wait()

    calls: list[object] = []
    uvloop.run(renew())


async def _describe(port: int) -> Description:
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        describe: Any = channel.unary_unary(f"/{SERVICE}/Describe")
        return Description.FromString(await describe(DescribeRequest().SerializeToString()))


if __name__ == "__main__":
    main()

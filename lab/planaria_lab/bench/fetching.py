"""Speed at which a newcomer fetches its state from all sources at once, over that of plain TCP
connections from the same machines.

    python -m planaria_lab.bench.fetching [MBPS] [ROUND_TRIP_MS] [SOURCES] [ROUNDS] [MIB]

Each process is in a network namespace of its own. The newcomer's link is the narrow one, and three
sources share it. Without arguments it has 50 Mbit/s. The round trip is 50 ms for a state of
64 MiB, then 200 ms for 256 MiB. It needs root. In a turn, the same number of bytes comes
twice: in equal parts by one plain connection from each source, and as a state by
node/state/transfer.py over node/wire/link.py. Goal: a ratio of 0.9.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import uvloop

from planaria.bootstrap.registry_pb2 import Cause
from planaria.node.machine.compute import ComputeThread
from planaria.node.machine.processes import enter_network
from planaria.node.state.stage_state import Age, StageState, StateId
from planaria.node.state.transfer import WEIGHTS, StateClient, StateServer, WantedState
from planaria.node.transaction.effects import NEVER
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.exchange import Exchanges
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.link import Links, LinkSettings
from planaria.node.wire.link_table import Peer
from planaria_lab.bench.copying import KEY
from planaria_lab.bench.rows import keep
from planaria_lab.emulation.emulation import EmulationError, emulate
from planaria_lab.emulation.links import Link, Network

JOINER: Final = "joiner"
AGE: Final = Age(0, 1)
VALUE: Final = torch.float32.itemsize
WIDE: Final = 1000.0  # Mbit/s of all other links
DEADLINE: Final = 300.0  # seconds for links to come up, and for a fetch
GOAL: Final = 0.9


class _Node:
    """The parts of a node that send and fetch state. Use it in the event loop only."""

    def __init__(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        self.links = Links("bench", name, KEY, self, LinkSettings(insecure=True))
        self.compute = ComputeThread(name, loop)
        self.exchanges = Exchanges(self.compute, loop, _crash)
        self.client = StateClient(self.exchanges, tensors, self.links.send, _accuse)
        self.server = StateServer(self.exchanges, tensors, self.links.send, self._served)
        self.state: StageState | None = None

    def _served(self, _: str, __: int, ___: int) -> StageState | None:
        return self.state

    def on_message(self, peer: str, message: pb.Message, now: float) -> None:
        self.client.on_message(peer, message)
        self.server.on_message(peer, message)

    def on_frame(self, peer: str, frame: Frame, now: float) -> None:
        self.client.on_frame(peer, frame)

    def on_link_up(self, *_: object) -> None: ...

    def on_link_lost(self, peer: str, reason: str, *_: object) -> None:
        raise RuntimeError(f"the link to {peer} is lost: {reason}")

    async def stop(self) -> None:
        self.exchanges.close()
        await self.links.stop()
        self.compute.stop()


def _crash(error: BaseException) -> None:
    raise error


def _accuse(peer: str, reason: str, _: Cause) -> None:
    raise RuntimeError(f"{peer}: {reason}")


async def _serve(name: str, host: str, size: int, share: int, pipe: Connection) -> None:
    node = _Node(name)
    weights = torch.randn(size // VALUE, generator=torch.Generator().manual_seed(0))
    state_id = StateId(1, *AGE, NEVER)
    node.state = StageState(state_id, {WEIGHTS: weights}, 0.0, 0, pb.Commit(), 0, digest=b"same")
    port = await node.links.start(f"{host}:0")
    node.links.set_peers(1, [Peer(JOINER, "", KEY.public)], [JOINER])

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(share))
        await writer.drain()
        writer.close()

    plain = await asyncio.start_server(pour, host, 0, family=socket.AF_INET)
    pipe.send((port, plain.sockets[0].getsockname()[1]))
    await asyncio.to_thread(pipe.recv)
    plain.close()
    await node.stop()


async def _pour_in(host: str, port: int) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    while await reader.read(1 << 20):
        pass
    writer.close()


async def _fetch(
    sources: dict[str, tuple[str, int, int]], size: int, rounds: int, pipe: Connection
) -> None:
    node = _Node(JOINER)
    peers = [Peer(name, f"{host}:{port}", KEY.public) for name, (host, port, _) in sources.items()]
    node.links.set_peers(1, peers, list(sources))
    until = time.monotonic() + DEADLINE
    while set(node.links.peers) < set(sources):
        if time.monotonic() > until:
            missing = set(sources) - set(node.links.peers)
            raise TimeoutError(f"no link to {missing} in {DEADLINE:g} s")
        await asyncio.sleep(0.05)
    turns, due = [], {WEIGHTS: size // VALUE}
    for _ in range(rounds):
        began = time.monotonic()
        await asyncio.gather(*(_pour_in(host, port) for host, _, port in sources.values()))
        plain = time.monotonic() - began
        work = node.client.fetch(WantedState(1, AGE, due), list(sources), DEADLINE)
        began = time.monotonic()
        delivery = await node.exchanges.outcome(work)
        turns.append((plain, time.monotonic() - began, dict(delivery.served)))
        node.client.forget()
    pipe.send(turns)
    await node.stop()


def _in(namespace: Path, work: Callable[..., Any], *arguments: Any) -> None:
    enter_network(namespace)
    torch.set_num_threads(1)
    uvloop.run(work(*arguments))


def measure(
    mbps: float, round_trip_ms: float, count: int, rounds: int, size: int
) -> Sequence[tuple[float, float, dict[str, int]]]:
    """Return for each turn: seconds by plain TCP, seconds of the fetch, and the bytes of it that
    each source served. `size`: bytes of the state. Raises EmulationError."""
    context = multiprocessing.get_context("spawn")
    names = [f"source-{number}" for number in range(count)]
    sites = dict.fromkeys(names, "there") | {JOINER: "here"}
    # All sources are at one site, so that one narrow uplink carries all bytes to the newcomer.
    link = Link("there", "here", round_trip_ms / 2, WIDE)
    with emulate(Network(sites, [link], {"there": mbps})) as links:
        processes: list[Any] = []
        sources: dict[str, tuple[str, int, int]] = {}
        pipes: list[Connection] = []

        def start(name: str, work: Callable[..., Any], *arguments: Any) -> None:
            process = context.Process(
                target=_in, args=(links.homes[name].namespace, work, *arguments), daemon=True
            )
            process.start()
            processes.append(process)
            arguments[-1].close()  # the process's end of the pipe

        try:
            for name in names:
                host = links.homes[name].host
                pipe, other = context.Pipe()
                start(name, _serve, name, host, size, size // count, other)
                pipes.append(pipe)
                if not pipe.poll(60):
                    raise TimeoutError(f"{name} did not start in 60 s")
                sources[name] = (host, *pipe.recv())
            results, sender = context.Pipe(duplex=False)
            start(JOINER, _fetch, sources, size, rounds, sender)
            turns: Sequence[tuple[float, float, dict[str, int]]] = results.recv()
            return turns
        finally:
            for pipe in pipes:
                pipe.send("stop")
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()


def compare(mbps: float, round_trip_ms: float, sources: int, rounds: int, mib: int) -> None:
    """Measure, print and keep the figures. Raises EmulationError."""
    size = mib << 20
    turns = measure(mbps, round_trip_ms, sources, rounds, size)
    for plain, copy, served in turns:
        shares = ", ".join(f"{part / size:.2f}" for part in served.values())
        rates = f"plain {size * 8e-6 / plain:.1f} Mbit/s   copy {size * 8e-6 / copy:.1f} Mbit/s"
        print(f"{rates}   shares {shares}")
    ratio = median(plain / copy for plain, copy, _ in turns)
    of_link = median(size * 8e-6 / copy / mbps for _, copy, _ in turns)
    print(
        f"{sources} sources, {mbps:g} Mbit/s, {round_trip_ms:g} ms there and back, {mib} MiB: "
        f"ratio copy / plain: {ratio:.2f}, {of_link:.2f} of the link (goal {GOAL})",
        flush=True,
    )
    settings = {"mbps": mbps, "round_trip_ms": round_trip_ms, "sources": sources, "mib": mib}
    keep("fetching", **settings, turns=turns)


def main() -> None:
    arguments = sys.argv[1:]
    usual = "50", "50", "3", "3", "64"
    long = "50", "200", "3", "2", "256"
    try:
        for words in [(*arguments, *usual[len(arguments) :])] if arguments else [usual, long]:
            mbps, round_trip_ms, *counts = words
            compare(float(mbps), float(round_trip_ms), *map(int, counts))
    except EmulationError as error:
        print(error)


if __name__ == "__main__":
    main()

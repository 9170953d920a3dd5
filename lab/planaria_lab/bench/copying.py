"""Delay of urgent frames beside a background copy on a slow link, and the rate of that copy.

    python -m planaria_lab.bench.copying [MBPS] [ROUND_TRIP_MS] [ROUNDS]

Two processes, each in a network namespace of its own, have an emulated link between them: 20 Mbit/s
and 50 ms by default. It needs root. One node sends to the other by two links, which take turns and
differ in their rule for copies. `one chunk`, the former rule, sends a chunk of up to 1 MiB while
nothing else is in flight. `window` is the rule of node/wire/background.py. Each turn measures

alone    seconds from sending to acknowledgement of frames of 16 KiB, one at a time with pauses
beside   the same, while a copy is sent to the same node, in frames of 1 MiB, two at a time
copy     the rate of such a copy alone, and that of the same frames as state, not as a copy

The ratios are beside / alone, mean and 95th percentile, and the copy's rate over that of state.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, quantiles
from typing import Final

import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from planaria.bootstrap.identity import Identity
from planaria.node.machine.processes import enter_network
from planaria.node.wire.background import Background
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.link import Links, LinkSettings
from planaria.node.wire.link_table import Peer
from planaria_lab.bench.rows import keep
from planaria_lab.emulation.emulation import EmulationError, emulate
from planaria_lab.emulation.links import all_alike

KEY: Final = Identity(Ed25519PrivateKey.from_private_bytes(bytes(32)))  # of all nodes
COPY: Final = 1 << 20  # bytes of a frame of a copy, as in node/state/copies.py
OUTSTANDING: Final = 2  # frames of a copy in flight at a time
URGENT: Final = 16 << 10  # bytes of an urgent frame
COUNT: Final = 40  # urgent frames in each part of a turn
PAUSE: Final = 0.2  # seconds between them, on average
SECONDS: Final = 8.0  # for which a link's rate is measured


class OneChunk(Background):
    """The former rule for copies: one chunk while nothing else is in flight."""

    def room(self, flight: int, now: float) -> int:
        return 0 if flight else COPY

    def sent(self, frame: int, end: int, size: int, flight: int, now: float) -> None: ...

    def acknowledged(self, frame: int, end: int, now: float) -> None: ...


RULES: Final[dict[str, Callable[[], Background]]] = {
    "one chunk": OneChunk,
    "window": Background,
}


@dataclass
class Figures:
    """The figures of one rule: seconds of each urgent frame alone and beside a copy, and bytes per
    second of copies and of others."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return fmean(self.beside) / fmean(self.alone)

    @property
    def tail(self) -> float:
        return quantiles(self.beside, n=20)[-1] / quantiles(self.alone, n=20)[-1]

    @property
    def carried(self) -> float:
        return sum(self.copy) / sum(self.others)


class _Node:
    def __init__(self, name: str, rule: Callable[[], Background] = Background) -> None:
        self.name = name
        settings = LinkSettings(background=rule, insecure=True)
        self.links = Links("bench", name, KEY, self, settings)
        self.up = asyncio.Event()

    def on_message(self, *_: object) -> None: ...

    def on_frame(self, *_: object) -> None: ...

    def on_link_up(self, *_: object) -> None:
        self.up.set()

    def on_link_lost(self, *_: object) -> None: ...


def _receive(namespace: Path, host: str, pipe: Connection) -> None:
    enter_network(namespace)
    uvloop.run(_receive_until_stopped(host, pipe))


async def _receive_until_stopped(host: str, pipe: Connection) -> None:
    node = _Node("z")
    port = await node.links.start(f"{host}:0")
    node.links.set_peers(1, [Peer(name, "", KEY.public) for name in RULES], list(RULES))
    pipe.send(port)
    await asyncio.to_thread(pipe.recv)
    await node.links.stop()


async def _keep_sending(links: Links, kind: str, until: float) -> float:
    """Send frames of a kind, two at a time, until a time; return the bytes per second."""
    began, sent = time.monotonic(), 0

    async def send() -> None:
        nonlocal sent
        while time.monotonic() < until:
            await links.deliver("z", Frame(kind, (1, 1), {}, [], bytes(COPY)))
            sent += COPY

    await asyncio.gather(*(send() for _ in range(OUTSTANDING)))
    return sent / (time.monotonic() - began)


async def _urgent(links: Links, drawn: random.Random) -> list[float]:
    waits = []
    for _ in range(COUNT):
        await asyncio.sleep(drawn.uniform(0.0, 2 * PAUSE))
        began = time.monotonic()
        await links.deliver("z", Frame("activation", (1, 1), {}, [], bytes(URGENT)))
        waits.append(time.monotonic() - began)
    return waits


async def _turn(links: Links, figures: Figures, drawn: random.Random) -> None:
    figures.others.append(await _keep_sending(links, "state", time.monotonic() + SECONDS))
    figures.copy.append(await _keep_sending(links, "copy", time.monotonic() + SECONDS))
    figures.alone += await _urgent(links, drawn)
    copying = asyncio.create_task(_keep_sending(links, "copy", float("inf")))
    await asyncio.sleep(SECONDS / 2)
    figures.beside += await _urgent(links, drawn)
    copying.cancel()
    with suppress(asyncio.CancelledError):
        await copying
    await links.deliver("z", Frame("copy", (1, 1), {}, [], b""))  # behind the rest of the copy


async def _send(address: str, rounds: int) -> dict[str, Figures]:
    nodes = {name: _Node(name, rule) for name, rule in RULES.items()}
    for node in nodes.values():
        node.links.set_peers(1, [Peer("z", address, KEY.public)], ["z"])
        await asyncio.wait_for(node.up.wait(), 60)
    figures = {name: Figures() for name in nodes}
    for number in range(rounds):
        for name, node in nodes.items():
            await _turn(node.links, figures[name], random.Random(number))
    for node in nodes.values():
        await node.links.stop()
    return figures


def _send_from(namespace: Path, address: str, rounds: int, pipe: Connection) -> None:
    enter_network(namespace)
    pipe.send(uvloop.run(_send(address, rounds)))


def measure(mbps: float, round_trip: float, rounds: int) -> dict[str, Figures]:
    """Measure the figures of each rule. `round_trip`: seconds. Raises EmulationError."""
    context = multiprocessing.get_context("spawn")
    with emulate(all_alike(["a", "z"], round_trip * 1e3 / 2, mbps)) as links:
        a, z = (links.homes[name] for name in ("a", "z"))
        pipe, other = context.Pipe()
        receiver = context.Process(target=_receive, args=(z.namespace, z.host, other), daemon=True)
        receiver.start()
        other.close()
        results, to_results = context.Pipe(duplex=False)
        sender = None
        try:
            if not pipe.poll(60):
                raise TimeoutError("the receiving process did not start in 60 s")
            sender = context.Process(
                target=_send_from,
                args=(a.namespace, f"{z.host}:{pipe.recv()}", rounds, to_results),
                daemon=True,
            )
            sender.start()
            to_results.close()
            by_rule: dict[str, Figures] = results.recv()
            return by_rule
        finally:
            pipe.send("stop")
            for process in filter(None, (receiver, sender)):
                process.join(10)
                if process.is_alive():
                    process.kill()


def main() -> None:
    arguments = [float(word) for word in sys.argv[1:]]
    mbps, milliseconds, rounds = (*arguments, *(20.0, 50.0, 3.0)[len(arguments) :])
    try:
        by_rule = measure(mbps, milliseconds / 1e3, int(rounds))
    except EmulationError as error:
        print(error)
        return
    print(f"{mbps:g} Mbit/s, {milliseconds:g} ms there and back")
    print(
        "rule       urgent alone   beside a copy       ratio   95th of it   copy / others   Mbit/s"
    )
    for name, figures in by_rule.items():
        print(
            f"{name:<10} {fmean(figures.alone) * 1e3:9.1f} ms "
            f"{fmean(figures.beside) * 1e3:11.1f} ms"
            f" {figures.mean:7.2f} {figures.tail:11.2f} {figures.carried:14.2f} "
            f"{fmean(figures.copy) * 8e-6:7.1f}"
        )
    rows = {name.replace(" ", "_"): vars(figures) for name, figures in by_rule.items()}
    keep("copying", mbps=mbps, round_trip_ms=milliseconds, **rows)


if __name__ == "__main__":
    main()

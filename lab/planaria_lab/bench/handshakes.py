"""Seconds of a link's handshake under TLS, over those in plain text.

A handshake is timed between two processes, from the request for a link until it is up: two
connections, under mutual TLS, and signed hellos. Each process is in a network namespace of its own,
with a round trip of 1 ms. Without the rights for that, both are on loopback, and this is printed.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from planaria.bootstrap.authority import Authority, CertifiedKey, Request, Role, Who
from planaria.bootstrap.credentials import PLAIN, Certified, Credentials
from planaria.bootstrap.identity import Identity
from planaria.node.local.plan import ProcessHome
from planaria.node.machine.processes import enter_network
from planaria.node.wire.link import Links, LinkSettings
from planaria.node.wire.link_table import Peer
from planaria_lab.bench.processes import receive, start
from planaria_lab.bench.rows import keep
from planaria_lab.emulation.emulation import EmulationError, emulate
from planaria_lab.emulation.links import all_alike

HANDSHAKES: Final = 30
GOAL: Final = 0.050  # seconds
RTT_MS, MBPS = 1.0, 1000.0
PAUSE: Final = 0.5  # seconds for the last link to be closed
START: Final = 60.0  # seconds for a handshake; one that takes longer hangs
KEYS: Final = {
    node: Identity(Ed25519PrivateKey.from_private_bytes(node.encode() * 32)) for node in "ab"
}


class _End:
    """One of the two nodes that make a link repeatedly."""

    def __init__(self, node: str, credentials: Credentials) -> None:
        settings = LinkSettings(insecure=True, credentials=credentials)
        self.links = Links("bench", node, KEYS[node], self, settings)
        self.up: asyncio.Queue[None] = asyncio.Queue()

    def on_message(self, *_: object) -> None: ...

    def on_frame(self, *_: object) -> None: ...

    def on_link_up(self, *_: object) -> None:
        self.up.put_nowait(None)

    def on_link_lost(self, *_: object) -> None: ...


def _credentials(pair: CertifiedKey | None) -> Credentials:
    return PLAIN if pair is None else Credentials.of(Certified(pair))


def _answer(
    home: ProcessHome | None, pair: CertifiedKey | None, descriptors: int, pipe: Connection
) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    async def answer() -> None:
        end = _End("b", _credentials(pair))
        host = "127.0.0.1" if home is None else home.host
        port = await end.links.start(f"{host}:0")
        end.links.set_peers(1, [Peer("a", "", KEYS["a"].public)], ["a"])
        pipe.send(f"{host}:{port}")
        await asyncio.to_thread(pipe.recv)
        await end.links.stop()

    if home is not None:
        enter_network(home.namespace)
    uvloop.run(answer())


def _dial(
    home: ProcessHome | None, pair: CertifiedKey | None, address: str, pipe: Connection
) -> None:
    """Dial `address` repeatedly, and send the median seconds of a TCP connection and the seconds of
    each handshake."""

    async def dial() -> tuple[float, list[float]]:
        end = _End("a", _credentials(pair))
        host, _, port = address.rpartition(":")
        reached, took = [], []
        for number in range(HANDSHAKES + 1):  # the first one warms up
            began = time.perf_counter()
            _, writer = await asyncio.open_connection(host, int(port))
            reached.append(time.perf_counter() - began)
            writer.close()
            began = time.perf_counter()
            end.links.set_peers(2 * number + 1, [Peer("b", address, KEYS["b"].public)], ["b"])
            async with asyncio.timeout(START):
                await end.up.get()
            took.append(time.perf_counter() - began)
            end.links.set_peers(2 * number + 2, [], [])
            await asyncio.sleep(PAUSE)
        await end.links.stop()
        return statistics.median(reached), took[1:]

    if home is not None:
        enter_network(home.namespace)
    pipe.send(uvloop.run(dial()))


class Took(NamedTuple):
    """Seconds of connections and handshakes."""

    tcp: float  # median of a TCP connection
    links: list[float]  # each handshake


@contextmanager
def answering(
    home: ProcessHome | None, pair: CertifiedKey | None, descriptors: int | None = None
) -> Iterator[str]:
    """Run a process that accepts links, and yield its address. `descriptors`: how many it may open;
    None: the hard limit."""
    allowed = descriptors or resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    process, pipe = start(_answer, home, pair, allowed)
    try:
        yield receive(pipe)
        pipe.send("stop")
    finally:
        process.kill()
        process.join()


def handshakes(home: ProcessHome | None, pair: CertifiedKey | None, address: str) -> Took:
    """Time connections and handshakes with the process at `address`."""
    process, pipe = start(_dial, home, pair, address)
    try:
        return Took(*receive(pipe))
    finally:
        process.kill()
        process.join()


def certified() -> tuple[CertifiedKey, CertifiedKey]:
    """Return keys of both ends, certified by one authority."""
    now = time.time()
    authority = Authority.make(now)
    pairs = []
    for node in "ab":
        request, who = Request.of(KEYS[node]), Who(Role.NODE, KEYS[node].instance)
        certificate = authority.issue(request.request, who, now)
        pairs.append(CertifiedKey(request.key, certificate, authority.certificate))
    return pairs[0], pairs[1]


def main() -> None:
    with ExitStack() as stack:
        homes: tuple[ProcessHome | None, ProcessHome | None] = None, None
        where = f"two machines {RTT_MS:g} ms apart"
        try:
            links = stack.enter_context(emulate(all_alike("ab", RTT_MS / 2, MBPS)))
            homes = links.homes["a"], links.homes["b"]
        except EmulationError as error:
            where = "loopback, without delay"
            print(f"handshakes are measured on loopback: {error}")
        a, b = homes
        with answering(b, None) as address:
            plain = handshakes(a, None, address).links
        own, others = certified()
        with answering(b, others) as address:
            rtt, tls = handshakes(a, own, address)
    median, longest = statistics.median(tls), max(tls)
    print(
        f"a link's handshake, {where} (a TCP connection takes {1e3 * rtt:.1f} ms): "
        f"{1e3 * median:.1f} ms under TLS, {1e3 * longest:.0f} ms at most; ratio to plain text "
        f"{median / statistics.median(plain):.1f}; goal: under {1e3 * GOAL:.0f} ms"
    )
    keep("handshakes", where=where, rtt=rtt, plain=plain, tls=tls)


if __name__ == "__main__":
    main()

"""The speed of links: measured for `planaria probe`, or seen by what they carry."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from planaria.bootstrap.registry_pb2 import LinkReport
from planaria.node.wire.frame_format import Frame

if TYPE_CHECKING:
    from planaria.node.wire.link import Links

log = logging.getLogger(__name__)

ECHOES: Final = 5
SMALLEST, LARGEST = 256 << 10, 64 << 20
"""Bytes of the first and of the largest transfer."""
LONG_ENOUGH: Final = 0.5
"""Seconds of sending that measure the rate; a shorter time may measure a buffer that takes all."""


class MeasuredLink(NamedTuple):
    rtt: float  # seconds
    rate: float  # bytes per second


async def measure(send: Callable[[int], Awaitable[None]], now: Callable[[], float]) -> MeasuredLink:
    """Measure a link's round trip and rate, beside its other traffic. `send` sends that many bytes,
    at least 1, and returns when they are acknowledged; `now` is a clock in seconds."""

    async def seconds(size: int) -> float:
        began = now()
        await send(size)
        return now() - began

    rtt = min([await seconds(1) for _ in range(ECHOES)])
    size = SMALLEST
    while (spent := await seconds(size) - rtt) < LONG_ENOUGH and size < LARGEST:
        size *= 2
    return MeasuredLink(rtt, size / max(spent, 1e-9))


async def measure_all(links: Links, peers: Iterable[str]) -> list[LinkReport]:
    """Measure links to these peers one after the other, so that none disturbs another."""
    reports = []
    for peer in peers:

        async def send(size: int, peer: str = peer) -> None:
            await links.deliver(peer, Frame("probe", (0, 0), {}, [], bytes(size)))

        try:
            rtt, rate = await measure(send, time.perf_counter)
        except ConnectionError as error:
            log.warning("a link is not measured: %s", error)
        else:
            reports.append(LinkReport(peer=peer, rtt_ms=rtt * 1e3, mbps=rate * 8 / 1e6))
    return reports


def speeds_seen(links: Links) -> list[LinkReport]:
    """The speeds of links as their traffic shows: of each whose round trip is known, that and the
    rate; 0: it has carried too little."""
    outboxes = {peer: link.session.outbox for peer, link in sorted(links.by_peer.items())}
    return [
        LinkReport(peer=peer, rtt_ms=outbox.round_trip * 1e3, mbps=outbox.rate * 8 / 1e6)
        for peer, outbox in outboxes.items()
        if outbox.round_trip
    ]

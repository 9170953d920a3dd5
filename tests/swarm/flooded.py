"""A swarm in a process of its own, of which one member floods others: how much memory they have
before, and at most while it does.

    python -m tests.swarm.flooded frames|messages DATA OUT

prints {"before": bytes, "most": bytes, "room": bytes, "sent": bytes}. `room` is what may wait at
those who are flooded, and what is on its way to them, at both ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Final

import uvloop

from planaria.node import seats
from planaria.node.data.corpus import Corpus
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frames import Frame
from tests.swarm.in_process import LocalSwarm, OneSeat
from tests.swarm.small import small

MIB: Final = 1 << 20
PIECE: Final = MIB // 32
"""Messages are acknowledged after 64 of them, or soon."""
UNSENT: Final = 4 * MIB
"""Bytes on the way to each, at most."""
ENOUGH: Final = {"frames": 128 * MIB, "messages": 64 * MIB}
"""Bytes to each, after which the flood ends: more than may wait there."""


def resident() -> int:
    """Bytes."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def frame_for(other: OneSeat) -> Frame:
    """Of an attempt that may come."""
    frame = Frame("activation", (1 << 40, 1), {"microbatch": 0, "position": 1}, [], bytes(PIECE))
    return replace(frame, seat=str(other.stage), sender="1")


def message_for(other: OneSeat) -> pb.Message:
    """Of an attempt that is long over, to a seat that there is or will be."""
    (seat,) = (name for name in "01" if other.seats.has(name))
    ballot, halt = pb.Ballot(view=1), pb.Halt(reason=PIECE * "x")
    return pb.Message(ballot=ballot, seat=seat, sender="1", halt=halt)


class Building(OneSeat):
    """Its seat is never ready."""

    async def _take_seat(self, name: str, stage: int) -> None:
        await asyncio.get_running_loop().create_future()


async def flood(swarm: LocalSwarm, kind: str) -> dict[str, int]:
    await swarm.until(lambda: swarm.committed() >= 5)
    sick = swarm.nodes[1, 1][0]
    if kind == "frames":
        others = [node for node, _ in swarm.nodes.values() if node is not sick]
        room = sum(node.seat.crossing for node in others if node.seat)
    else:
        building = swarm.start(1, 2, of=Building)
        others = [swarm.nodes[0, 0][0], swarm.nodes[1, 0][0], building]
        room = seats.MOST_EARLY
        await swarm.until(lambda: building.seats.has("1") and sick.links.linked(building.node))
    gc.collect()
    before = most = resident()
    sent: Counter[str] = Counter()
    enough, made = ENOUGH[kind], frame_for if kind == "frames" else message_for

    def floods() -> bool:
        nonlocal most
        most = max(most, resident())
        for other in others:
            link = sick.links.by_peer.get(other.node)
            while link is not None and link.session.held < UNSENT and sent[other.node] < enough:
                sick.links.send(other.node, made(other))
                sent[other.node] += PIECE
        return sick.over.done() or all(sent[other.node] >= enough for other in others)

    await swarm.until(floods)
    at = swarm.committed()
    await swarm.until(lambda: swarm.committed() >= at + 3)
    assert not any(node.over.done() for node in others)
    room += len(others) * 2 * (UNSENT + PIECE)
    return {"before": before, "most": max(most, resident()), "room": room, "sent": sent.total()}


async def main(kind: str, data: Path, out: Path) -> None:
    run = small(replicas=2, steps=10_000, training__batch=4)
    async with LocalSwarm(run, Corpus.open(data), out) as swarm:
        print(json.dumps(await flood(swarm, kind)), flush=True)


if __name__ == "__main__":
    kind, data, out = sys.argv[1:]
    uvloop.run(main(kind, Path(data), Path(out)))

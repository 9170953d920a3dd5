from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch

from node.link import Links, LinkSettings, Peer
from node.stage_pb2 import Message
from node.wire import Frame, decode, encode

DEADLINE = 20.0  # seconds; reached only when a test fails
QUICK = LinkSettings(view_wait=0.05, handshake=10.0, chunk=1024, window=4096)


class Recorder:
    """Events of one node, in order."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.hold = False

    def on_message(self, peer: str, message: Message) -> None:
        self.queue.put_nowait(("message", peer, message))

    def on_frame(self, peer: str, frame: Frame) -> None:
        self.queue.put_nowait(("frame", peer, frame))

    def on_link_up(self, peer: str) -> None:
        self.queue.put_nowait(("up", peer))

    def on_link_lost(self, peer: str, reason: str, unacknowledged: list[Frame]) -> None:
        self.queue.put_nowait(("lost", peer, reason, unacknowledged))

    async def next(self, kind: str) -> tuple[Any, ...]:
        async with asyncio.timeout(DEADLINE):
            event = await self.queue.get()
        assert event[0] == kind, event
        return event[1:]


class Node:
    def __init__(
        self, name: str, run: str = "run", settings: LinkSettings = QUICK, **more: Any
    ) -> None:
        self.events = Recorder()
        self.links = Links(run, name, self.events, settings, **more)
        self.name, self.address = name, ""

    def peer(self) -> Peer:
        return Peer(self.name, self.address)


@asynccontextmanager
async def started(*nodes: Node, listen: str = "ab") -> AsyncIterator[None]:
    try:
        for node in nodes:
            if node.name in listen:
                node.address = f"127.0.0.1:{await node.links.start('127.0.0.1:0')}"
            else:
                await node.links.start(None)
        yield
    finally:
        for node in nodes:
            await node.links.stop()
        assert [task for task in asyncio.all_tasks() if "link to" in task.get_name()] == []


def view(number: int, *nodes: Node) -> None:
    for node in nodes:
        others = [other.name for other in nodes if other is not node]
        node.links.set_peers(number, [other.peer() for other in nodes], others)


async def up(*nodes: Node) -> None:
    for node in nodes:
        for _ in range(len(nodes) - 1):
            await node.events.next("up")


def frame(size: int = 16, kind: str = "activation", **fields: Any) -> Frame:
    descriptors, buffers = encode([torch.arange(size, dtype=torch.uint8)], "none")
    return Frame(kind, (1, 2), fields, descriptors, buffers)


def message(step: int) -> Message:
    return Message(ballot={"view": 1, "attempt": 2}, ready={"step": step})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0)


# What a link carries


async def test_messages_and_frames_both_ways_and_their_bytes_are_counted() -> None:
    a, b = Node("a"), Node("b")
    async with started(a, b):
        view(1, a, b)
        await up(a, b)
        for one, other in ((a, b), (b, a)):
            for step in range(5):
                assert one.links.send(other.name, message(step))
            for step in range(5):
                assert await other.events.next("message") == (one.name, message(step))
            assert one.links.send_frame(other.name, frame(10_000, microbatch=3))
            peer, found = await other.events.next("frame")
            assert peer == one.name
            assert (found.kind, found.ballot, found.fields) == (
                "activation",
                (1, 2),
                {"microbatch": 3},
            )
            (tensor,) = decode(found.descriptors, found.payload)
            assert torch.equal(tensor, torch.arange(10_000, dtype=torch.uint8))
        await until(lambda: a.links.unacknowledged == b.links.unacknowledged == 0)
        assert a.links.bytes_out > 10_000 < a.links.bytes_in
        assert a.links.traffic["b"].bytes_out == a.links.bytes_out

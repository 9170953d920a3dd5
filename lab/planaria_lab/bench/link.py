"""Throughput of frames over a link, over that of bare bytes on the same kind of gRPC stream.

Two processes on loopback with uvloop, in one direction. Three methods take turns:

bare     2 MiB `bytes`, made beforehand, over a bidirectional grpc.aio stream without serializers
frames   8 MiB frames over Links: heads, chunks of 2 MiB, reassembly, acknowledgements, heartbeats
tensors  the same; also, the sender encodes each frame's tensor (codec none: its checksum), and the
         receiver decodes it (checksum verified), in a thread, as the daemon does

Time is taken from the first byte offered to the receiver's message that it has all bytes.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter
from typing import Any, Final

import grpc
import torch
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from planaria.bootstrap.identity import Identity
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.link import Links, LinkSettings
from planaria.node.wire.link_table import Peer
from planaria.node.wire.stage_pb2 import Message
from planaria.node.wire.tensors import decode, encode
from planaria_lab.bench.processes import receive, start
from planaria_lab.bench.rows import keep

CHUNK: Final = 2 << 20
FRAME: Final = 8 << 20
SOURCE: Final = 64 << 20  # bytes that are sent in turn, more than caches hold
BARE: Final = "/bench/bare"
KEY: Final = Identity(Ed25519PrivateKey.from_private_bytes(bytes(32)))  # of both nodes
OPTIONS: Final = [
    ("grpc.max_receive_message_length", 2 * CHUNK),
    ("grpc.max_send_message_length", 2 * CHUNK),
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True)
class LinkFigures:
    """Median GB/s of each method. `rounds`: GB/s of bare, frames and tensors in each round."""

    bare: float
    frames: float
    tensors: float
    rounds: list[tuple[float, float, float]]

    @property
    def frames_to_bare(self) -> float:
        return self.frames / self.bare

    @property
    def tensors_to_bare(self) -> float:
        return self.tensors / self.bare


class _Receiver:
    """The receiving node. It answers a message with the number of frames to come, and sends another
    message when it has them all."""

    def __init__(self) -> None:
        self.links = Links("bench", "b", KEY, self, LinkSettings())
        self.decode = False
        self.left = 0
        self.pool = ThreadPoolExecutor(1)
        self.loop = asyncio.get_running_loop()

    def on_message(self, _: str, message: Message, now: float) -> None:
        self.decode, self.left = bool(message.ballot.view), message.ballot.attempt
        self.links.send("a", Message(reduce={}))

    def on_frame(self, _: str, frame: Frame, now: float) -> None:
        if self.decode:
            work = self.loop.run_in_executor(self.pool, decode, frame.descriptors, frame.payload)
            work.add_done_callback(lambda done: self.count(done.result()))
        else:
            self.count(None)

    def count(self, _: Any) -> None:
        self.left -= 1
        if not self.left:
            self.links.send("a", Message(reduce={}))

    def on_link_up(self, *_: object) -> None: ...

    def on_link_lost(self, *_: object) -> None: ...


class _Sender:
    def __init__(self) -> None:
        self.links = Links("bench", "a", KEY, self, LinkSettings())
        self._events: asyncio.Queue[str] = asyncio.Queue()

    def on_message(self, *_: object) -> None:
        self._events.put_nowait("answer")

    def on_frame(self, *_: object) -> None: ...

    def on_link_up(self, *_: object) -> None:
        self._events.put_nowait("up")

    def on_link_lost(self, _: str, reason: str, *__: object) -> None:
        self._events.put_nowait(f"lost: {reason}")

    async def expect(self, expected: str) -> None:
        async with asyncio.timeout(60):
            event = await self._events.get()
        assert event == expected, event


def _receive(pipe: Connection) -> None:
    uvloop.run(_receive_until_stopped(pipe))


async def _receive_until_stopped(pipe: Connection) -> None:
    async def swallow(_: Any, context: Any) -> None:
        received = 0
        while (data := await context.read()) is not grpc.aio.EOF:
            received += len(data)
        await context.write(str(received).encode())

    server = grpc.aio.server(options=OPTIONS)
    handlers: dict[str, Any] = {"bare": grpc.stream_stream_rpc_method_handler(swallow)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    receiver = _Receiver()
    link_port = await receiver.links.start("127.0.0.1:0")
    receiver.links.set_peers(1, [Peer("a", "", KEY.public)], ["a"])
    pipe.send((port, link_port))
    await asyncio.to_thread(pipe.recv)
    await receiver.links.stop()
    await server.stop(None)


async def _send_bare(port: int, pieces: list[bytes], total: int) -> float:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        call: Any = channel.stream_stream(BARE)()
        await call.wait_for_connection()
        start = perf_counter()
        for index in range(total // CHUNK):
            await call.write(pieces[index % len(pieces)])
        await call.done_writing()
        received = int(await call.read())
        seconds = perf_counter() - start
    assert received == total, f"{received} of {total} bytes arrived"
    return total / seconds / 1e9


async def _send_frames(
    sender: _Sender, tensors: list[torch.Tensor], total: int, with_codec: bool
) -> float:
    count = total // FRAME
    encoded = [encode([tensor], "none") for tensor in tensors]
    sender.links.send("b", Message(ballot={"view": int(with_codec), "attempt": count}))
    await sender.expect("answer")
    start = perf_counter()
    for index in range(count):
        if with_codec:
            tensor = tensors[index % len(tensors)]
            descriptors, buffers = await asyncio.to_thread(encode, [tensor], "none")
        else:
            descriptors, buffers = encoded[index % len(tensors)]
        sender.links.send("b", Frame("activation", (1, 1), {}, descriptors, buffers))
    await sender.expect("answer")
    return total / (perf_counter() - start) / 1e9


async def _measure(rounds: int, total: int, ports: tuple[int, int]) -> LinkFigures:
    source = torch.randint(0, 256, (SOURCE,), dtype=torch.uint8)
    pieces = [piece.numpy().tobytes() for piece in torch.split(source, CHUNK)]
    tensors = list(torch.split(source.view(torch.float32), FRAME // 4))
    port, link_port = ports
    sender = _Sender()
    sender.links.set_peers(1, [Peer("b", f"127.0.0.1:{link_port}", KEY.public)], ["b"])
    await sender.expect("up")
    measured = []
    for _ in range(rounds + 1):  # the first one warms up
        bare = await _send_bare(port, pieces, total)
        frames = await _send_frames(sender, tensors, total, with_codec=False)
        encoded = await _send_frames(sender, tensors, total, with_codec=True)
        measured.append((bare, frames, encoded))
    await sender.links.stop()
    measured = measured[1:]
    bare, frames, encoded = (median(column) for column in zip(*measured, strict=True))
    return LinkFigures(bare, frames, encoded, measured)


def measure(rounds: int = 7, total: int = 512 << 20) -> LinkFigures:
    """Measure all methods. `total`: bytes of each method in each round."""
    receiver, pipe = start(_receive)
    try:
        return uvloop.run(_measure(rounds, total, receive(pipe)))
    finally:
        pipe.send("stop")
        receiver.join(10)
        if receiver.is_alive():
            receiver.kill()


def main() -> None:
    figures = measure()
    print("GB/s      bare  frames  tensors")
    for row in figures.rounds:
        print("        " + "  ".join(f"{value:6.2f}" for value in row))
    print(f"median  {figures.bare:6.2f}  {figures.frames:6.2f}  {figures.tensors:6.2f}")
    print(f"of bare         {figures.frames_to_bare:6.2f}  {figures.tensors_to_bare:6.2f}")
    keep("link", gigabytes_per_second={"bare, frames, tensors": figures.rounds})


if __name__ == "__main__":
    main()

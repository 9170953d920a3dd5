"""The path of an activation from the socket to the matrix product is that of docs/protocol.md."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
import torch

import planaria
from planaria.node import seats
from planaria.node.machine.compute import ComputeThread
from planaria.node.model import modules
from planaria.node.wire.connection import Bulk, Connection, Traffic
from planaria.node.wire.frame_format import Chunk, Frame
from planaria.node.wire.session import Session, SessionBounds
from tests.node.test_agent import ATTEMPT, Seat, activation, begin

ROOT = Path(planaria.__file__).parent
PAGE = (ROOT.parent / "docs/protocol.md").read_text(encoding="utf-8")
DRAWN = re.findall(r"(?m)^(node/[\w/]+\.py)  +\S", PAGE)
BOUNDS = SessionBounds(*[1 << 20] * 5)


def has_data(value: object) -> bool:
    """Whether an argument is a chunk, frame or tensor, or has one."""
    if isinstance(value, partial):
        return has_data(value.args)
    if isinstance(value, tuple | list) and not isinstance(value, Chunk):
        return any(map(has_data, value))
    return isinstance(value, bytes | Chunk | Frame | torch.Tensor)


class Trace:
    """A profile function that notes the files whose functions get the data. It stops at the first
    call in model/modules.py."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.done = threading.Event()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event != "call" or self.done.is_set() or ROOT not in path.parents:
            return
        values = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
        name = str(path.relative_to(ROOT))
        if name not in self.files and any(map(has_data, values)):
            self.files.append(name)
        if path == Path(modules.__file__):
            self.done.set()


async def test_an_activation_takes_the_files_of_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seats, "seat_id", lambda node, name: node)
    trace, seat = Trace(), Seat("b")
    seat.hears("a", ATTEMPT, step=begin())
    receiver = seats.Seats("b", seat.net)
    receiver.agents[""] = seat.agent
    threading.setprofile(trace)
    thread = ComputeThread("compute", asyncio.get_running_loop())
    threading.setprofile(None)
    seat.agent.workplace.compute = seats.SeatCompute(receiver, "", thread)

    sender = Session(1, BOUNDS)
    sender.outbox.push(activation(ATTEMPT))
    chunks = iter([sender.outbox.next(0.0)])

    async def read() -> object:
        return next(chunks, None)

    link = SimpleNamespace(
        peer="a", session=Session(1, BOUNDS), traffic=Traffic(), over=asyncio.Event(), now=0.0
    )
    link.heard = link.used = lambda: None
    links = SimpleNamespace(events=receiver, relays=None)
    connection = Connection(links, link, [None])  # type: ignore[arg-type,list-item]
    sys.setprofile(trace)
    try:
        await connection._collect(Bulk(1, SimpleNamespace(read=read)))  # type: ignore[arg-type]
    finally:
        sys.setprofile(None)

    assert await asyncio.to_thread(trace.done.wait, 60.0)
    thread.stop()
    assert ["node/wire/connection.py", *trace.files] == DRAWN, "it reads the chunk"
    assert len(DRAWN) <= 10

"""A client that is no member asks a node over gRPC, and is answered or told why not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from planaria.bootstrap.authority import Authority, Role
from planaria.bootstrap.credentials import Credentials
from planaria.bootstrap.identity import Identity
from planaria.node.transaction.effects import NEVER
from planaria.node.wire import observers
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.link import Links, LinkSettings
from planaria.node.wire.observer_client import NoAnswerError, ObserverClient, over_streams
from planaria.node.wire.observers import FRAME_LIMIT, Observers
from tests.bootstrap.conftest import certified

SHOWN = Frame("state", NEVER, {"transfer": 1}, [], b"shown", sender="node/1")


class Events:
    """Events of links; none occur."""


@asynccontextmanager
async def node(
    token: str = "", credentials: Credentials | None = None
) -> AsyncIterator[tuple[Observers, str]]:
    """A node that answers each pin request and sends back each frame."""

    gone: list[str] = []

    def heard(name: str, message: pb.Message, now: float) -> None:
        asked = message.pin_request
        pinned = pb.Pinned(transfer=asked.transfer, committed=asked.step)
        here.tell(name, pb.Message(sender=message.seat, pinned=pinned))

    def shown(name: str, frame: Frame, now: float) -> None:
        here.tell(name, frame)

    here = Observers()
    here.seats = SimpleNamespace(
        on_observer_message=heard, on_observer_frame=shown, on_observer_gone=gone.append
    )
    events: Any = Events()
    links = Links(
        "run",
        "node",
        Identity.generate(),
        events,
        LinkSettings(credentials=credentials or Credentials(token=token)),
        observers=here,
    )
    port = await links.start("127.0.0.1:0")
    try:
        yield here, f"127.0.0.1:{port}"
    finally:
        await links.stop()
        assert sorted(gone) == [f"?{number}" for number in range(1, len(gone) + 1)]


@asynccontextmanager
async def asking(
    address: str, run: str = "run", token: str = "", credentials: Credentials | None = None
) -> AsyncIterator[ObserverClient]:
    """A client that reaches seat `node/1` directly and `hidden/2` through it; `heard`: input."""
    heard: asyncio.Queue[Any] = asyncio.Queue()

    def tell(*of: Any) -> None:
        heard.put_nowait(of)

    client = ObserverClient(over_streams(run, credentials or Credentials(token=token)), tell, tell)
    client.heard = heard  # type: ignore[attr-defined]
    for seat in ("node/1", "hidden/2"):
        client.reach(seat, "node", address)
    try:
        yield client
    finally:
        await client.close()


async def test_an_onlooker_asks_and_is_answered_by_messages_and_frames() -> None:
    async with node("secret") as (_, address), asking(address, token="secret") as client:
        answers = await asyncio.gather(client.pin("node/1", 5), client.pin("hidden/2", 6))
        assert [answer.committed for answer in answers] == [5, 6]
        assert client.send("node/1", SHOWN)
        seat, frame = await client.heard.get()  # type: ignore[attr-defined]
        assert (seat, frame.payload, frame.fields) == ("node/1", b"shown", {"transfer": 1})


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({}, "requires a join token"),
        ({"token": "other"}, "token is not this run's"),
        ({"token": "secret", "run": "another"}, "node is in run run, not 'another'"),
    ],
)
async def test_who_may_not_ask_is_told_why(wrong: dict[str, str], why: str) -> None:
    async with node("secret") as (_, address), asking(address, **wrong) as client:
        with pytest.raises(NoAnswerError, match=f"node at {address}: .*{why}"):
            await client.pin("node/1", 5)
        with pytest.raises(NoAnswerError, match=why):
            await client.pin("hidden/2", 5)
        assert not client.send("node/1", SHOWN)


async def test_a_seat_of_a_node_with_the_longest_name_is_asked_by_frames() -> None:
    seat = f"{'n' * 128}/10.100000"
    async with node() as (_, address), asking(address) as client:
        client.reach(seat, "node", address)
        asked = replace(SHOWN, seat=seat, sender=seat)
        assert client.send(seat, asked)
        assert await client.heard.get() == (seat, asked)  # type: ignore[attr-defined]


async def test_nobody_there_is_said() -> None:
    async with node() as (_, address):
        pass
    async with asking(address) as client:
        with pytest.raises(NoAnswerError, match=f"node at {address}: "):
            await client.pin("node/1", 5)


async def test_a_node_that_stops_says_so() -> None:
    async with AsyncExitStack() as here:
        async with node() as (_, address):
            client = await here.enter_async_context(asking(address))
            await client.pin("node/1", 5)
        seat, why = await client.heard.get()  # type: ignore[attr-defined]
        assert (seat, "node stops" in why) == ("node/1", True)


async def test_who_is_banned_is_cut_off_and_answered_no_more() -> None:
    authority = Authority.make(time.time())
    banned = Identity.generate()
    own = certified(authority, Role.NODE, Identity.generate())
    reader = certified(authority, Role.READER, banned)
    other = certified(authority, Role.READER, Identity.generate())
    async with (
        node(credentials=own) as (here, address),
        asking(address, credentials=reader) as client,
        asking(address, credentials=other) as another,
    ):
        await asyncio.gather(client.pin("node/1", 5), another.pin("node/1", 5))
        here.bar([banned.instance])
        seat, why = await client.heard.get()  # type: ignore[attr-defined]
        assert (seat, "banned you" in why) == ("node/1", True)
        async with asking(address, credentials=reader) as again:
            with pytest.raises(NoAnswerError, match="banned you"):
                await again.pin("node/1", 5)
        await another.pin("node/1", 6)
        here.bar([])
        async with asking(address, credentials=reader) as again:
            await again.pin("node/1", 6)


async def test_too_many_onlookers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "MOST", 1)
    async with node() as (_, address), asking(address) as client:
        await client.pin("node/1", 5)
        async with asking(address) as other:
            with pytest.raises(NoAnswerError, match="1 others already read"):
                await other.pin("node/1", 5)


async def test_an_answer_that_is_too_large_ends_the_conversation() -> None:
    async with node() as (here, address), asking(address) as client:
        await client.pin("node/1", 5)
        here.tell("?1", Frame("state", NEVER, {}, [], bytes(FRAME_LIMIT + 1), sender="node/1"))
        seat, why = await client.heard.get()  # type: ignore[attr-defined]
        assert seat == "node/1"
        assert "ask less" in why

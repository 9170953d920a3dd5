"""The HTTP server: its bounds on connections, its headers and its address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import Receive, Scope, Send

from planaria.bootstrap.address import Address
from planaria.node.page import http_server
from planaria.node.page.http_address import listen_at
from planaria.node.page.http_server import listening

DEADLINE = 120.0  # seconds; only a hanging test gets there
ASK = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that answers `/endless` with more than any buffer holds, and other paths briefly."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(2000 if scope["path"] == "/endless" else 0):
        await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
        await asyncio.sleep(0)  # a client that is gone takes all of it at once
    await send({"type": "http.response.body", "body": b"here"})


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    bound = listen_at(Address.parse("127.0.0.1:0"), "--http")
    async with asyncio.timeout(DEADLINE), listening(endless, bound, asyncio.Event()):
        yield bound.getsockname()[1]


async def closed(reader: asyncio.StreamReader) -> bytes:
    """Return what arrives until the server closes the connection."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_a_connection_too_many_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 3)
    async with served() as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in held:
            writer.write(ASK.replace(b"/ ", b"/endless "))
            await writer.drain()
        for reader, _ in held:
            assert await reader.readline()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await closed(reader) == b""
        writer.close()
        held.pop()[1].transport.abort()
        while True:  # until the server has noticed
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            if b"here" in await closed(reader):
                break
        for _, writer in held:
            writer.transport.abort()


async def test_idle_connections_of_one_address_keep_out_nobody_else() -> None:
    async with served() as port:
        stream, streaming = await asyncio.open_connection("127.0.0.1", port)
        streaming.write(ASK.replace(b"/ ", b"/endless "))
        assert await stream.readline()
        at = ("127.0.0.2", 0)
        idle = [await asyncio.open_connection("127.0.0.1", port, local_addr=at) for _ in range(300)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert b"here" in await closed(reader)
        end = b""
        while b"here" not in end:  # this connection isn't closed, either
            end = end[-4:] + (await stream.read(2**20) or b"closed: not here")
        assert b"closed" not in end
        for other in (streaming, *(writer for _, writer in idle)):
            other.transport.abort()


async def test_each_answer_says_what_a_browser_may_load_and_keep() -> None:
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        head = (await closed(reader)).decode().lower().split("\r\n\r\n")[0]
        writer.close()
    assert "\r\ncache-control: no-store\r\n" in head
    policy = head.partition("content-security-policy: ")[2].partition("\r\n")[0]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy
    assert "unsafe" not in policy


async def test_an_address_that_is_taken_is_said_with_the_option_to_change() -> None:
    with listen_at(Address.parse("127.0.0.1:0"), "--http") as bound:
        taken = Address("127.0.0.1", bound.getsockname()[1])
        with pytest.raises(OSError, match=f"can't serve HTTP at {taken}: .*--http HOST:PORT"):
            listen_at(taken, "--http")

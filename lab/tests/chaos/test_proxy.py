"""The proxy between real sockets."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from planaria_lab.chaos.proxy import HOST, Proxy, Way, diallers, obey


class Echo:
    """A server that sends back what it receives, and records how its connections ended."""

    def __init__(self) -> None:
        self.heard = asyncio.Event()
        self.endings: asyncio.Queue[str] = asyncio.Queue()

    async def start(self, address: str) -> asyncio.Server:
        host, _, port = address.rpartition(":")
        return await asyncio.start_server(self.serve, host, int(port))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                self.heard.set()
                writer.write(data)
            self.endings.put_nowait("closed")
        except ConnectionResetError:
            self.endings.put_nowait("reset")
        writer.close()


@pytest.fixture
async def echo() -> Echo:
    return Echo()


@pytest.fixture
async def proxy(echo: Echo) -> AsyncIterator[Proxy]:
    async with Proxy() as proxy:
        server = await echo.start(proxy.behind)  # at the port that is kept for it
        yield proxy
        server.close()


async def dial(proxy: Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(HOST, int(proxy.address.rpartition(":")[2]))


async def test_it_carries_any_bytes_both_ways(proxy):
    reader, writer = await dial(proxy)
    sent = bytes(range(256)) * 40_000
    writer.write(sent)
    assert await reader.readexactly(len(sent)) == sent
    assert proxy.connections == 1


async def test_reset_reaches_both_sides_and_who_dials_again_is_served(proxy, echo):
    reader, writer = await dial(proxy)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    assert proxy.reset() == 1
    with pytest.raises(ConnectionResetError):
        await reader.read()
    assert await echo.endings.get() == "reset"
    reader, writer = await dial(proxy)
    writer.write(b"two")
    assert await reader.readexactly(3) == b"two"
    assert proxy.resets == 1


async def test_blinking_resets_again_and_again(proxy):
    blinking = asyncio.create_task(proxy.blink(every=0.001, seconds=600.0))
    for _ in range(3):
        reader, _ = await dial(proxy)
        with pytest.raises(ConnectionResetError):
            await reader.read()
    blinking.cancel()
    assert proxy.resets >= 3


@pytest.mark.parametrize("way", list(Way))
async def test_one_way_is_held_and_nothing_is_lost_by_it(proxy, echo, way):
    reader, writer = await dial(proxy)
    proxy.hold(way)
    writer.write(b"held")
    answer = asyncio.create_task(reader.readexactly(4))
    if way is Way.OUT:
        await echo.heard.wait()  # the other way is open
    done, _ = await asyncio.wait([answer], timeout=0.05)
    assert not done
    assert echo.heard.is_set() == (way is Way.OUT)
    proxy.release()
    assert await answer == b"held"


async def test_of_whom_it_is_cut_off_from_nothing_passes_and_of_others_all(echo, monkeypatch):
    names: dict[int, str] = {}
    monkeypatch.setattr("planaria_lab.chaos.proxy.diallers", lambda processes: names)
    async with Proxy() as proxy:
        server = await echo.start(proxy.behind)
        ends = {name: await dial(proxy) for name in ("one", "two")}
        names |= {end.get_extra_info("sockname")[1]: name for name, (_, end) in ends.items()}
        proxy.cut("one", "three")
        answers = {}
        for name, (reader, writer) in ends.items():
            writer.write(name.encode())
            answers[name] = asyncio.create_task(reader.readexactly(3))
        assert await answers["two"] == b"two"
        assert not answers["one"].done()
        proxy.cut("three")
        assert await answers["one"] == b"one"
        server.close()


async def test_the_system_names_the_process_that_dialled(proxy, echo):
    _, writer = await dial(proxy)
    port = writer.get_extra_info("sockname")[1]
    names = diallers({"gone": 0, "this": os.getpid()})
    assert names[port] == "this"
    assert set(names.values()) == {"this"}
    assert port not in diallers({"another": os.getppid()})


async def test_who_hangs_up_ends_it_for_the_other(proxy, echo):
    _, writer = await dial(proxy)
    writer.write(b"x")
    await echo.heard.wait()
    writer.close()
    assert await echo.endings.get() == "closed"


async def test_a_node_that_is_not_there_is_a_reset(echo):
    async with Proxy() as proxy:
        reader, _ = await dial(proxy)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        server = await echo.start(proxy.behind)
        reader, writer = await dial(proxy)
        writer.write(b"now")
        assert await reader.readexactly(3) == b"now"
        server.close()


async def test_a_line_that_is_no_command_is_refused(proxy):
    with pytest.raises(ValueError, match="'restart' is not a command: use reset, "):
        await obey(proxy, "restart")


def test_as_a_process_of_its_own():
    command = [sys.executable, "-m", "planaria_lab.chaos.proxy"]
    done = subprocess.run(
        command, input="hold in\nrelease\nreset\n", capture_output=True, text=True, check=True
    )
    where, *answers = done.stdout.splitlines()
    assert [place.startswith("127.0.0.1:") for place in where.split()] == [True, True]
    assert answers == ["0", "0", "0"]

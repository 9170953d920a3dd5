"""A TCP relay that keeps all bytes, and can hold them back or break."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from planaria.bootstrap.address import Address


class Wire:
    """A relay to `address`. While `passing` is clear, nothing passes, without an error."""

    def __init__(self, address: str) -> None:
        self._to = Address.parse(address)
        self.passing = asyncio.Event()
        self.passing.set()
        self.writers: list[asyncio.StreamWriter] = []
        self.carried: list[bytearray] = []  # by each connection, each way
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner = await asyncio.open_connection(*self._to)
        except OSError:
            writer.close()
            return
        self.writers += [writer, inner[1]]
        for source, sink in ((reader, inner[1]), (inner[0], writer)):
            self._tasks.add(asyncio.create_task(self._relay(source, sink)))

    async def _relay(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        self.carried.append(carried := bytearray())
        with suppress(OSError):
            while data := await source.read(1 << 16):
                carried += data
                await self.passing.wait()
                sink.write(data)
                await sink.drain()
        sink.close()

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()

"""A TCP proxy in front of a node that can break its links. It resets connections, or holds back the
bytes of one direction, or of connections from some nodes.

It needs no root, and passes bytes on unread, so it works with TLS. Only connections that other
nodes dial pass through it. Those that the node dials pass through the other nodes' proxies. So a
cut between two nodes needs both their proxies. Each finds the process that dialled by its port, in
/proc.

    python -m planaria_lab.chaos.proxy [HOST:PORT]

prints `ADDRESS BEHIND`: the address for peers to dial, and the one for the node to listen at, which
is HOST:PORT if given. It obeys lines on standard input until that ends: `reset`, `blink EVERY
SECONDS`, `hold in`, `hold out`, `release`. It answers each with the number of connections left.
"""

from __future__ import annotations

import asyncio
import enum
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

HOST = "127.0.0.1"
CHUNK = 1 << 16
"""Bytes that are passed on at a time, at most."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: on, no seconds


class Way(enum.Enum):
    """A direction, as the node sees it."""

    IN = "in"
    OUT = "out"


def diallers(processes: Mapping[str, int]) -> dict[int, str]:
    """Map local TCP ports to the names of the processes that use them. `processes`: name -> pid,
    of this user's; those that have ended are left out. Linux only. It takes a tenth of a second if
    there are many sockets."""
    ports: dict[str, int] = {}
    for table in Path("/proc/self/net").glob("tcp*"):  # tcp6 has IPv4 connections, too
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            ports[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    names: dict[int, str] = {}
    for name, pid in processes.items():
        with suppress(OSError):  # it has ended
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # it was closed meanwhile
                    if port := ports.get(str(descriptor.readlink())):
                        names[port] = name
    return names


class Proxy:
    """A proxy in front of one node. `address`: HOST:PORT that peers dial. `behind`: HOST:PORT where
    the node listens. Use it in one event loop only."""

    def __init__(
        self, behind: str = "", processes: Callable[[], Mapping[str, int]] = lambda: {}
    ) -> None:
        """Without `behind`, reserve a free port for the node. The node need not listen yet, and may
        stop and start again. `processes` returns name -> pid of the processes that dial, for `cut`.
        Raises OSError."""
        self._kept: socket.socket | None = None
        if not behind:
            # This socket is bound and never listens, so that no other process gets the port.
            self._kept = socket.socket()
            self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._kept.bind((HOST, 0))
            behind = f"{HOST}:{self._kept.getsockname()[1]}"
        self.behind, self.address = behind, ""
        self.resets = 0  # connections that were broken so far
        self._processes, self._names = processes, dict[int, str]()
        self._looking = asyncio.Lock()
        self._cut: set[str] = set()
        self._changed = asyncio.Event()  # set when cuts change
        self._passing = {way: asyncio.Event() for way in Way}
        self._carrying: set[asyncio.Task[None]] = set()  # a task for each connection
        self._ends: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._server: asyncio.Server | None = None
        self.release()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._dialled, HOST, 0)
        self.address = f"{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening, and reset all connections."""
        if self._server is not None:
            self._server.close()
        self.release()
        self.cut()
        while self._carrying:  # new connections may still have been accepted
            self.reset()
            await asyncio.wait(self._carrying, timeout=0.1)
        if self._kept is not None:
            self._kept.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- faults

    @property
    def connections(self) -> int:
        return len(self._ends)

    def reset(self) -> int:
        """Send RST to both sides of every connection. Return how many connections there were."""
        count = self.connections
        for end in (end for ends in self._ends.values() for end in ends):
            _abort(end)
        self._ends.clear()
        self.resets += count
        return count

    async def blink(self, every: float, seconds: float) -> None:
        """Call `reset` every `every` seconds, for `seconds` in all."""
        for _ in range(int(seconds / every)):
            self.reset()
            await asyncio.sleep(every)

    def hold(self, way: Way) -> None:
        """Hold back all bytes of this direction until `release`. Connections stay open, and new
        ones are accepted. After `release` the bytes arrive, as if TCP had sent them again."""
        self._passing[way].clear()

    def cut(self, *names: str) -> None:
        """Hold back all bytes, both ways, of connections that these processes dialled, until a
        `cut` without them. As behind a firewall that drops packets, connections stay open, and the
        bytes arrive later."""
        self._cut = set(names)
        self._names.clear()  # another process may have got a port since
        self._changed.set()
        self._changed = asyncio.Event()

    def release(self) -> None:
        for passing in self._passing.values():
            passing.set()

    # --- connections

    async def _dialled(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        ends = self._ends[task] = [writer]
        try:
            host, _, port = self.behind.rpartition(":")
            beyond, onward = await asyncio.open_connection(host, int(port))
            ends.append(onward)
            if task not in self._ends:  # reset meanwhile
                return
            port = writer.get_extra_info("peername")[1]
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(Way.IN, reader, onward, port))
                both.create_task(self._pass(Way.OUT, beyond, writer, port))
        except* OSError:  # one side has closed, so the other side is closed, too
            pass
        finally:
            for end in ends:
                _abort(end)
            self._ends.pop(task, None)
            self._carrying.discard(task)

    async def _pass(
        self, way: Way, source: asyncio.StreamReader, sink: asyncio.StreamWriter, port: int
    ) -> None:
        """Pass bytes on in one direction until the source closes. `port`: the dialler's."""
        while chunk := await source.read(CHUNK):
            await self._may_pass(way, port)
            sink.write(chunk)
            await sink.drain()
        await self._may_pass(way, port)
        sink.close()
        await sink.wait_closed()  # waits until the last bytes are sent
        raise ConnectionResetError("the source has closed")

    async def _may_pass(self, way: Way, port: int) -> None:
        await self._passing[way].wait()
        while self._cut and await self._name(port) in self._cut:
            await self._changed.wait()

    async def _name(self, port: int) -> str:
        async with self._looking:
            if port not in self._names:
                self._names = {port: "", **await asyncio.to_thread(diallers, self._processes())}
            return self._names[port]


def _abort(end: asyncio.StreamWriter) -> None:
    """Close a connection with RST."""
    if not end.transport.is_closing():
        end.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE
        )
    end.transport.abort()


async def obey(proxy: Proxy, line: str) -> None:
    """Carry out one line of standard input. Raises ValueError for an unknown command."""
    match line.split():
        case ["reset"]:
            proxy.reset()
        case ["blink", every, seconds]:
            await proxy.blink(float(every), float(seconds))
        case ["hold", way]:
            proxy.hold(Way(way))
        case ["release"]:
            proxy.release()
        case _:
            raise ValueError(
                f"{line!r} is not a command: use reset, blink EVERY SECONDS, hold in|out or release"
            )


async def main(behind: str) -> None:
    loop = asyncio.get_running_loop()
    async with Proxy(behind) as proxy:
        print(proxy.address, proxy.behind, flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            await obey(proxy, line.strip())
            print(proxy.connections, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or [""]))

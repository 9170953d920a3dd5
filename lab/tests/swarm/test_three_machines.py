"""Three machines as network namespaces, joined by an invite: no secret is readable on the wire."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from planaria.bootstrap.invites import encode
from planaria_lab.emulation.emulation import Emulation, EmulationError, emulate
from planaria_lab.emulation.links import all_alike
from tests.swarm.machines import TOKEN, machines


class Capture:
    """Records all packets of a machine until it is closed."""

    def __init__(self, links: Emulation, machine: str) -> None:
        with links.inside(machine):
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self.seen = bytearray()
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self.seen += self._socket.recv(1 << 16)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()


async def test_three_machines_are_a_swarm_under_tls_by_three_commands(
    data: Path, tmp_path: Path
) -> None:
    """Network namespaces stand for machines, which needs root."""
    with ExitStack() as stack:
        try:
            links = stack.enter_context(emulate(all_alike(["r", "a", "b"], 1, 200)))
        except EmulationError as error:
            pytest.skip(str(error))
        here = stack.enter_context(machines(tmp_path, data, stages=1))
        place = {name: home.namespace for name, home in links.homes.items()}
        captures = [Capture(links, name) for name in ("r", "a")]
        host = links.homes["r"].host
        here.start_registry("0.0.0.0:7400", place["r"], "--advertise", host)
        invited = await here.invite("owner")
        assert list(invited.registries) == [f"{host}:7400"]
        assert list(invited.enrolments) == [f"{host}:7399"]
        for name in ("a", "b"):
            here.start_node(name, encode(invited), place[name])
        await here.committed(beyond=1)
        for capture in captures:
            capture.close()
            assert b"\x16\x03\x01" in capture.seen  # a TLS handshake
            names = here.folder.glob("[ab]/events-*.jsonl")
            nodes = [path.stem.removeprefix("events-").encode() for path in names]
            assert len(nodes) == 2
            frames = b"activation", b"microbatch"  # words in heads of frames
            for hidden in (invited.secret, TOKEN.encode(), b"PRIVATE KEY", *frames, *nodes):
                assert hidden not in capture.seen

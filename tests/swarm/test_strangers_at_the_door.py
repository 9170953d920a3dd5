"""A registry that may open few files, what strangers do to it, and a run that goes on meanwhile."""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from planaria.bootstrap.address import Address
from planaria.bootstrap.client import JoinRefused, RegistryClient
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.journal import read_view
from planaria.bootstrap.registry_pb2 import (
    Description,
    JoinRequest,
    Member,
    Renewal,
    Report,
    Seat,
    SeatReport,
    View,
)
from planaria.bootstrap.rules import PROTOCOL
from planaria.node.machine.processes import run_planaria
from planaria.node.report.ledger import audit
from tests.stubs import RegistryStub
from tests.swarm.machines import DEADLINE, Machines, machines

DESCRIPTORS, IDLE, STREAMS = 1024, 300, 20
MIB = 1 << 20
REPORT = 15 * MIB
FORGED = "x\n2026-01-01 00:00:00 INFO the run is over"
CLEARING = "\x1b[2J\x1b[H"


def run_limited(arguments: list[str]) -> None:
    """As on a machine whose processes may open few files, where it is a registry."""
    if arguments[0] == "bootstrap":
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    run_planaria(arguments)


async def test_a_registry_with_few_descriptors_serves_a_run_whatever_strangers_do(
    data: Path, tmp_path: Path
) -> None:
    with machines(tmp_path, data, 1, secured=False, work=run_limited) as here:
        swarm = Swarm(here)
        await swarm.begin()
        await swarm.hears_of_strange_names()
        await swarm.is_flooded()
        await swarm.is_shown_a_forged_view()
    audited = audit(tmp_path / "a")
    assert (audited.duplicates, audited.missing, audited.extra) == (0, 0, 0)


class Swarm:
    """One node at each stage, and later a third."""

    def __init__(self, here: Machines) -> None:
        self.here, self.journal = here, here.folder / "journal"

    async def begin(self) -> None:
        named = self.here.folder / "address"
        more = "--journal", str(self.journal), "--address-file", str(named)
        self.here.start_registry("127.0.0.1:0", None, *more)
        async with asyncio.timeout(DEADLINE):
            while not named.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        self.address = named.read_text().strip()
        for name, stage in (("a", "0"), ("b", "1")):
            self.here.start_node(name, self.address, None, "--stage", stage)
        await self.here.committed(beyond=1)

    async def described(self) -> Description:
        client = RegistryClient([self.address])
        try:
            return await client.describe(DEADLINE)
        finally:
            await client.close()

    async def goes_on(self, members: int) -> Description:
        """So many are members, and two more steps are committed."""
        async with asyncio.timeout(DEADLINE):
            while len((found := await self.described()).view.members) != members:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        step = await self.here.committed(beyond=0)
        await self.here.committed(beyond=step + 1)
        return found

    def log(self) -> str:
        return self.here.processes.log("registry").read_text()

    # -- what strangers do -----------------------------------------------------------------------

    async def hears_of_strange_names(self) -> None:
        run, before = (await self.described()).run, self.log()
        strange: list[tuple[str, dict[str, str]]] = [
            ("is not a valid name", {"node": FORGED}),
            ("is not a valid name", {"node": f"x{CLEARING}"}),
            ("isn't printable", {"host": FORGED}),
            ("isn't printable", {"device": CLEARING}),
            ("has the port", {"address": "unix:/var/run/docker.sock"}),
            ("begins with unix:", {"address": "unix:///var/run/docker.sock"}),
        ]
        for why, said in strange:
            client = RegistryClient([self.address])
            request = JoinRequest(**{"protocol": PROTOCOL, "run": run, "node": "x"} | said)
            with pytest.raises(JoinRefused, match=why):
                await client.join(request, Identity.generate(), DEADLINE)
            await client.close()
        told = self.log().removeprefix(before)
        assert [line for line in told.splitlines() if "is refused" in line]
        assert not any(line.startswith("2026-01-01") for line in told.splitlines())
        assert "\x1b" not in told
        await self.goes_on(members=2)

    async def is_flooded(self) -> None:
        """Somebody new joins meanwhile."""
        with ExitStack() as stack:
            for _ in range(IDLE):
                idle = stack.enter_context(socket.socket())
                idle.bind(("127.0.0.2", 0))
                idle.connect(tuple(Address.parse(self.address)))
            said = await asyncio.gather(*(self.reports_much(n) for n in range(STREAMS)))
            assert "INVALID_ARGUMENT" in said
            self.here.start_node("c", self.address)
            found = await self.goes_on(members=3)
            assert found.ByteSize() < MIB
            assert "Traceback" not in self.log()

    async def reports_much(self, number: int) -> str:
        """What it is told."""
        much = SeatReport(message="x" * REPORT)
        renewal = Renewal(node=f"x{number}", report=Report(seats=[much]))
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self.address, options) as channel:
            call = RegistryStub(channel).KeepAlive(iter([renewal]), timeout=DEADLINE)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            return error.value.code().name

    async def is_shown_a_forged_view(self) -> None:
        """A registry that has lost its journal, before the nodes are back, or after."""
        view = (await self.described()).view
        self.here.processes.kill("registry")
        self.journal.unlink()
        self.here.start_registry(self.address, None, "--journal", str(self.journal))
        liar = Identity.generate()
        for signed in (False, True):
            assert "has not signed" in await self.shows(forged(view, liar, signed), liar)
        found = await self.goes_on(members=3)
        assert {m.node for m in found.view.members} == {m.node for m in view.members}
        assert found.view.driver == view.driver
        written = read_view(self.journal)
        assert written.number == found.view.number
        assert "x shows view" in self.log()

    async def shows(self, view: View, liar: Identity) -> str:
        """What it is told of it, once the registry is there."""
        renewal = Renewal(node="x", run=view.run, view=view, member=view.members[-1])
        liar.sign_message(renewal, view.run)
        async with grpc.aio.insecure_channel(self.address) as channel:
            call = RegistryStub(channel).KeepAlive(
                iter([renewal]), wait_for_ready=True, timeout=DEADLINE
            )
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            return error.value.details() or ""


def forged(view: View, liar: Identity, signed: bool) -> View:
    """In which somebody drives who is no member; signed by it, or as the real one was."""
    made = View()
    made.CopyFrom(view)
    made.number += 1_000_000
    made.driver = "x"
    own = Member(node="x", joined=10**6, key=liar.public)
    own.seats.append(Seat(stage=0))
    made.members.append(own)
    if signed:
        liar.sign_message(made, view.run)
    return made

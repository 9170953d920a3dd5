"""Who speaks for others, to the registry and on links, is refused and named; training goes on."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc
import pytest

from planaria.bootstrap.client import JoinRefused, RegistryClient
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.journal import read_view
from planaria.bootstrap.membership import PROTOCOL
from planaria.bootstrap.registry_pb2 import (
    JoinRequest,
    LeaveRequest,
    Member,
    Renewal,
    Report,
    SeatReport,
    Suspicion,
    View,
)
from planaria.bootstrap.registry_pb2_grpc import RegistryStub
from planaria.node.local.swarm import ADDRESS
from planaria.node.wire.link import Links, Peer
from tests.swarm.small import small

STEPS = 100_000
MANY = 10**9  # steps


class Stranger:
    """With a key of its own, which it has made itself."""

    def __init__(self, address: str) -> None:
        self.address, self.identity = address, Identity.generate()

    async def speak(self) -> View:
        """Says all that it can of others and in their names. Returns the view before."""
        client = RegistryClient([self.address])
        try:
            view = (await client.describe()).view
            await self.act_for_others(view)
            for member in view.members:
                with pytest.raises(JoinRefused, match=f"is the address of {member.node}"):
                    await client.join(self.joining(view, member), self.identity, deadline=20)
            await self.link_as_driver(view)
            await self.be_ahead_of_all(client, view)
            return view
        finally:
            await client.close()

    def joining(self, view: View, member: Member) -> JoinRequest:
        return JoinRequest(
            protocol=PROTOCOL, run=view.run, node=f"x-{member.node}", address=member.address
        )

    async def act_for_others(self, view: View) -> None:
        driver, other = view.driver, view.members[-1].node
        report = Report(seats=[SeatReport(stage=0, committed=MANY)], leaving=True)
        own = Renewal(node=driver, run=view.run, report=report, view=view)
        suspicion = Suspicion(accuser=driver, accused=other, why="it is mad", cause="NUMBERS")
        leave = LeaveRequest(node=other, why="it wants to")
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub = RegistryStub(channel)
            for sign in (lambda message: None, self.sign_for(view.run)):
                for message in (own, suspicion, leave):
                    sign(message)
                for call in (
                    lambda: stub.KeepAlive(iter([own])).read(),
                    lambda: stub.Suspect(suspicion),
                    lambda: stub.Leave(leave),
                ):
                    with pytest.raises(grpc.aio.AioRpcError, match="speaks for itself") as error:
                        await call()
                    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED

    def sign_for(self, run: str):
        return lambda message: self.identity.sign_message(message, run)

    async def link_as_driver(self, view: View) -> None:
        links = Links(view.run, view.driver, self.identity, Quiet())
        for member in view.members:
            if member.node != view.driver:
                peer = Peer(member.node, member.address, member.key)
                links.set_peers(1, [peer], [])
                links._demanded.add(peer.node)
                with pytest.raises(grpc.aio.AioRpcError, match=f"in the name of {view.driver}"):
                    await links._dial(peer)
        await links.stop()

    async def be_ahead_of_all(self, client: RegistryClient, view: View) -> None:
        """A member by right, it says that all is done, and leaves: the next view."""
        request = JoinRequest(protocol=PROTOCOL, run=view.run, node="ahead", standby=True)
        reply = await client.join(request, self.identity)
        client.report(Report(seats=[SeatReport(stage=0, committed=MANY, finished=True)]))
        keeping = asyncio.create_task(
            client.keep_membership("ahead", reply, lambda view: None, lambda why: None)
        )
        while not any("what ahead " in told for told in (await client.describe()).decisions):
            pass
        await client.leave("ahead", "it has said what it wanted to")
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping


class Quiet:
    """Events of links that never come up."""


def test_who_speaks_for_others_is_refused_and_named_and_training_goes_on(up):
    swarm = up(small(stages=1, steps=STEPS, swarm__lease=20))
    swarm.wait_until("steps", lambda: swarm.committed() >= 2)
    stranger = Stranger((swarm.out / ADDRESS).read_text().strip())
    view = asyncio.run(asyncio.wait_for(stranger.speak(), 300))
    step = swarm.committed()
    swarm.wait_until("more steps", lambda: swarm.committed() >= step + 2)
    assert swarm.members() == {member.node for member in view.members}
    written, _ = read_view(swarm.out / "logs" / "registry.journal")
    assert written.number > view.number
    assert (written.driver, written.committed <= STEPS) == (view.driver, True)
    logs = {path.stem: path.read_text() for path in (swarm.out / "logs").glob("*.log")}
    for what in ("Renewal", "Suspicion", "LeaveRequest"):
        assert f"a {what} in the name of" in logs["registry"]
    refused = f"a hello in the name of {view.driver} is not signed by the key"
    assert any(refused in text for name, text in logs.items() if name != "registry")

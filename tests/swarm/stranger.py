"""Who is no member of a run, and says of others, and in their names, all that can be said."""

from __future__ import annotations

import grpc
import pytest

from planaria.bootstrap.authority import Role
from planaria.bootstrap.client import JoinRefused, RegistryClient
from planaria.bootstrap.credentials import PLAIN, Credentials, channel
from planaria.bootstrap.identity import Identity
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
from planaria.bootstrap.rules import PROTOCOL
from planaria.node.wire.link import Links, LinkSettings
from planaria.node.wire.link_table import Peer
from planaria.node.wire.session import Refused
from tests.stubs import RegistryStub

MANY = 10**9  # steps


class Stranger:
    """With a key of its own, and under TLS a certificate for it."""

    def __init__(
        self, address: str, identity: Identity | None = None, credentials: Credentials = PLAIN
    ) -> None:
        self.address, self.credentials = address, credentials
        self.identity = identity or Identity.generate()

    async def speak(self) -> View:
        """Says it all. Returns the view before."""
        client = RegistryClient([self.address], self.credentials)
        try:
            view = (await client.describe()).view
            await self.act_for_others(view)
            for member in view.members:
                with pytest.raises(JoinRefused, match=f"is the address of {member.node}"):
                    await client.join(self.joining(view, member), self.identity, deadline=20)
            await self.link(view, view.driver, f"in the name of {view.driver}")
            await self.link(view, "x", "'x' is no member of view")
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
        more = {"metadata": self.credentials.metadata}
        async with channel(self.address, self.credentials, holder=Role.REGISTRY) as dialled:
            stub = RegistryStub(dialled)
            for sign in (lambda message: None, self.sign_for(view.run)):
                for message in (own, suspicion, leave):
                    sign(message)
                for call in (
                    lambda: stub.KeepAlive(iter([own]), **more).read(),
                    lambda: stub.Suspect(suspicion, **more),
                    lambda: stub.Leave(leave, **more),
                ):
                    with pytest.raises(grpc.aio.AioRpcError, match="own messages only") as error:
                        await call()
                    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED

    def sign_for(self, run: str):
        return lambda message: self.identity.sign_message(message, run)

    async def link(self, view: View, name: str, why: str) -> None:
        """With each of the others, as somebody of this name."""
        settings = LinkSettings()
        links = Links(view.run, name, self.identity, Quiet(), settings, self.credentials)
        for member in view.members:
            if member.node != name:
                peer = Peer(member.node, member.address, member.key)
                links.set_peers(1, [peer], [])
                links._demanded.add(peer.node)
                with pytest.raises(Refused, match=why):
                    await links._dial(peer)
        await links.stop()


class Quiet:
    """Events of links that never come up."""

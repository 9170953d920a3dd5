"""Whoever has many names has not many places, and honest newcomers have theirs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from planaria.bootstrap.address import Address
from planaria.bootstrap.client import JoinRefused, RegistryClient
from planaria.bootstrap.credentials import Credentials
from planaria.bootstrap.enrolment_client import Enrolment
from planaria.bootstrap.enrolment_pb2 import Invitation
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.invites import encode
from planaria.bootstrap.registry_pb2 import JoinReply, JoinRequest, Member, Report
from planaria.bootstrap.rules import PROTOCOL
from planaria.node.report.ledger import audit
from tests.swarm.machines import DEADLINE, TOKEN, Machines, machines

NAMES = 9


def own_host() -> str:
    """This machine's, as others see it."""
    with socket.socket(type=socket.SOCK_DGRAM) as way:
        try:
            way.connect(("192.0.2.254", 9))  # which sends nothing
        except OSError:
            pytest.skip("this machine has loopback alone: all are in one place there")
        return str(way.getsockname()[0])


def dialled(invited: Invitation, host: str) -> Invitation:
    """The same, at another of the registry's addresses."""
    made = Invitation()
    made.CopyFrom(invited)
    for places in (made.registries, made.enrolments):
        places[:] = [str(Address.parse(place)._replace(host=host)) for place in places]
    return made


class Liar:
    """A member by right that does nothing, from another place than honest ones."""

    def __init__(self, invited: Invitation, identity: Identity, credentials: Credentials) -> None:
        self.invited, self.identity, self.credentials = invited, identity, credentials
        self.client = RegistryClient(invited.registries, credentials)
        self.joined = asyncio.Event()

    @classmethod
    async def admitted(cls, invited: Invitation) -> Liar:
        identity = Identity.generate()
        certified = await Enrolment(invited, identity, None).come(DEADLINE)
        return cls(invited, identity, Credentials.of(certified, TOKEN))

    async def __aenter__(self) -> Liar:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.client.close()

    def again(self) -> Liar:
        """With the same key, by a connection of its own."""
        return Liar(self.invited, self.identity, self.credentials)

    async def join(self, name: str, deadline: float = DEADLINE) -> JoinReply:
        found = await self.client.describe()
        data = next(one.member.data for one in found.members if one.member.data)
        request = JoinRequest(protocol=PROTOCOL, run=found.run, node=name, data=data, host=name)
        return await self.client.join(request, self.identity, deadline)

    async def stay(self, name: str) -> None:
        reply = await self.join(name)
        self.joined.set()
        self.client.report(Report(memory=1))
        await self.client.keep_membership(name, reply, lambda view: None, lambda why: None)


async def members(liar: Liar, condition: Callable[[dict[str, set[int]]], bool]) -> None:
    """Waits until the stages of those that are heard, by what they are called at first, are so."""
    async with asyncio.timeout(DEADLINE):
        while True:
            found = await liar.client.describe()
            heard = [one.member for one in found.members if one.report.memory]
            if condition({one.node.partition("-")[0]: stages(one) for one in heard}):
                return
            await asyncio.sleep(0.05)


def stages(member: Member) -> set[int]:
    return {seat.stage for seat in member.seats}


async def test_nine_names_are_no_stage_and_one_key_is_one_member(
    data: Path, tmp_path: Path
) -> None:
    host = own_host()
    with machines(tmp_path, data, 1, recovery__policy="snapshot") as here:
        here.start_registry("0.0.0.0:0")
        invited = await here.invite("node")
        near, far = dialled(invited, "127.0.0.1"), dialled(invited, host)
        owner = dialled(await here.invite("owner"), "127.0.0.1")
        for name, invite, stage in (("a", owner, "0"), ("b", near, "1")):
            more = "--stage", stage, "--listen", "127.0.0.1:0"
            here.start_node(name, encode(invite), None, *more)
        await here.committed(beyond=1)
        async with AsyncExitStack() as stack:
            liars = [
                await stack.enter_async_context(await Liar.admitted(far)) for _ in range(NAMES)
            ]
            staying = []
            try:
                for number, liar in enumerate(liars):
                    staying.append(asyncio.create_task(liar.stay(f"x{number}")))
                    if not number:
                        await has_one_place(liar, f"x{number}")
                await asyncio.gather(*(liar.joined.wait() for liar in liars))
                await honest_ones_train(here, liars[0], near)
            finally:
                for task in staying:
                    task.cancel()
                await asyncio.gather(*staying, return_exceptions=True)
    audited = audit(tmp_path / "a")
    assert (audited.duplicates, audited.missing, audited.extra) == (0, 0, 0)


async def has_one_place(liar: Liar, name: str) -> None:
    """It can't have another by the same invite."""
    await members(liar, lambda found: name in found)
    async with liar.again() as another:
        with pytest.raises(JoinRefused, match="has the same key"):
            await another.join("y", deadline=3.0)


async def honest_ones_train(here: Machines, asked: Liar, near: Invitation) -> None:
    """One stage loses its only honest node; nine have come before one that is honest."""
    await here.committed(beyond=1 + await here.committed(beyond=0))
    here.start_node("c", encode(near), None, "--listen", "127.0.0.1:0")
    await members(asked, lambda found: "c" in found)
    here.processes.kill("b")
    await members(asked, lambda found: "b" not in found and 1 in found["c"])
    await here.committed(beyond=1 + await here.committed(beyond=0))

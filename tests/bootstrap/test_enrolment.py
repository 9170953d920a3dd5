"""Tests of enrolment over loopback, from an invite to mutual TLS, and of what roles may do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import virtual_time

from planaria.bootstrap.admission import Admission
from planaria.bootstrap.authority import (
    LIFETIME,
    Authority,
    CertifiedKey,
    Request,
    Role,
    Who,
    to_der,
)
from planaria.bootstrap.client import JoinRefused, RegistryClient, RegistryUnreachable
from planaria.bootstrap.credentials import PLAIN, Certified, Credentials, channel
from planaria.bootstrap.enrolment import EnrolmentServer
from planaria.bootstrap.enrolment_client import Enrolment, EnrolmentUnreachable
from planaria.bootstrap.enrolment_pb2 import (
    AllowRequest,
    BanRequest,
    EvictRequest,
    Invitation,
    InviteRequest,
    ListEnrolledRequest,
    ListInvitesRequest,
    RevokeRequest,
)
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.invites import NotAdmitted, encode
from planaria.bootstrap.service import RegistryServer
from planaria.node.commands.registry import ask_registry, credentials_for
from planaria.node.launch.options import Security
from tests.bootstrap.conftest import RULES, RUN_FILE, joining, soon, until
from tests.stubs import OperatorStub

ADDRESS = "127.0.0.1:9"


@dataclass
class Run:
    registry: RegistryServer
    admission: Admission
    address: str
    enrolment: str

    def invitation(
        self, role: Role = Role.NODE, uses: int = 0, stage: int | None = None
    ) -> Invitation:
        _, secret = self.admission.invite(role, uses, 0.0, stage)
        assert self.admission.authority is not None
        return Invitation(
            run="r",
            registries=[self.address],
            enrolments=[self.enrolment],
            authority=to_der(self.admission.authority.certificate),
            secret=secret,
            role=role,
            stage=stage,
        )

    async def enrolled(
        self, role: Role = Role.NODE, identity: Identity | None = None, stage: int | None = None
    ) -> Credentials:
        invitation = self.invitation(role, stage=stage)
        certified = await Enrolment(invitation, identity or Identity.generate(), None).come()
        return Credentials.of(certified)

    @asynccontextmanager
    async def client(self, credentials: Credentials) -> AsyncIterator[RegistryClient]:
        client = RegistryClient([self.address], credentials)
        try:
            yield client
        finally:
            await client.close()

    @asynccontextmanager
    async def operator(self, credentials: Credentials) -> AsyncIterator[Any]:
        async with channel(self.address, credentials, holder=Role.REGISTRY) as opened:
            yield OperatorStub(opened)


@asynccontextmanager
async def running(
    folder: Path | None = None, clock: Callable[[], float] = time.time
) -> AsyncIterator[Run]:
    admission = Admission(folder, clock=clock)
    certified = Certified(admission.own_pair(), admission.own_pair, clock)
    registry = RegistryServer(RULES, RUN_FILE, admission=admission)
    enrolment = EnrolmentServer(admission)
    port = await registry.start("127.0.0.1:0", Credentials.of(certified))
    beside = await enrolment.start("127.0.0.1:0", certified)
    try:
        yield Run(registry, admission, f"127.0.0.1:{port}", f"127.0.0.1:{beside}")
    finally:
        await enrolment.stop()
        await registry.stop()


async def test_an_invite_is_all_that_mutual_tls_takes(tmp_path: Path) -> None:
    file, identity = tmp_path / "certificate.pem", Identity.generate()
    async with running() as run:
        invitation = run.invitation(uses=1)
        certified = await Enrolment(invitation, identity, file).come()
        assert certified.pair.who == (Role.NODE, identity.instance, None)
        assert file.stat().st_mode & 0o777 == 0o600
        async with run.client(Credentials.of(certified)) as client:
            assert (await client.describe()).run == "r"
        with pytest.raises(NotAdmitted, match="used up"):
            await Enrolment(invitation, Identity.generate(), None).come()
        again = await Enrolment(invitation, identity, file).come()
        assert again.pair == certified.pair  # not renewed while it is fresh
        for wrong in (PLAIN, Credentials.of(Certified(Authority.make(time.time()).own_pair(0)))):
            async with run.client(wrong) as client:
                with pytest.raises(RegistryUnreachable):
                    await client.describe(deadline=0.5)


async def test_an_invite_for_another_stage_counts_instead_of_the_kept_certificate(
    tmp_path: Path,
) -> None:
    file, identity = tmp_path / "certificate.pem", Identity.generate()
    async with running() as run:
        for stage in (1, 2, None):
            certified = await Enrolment(run.invitation(stage=stage), identity, file).come()
            assert certified.pair.who == (Role.NODE, identity.instance, stage)


async def test_an_answer_that_cannot_be_read_is_no_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answer(*_: object) -> bytes:
        return b"\xff"

    monkeypatch.setattr("planaria.bootstrap.grpc_transport.GrpcChannel.call", answer)
    async with running() as run:
        with pytest.raises(EnrolmentUnreachable, match="what came is no EnrolReply"):
            await Enrolment(run.invitation(), Identity.generate(), None).come(deadline=0.3)


async def test_who_is_not_of_the_invites_authority_is_not_asked() -> None:
    async with running() as run:
        invitation = run.invitation()
        invitation.authority = to_der(Authority.make(time.time()).certificate)
        with pytest.raises(EnrolmentUnreachable, match=r"accepts invites, tried for 0\.3 s"):
            await Enrolment(invitation, Identity.generate(), None).come(deadline=0.3)
        assert not run.admission.invites.enrolled


async def test_certificates_are_renewed_without_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file, identity = tmp_path / "a", tmp_path / "c.pem", Identity.generate()
    monkeypatch.setattr("planaria.bootstrap.enrolment_client.SOONEST", 0.0)
    shift = [-LIFETIME * 0.75]
    async with running(folder, lambda: time.time() + shift[0]) as run:
        invitation = run.invitation(uses=1)
        old = await Enrolment(invitation, identity, file, lambda: time.time() + shift[0]).come()
        first = old.pair
        assert first.is_due(time.time())
        assert not first.is_over(time.time())
        invitation.ClearField("secret")
        shift[0] = 0.0
        enrolment = Enrolment(invitation, identity, file)
        renewing = asyncio.create_task(enrolment.keep_renewed(old))
        await until(lambda: old.pair != first)
        renewing.cancel()
        assert not old.pair.is_due(time.time())
        file.write_bytes(b"".join(first))
        assert (await Enrolment(invitation, identity, file).come()).pair.ends > first.ends
        async with run.client(Credentials.of(old)) as client:  # the registry's is new, too
            assert (await client.describe()).run == "r"


def test_a_machine_that_has_slept_renews_its_certificate_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop's clock stands still while a laptop sleeps."""
    authority, identity, slept = Authority.make(0), Identity.generate(), [0.0]

    async def sleep_and_wake() -> None:
        loop = asyncio.get_running_loop()

        def clock() -> float:
            return loop.time() + slept[0]

        def issued() -> CertifiedKey:
            request, who = Request.of(identity), Who(Role.NODE, identity.instance)
            certificate = authority.issue(request.request, who, clock())
            return CertifiedKey(request.key, certificate, authority.certificate)

        async def ask(secret: bytes, deadline: float) -> CertifiedKey:
            return issued()

        invitation = Invitation(authority=to_der(authority.certificate))
        enrolment, certified = Enrolment(invitation, identity, None, clock), Certified(issued())
        monkeypatch.setattr(enrolment, "_ask", ask)
        renewing = asyncio.create_task(enrolment.keep_renewed(certified))
        await asyncio.sleep(3600)
        slept[0] = 2 * LIFETIME
        await asyncio.sleep(3600)
        assert not certified.pair.is_over(clock())
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)

    virtual_time.run(sleep_and_wake())


async def test_a_command_that_takes_long_has_its_certificate_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("planaria.bootstrap.enrolment_client.SOONEST", 0.0)
    shift = [-LIFETIME * 0.75]
    async with running(None, lambda: time.time() + shift[0]) as run:
        join = encode(run.invitation(Role.READER, uses=1))

        def command() -> None:
            credentials = credentials_for(join, Security())
            assert credentials.certified is not None
            first = credentials.certified.pair
            shift[0] = 0.0

            async def look(client: RegistryClient) -> None:
                await until(lambda: credentials.certified.pair != first)
                assert not credentials.certified.pair.is_due(time.time())
                assert (await client.describe()).run == "r"

            ask_registry(join, credentials, look)

        await asyncio.to_thread(command)


async def test_who_guesses_is_told_to_wait() -> None:
    async with running() as run:
        invitation = run.invitation()
        invitation.secret = b"guess"
        for _ in range(10):
            with pytest.raises(NotAdmitted, match="not one of this run's"):
                await Enrolment(invitation, Identity.generate(), None).come()
        with pytest.raises(EnrolmentUnreachable, match="ask again in a minute"):
            await Enrolment(invitation, Identity.generate(), None).come(deadline=2.0)


async def test_who_looks_does_not_command_and_who_commands_does() -> None:
    async with running() as run:
        for role in (Role.READER, Role.NODE):
            credentials = await run.enrolled(role)
            async with run.client(credentials) as client:
                assert (await client.describe()).run == "r"
                with pytest.raises(JoinRefused, match="has no page"):  # any role may look
                    await client.show()
                with pytest.raises(JoinRefused, match=rf"role operator.* has {role}"):
                    await client.measure()
            async with run.operator(credentials) as stub:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Invite(InviteRequest(role="operator"))
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        async with run.operator(await run.enrolled(Role.OPERATOR)) as stub:
            made = await stub.Invite(InviteRequest(role="reader", uses=3, seconds=60))
            reply = await stub.ListInvites(ListInvitesRequest())
            listed = {invite.id: invite for invite in reply.invites}
            assert (listed[made.id].uses, listed[made.id].used) == (3, 0)
            await stub.Revoke(RevokeRequest(id=made.id))
            invitation = run.invitation(Role.READER)
            invitation.secret = made.secret
            with pytest.raises(NotAdmitted, match="revoked"):
                await Enrolment(invitation, Identity.generate(), None).come()
            enrolled = (await stub.ListEnrolled(ListEnrolledRequest())).enrolled
            assert sorted(invite.role for invite in enrolled) == ["node", "operator", "reader"]
            for wrong in (InviteRequest(role="king"), InviteRequest(role="reader", stage=1)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Invite(wrong)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_certificate_says_whose_node_joins() -> None:
    async with running() as run:
        for role, stage in ((Role.NODE, 1), (Role.OWNER, 0)):
            identity = Identity.generate()
            async with run.client(await run.enrolled(role, identity)) as client:
                reply = await client.join(joining(role, ADDRESS, stage=stage), identity)
            assert reply.view.members[-1].owner == (role is Role.OWNER)


async def test_who_is_banned_is_gone_and_stays_away() -> None:
    async with running() as run:
        identity, other = Identity.generate(), Identity.generate()
        node = await run.enrolled(identity=identity, stage=1)
        async with run.client(node) as client, run.client(node) as thief:
            with pytest.raises(JoinRefused, match="invited for stage 1"):
                await client.join(joining("a", ADDRESS, stage=0), identity)
            with pytest.raises(JoinRefused, match="belongs to another key"):
                await thief.join(joining("b", ADDRESS, stage=1), other)
            reply = await client.join(joining("a", ADDRESS, stage=1), identity)
            gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            keeping = asyncio.create_task(
                client.keep_membership("a", reply, lambda view: None, gone.set_result)
            )
            async with run.operator(await run.enrolled(Role.OPERATOR)) as stub:
                await stub.Ban(BanRequest(who="a"))
                assert await soon(gone) == "banned by the run's operator"
                await soon(keeping)
                with pytest.raises(JoinRefused, match="banned"):
                    await client.describe()
                with pytest.raises(JoinRefused, match="banned"):
                    await client.join(joining("c", ADDRESS, stage=1), identity)
                await stub.Allow(AllowRequest(instance=identity.instance))
            again = await client.join(joining("c", ADDRESS, stage=1), identity)
            assert [member.node for member in again.view.members] == ["c"]


async def test_in_plain_text_this_machine_commands_and_nobody_is_invited(place: Any) -> None:
    stub = OperatorStub(place.channel())
    with pytest.raises(grpc.aio.AioRpcError, match="issues no certificates"):
        await stub.Invite(InviteRequest(role="node"))
    with pytest.raises(grpc.aio.AioRpcError, match="x is no member"):
        await stub.Evict(EvictRequest(node="x"))
    await stub.Ban(BanRequest(who="0" * 32))
    assert list((await stub.ListEnrolled(ListEnrolledRequest())).banned) == ["0" * 32]
    await stub.Allow(AllowRequest(instance="0" * 32))

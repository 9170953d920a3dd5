"""The gRPC services that create and redeem invites."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from planaria.bootstrap import enrolment_pb2 as pb
from planaria.bootstrap.admission import Admission, AdmissionError
from planaria.bootstrap.authority import REQUEST_BYTES, Role
from planaria.bootstrap.authorization import ENROL, host_of
from planaria.bootstrap.credentials import Certified, Credentials
from planaria.bootstrap.effects import Refused
from planaria.bootstrap.escaping import readable
from planaria.bootstrap.grpc_transport import GrpcTransport
from planaria.bootstrap.invites import Attempts, InviteError, NotAdmitted
from planaria.bootstrap.transport import AcceptedStream, Broken, parse

if TYPE_CHECKING:
    from planaria.bootstrap.service import RegistryServer

log = logging.getLogger(__name__)

AT_ONCE: Final = 64  # concurrent calls
FAREWELL: Final = 1.0  # seconds granted to open calls when the registry stops


class EnrolmentServer:
    """The enrolment service, on its own port, where only the registry shows a certificate."""

    def __init__(self, admission: Admission) -> None:
        self._admission, self._attempts = admission, Attempts()

    async def start(self, listen: str, certified: Certified) -> int:
        """Serves on HOST:PORT and returns the port. Raises the errors of `add_port`."""
        self._now = asyncio.get_running_loop().time
        credentials = Credentials(server=certified.server(mutual=False))
        self._transport = GrpcTransport(credentials, serving=_OPTIONS, at_once=AT_ONCE)
        return await self._transport.serve(listen, {ENROL: self._enrol}, ())

    async def stop(self) -> None:
        await self._transport.stop(FAREWELL)

    async def _enrol(self, stream: AcceptedStream) -> None:
        host = host_of(stream.peer)
        if self._attempts.are_too_many(host, self._now()):
            why = "too many requests from this address were refused; ask again in a minute"
            raise Broken("RESOURCE_EXHAUSTED", why)
        try:
            request = parse(await stream.read() or b"", pb.EnrolRequest)
            who, certificate = self._admission.enrol(request)
        except NotAdmitted as refused:
            self._attempts.failed(host)
            log.info("%s gets no certificate: %s", host, refused)
            raise Broken("PERMISSION_DENIED", str(refused)) from None
        except AdmissionError as error:
            log.error("can't enrol nodes: %s", error)
            why = "the registry can't store its decision; its operator has to repair its storage"
            raise Broken("UNAVAILABLE", why) from None
        again = "" if request.secret else ", again"
        log.info("%s %s, at %s, has its certificate%s", who.role, who.instance, host, again)
        await stream.write(pb.EnrolReply(certificate=certificate).SerializeToString())


class OperatorServer:
    """The operator service; authorization.py admits only operators."""

    def __init__(self, admission: Admission, registry: RegistryServer) -> None:
        self._admission, self._registry = admission, registry

    async def Invite(self, request: pb.InviteRequest, stream: AcceptedStream) -> pb.Invited:
        if not self._admission.certifies:
            why = (
                "this registry issues no certificates, so it has no invites: start it without "
                "--insecure and without certificates of your own"
            )
            raise Refused("FAILED_PRECONDITION", why)
        stage = request.stage if request.HasField("stage") else None
        with _refusals():
            role = Role(request.role)
            made, secret = self._admission.invite(role, request.uses, request.seconds, stage)
        return pb.Invited(id=made.id, secret=secret)

    async def ListInvites(
        self, request: pb.ListInvitesRequest, stream: AcceptedStream
    ) -> pb.Invites:
        records, listed = self._admission.invites, pb.Invites()
        for invite in records.invites.values():
            listed.invites.add(
                id=invite.id,
                role=invite.role,
                uses=invite.uses,
                used=records.used[invite.id],
                ends=invite.ends,
                stage=invite.stage,
                revoked=invite.id in records.revoked,
            )
        return listed

    async def Revoke(self, request: pb.RevokeRequest, stream: AcceptedStream) -> pb.Done:
        with _refusals():
            self._admission.decide(self._admission.invites.revoke(request.id))
        return pb.Done(
            what=f"invite {request.id} is revoked; nodes that have used it stay enrolled"
        )

    async def ListEnrolled(
        self, request: pb.ListEnrolledRequest, stream: AcceptedStream
    ) -> pb.EnrolledReply:
        records = self._admission.invites
        reply = pb.EnrolledReply(banned=sorted(records.banned))
        for instance, enrolled in records.enrolled.items():
            reply.enrolled.add(
                instance=instance,
                role=enrolled.who.role,
                invite=enrolled.invite,
                stage=enrolled.who.stage,
            )
        return reply

    async def Evict(self, request: pb.EvictRequest, stream: AcceptedStream) -> pb.Done:
        if self._registry.instance_of(request.node) is None:
            why = f"{readable(request.node[:80])} is no member; `planaria members` lists members"
            raise Refused("NOT_FOUND", why)
        self._registry.evict(request.node, "evicted by the run's operator")
        return pb.Done(what=f"{request.node} is evicted; it may join again under a new node id")

    async def Ban(self, request: pb.BanRequest, stream: AcceptedStream) -> pb.Done:
        instance = self._registry.instance_of(request.who) or request.who
        with _refusals():
            self._admission.decide(self._admission.invites.ban(instance))
        self._registry.machine.bar(self._admission.invites.banned)
        self._registry.cut(instance, "banned by the run's operator")
        return pb.Done(what=f"{instance} is banned; `planaria allow {instance}` lifts the ban")

    async def Allow(self, request: pb.AllowRequest, stream: AcceptedStream) -> pb.Done:
        with _refusals():
            self._admission.decide(self._admission.invites.allow(request.instance))
        self._registry.machine.bar(self._admission.invites.banned)
        return pb.Done(what=f"{request.instance} may join again")

    async def Command(self, request: pb.CommandRequest, stream: AcceptedStream) -> pb.Done:
        changed = self._registry.command(request.word, request.why, request.settings, request.step)
        return pb.Done(what=changed or "that is the run's order already")


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns errors of a decision about invites into refusals of the call."""
    try:
        yield
    except AdmissionError as error:
        raise Refused("UNAVAILABLE", str(error)) from error
    except (InviteError, ValueError) as error:
        raise Refused("INVALID_ARGUMENT", readable(str(error))) from error


_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 2 * REQUEST_BYTES),
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.max_connection_age_ms", 60_000),
    ("grpc.max_concurrent_streams", 4),
)

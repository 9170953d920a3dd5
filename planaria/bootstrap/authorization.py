"""Calls to the registry: their authorization by certificate and signature, and their encoding."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from planaria.bootstrap.address import Address, unmapped
from planaria.bootstrap.authority import Role, Who
from planaria.bootstrap.credentials import Credentials
from planaria.bootstrap.effects import Refused, not_served
from planaria.bootstrap.enrolment_pb2 import DESCRIPTOR as ENROLMENT
from planaria.bootstrap.escaping import readable
from planaria.bootstrap.identity import instance_of, is_message_signed
from planaria.bootstrap.registry_pb2 import DESCRIPTOR as REGISTRY
from planaria.bootstrap.registry_pb2 import JoinRequest
from planaria.bootstrap.transport import AcceptedStream, Broken, Handler

log = logging.getLogger(__name__)

REGISTRY_CALLS: Final = REGISTRY.services_by_name["Registry"]
OPERATOR_CALLS: Final = ENROLMENT.services_by_name["Operator"]
ENROL: Final = f"{ENROLMENT.services_by_name['Enrolment'].full_name}/Enrol"

NODES, COMMANDS = {Role.OWNER, Role.NODE}, {Role.OPERATOR}
LOOKS = NODES | COMMANDS | {Role.READER}
RIGHTS: Final = {
    "Join": NODES,
    "KeepAlive": NODES,
    "Suspect": NODES,
    "Leave": NODES,
    "Watch": LOOKS,
    "Describe": LOOKS,
    "Show": LOOKS,
    "Examine": LOOKS,
    "Measure": COMMANDS,  # loads every link
}
"""Roles allowed to call each registry method. Methods of `Operator` require an operator."""


class Gate:
    """Checks every call. Health is open to all: container probes have neither token nor name."""

    def __init__(self, credentials: Credentials, is_banned: Callable[[str], bool]) -> None:
        self._credentials, self._is_banned = credentials, is_banned
        self._streams: defaultdict[str, dict[asyncio.Task[Any], None]] = defaultdict(dict)
        """Open calls by instance."""

    def cut(self, instance: str) -> None:
        """Cancels the instance's open calls."""
        for task in self._streams.pop(instance, ()):
            task.cancel()

    def handlers(self, service: ServiceDescriptor, server: object) -> dict[str, Handler]:
        """The handlers of a service's calls, which the methods of `server` answer. A method gets
        its request, or an iterator of them, and the stream. It raises Refused, and returns a
        message or bytes, or an iterator of these."""
        return {
            f"{service.full_name}/{method.name}": partial(
                self._handle, method, getattr(server, method.name)
            )
            for method in service.methods
        }

    async def _handle(
        self, method: MethodDescriptor, answer: Callable[..., Any], stream: AcceptedStream
    ) -> None:
        """Serves one call: checks it, and sends what `answer` returns. Raises Broken."""
        kind = GetMessageClass(method.input_type)
        try:
            if method.client_streaming:
                who = self._check(method, stream)
                await self._answer_all(who, answer(_requests(stream, kind), stream), stream)
                return
            if (data := await stream.read()) is None:
                raise Refused("INVALID_ARGUMENT", "the request is missing")
            request = _parsed(data, kind)
            who = self._check(method, stream, request)
            if method.server_streaming:
                await self._answer_all(who, answer(request, stream), stream)
            else:
                await stream.write(_serialized(await answer(request, stream)))
        except Refused as refused:
            raise Broken(refused.code, refused.reason) from None

    async def _answer_all(
        self, who: Who, answers: AsyncIterator[object], stream: AcceptedStream
    ) -> None:
        with self._open(who):
            await stream.accept({})
            async with aclosing(answers):  # type: ignore[type-var]
                async for answer in answers:
                    await stream.write(_serialized(answer))

    def _check(
        self, method: MethodDescriptor, stream: AcceptedStream, request: object = None
    ) -> Who:
        """Checks whether the caller may make this call; returns who it is. Raises Refused."""
        who = stream.caller
        why = self._refusal(who, method, stream)
        if not why and isinstance(request, JoinRequest):
            why = self._banned(instance_of(request.key)) or _mismatch(who, request)
        if why:
            raise Refused("PERMISSION_DENIED", why)
        return who

    def _refusal(self, who: Who, method: MethodDescriptor, stream: AcceptedStream) -> str:
        """Why the call is refused; empty: it is allowed."""
        if why := self._banned(who.instance):
            return why
        commands = method.containing_service.full_name == OPERATOR_CALLS.full_name
        if self._credentials.certified is None and not commands:
            return ""
        if self._credentials.channel is None:  # plain text: no identity
            host = host_of(stream.peer)
            if host and Address(host, 0).is_loopback:
                return ""
            return "a registry without TLS accepts commands only from its own machine"
        rights = COMMANDS if commands else RIGHTS[method.name]
        if who.role in rights:
            return ""
        needed = " or ".join(sorted(rights))
        return (
            f"this call needs a certificate of role {needed}, and yours has "
            f"{who.role or 'no role of this run'}: ask the run's operator for an invite"
        )

    def _banned(self, instance: str) -> str:
        if not self._is_banned(instance):
            return ""
        return "the run's operator has banned this node; ask them to allow it again"

    @contextmanager
    def _open(self, who: Who) -> Iterator[None]:
        """Lists this call among the caller's open ones, so that `cut` can end it."""
        task = asyncio.current_task()
        if not who.instance or task is None:
            yield
            return
        self._streams[who.instance][task] = None
        try:
            yield
        finally:
            if tasks := self._streams.get(who.instance):
                tasks.pop(task, None)
                if not tasks:
                    del self._streams[who.instance]


async def _requests(stream: AcceptedStream, kind: type[Message]) -> AsyncIterator[Message]:
    while (data := await stream.read()) is not None:
        yield _parsed(data, kind)


def _parsed(data: bytes, kind: type[Message]) -> Message:
    """Parses a request. Raises Refused."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise Refused("INVALID_ARGUMENT", f"the request is no {kind.DESCRIPTOR.name}") from None


def _serialized(answer: Any) -> bytes:
    """Serializes an answer; bytes pass through, since broadcasts are serialized once."""
    if isinstance(answer, bytes):
        return answer
    content: bytes = answer.SerializeToString()
    return content


def host_of(peer: str) -> str:
    """The host of a caller, of which gRPC says ipv4:1.2.3.4:567 or ipv6:[::1]:567; empty for other
    kinds. An IPv4 address that IPv6 carries is one of IPv4."""
    kind, _, place = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    return unmapped(Address.parse(place).host.partition("%")[0])


def _mismatch(who: Who, request: JoinRequest) -> str:
    """Why a join does not match the caller's certificate; empty: it does."""
    if who.stage is not None and not (request.HasField("stage") and request.stage == who.stage):
        return f"you were invited for stage {who.stage}: join with --stage {who.stage}"
    if who.instance and instance_of(request.key) != who.instance:
        return "the certificate belongs to another key than the join; name this node's own folder"
    return ""


def check_join(request: JoinRequest, run: str, caller: str) -> None:
    """Raises Refused unless the join names this run and is signed by the key that it shows."""
    if request.run != run:
        raise not_served(run, request.run)
    if not is_message_signed(request.key, request, run):
        who = readable(request.node)
        log.warning("a join of %s, from %s, is not signed with its key", who, caller)
        raise Refused(
            "PERMISSION_DENIED",
            f"the join of {who} is not signed with the key in it; a node signs with the key of its "
            "folder",
        )


def check_signed(message: Message, node: str, key: bytes, run: str, caller: str) -> None:
    """Raises Refused unless the key of `node` has signed the message in its name."""
    if is_message_signed(key, message, run):
        return
    kind, name = message.DESCRIPTOR.name, readable(node)
    log.warning("a %s in the name of %s, from %s, is not signed with its key", kind, name, caller)
    raise Refused(
        "PERMISSION_DENIED",
        f"{caller} sends a {kind} in the name of {name}, not signed with the key of {name}: a "
        "node may send its own messages only",
    )

"""Authorization of calls to the registry, by join token, certificate and signature."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health

from planaria.bootstrap.address import Address, unmapped
from planaria.bootstrap.authority import Role, Who
from planaria.bootstrap.credentials import Credentials
from planaria.bootstrap.effects import Refused, not_served
from planaria.bootstrap.enrolment_pb2 import DESCRIPTOR as ENROLMENT
from planaria.bootstrap.identity import instance_of, is_message_signed
from planaria.bootstrap.registry_pb2 import DESCRIPTOR as REGISTRY
from planaria.bootstrap.registry_pb2 import JoinRequest
from planaria.bootstrap.spelling import readable

if TYPE_CHECKING:  # generic in their stubs only
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]

log = logging.getLogger(__name__)

_REGISTRY: Final = REGISTRY.services_by_name["Registry"].full_name
OPERATOR: Final = ENROLMENT.services_by_name["Operator"].full_name

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


class Gate(grpc.aio.ServerInterceptor):
    """Checks every call. Health is open to all: container probes have neither token nor name."""

    def __init__(self, credentials: Credentials, is_banned: Callable[[str], bool]) -> None:
        self._credentials, self._is_banned = credentials, is_banned
        self._streams: defaultdict[str, set[asyncio.Task[Any]]] = defaultdict(set)  # by instance

    def cut(self, instance: str) -> None:
        """Cancels the instance's open calls."""
        for task in self._streams.pop(instance, ()):
            task.cancel()

    async def intercept_service(  # type: ignore[override]
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        if details.method.startswith(f"/{health.SERVICE_NAME}/"):
            return await continuation(details)
        metadata = details.invocation_metadata or ()
        why = self._credentials.check({k: v for k, v in metadata if isinstance(v, str)})
        if why is not None:
            return _denying(why)
        handler = await continuation(details)
        return handler and self._guarded(handler, details.method)

    def _guarded(self, handler: Handler, path: str) -> Handler:
        _, service, method = path.split("/")
        if service not in (_REGISTRY, OPERATOR):
            return handler
        call: Any = handler.unary_unary or handler.unary_stream or handler.stream_stream
        rights = COMMANDS if service == OPERATOR else RIGHTS[method]

        def check(context: Context, request: object) -> Who:
            who = who_calls(context)
            why = self._refusal(who, rights, service, context)
            if not why and isinstance(request, JoinRequest):
                why = self._banned(instance_of(request.key)) or _other(who, request)
            if why:
                raise Refused("PERMISSION_DENIED", why)
            return who

        async def unary(request: object, context: Context) -> object:
            try:
                check(context, request)
                return await call(request, context)
            except Refused as refused:
                answer = _alone(refused)
            del request
            return await context.abort(*answer)

        async def streaming(requests: object, context: Context) -> AsyncIterator[object]:
            """`requests`: one request, or an iterator."""
            try:
                with self._open(check(context, requests)):
                    async with aclosing(call(requests, context)) as answers:
                        async for answer in answers:
                            yield answer
                return
            except Refused as refused:
                answer = _alone(refused)
            del requests
            await context.abort(*answer)

        def content(answer: Any) -> bytes:
            """Serializes a reply; bytes pass through, since broadcasts are serialized once."""
            if isinstance(answer, bytes):
                return answer
            content_bytes: bytes = answer.SerializeToString()
            return content_bytes

        serializers = handler.request_deserializer, content
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(unary, *serializers)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(streaming, *serializers)
        return grpc.stream_stream_rpc_method_handler(streaming, *serializers)

    def _refusal(self, who: Who, rights: set[Role], service: str, context: Context) -> str:
        """Why the call is refused; empty: it is allowed."""
        if why := self._banned(who.instance):
            return why
        if self._credentials.certified is None and service != OPERATOR:
            return ""
        if self._credentials.channel is None:  # plain text: no identity
            if is_of_this_machine(context.peer()):
                return ""
            return "a registry without TLS accepts commands only from its own machine"
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
        task = asyncio.current_task()
        if not who.instance or task is None:
            yield
            return
        self._streams[who.instance].add(task)
        try:
            yield
        finally:
            if tasks := self._streams.get(who.instance):
                tasks.discard(task)
                if not tasks:
                    del self._streams[who.instance]


def _alone(refused: Refused) -> tuple[grpc.StatusCode, str]:
    """Status and reason of a refusal, which loses its traceback. gRPC keeps the error that `abort`
    raises; frames would keep large requests of strangers with it until a garbage collection."""
    refused.with_traceback(None)
    return grpc.StatusCode[refused.code], refused.reason


def who_calls(context: Context) -> Who:
    """The caller's identity by its certificate; empty in plain text."""
    shown = context.auth_context().get("x509_subject_alternative_name", ())
    return Who.of(name.decode(errors="replace") for name in shown)


def address_of(peer: str) -> Address | None:
    """The address in a gRPC peer, ipv4:1.2.3.4:567 or ipv6:[::1]:567; None for other kinds. An
    IPv4 address that IPv6 carries is one of IPv4."""
    kind, _, place = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    address = Address.parse(place)
    return address._replace(host=unmapped(address.host.partition("%")[0]))


def host_of(peer: str) -> str:
    """The host in a gRPC peer; empty for other kinds."""
    place = address_of(peer)
    return place.host if place is not None else ""


def is_of_this_machine(peer: str) -> bool:
    host = host_of(peer)
    return bool(host) and Address(host, 0).is_loopback


def _other(who: Who, request: JoinRequest) -> str:
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


def _denying(why: str) -> Handler:
    async def deny(requests: AsyncIterator[object], context: Context) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)

    return grpc.stream_stream_rpc_method_handler(deny)

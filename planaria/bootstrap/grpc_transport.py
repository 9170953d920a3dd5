"""The port to the network (transport.py) over gRPC. TLS, tokens, liveness checks, health and
reflection are on this side of it."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
from grpc import StatusCode
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from planaria.bootstrap.address import EVERYWHERE, Address, Reach, resolved_not_to_dial
from planaria.bootstrap.authority import Role, Who
from planaria.bootstrap.connection_limits import open_descriptors, server_options
from planaria.bootstrap.credentials import Credentials, add_port, channel
from planaria.bootstrap.transport import Broken, Handler

log = logging.getLogger(__name__)

Options = Sequence[tuple[str, int | str]]
_DIRECT = ("grpc.enable_http_proxy", 0)
_ALONE = ("grpc.so_reuseport", 0)  # otherwise two processes could share a port unnoticed
PAUSE = 0.25  # seconds between two attempts of a liveness check
_ANOTHER = (StatusCode.NOT_FOUND, StatusCode.UNIMPLEMENTED)


@contextmanager
def _as_broken() -> Iterator[None]:
    """Turns gRPC's errors in this block into Broken."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise Broken(error.code().name, error.details() or "") from None
    except (grpc.aio.BaseError, asyncio.InvalidStateError):
        raise Broken("INTERNAL", "the connection broke") from None


class _Stream:
    """One end of a gRPC stream: a call, or a servicer's context."""

    def __init__(self, ends: Any) -> None:
        self._ends = ends

    async def read(self) -> bytes | None:
        with _as_broken():
            data = await self._ends.read()
        if data is grpc.aio.EOF:
            return None
        assert isinstance(data, bytes)
        return data

    async def write(self, data: bytes, /) -> None:
        with _as_broken():
            await self._ends.write(data)


class GrpcDialledStream(_Stream):
    async def accepted(self) -> Mapping[str, str]:
        with _as_broken():
            return _texts(await self._ends.initial_metadata())

    def cancel(self) -> None:
        self._ends.cancel()


class GrpcAcceptedStream(_Stream):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.metadata: Mapping[str, str] = _texts(context.invocation_metadata())

    @property
    def peer(self) -> str:
        return str(self._ends.peer())

    @property
    def caller(self) -> Who:
        shown = self._ends.auth_context().get("x509_subject_alternative_name", ())
        return Who.of(name.decode(errors="replace") for name in shown)

    @property
    def seconds_left(self) -> float | None:
        left: float | None = self._ends.time_remaining()
        return left

    def when_over(self, call: Callable[[], None]) -> None:
        self._ends.add_done_callback(lambda _: call())

    async def accept(self, metadata: Mapping[str, str]) -> None:
        with _as_broken():
            await self._ends.send_initial_metadata(tuple(metadata.items()))


def _texts(metadata: Any) -> dict[str, str]:
    return {key: str(value) for key, value in metadata or ()}


class GrpcChannel:
    def __init__(self, opened: grpc.aio.Channel, common: tuple[tuple[str, str], ...]) -> None:
        self._channel, self._common = opened, common

    def stream(self, method: str, metadata: Mapping[str, str] | None = None) -> GrpcDialledStream:
        multi: Any = self._channel.stream_stream(f"/{method}")
        pairs = (*(metadata or {}).items(), *self._common)
        return GrpcDialledStream(multi(metadata=pairs))

    async def call(self, method: str, request: bytes, seconds: float) -> bytes:
        """Makes a call, not over a stream: a failed write would hide the refusal's status."""
        unary: Any = self._channel.unary_unary(f"/{method}")
        with _as_broken():
            answer: bytes = await unary(request, metadata=self._common, timeout=seconds)
        return answer

    async def close(self) -> None:
        await self._channel.close()


class GrpcTransport:
    """The network over gRPC. `dialling`, `serving`: options for channels and for the server."""

    def __init__(
        self,
        credentials: Credentials,
        dialling: Options = (),
        serving: Options = (),
        reach: Reach = EVERYWHERE,
        insecure: bool = False,
        at_once: int | None = None,
        reflected: Collection[str] = (),
    ) -> None:
        """`at_once`: the most streams accepted at a time. `reflected`: services that gRPC
        reflection describes."""
        self._credentials, self._reach = credentials, reach
        self._dialling, self._serving, self._insecure = dialling, serving, insecure
        self._at_once, self._reflected = at_once, reflected
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()

    async def not_to_dial(self, address: str) -> str:
        return await resolved_not_to_dial(address, self._reach)

    def channel(self, address: str, holder: str = Role.NODE) -> GrpcChannel:
        options = (*self._dialling, _DIRECT)
        opened = channel(address, self._credentials, options, holder)
        return GrpcChannel(opened, self._credentials.metadata)

    async def is_alive(
        self, node: str, address: str, seconds: float, reach: Reach | None = None, holder: str = ""
    ) -> bool | None:
        """Whether a node answers, by a health service named after it. False at once if the port
        refuses connections or another node answers. Also False after two accepted connections in a
        row without an answer: a container's port forwarder does that. None after `seconds` without
        any answer, since the network may recover, and for an address that must not be dialled."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        unanswered = 0
        while (seconds_left := end - loop.time()) > 0:
            try:
                async with asyncio.timeout(seconds_left):
                    where = self._reach if reach is None else reach
                    if why := await resolved_not_to_dial(address, where):
                        log.warning("%s is not dialled: %s", node, why)
                        return None
                    await _connect(address)
                    return await self._serves(node, address, holder or Role.NODE)
            except ConnectionRefusedError:
                return False
            except grpc.aio.AioRpcError as error:
                unanswered += 1
                if error.code() in _ANOTHER or unanswered == 2:
                    return False
            except OSError:  # includes TimeoutError: no route at the moment
                unanswered = 0
            await asyncio.sleep(min(PAUSE, max(0.0, end - loop.time())))
        return None

    async def _serves(self, node: str, address: str, holder: str) -> bool:
        async with channel(address, self._credentials, (_DIRECT,), holder) as open_channel:
            stub = health_pb2_grpc.HealthStub(open_channel)
            request = health_pb2.HealthCheckRequest(service=node)
            answer = await stub.Check(request)  # type: ignore[attr-defined]
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def serve(
        self, listen: str, handlers: Mapping[str, Handler], names: Collection[str]
    ) -> int:
        options = (*self._serving, _ALONE, *server_options(open_descriptors()))
        at_once = self._at_once
        self._server = server = grpc.aio.server(options=options, maximum_concurrent_rpcs=at_once)
        services: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for path, handler in handlers.items():
            service, _, method = path.partition("/")
            served: Any = grpc.stream_stream_rpc_method_handler(partial(self._handle, handler))
            services[service][method] = served
        for service, methods in services.items():
            generic = grpc.method_handlers_generic_handler(service, methods)
            server.add_generic_rpc_handlers((generic,))
        port = add_port(server, listen, self._credentials, self._insecure)
        if names:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._reflected:
            _reflect(server, self._reflected)
        for name in names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await server.start()
        return port

    async def _handle(self, handler: Handler, _: Any, context: Any) -> None:
        """Serves an accepted stream, if its token is right."""
        stream = GrpcAcceptedStream(context)
        try:
            if why := self._credentials.check(stream.metadata):
                log.warning("refused a stream of %s: %s", stream.peer, why)
                raise Broken("UNAUTHENTICATED", why)
            await handler(stream)
            return
        except Broken as broken:
            # gRPC keeps the error that `abort` raises. This one would keep large requests with it.
            status = StatusCode[broken.code], broken.details
        await context.abort(*status)

    async def stop(self, grace: float) -> None:
        if self._server is not None:
            await self._health.enter_graceful_shutdown()
            await self._server.stop(grace)


async def _connect(address: str) -> None:
    """Checks that an address takes connections: gRPC doesn't say so. Raises OSError."""
    host, port = Address.parse(address)
    _, writer = await asyncio.open_connection(host, port)
    writer.close()


def _reflect(server: grpc.aio.Server, services: Collection[str]) -> None:
    """Enables gRPC server reflection (grpcurl) if grpcio-reflection is installed."""
    try:
        from grpc_reflection.v1alpha import reflection
    except ModuleNotFoundError:
        return
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)

"""Liveness check: whether a given node answers at its address."""

from __future__ import annotations

import asyncio
import logging

import grpc
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from planaria.bootstrap.address import EVERYWHERE, Address, Reach, resolved_not_to_dial
from planaria.bootstrap.authority import Role
from planaria.bootstrap.credentials import Credentials, channel

log = logging.getLogger(__name__)

PAUSE = 0.25  # seconds between two attempts
_ANOTHER = (StatusCode.NOT_FOUND, StatusCode.UNIMPLEMENTED)


async def is_alive(
    node: str,
    address: str,
    credentials: Credentials,
    seconds: float,
    reach: Reach = EVERYWHERE,
    holder: str = Role.NODE,
) -> bool | None:
    """Whether the node answers at HOST:PORT with a health service named after it. `holder`: the
    role or instance that its certificate must name, see `channel`.

    False at once if the port refuses connections or another node answers. Also False after two
    accepted connections in a row without an answer: a container's port forwarder does that. None
    after `seconds` without any answer, since the network may recover, and for an address that must
    not be dialled.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    unanswered = 0
    while (seconds_left := end - loop.time()) > 0:
        try:
            async with asyncio.timeout(seconds_left):
                if why := await resolved_not_to_dial(address, reach):
                    log.warning("%s is not dialled: %s", node, why)
                    return None
                await _connect(address)
                return await _serves(node, address, credentials, holder)
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


async def _connect(address: str) -> None:
    """A reachability probe, since gRPC does not report a refused connection."""
    host, port = Address.parse(address)
    _, writer = await asyncio.open_connection(host, port)
    writer.close()


async def _serves(node: str, address: str, credentials: Credentials, holder: str) -> bool:
    options = (("grpc.enable_http_proxy", 0),)
    async with channel(address, credentials, options, holder) as open_channel:
        stub = health_pb2_grpc.HealthStub(open_channel)
        request = health_pb2.HealthCheckRequest(service=node)
        answer = await stub.Check(request)  # type: ignore[attr-defined]
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

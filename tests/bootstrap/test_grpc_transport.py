"""Tests of calls over gRPC."""

from __future__ import annotations

import pytest

from planaria.bootstrap.credentials import Credentials
from planaria.bootstrap.grpc_transport import GrpcTransport
from planaria.bootstrap.transport import AcceptedStream, Broken

CALLS = 100
"""Enough calls to show a bug: over a stream, one in fifty lost the status of a refusal."""


async def test_a_call_that_is_refused_before_it_is_read_says_why() -> None:
    async def refuse(stream: AcceptedStream) -> None:
        raise Broken("UNAVAILABLE", "try another one")

    server = GrpcTransport(Credentials(), insecure=True)
    port = await server.serve("127.0.0.1:0", {"S/M": refuse}, ())
    for _ in range(CALLS):
        channel = GrpcTransport(Credentials()).channel(f"127.0.0.1:{port}")
        with pytest.raises(Broken, match="UNAVAILABLE: try another one"):
            await channel.call("S/M", b"request", 10.0)
        await channel.close()
    await server.stop(0)

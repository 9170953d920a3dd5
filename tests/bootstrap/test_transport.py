"""One request and its answer, over a stream."""

from __future__ import annotations

from typing import Any

import pytest

from planaria.bootstrap.transport import Broken, call


class Refused:
    """A channel whose other end refuses streams before it reads: as in gRPC, the request can't be
    written then, and only reading tells the status."""

    cancelled = False

    def stream(self, *_: object, **__: object) -> Refused:
        return self

    async def write(self, data: bytes) -> None:
        raise Broken("INTERNAL", "the connection broke")

    async def read(self) -> bytes | None:
        raise Broken("UNAVAILABLE", "try another one")

    def cancel(self) -> None:
        self.cancelled = True


async def test_a_call_that_is_refused_before_it_is_read_says_why() -> None:
    channel: Any = Refused()
    with pytest.raises(Broken, match="UNAVAILABLE: try another one"):
        await call(channel, "S/M", b"request", 10.0)
    assert channel.cancelled

"""An HTTP server within another process, with a limit for many clients."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from planaria.node.page.http_address import TlsFiles

MOST_CONNECTIONS = 64
"""Limit of connections; beyond it, one of the address with the most connections is closed."""
LONGEST_REQUEST = 16 * 2**10
"""Limit of a request's first line and headers in bytes."""
FAREWELL = 1
"""Seconds for answers to end when the server stops."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of each answer."""


class PageConnection(H11Protocol):
    """A connection that may have to make room for others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.since = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            self._close_one()

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _close_one(self) -> None:
        """Close a connection, maybe this one. Of the address with the most, an idle one goes before
        one with an answer in progress, and then the oldest."""
        connections = cast("set[PageConnection]", self.connections)
        count = Counter(connection.address for connection in connections)
        chosen = min(connections, key=lambda c: (-count[c.address], c.is_answering, c.since))
        chosen.transport.abort()


class _Server(uvicorn.Server):
    """A server that leaves signals to its process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def listening(
    app: ASGIApp, bound: socket.socket, over: asyncio.Event, keys: TlsFiles | None = None
) -> AsyncIterator[None]:
    """Serve at the socket in this block, and close it. `over` is set when answers must end. Raises
    OSError where `keys` can't be used."""
    with bound:
        server = _Server(_config(app, keys))
        server.config.load()
        serving = asyncio.get_running_loop().create_task(server.serve([bound]))
        try:
            yield
        finally:
            over.set()
            server.should_exit = True
            await serving


def _config(app: ASGIApp, keys: TlsFiles | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=PageConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        headers=list(HEADERS.items()),
        h11_max_incomplete_event_size=LONGEST_REQUEST,
        timeout_graceful_shutdown=FAREWELL,
        ssl_certfile=str(keys.certificate) if keys else None,
        ssl_keyfile=str(keys.key) if keys else None,
    )

"""The page over HTTP: a read-only starlette application."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from planaria.bootstrap.errors import UserError

STATIC = Path(__file__).parent / "static"
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
REFRESH = 1.0
"""Seconds between two updates, for all clients."""
QUIET = 15.0
"""Seconds of silence after which an event stream gets a comment."""
LOCAL = ["127.0.0.1", "localhost", "[::1]"]
"""Host names of this machine, the only ones accepted by a page for this machine alone."""
State = Mapping[str, Any]


class PageSource:
    """What the page shows: a live run or, with a `span`, a replay."""

    span: tuple[float, float] | None = None
    """Unix seconds of the first and the last moment to replay; None: the run is live."""

    def now(self) -> State:
        """The page's present state, or the final one of a run that is over."""
        raise NotImplementedError

    def at(self, moment: float) -> State:
        """The page's state at a moment of the span."""
        raise NotImplementedError


class CachedState:
    """The page's state as JSON text, by part, cached for `REFRESH` seconds for all clients."""

    def __init__(self, shown: PageSource, clock: Callable[[], float]) -> None:
        self._shown, self._clock = shown, clock
        self._made = -REFRESH
        self._parts: dict[str, str] = {}

    def now(self) -> dict[str, str]:
        if self._clock() - self._made >= REFRESH:
            self._parts = as_json(self._shown.now())
            self._made = self._clock()
        return self._parts


def as_json(state: State) -> dict[str, str]:
    """The page's state as JSON text, by part. Raises ValueError for a number that JSON lacks: the
    page couldn't read it."""
    return {
        key: json.dumps(value, allow_nan=False, separators=(",", ":"))
        for key, value in state.items()
    }


def join_parts(parts: Mapping[str, str]) -> str:
    return "{" + ",".join(f'"{key}":{text}' for key, text in parts.items()) + "}"


Figures = Callable[[], Awaitable[bytes]]
"""Source of the exposition for Prometheus. Raises UserError."""


def make_app(
    shown: PageSource,
    over: asyncio.Event,
    token: str = "",
    local: bool = True,
    figures: Figures | None = None,
) -> Starlette:
    """The page's application, until `over` is set. Requests need the `token`, if there is one;
    `local`: for this machine only. `figures`: of a live run."""
    parts = CachedState(shown, lambda: asyncio.get_running_loop().time())

    async def state(request: Request) -> Response:
        at, span = request.query_params.get("at"), shown.span
        if at is None or span is None:
            return _json(join_parts(parts.now()))
        try:
            moment = float(at)
        except ValueError:
            return PlainTextResponse(f"at={at[:40]!r} is not a number of seconds", 400)
        if not span[0] <= moment <= span[1]:
            return PlainTextResponse(f"at={moment:g} is not between {span[0]} and {span[1]}", 400)
        return _json(join_parts(as_json(shown.at(moment))))

    async def stream(request: Request) -> Response:
        return StreamingResponse(_changes(parts, over), media_type="text/event-stream")

    async def span(request: Request) -> Response:
        return _json(json.dumps(shown.span))

    routes = [Route(path, _file_route(*file)) for path, file in FILES.items()]
    routes += [Route("/state", state), Route("/events", stream), Route("/span", span)]
    if figures is not None:
        routes.append(_metrics_route(figures))
    return _guarded(routes, token, local)


def metrics_app(figures: Figures, token: str = "", local: bool = True) -> Starlette:
    """An HTTP application with the metrics only."""
    return _guarded([_metrics_route(figures)], token, local)


def _metrics_route(figures: Figures) -> Route:
    async def metrics(request: Request) -> Response:
        try:
            return Response(await figures(), headers={"Content-Type": CONTENT_TYPE})
        except UserError as error:
            return PlainTextResponse(f"{error}\n", 502)

    return Route("/metrics", metrics)


def _guarded(routes: list[Route], token: str, local: bool) -> Starlette:
    guards = [Middleware(TrustedHostMiddleware, allowed_hosts=LOCAL)] if local else []
    if token:
        guards.append(Middleware(_Gate, token=token))
    return Starlette(routes=routes, middleware=guards)


def _file_route(name: str, kind: str) -> Callable[[Request], Any]:
    content = (STATIC / name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind)

    return answer


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")


async def _changes(parts: CachedState, over: asyncio.Event) -> AsyncIterator[str]:
    """Server-sent events: first the whole state, then changed parts. A slow reader gets fewer
    events: nothing is queued."""
    sent: dict[str, str] = {}
    clock = asyncio.get_running_loop().time
    last_sent = clock()
    while not over.is_set():
        now = parts.now()
        changed = {key: text for key, text in now.items() if sent.get(key) != text}
        sent = now
        if changed:
            yield f"data: {join_parts(changed)}\n\n"
            last_sent = clock()
        elif clock() - last_sent > QUIET:
            yield ": nothing new\n\n"
            last_sent = clock()
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), REFRESH)


class _Gate:
    """Middleware that requires the join token: as the password of any user (basic authentication),
    or as a bearer token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._may(scope):
            await self._app(scope, receive, send)
            return
        refusal = "this page requires the run's join token as password, with any user name\n"
        headers = {"WWW-Authenticate": 'Basic realm="planaria: the join token is the password"'}
        await PlainTextResponse(refusal, 401, headers)(scope, receive, send)

    def _may(self, scope: Scope) -> bool:
        kind, _, shown = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"basic":
            try:
                shown = base64.b64decode(shown, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif kind.lower() != b"bearer":
            return False
        return hmac.compare_digest(shown.strip(), self._token)

"""Servers of the page: beside a live registry, of a remote one, and of a run's folder."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette

from planaria.bootstrap.address import Address
from planaria.bootstrap.client import RegistryClient, RegistryUnreachable
from planaria.bootstrap.service import RegistryServer
from planaria.node.page.app import (
    REFRESH,
    CachedState,
    Figures,
    PageSource,
    as_json,
    join_parts,
    make_app,
    metrics_app,
)
from planaria.node.page.http_address import PageAddress
from planaria.node.page.http_server import listening
from planaria.node.page.metrics import exposition, registry_points
from planaria.node.page.replay import Replay
from planaria.node.page.state import Moment, page_state
from planaria.node.report.history import History
from planaria.node.report.notifications import Notification, Notifier
from planaria.node.report.run_state import RunState
from planaria.node.run_file import RunFile, loads

log = logging.getLogger("planaria")

ANSWER: Final = 5.0
"""Seconds for a remote registry to answer."""


class LocalPage(PageSource):
    """Source of the page of a local registry's run; `price` of a node hour."""

    def __init__(self, registry: RegistryServer, run: RunFile, price: float | None = None) -> None:
        self.registry, self._known, self._price = registry, run, price
        self._text = registry.run_file  # of the run that is known
        self._began = time.time()
        self._history = History(run.steps)
        registry.on_happened = self._happened

    def _happened(self, node: str, lines: Sequence[str]) -> None:
        driver, stages = self.registry.machine.view.driver, self._run.model.body_stages
        for line in lines:
            self._history.hear_from(node, line, stages, time.time(), driver)

    @property
    def _run(self) -> RunFile:
        """The registry's run file, with its present settings."""
        if self.registry.run_file != self._text:
            self._text = self.registry.run_file
            self._known = loads(self._text)
            self._history.story.steps = self._known.steps
        return self._known

    def news(self, notifier: Notifier) -> list[Notification]:
        """What the notifier tells of the run's present state."""
        state = RunState(self.registry.describe(), self._history.story)
        return notifier.due(state, self._history, self._run, time.time())

    def count_node_seconds(self) -> None:
        """Count the node-seconds since the last call."""
        self._history.count_node_seconds(len(self.registry.machine.members), time.time())

    def now(self) -> dict[str, Any]:
        self.count_node_seconds()
        moment = Moment(time.time(), self._began, price=self._price)
        return page_state(self.registry.describe(), self._history, self._run, moment)

    async def figures(self) -> bytes:
        """The exposition for Prometheus."""
        return self._exposed()

    def shown(self, parts: CachedState, figures: bool) -> bytes:
        """What the registry answers to a remote page: its state, or metrics."""
        return self._exposed() if figures else join_parts(parts.now()).encode()

    def _exposed(self) -> bytes:
        self.count_node_seconds()
        samples = registry_points(self.registry.describe(), self._history, self._run)
        return exposition(self.registry.machine.rules.run, samples)


class RemotePage(PageSource):
    """Source of the page of a remote registry's run."""

    def __init__(self, client: RegistryClient, state: dict[str, Any]) -> None:
        self._client, self._state = client, state
        self._request_lock = asyncio.Lock()

    @classmethod
    async def by(cls, client: RegistryClient) -> RemotePage:
        """Connect to the registry, and read the page's state once. Raises JoinRefused,
        RegistryUnreachable, ValueError."""
        return cls(client, parse_state(await client.show()))

    def now(self) -> dict[str, Any]:
        return self._state

    async def keep_looking(self) -> None:
        """Update forever; without the registry, keep the last state. Raises JoinRefused."""
        while True:
            await asyncio.sleep(REFRESH)
            try:
                self._state = parse_state(await self._ask())
            except (RegistryUnreachable, ValueError) as error:
                troubles = [f"no answer from the registry, this is its last state: {error}"]
                self._state = {**self._state, "troubles": troubles}

    async def figures(self) -> bytes:
        """The exposition for Prometheus. Raises JoinRefused, RegistryUnreachable."""
        return await self._ask(figures=True)

    async def _ask(self, figures: bool = False) -> bytes:
        """One request at a time: a client that changes its address cancels the others."""
        async with self._request_lock:
            return await self._client.show(figures, ANSWER)


def parse_state(content: bytes) -> dict[str, Any]:
    """Parses the state of a page that another machine serves. Raises ValueError."""
    try:
        state = json.loads(content)
        if not isinstance(state, dict) or not all(key.isidentifier() for key in state):
            raise ValueError("it is not the state of a page")
        as_json(state)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the registry's answer can't be read: {error}") from error
    return state


@asynccontextmanager
async def page_beside(living: LocalPage, place: PageAddress) -> AsyncIterator[None]:
    """Serve the registry's page in this block. Raises OSError, which says what to do about it."""
    registry = living.registry
    parts = CachedState(living, asyncio.get_running_loop().time)
    registry.on_show = partial(living.shown, parts)
    counting = asyncio.get_running_loop().create_task(_count_node_seconds(living))
    app = partial(make_app, living, figures=living.figures)
    try:
        async with _serve_app(app, place) as url:
            registry.page = url
            log.info("watch the run at %s", url)
            yield
    finally:
        registry.page, registry.on_show = "", None
        counting.cancel()


async def _count_node_seconds(living: LocalPage) -> None:
    while True:
        await asyncio.sleep(REFRESH)
        living.count_node_seconds()


async def serve_replay(
    replay: Replay, place: PageAddress, say: Callable[[str], None], end: Awaitable[object]
) -> None:
    """Serve the page of a run's files until `end`; `say` gets the URL once it listens. Raises
    OSError."""
    async with _serve_app(partial(make_app, replay), place) as url:
        say(url)
        await end


async def serve_remote(
    client: RegistryClient, place: PageAddress, say: Callable[[str], None]
) -> None:
    """Serve the page of a remote registry's run, as long as `client` is admitted. Raises
    JoinRefused, RegistryUnreachable, ValueError, OSError."""
    remote = await RemotePage.by(client)
    async with _serve_app(partial(make_app, remote, figures=remote.figures), place) as url:
        say(url)
        await remote.keep_looking()


@asynccontextmanager
async def metrics_beside(place: PageAddress, figures: Figures) -> AsyncIterator[None]:
    """Serve metrics for Prometheus in this block. Raises OSError."""

    def app(over: asyncio.Event, token: str, local: bool) -> Starlette:
        return metrics_app(figures, token, local)

    async with _serve_app(app, place) as url:
        log.info("this node's metrics for Prometheus are at %smetrics", url)
        yield


@asynccontextmanager
async def _serve_app(
    make: Callable[[asyncio.Event, str, bool], Starlette], place: PageAddress
) -> AsyncIterator[str]:
    """Serve a page's application in this block. Yields the URL."""
    over = asyncio.Event()
    app = make(over, place.required_token, place.listen.is_loopback)
    bound = place.bind()
    port = bound.getsockname()[1]
    async with listening(app, bound, over, place.keys):
        host = socket.gethostname() if place.listen.is_any else place.listen.host
        yield f"{'https' if place.keys else 'http'}://{Address(host, port)}/"

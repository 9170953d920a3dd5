"""A registry that shares its run with others: follows the leader, or leads itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from planaria.bootstrap.address import Address
from planaria.bootstrap.connection_limits import open_descriptors, server_options
from planaria.bootstrap.credentials import Credentials, add_port
from planaria.bootstrap.etcd import EtcdAway
from planaria.bootstrap.files import replace_file
from planaria.bootstrap.service import RegistryServer, stopped_by_signals
from planaria.bootstrap.spelling import readable
from planaria.bootstrap.store import LEASE, RENEWALS, NotLeading, Store

if TYPE_CHECKING:  # generic in its stub only
    Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)

GRACE: Final = 3.0
"""Seconds granted to members, beyond those of a restart, to find the new leader."""
LOOK: Final = 0.5  # seconds between two checks of the leader
FAREWELL: Final = 0.1  # seconds granted to open calls, whose refusal names the leader


async def lead_in_turn(
    store: Store,
    lead: Callable[[asyncio.Event, asyncio.Task[None]], Awaitable[object]],
    listen: str,
    credentials: Credentials,
    insecure: bool = False,
    address_file: Path | None = None,
) -> None:
    """Follows and leads in turn until SIGINT or SIGTERM. `lead` gets the stop event and a task that
    ends with the term; NotLeading and EtcdAway end its turn. Raises its other errors and those of
    `add_port`, EtcdRefused and StoreError."""
    stop = stopped_by_signals()
    while not stop.is_set():
        following = Follower(store, credentials)
        async with following.serving(listen, insecure):
            if address_file is not None:
                replace_file(address_file, f"{Address.parse(listen)}\n".encode())
            await following.until_elected(stop)
        if store.leads and not stop.is_set():
            log.info("this registry leads from now on")
            async with _term_of(store) as term:
                try:
                    await lead(stop, term)
                except NotLeading:
                    pass  # already logged
                except EtcdAway as error:
                    log.warning("this registry lost the lead at once: %s", error)


@asynccontextmanager
async def _term_of(store: Store) -> AsyncIterator[asyncio.Task[None]]:
    async def keep() -> None:
        while store.leads:
            await asyncio.to_thread(store.renew)
            await asyncio.sleep(LEASE / RENEWALS)

    keeping = asyncio.create_task(keep())
    try:
        yield keeping
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await asyncio.to_thread(store.resign)


@asynccontextmanager
async def ending_with(term: asyncio.Task[None], registry: RegistryServer) -> AsyncIterator[None]:
    """Deposes the registry when the term ends."""

    def over(ended: asyncio.Task[None]) -> None:
        registry.fail(NotLeading("its lease has expired"))

    term.add_done_callback(over)
    try:
        yield
    finally:
        term.remove_done_callback(over)


class Follower:
    """A registry that does not lead; it refuses all calls and names the leader."""

    def __init__(self, store: Store, credentials: Credentials) -> None:
        self._store, self._credentials = store, credentials
        self._leader, self._etcd_error = "", ""

    @asynccontextmanager
    async def serving(self, listen: str, insecure: bool) -> AsyncIterator[None]:
        """Serves on HOST:PORT. Raises the errors of `add_port`."""
        options = (("grpc.so_reuseport", 0), *server_options(open_descriptors()))
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((_Everything(self._refuse),))
        add_port(server, listen, self._credentials, insecure)
        await server.start()
        try:
            yield
        finally:
            await server.stop(FAREWELL)

    async def until_elected(self, stop: asyncio.Event) -> None:
        """Returns when elected, or after `stop`. Raises EtcdRefused, StoreError."""
        while not stop.is_set():
            try:
                leader = await asyncio.to_thread(self._store.leader)
                if not leader and await asyncio.to_thread(self._store.campaign):
                    return
                self._followed(leader)
            except EtcdAway as error:
                self._lost_etcd(error)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK)

    def _followed(self, leader: str) -> None:
        if self._etcd_error:
            log.info("etcd is back")
        if leader and leader != self._leader:
            log.info("this registry follows; %s leads", readable(leader))
        self._leader, self._etcd_error = leader, ""

    def _lost_etcd(self, error: EtcdAway) -> None:
        if not self._etcd_error:
            log.error("%s. No views are issued meanwhile; nodes train on in their last view", error)
        self._leader, self._etcd_error = "", str(error)

    async def _refuse(self, requests: AsyncIterator[bytes], context: Context) -> None:
        metadata = context.invocation_metadata() or ()
        why = self._credentials.check({k: v for k, v in metadata if isinstance(v, str)})
        if why is not None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)
        await context.abort(grpc.StatusCode.UNAVAILABLE, self._refusal())

    def _refusal(self) -> str:
        if self._etcd_error:
            return f"{self._etcd_error}: no registry leads, and nodes train on in their last view"
        if self._leader:
            return f"this registry follows, and {readable(self._leader)} leads: name that one, too"
        return "this registry follows, and none leads yet; try again"


class _Everything(grpc.GenericRpcHandler):
    """A handler for all methods of any kind; it reads no request."""

    def __init__(self, answer: Callable[[Any, Any], Awaitable[None]]) -> None:
        self._handler: Any = grpc.stream_stream_rpc_method_handler(answer)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return self._handler

"""A registry that shares its run with others: follows the leader, or leads itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from planaria.bootstrap.address import Address
from planaria.bootstrap.authorization import OPERATOR_CALLS, REGISTRY_CALLS
from planaria.bootstrap.escaping import readable
from planaria.bootstrap.etcd import EtcdAway
from planaria.bootstrap.files import replace_file
from planaria.bootstrap.service import RegistryServer
from planaria.bootstrap.stop_signals import stop_signals
from planaria.bootstrap.store import LEASE, RENEWALS, NotLeading, Store
from planaria.bootstrap.transport import AcceptedStream, Broken, Transport

log = logging.getLogger(__name__)

GRACE: Final = 3.0
"""Seconds granted to members, beyond those of a restart, to find the new leader."""
LOOK: Final = 0.5  # seconds between two checks of the leader
NO_LEADER: Final = "No views are issued meanwhile; nodes train on in their last view"
FAREWELL: Final = 0.1  # seconds granted to open calls, whose refusal names the leader


async def lead_in_turn(
    store: Store,
    lead: Callable[[asyncio.Future[int], asyncio.Task[None]], Awaitable[object]],
    listen: str,
    make_transport: Callable[[], Transport],
    address_file: Path | None = None,
    stop: asyncio.Future[int] | None = None,
) -> None:
    """Follows and leads in turn until `stop` is done, by default by a signal. `lead` gets `stop`,
    and a task that ends with the term; NotLeading and EtcdAway end its turn. Raises its other
    errors and those of `Transport.serve`, EtcdRefused and StoreError."""
    stop = stop or stop_signals()
    while not stop.done():
        following = Follower(store, make_transport())
        async with following.serving(listen):
            if address_file is not None:
                replace_file(address_file, f"{Address.parse(listen)}\n".encode())
            await following.until_elected(stop)
        if store.leads:
            async with _term_of(store) as term:
                if stop.done():
                    return
                log.info("this registry leads from now on")
                try:
                    await lead(stop, term)
                except NotLeading:
                    pass  # already logged
                except EtcdAway as error:
                    log.warning("this registry lost the lead at once: %s", error)


@asynccontextmanager
async def _term_of(store: Store) -> AsyncIterator[asyncio.Task[None]]:
    """Keeps the term of a registry that leads; yields a task that ends with it."""

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

    def __init__(self, store: Store, transport: Transport) -> None:
        self._store, self._transport = store, transport
        self._leader, self._etcd_error = "", ""

    @asynccontextmanager
    async def serving(self, listen: str) -> AsyncIterator[None]:
        """Serves on HOST:PORT. Raises the errors of `Transport.serve`."""
        calls = (
            f"{service.full_name}/{method.name}"
            for service in (REGISTRY_CALLS, OPERATOR_CALLS)
            for method in service.methods
        )
        await self._transport.serve(listen, dict.fromkeys(calls, self._refuse), ())
        try:
            yield
        finally:
            await self._transport.stop(FAREWELL)

    async def until_elected(self, stop: asyncio.Future[int]) -> None:
        """Follows until this registry leads, or `stop` is done. Raises EtcdRefused, StoreError."""
        while not stop.done():
            try:
                leader = await asyncio.to_thread(self._store.leader)
                if not leader and await asyncio.to_thread(self._store.campaign):
                    return
                if self._etcd_error:
                    log.info("etcd is back")
                if leader not in ("", self._leader):
                    log.info("this registry follows; %s leads", readable(leader))
                self._leader, self._etcd_error = leader, ""
            except EtcdAway as error:
                if not self._etcd_error:
                    log.error("%s. %s", error, NO_LEADER)
                self._leader, self._etcd_error = "", str(error)
            await asyncio.wait([stop], timeout=LOOK)

    async def _refuse(self, _: AcceptedStream) -> None:
        """Refuses a call. The reason names the leader, or says why there is none."""
        why = "this registry follows, and none leads yet; try again"
        if self._etcd_error:
            why = f"{self._etcd_error}: no registry leads, and nodes train on in their last view"
        elif self._leader:
            why = f"this registry follows, and {readable(self._leader)} leads: name that one, too"
        raise Broken("UNAVAILABLE", why)

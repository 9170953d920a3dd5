"""A registry's process: alone with a journal, or one of several that share a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planaria.bootstrap.address import Address
from planaria.bootstrap.admission import Admission, folder_beside
from planaria.bootstrap.authority import Role
from planaria.bootstrap.credentials import Certified, Credentials
from planaria.bootstrap.etcd import Etcd, EtcdPlace
from planaria.bootstrap.journal import Journal, read_view
from planaria.bootstrap.leader_election import GRACE, ending_with, lead_in_turn
from planaria.bootstrap.registry_enrolment import advertised, beside, enrolling
from planaria.bootstrap.rules import MembershipRules
from planaria.bootstrap.service import Part, RegistryServer, ViewStore, over_grpc, serve
from planaria.bootstrap.store import Store
from planaria.node.commands.registry import run_on_loop
from planaria.node.commands.terminal import console, say
from planaria.node.launch.resolve import registry_rules, run_id
from planaria.node.launch.settings import resettled
from planaria.node.page.http_address import PageAddress
from planaria.node.run_file import RunFile, without_private

if TYPE_CHECKING:
    from planaria.node.commands.machines import BootstrapOptions


@dataclass(frozen=True)
class Bootstrapping:
    """A registry's options, and what follows. Methods raise what the parts that they start do."""

    options: BootstrapOptions
    listen: Address
    run: RunFile  # resolved
    limits: Mapping[str, Any]  # rules of the registry that aren't the run's
    credentials: Credentials
    enrol: Address | None  # None: beside `listen`
    others: Sequence[Address]
    page: PageAddress | None

    def serve_alone(self) -> None:
        """Serve a registry with a journal, or none, until a signal."""
        journal, after, folder = self.options.journal, self.options.after, self.options.authority
        if after is not None and journal is None:
            raise ValueError(f"--after {after}: give this run a --journal of its own, too")
        if folder is None and journal is not None:
            folder = folder_beside(journal)
        admission = Admission(folder, self._certifies)
        if journal is None:
            run_on_loop(self._serve(admission, self._certified(admission), None))
            return
        with Journal(journal, run_id(self.run), admission.key) as log:
            if after is not None and log.view is None:
                last = read_view(after)
                log.go_on_from(last, f"the run {last.run} continues with other settings")
            page = self.page and replace(
                self.page, port_file=journal.with_name(f"{journal.name}.page")
            )
            serving = replace(self, page=page)
            run_on_loop(serving._serve(admission, self._certified(admission), log))

    def serve_among_others(self) -> None:
        """Serve when elected leader among the store's registries, until a signal."""
        authority = self.options.authority
        if authority is None or not self.listen.port:
            raise ValueError(
                "--store needs a port in --listen, and --authority DIR, with the same "
                "authority.pem at each of the run's registries"
            )
        admission = Admission(authority, self._certifies)
        certified = self._certified(admission)
        credentials = self._credentials(certified)
        at = advertised(self.listen, self.listen.port, self._advertised(self.listen.port))
        etcd = Etcd(EtcdPlace.parse(self.options.store))
        shared = Store(etcd, run_id(self.run), admission.key, str(at))
        longer = {"restart_grace": self.rules_of(self.run).grace + GRACE}
        patient = replace(self, limits={**self.limits, **longer})

        async def lead(stop: asyncio.Future[int], term: asyncio.Task[None]) -> None:
            decided = partial(Admission, authority, self._certifies, decided=shared)
            leading = await asyncio.to_thread(decided)
            await patient._serve(leading, certified, shared, stop, partial(ending_with, term))

        transport = partial(over_grpc, credentials, self.options.insecure)
        place = str(self.listen), transport, self.options.address_file
        run_on_loop(lead_in_turn(shared, lead, *place))

    # -- the run

    def rules_of(self, run: RunFile) -> MembershipRules:
        return replace(registry_rules(run), **self.limits)

    # -- inside ----------------------------------------------------------------------------------

    @cached_property
    def _certifies(self) -> bool:
        if self.credentials.server is not None or self.options.insecure:
            return False
        return self.options.authority is not None or not self.listen.is_loopback

    def _certified(self, admission: Admission) -> Certified | None:
        return Certified(admission.own_pair(), admission.own_pair) if self._certifies else None

    def _credentials(self, certified: Certified | None) -> Credentials:
        if certified is None:
            return self.credentials
        return Credentials.of(certified, self.credentials.token)

    def _advertised(self, port: int) -> Address | None:
        """The registry's address in --advertise; None: not given."""
        named = self.options.advertise
        return None if named is None else Address.parse_host(named, port)

    def _serve(
        self,
        admission: Admission,
        certified: Certified | None,
        store: ViewStore | None,
        stop: asyncio.Future[int] | None = None,
        *parts: Part,
    ) -> Coroutine[object, object, None]:
        rules, run_file = self.rules_of(self.run), without_private(self.run)
        registry = RegistryServer(
            rules, run_file, store, admission=admission, resettle=partial(resettled, self.rules_of)
        )
        parts = (*parts, self._watched)
        if certified is not None:
            parts = (*parts, partial(self._invites_beside, admission, certified))
        listen, credentials = str(self.listen), self._credentials(certified)
        place = listen, credentials, self.options.insecure, self.options.address_file
        return serve(registry, *place, parts, stop)

    def _invites_beside(
        self, admission: Admission, certified: Certified, registry: RegistryServer
    ) -> AbstractAsyncContextManager[None]:
        listen, enrol = self.listen, self.enrol
        at = enrol or beside(listen._replace(port=registry.port if listen.port else 0))

        def addresses_for(port: int) -> tuple[Address, Address]:
            place = advertised(listen, registry.port, self._advertised(registry.port))
            if enrol is None or enrol.is_any:
                return place, place._replace(port=port)
            return place, enrol._replace(port=port)

        show = partial(_show_invites, admission.folder)
        named = admission, certified, run_id(self.run), at, addresses_for, show, self.others
        return enrolling(*named)

    @asynccontextmanager
    async def _watched(self, registry: RegistryServer) -> AsyncIterator[None]:
        """Beside the registry, its page, and the command that hears of events."""
        command = self.run.notify.command
        if self.page is None and not command:
            yield
            return
        from planaria.node.page.notifying import notifying
        from planaria.node.page.serving import LocalPage, page_beside

        living = LocalPage(registry, self.run, self.options.price)
        async with AsyncExitStack() as stack:
            if self.page is not None:
                await stack.enter_async_context(page_beside(living, self.page))
            if command:
                await stack.enter_async_context(notifying(living, command))
            yield


def _show_invites(folder: Path | None, invites: Mapping[Role, str]) -> None:
    """Print commands with the invites. Output that isn't a terminal may be logged, so there the
    invite's file is named, if there is one."""
    for role, text in invites.items():
        word = text if folder is None or console.is_terminal else f"@{folder / f'{role}.invite'}"
        command = "invite" if role is Role.OPERATOR else "node"
        say(f"{role}: planaria {command} --join {word}")

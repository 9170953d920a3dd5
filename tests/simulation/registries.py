"""Registries that share a run through a store with etcd's semantics; one leads at a time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from planaria.bootstrap.leader_election import ending_with, lead_in_turn
from planaria.bootstrap.registry_pb2 import View
from planaria.bootstrap.store import Store
from simulation.registry import KEY, LOOK, Registry
from simulation.transport import MemoryTransport
from simulation.world import Process
from tests.bootstrap.fake_etcd import FakeEtcd, Fate

if TYPE_CHECKING:
    from simulation.cluster import Cluster

FATES: Final = [Fate.LOST, Fate.LOST, Fate.UNANSWERED]
"""Outcomes of a registry's requests while it can't reach etcd."""


class CheckedStore(Store):
    """A store that demands growing numbers of views, whichever registry leads."""

    registries: Registries

    def append(self, view: View) -> None:
        super().append(view)
        newest, cluster = self.registries.newest, self.registries.cluster
        grows = view.number > newest.number
        cluster.demand(grows, "I6", f"view {view.number} comes after view {newest.number}")
        self.registries.journal.append(view)


class Registries(Registry):
    """Three processes at addresses of their own. `process` and `server` are those of the present or
    last leader."""

    addresses = ("10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1")

    def __init__(self, cluster: Cluster) -> None:
        self.etcd = FakeEtcd()
        self.away: dict[str, float] = {}  # by address: until when it can't reach etcd
        self.processes: dict[str, Process] = {}
        super().__init__(cluster)

    def restart(self) -> None:
        """Starts all processes that are down."""
        for address in self.addresses:
            if address not in self.processes or not self.processes[address].alive:
                process = self.processes[address] = Process(self.world, self.name)
                self.process = process
                process.spawn(self._lead_in_turn(process, address))

    async def _lead_in_turn(self, process: Process, address: str) -> None:
        cluster = self.cluster

        def transport() -> MemoryTransport:
            return MemoryTransport(cluster.network, process, address)

        def fate() -> Fate:
            self.etcd.passes(self.world.now - self.etcd.now)
            reached = self.world.now >= self.away.get(address, 0.0)
            return Fate.ANSWERED if reached else self.world.random.choice(FATES)

        async def lead(stop: asyncio.Future[int], term: asyncio.Task[None]) -> None:
            server = self.make_server(store)
            await server.start(address, transport=transport())
            self.world.say(self.name, f"{address} leads")
            cluster.counts["led"] += 1
            self.process, self.server = process, server
            async with ending_with(term, server):
                try:
                    await server.wait()
                finally:
                    await server.stop()

        link = self.etcd.link(fate)
        store = CheckedStore(link, "run", KEY, address, lambda: self.world.now)  # type: ignore[arg-type]
        store.registries = self
        await lead_in_turn(store, lead, address, transport, stop=asyncio.Future[int]())

    def leave_etcd(self, seconds: float) -> None:
        """Cuts the leader off from etcd; the others still reach it."""
        address = next(at for at, process in self.processes.items() if process is self.process)
        self.world.say(self.name, f"{address} can't reach etcd for {seconds:.1f} s")
        self.away[address] = self.world.now + seconds

    def _look(self) -> None:
        if hasattr(self, "server"):
            super()._look()
        else:
            self.world.after(LOOK, self._look)

"""The production registry as a process; its journal survives a crash."""

from __future__ import annotations

import hashlib
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from planaria.bootstrap import registry_pb2 as pb
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.invites import Invites
from planaria.bootstrap.journal import JournalError
from planaria.bootstrap.rules import MembershipRules, Resettle
from planaria.bootstrap.service import RegistryServer
from planaria.bootstrap.step_time import Load
from planaria.bootstrap.views import apply, difference
from simulation.keys import PrivateKey
from simulation.transport import MemoryTransport
from simulation.world import Process
from tests.membership import validate_state

if TYPE_CHECKING:
    from simulation.cluster import Cluster

ADDRESS: Final = "10.0.0.1:1"
KEY: Final = Identity(PrivateKey(bytes(32)))  # type: ignore[arg-type]  # the run's key
LOOK: Final = 0.1


@cache
def key_of(host: str) -> Identity:
    """The key of every node on this host."""
    key = PrivateKey(hashlib.sha256(host.encode()).digest())
    return Identity(key)  # type: ignore[arg-type]


class MemoryJournal:
    """A journal. `view` is on the disk; `newest` is the newest view that was to be written."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.view: pb.View | None = None
        self.newest = pb.View()
        self.fails = False
        self.issued: dict[int, pb.View] = {}

    def append(self, view: pb.View) -> None:
        """Appends a view. Raises JournalError if the disk is full."""
        if view.number not in self.issued or view != self.newest:
            self._check(view)
        if self.fails:
            raise JournalError("the disk is full")
        self.view = view

    def _check(self, view: pb.View) -> None:
        cluster = self._cluster
        cluster.world.say("registry", f"view {view.number}: {view.reason}")
        cluster.check_issued(self.newest, view)
        difference_applied = apply(self.newest, difference(self.newest, view))
        cluster.demand(difference_applied == view, "I6", "it isn't what its difference gives")
        self.newest = self.issued[view.number] = view
        cluster.registry.take_note(view)


class Registry:
    """Registry processes, one after the other, with one journal."""

    name = "registry"
    addresses: tuple[str, ...] = (ADDRESS,)
    run_file = ""
    resettle: Resettle | None = None

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.journal = MemoryJournal(cluster)
        self.rules = MembershipRules(
            run="run",
            stages=cluster.rules.stages,
            replicas=max(1, len(cluster.hosts) // (cluster.rules.stages + 1)),
            start_grace=10.0,
            policy=cluster.rules.policy,
            load=Load((1,) * cluster.rules.stages, cluster.rules.microbatches, 64, 64),
        )
        self.restart()
        self.world.after(LOOK, self._look)

    def restart(self) -> None:
        if getattr(self, "process", None) and self.process.alive:
            return
        self.process = Process(self.world, self.name)
        self.journal.newest = self.journal.view or pb.View()
        self.server = self.make_server(self.journal)
        transport = MemoryTransport(self.cluster.network, self.process, self.name)
        self.process.spawn(self.server.start(ADDRESS, transport=transport))
        if self.journal.view is not None:
            self.world.say(self.name, "is back")

    def make_server(self, journal: Any) -> RegistryServer:
        admission: Any = SimpleNamespace(key=KEY, invites=Invites(), certifies=False)
        return RegistryServer(
            self.rules, self.run_file, journal, admission=admission, resettle=self.resettle
        )

    def take_note(self, view: pb.View) -> None:
        """Called when a view is issued; does nothing here."""

    def crash(self) -> None:
        if self.process.alive:
            self.world.say(self.name, "crashes")
            self.process.alive = False
            self.cluster.network.died(self.process)

    def freeze(self, seconds: float) -> None:
        process = self.process
        if process.responsive:
            process.freeze()
            self.world.after(seconds, process.thaw)

    @property
    def newest(self) -> pb.View:
        return self.journal.newest

    def view(self) -> pb.View:
        return self.newest

    def names(self) -> set[str]:
        return {member.node for member in self.newest.members}

    def fill_disk(self, seconds: float) -> None:
        self.journal.fails = True
        self.world.after(seconds, self._free_disk)

    def _free_disk(self) -> None:
        self.journal.fails = False

    def forget(self) -> None:
        """Deletes the journal."""
        self.journal.view, self.journal.newest = None, pb.View()
        self.journal.issued.clear()

    def _look(self) -> None:
        if self.process.responsive:
            validate_state(self.server.machine)
        self.world.after(LOOK, self._look)

"""Three registries of one run share etcd: whichever is lost, training goes on."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path

from planaria.bootstrap.admission import Admission
from planaria.bootstrap.invites import encode
from planaria.bootstrap.registry_pb2 import View
from planaria.bootstrap.store import Store
from planaria.node.launch.resolve import registry_rules
from planaria.node.report.ledger import audit
from planaria.node.run_file import load
from tests.etcd_server import EtcdServer, etcd_server
from tests.harness.wire import Wire
from tests.swarm.test_invited import DEADLINE, TOKEN, Machines

NAMES = ("r1", "r2", "r3")


class Registries(Machines):
    """Registries with a folder each, in which the operator has put the run's key."""

    def __init__(self, folder: Path, data: Path, etcd: EtcdServer, ways: list[Wire]) -> None:
        super().__init__(folder, data, stages=1)
        self.etcd, self.ways = etcd, dict(zip(NAMES, ways, strict=True))
        self.run = registry_rules(load(folder / "run.toml")).run
        self.key = Admission(folder / "r1").key
        for name in NAMES[1:]:
            (folder / name).mkdir(mode=0o700)
            shutil.copy(folder / "r1" / "authority.pem", folder / name)
        self.ports = dict(zip(NAMES, _ports(2 * len(NAMES))[::2], strict=True))
        self.authority = folder / "r1"

    def at(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name]}"

    def begin_registry(self, name: str) -> None:
        others = ",".join(self.at(other) for other in NAMES if other != name)
        self.processes.start(
            name,
            [
                *("bootstrap", "--run", str(self.folder / "run.toml"), "--listen", self.at(name)),
                *("--authority", str(self.folder / name), "--token", TOKEN, "--http", "none"),
                *("--store", f"etcd://{self.ways[name].address}", "--others", others),
            ],
        )

    async def leader(self, other_than: str = "") -> str:
        """Wait for a leader other than the given registry, and return its name."""
        store = Store(self.etcd.etcd, self.run, self.key, "")
        async with asyncio.timeout(DEADLINE):
            while True:
                at = await asyncio.to_thread(store.leader)
                name = next((name for name in NAMES if at == self.at(name)), "")
                if name and name != other_than:
                    return name
                await asyncio.sleep(0.02)

    async def view(self, condition: Callable[[View], bool]) -> View:
        """Return the newest view in etcd, once it fulfils the condition."""
        async with asyncio.timeout(DEADLINE):
            while True:
                kept = await asyncio.to_thread(self.etcd.history, f"planaria/{self.run}/view")
                if kept and condition(view := View.FromString(kept[-1])):
                    return view
                await asyncio.sleep(0.1)

    async def trains_on(self) -> None:
        step = await self.committed(beyond=0)
        await self.committed(beyond=step + 5)

    def logged(self, name: str) -> str:
        return self.processes.log(name).read_text()

    async def says(self, name: str, words: str, since: str = "") -> None:
        """Wait until its log has the regular expression `words` after the text `since`."""
        async with asyncio.timeout(DEADLINE):
            while not re.search(words, self.logged(name).removeprefix(since)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def _ports(count: int) -> list[int]:
    """Return free consecutive ports, since enrolment uses the port below a registry's."""
    for first in range(20_000, 30_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return list(range(first + 1, first + count + 1))
    raise AssertionError("no ports are free")


@asynccontextmanager
async def registries(folder: Path, data: Path) -> AsyncIterator[Registries]:
    async with AsyncExitStack() as stack:
        etcd = stack.enter_context(etcd_server(folder))
        ways = [await stack.enter_async_context(Wire(f"127.0.0.1:{etcd.port}")) for _ in NAMES]
        here = Registries(folder, data, etcd, ways)
        stack.callback(here.processes.kill_all)
        for name in NAMES:
            here.begin_registry(name)
        try:
            yield here
        except (TimeoutError, AssertionError) as error:
            error.add_note(here.logs())
            raise


async def test_whoever_leads_is_lost_and_training_goes_on(data: Path, tmp_path: Path) -> None:
    async with registries(tmp_path, data) as here:
        here.authority = first = here.folder / await here.leader()
        invited = await here.invite("owner")
        assert {*invited.registries} == {here.at(name) for name in NAMES}
        for name in ("a", "b"):
            here.start_node(name, encode(invited))
        await here.committed(beyond=1)

        here.processes.kill(first.name)
        second = await here.leader(other_than=first.name)
        await here.trains_on()

        before = {second: here.logged(second)}
        here.ways[second].passing.clear()
        await here.leader(other_than=second)
        await here.says(second, "the registry ends")
        await here.trains_on()
        here.ways[second].passing.set()
        # It leads again if the present leader was held up for as long as a lease.
        await here.says(second, "this registry (follows|leads from now on)", before[second])

        left = [name for name in NAMES if name != first.name]
        before = {name: here.logged(name) for name in left}
        with here.etcd.stopped():
            for name in left:
                await here.says(name, "No views are issued meanwhile", before[name])
            await here.trains_on()
        here.start_node("c", encode(invited))  # invited by the first leader
        last = await here.view(lambda view: len(view.members) == 3)
        assert not here.processes.ended(), here.logs()
        check_views(here, last)


def check_views(here: Registries, last: View) -> None:
    """Check that views in etcd are in order, and that no member was ever evicted."""
    numbers = [int(value) for value in here.etcd.history(f"planaria/{here.run}/number")]
    kept = [View.FromString(value) for value in here.etcd.history(f"planaria/{here.run}/view")]
    assert [view.number for view in kept] == numbers
    assert all(a < b for a, b in pairwise(numbers)) and numbers[-1] == last.number
    for before, view in pairwise(kept):
        assert {(m.node, m.joined) for m in before.members} <= {
            (m.node, m.joined) for m in view.members
        }
    ledgers = here.folder / "ledgers"
    ledgers.mkdir()
    for ledger in here.folder.glob("[abc]/ledger-*.jsonl"):
        shutil.copy(ledger, ledgers)
    assert audit(ledgers).exact

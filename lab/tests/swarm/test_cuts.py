"""Tests of live nodes that can't reach each other: behind proxies that drop another node's
connections, or because they only dial out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.registry_pb2 import Description
from planaria.node.report.ledger import audit
from planaria_lab.chaos.proxy import Proxy
from tests.swarm.deaths import Swarm
from tests.swarm.small import small

RUN = small(steps=100_000, training__validation_microbatches=0, swarm__lease=3, swarm__silence=2)
SPARE = "0.1"


class CutSwarm(Swarm):
    """A swarm with one node per stage and a second one of stage 0. Nodes are behind proxies, except
    those in `dials`, which only dial out."""

    def __init__(self, out: Path, data: Path, dials: tuple[str, ...]) -> None:
        super().__init__(out, data, RUN, {})
        self.dials = dials
        self.proxies = {
            slot: Proxy(processes=self.processes.running) for slot in ("0.0", SPARE, "1.0", "2.0")
        }

    def reached_at(self, slot: str) -> list[str]:
        if slot in self.dials:
            return ["--advertise", "none"]
        return ["--listen", self.proxies[slot].behind, "--advertise", self.proxies[slot].address]

    def slot_of(self, node: str) -> str:
        (pid,) = [event["pid"] for event in self.read("joined") if event["node"] == node]
        return next(slot for slot, running in self.processes.running().items() if running == pid)

    async def until(self, event: str, condition: Callable[[], object]) -> None:
        while not condition():
            assert time.monotonic() < self.deadline, f"still waiting for {event}"
            assert self.processes.ended() == [], f"while waiting for {event}"
            await asyncio.sleep(0.02)

    async def carrier(self, wanted: Callable[[str], object]) -> str:
        """Wait until both nodes that are cut off from each other report the same wanted relay, and
        return it; empty: none."""

        relays: list[str] = []

        def is_relayed() -> object:
            newest = {event["node"]: event["via"] for event in self.read("relayed")}
            relays[:] = newest.values()
            return len(relays) == 2 and relays[0] == relays[1] and wanted(relays[0])

        await self.until("a relay", is_relayed)
        return relays[0]

    async def steps(self, count: int) -> None:
        wanted = len(self.read("committed")) + count
        await self.until(f"{count} steps", lambda: len(self.read("committed")) >= wanted)

    async def described(
        self, event: str, condition: Callable[[Description], object]
    ) -> Description:
        """Wait until the registry's description fulfils the condition, and return it."""
        client = RegistryClient([(self.out / "address").read_text().strip()])
        try:
            while not condition(description := await client.describe()):
                assert time.monotonic() < self.deadline, f"still waiting for {event}: {description}"
                await asyncio.sleep(0.1)
            return description
        finally:
            await client.close()


@asynccontextmanager
async def training(out: Path, data: Path, dials: tuple[str, ...] = ()) -> AsyncIterator[CutSwarm]:
    """Run a swarm; at its end, check that every sample has counted once."""
    swarm = CutSwarm(out, data, dials)
    try:
        for proxy in swarm.proxies.values():
            await proxy.start()
        swarm.start()
        swarm.start_node(SPARE)
        await swarm.steps(3)
        yield swarm
    finally:
        swarm.processes.kill_all()
        for proxy in swarm.proxies.values():
            await proxy.close()
    assert audit(out / "logs").exact


async def test_two_that_are_cut_off_from_each_other_are_carried_for_until_they_are_not(
    data: Path, tmp_path: Path
) -> None:
    async with training(tmp_path, data) as swarm:
        swarm.proxies["1.0"].cut("2.0")
        swarm.proxies["2.0"].cut("1.0")
        await swarm.carrier(bool)
        await swarm.steps(3)
        description = await swarm.described(
            "a relay", lambda known: any(c.carried for c in known.cuts)
        )
        (cut,) = description.cuts
        assert swarm.slot_of(cut.via) in ("0.0", SPARE), "who has links to both"
        assert cut.state == f"{cut.via} relays for them"
        for slot in ("1.0", "2.0"):
            swarm.proxies[slot].cut()
        await swarm.carrier(lambda via: not via)
        await swarm.steps(3)
        description = await swarm.described("no cut", lambda known: not known.cuts)
        assert not description.evictions


async def test_two_that_only_dial_out_are_carried_for_by_another_when_the_relay_is_killed(
    data: Path, tmp_path: Path
) -> None:
    async with training(tmp_path, data, dials=("1.0", "2.0")) as swarm:
        via = await swarm.carrier(bool)
        killed = swarm.slot_of(via)
        swarm.processes.kill(killed)
        other = await swarm.carrier(lambda node: node not in ("", via))
        assert {killed, swarm.slot_of(other)} == {"0.0", SPARE}
        await swarm.steps(3)
        description = await swarm.described("an eviction", lambda known: known.evictions)
        assert [gone.member.node for gone in description.evictions] == [via]

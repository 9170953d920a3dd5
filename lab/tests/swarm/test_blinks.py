"""All links of a swarm break each second: steps go on, and no loss is reported."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from planaria.node.data.corpus import Corpus
from planaria_lab.chaos.proxy import Proxy
from tests.swarm.in_process import LocalSwarm, OneSeat
from tests.swarm.lines import Lines
from tests.swarm.small import small

STEPS, RESETS = 10, 5
"""The fewest steps to commit meanwhile, and the fewest times that all links break."""


class BehindProxies(LocalSwarm):
    """A swarm with a proxy in front of each node's port."""

    async def __aenter__(self) -> BehindProxies:
        self.stack, self.proxies = AsyncExitStack(), {}
        slots = [(stage, n) for stage in (0, 1, 2) for n in range(self.run.swarm.replicas)]
        for slot in slots:
            self.proxies[slot] = await self.stack.enter_async_context(Proxy())
        await super().__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        await self.stack.aclose()

    def start(self, stage: int, replica: int) -> OneSeat:
        proxy = self.proxies[stage, replica]
        return super().start(stage, replica, advertise=proxy.address, listen=proxy.behind)


@pytest.mark.parametrize("replicas", [1, 2])
async def test_links_that_break_each_second_cost_no_attempt(data, tmp_path, replicas):
    run = small(replicas=replicas, steps=1000)
    async with BehindProxies(run, Corpus.open(data), tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 2)
        since, view = swarm.committed(), swarm.registry.membership.view.number
        proxies = swarm.proxies.values()
        blinking = [asyncio.create_task(proxy.blink(1.0, 3600.0)) for proxy in proxies]
        links = 3 * replicas**2  # three pairs of neighbours, two connections each
        await swarm.until(
            lambda: (
                swarm.committed() >= since + STEPS
                and sum(proxy.resets for proxy in proxies) >= RESETS * 2 * links
            )
        )
        for blink in blinking:
            blink.cancel()
        assert swarm.registry.membership.view.number == view
        assert not any(node.over.done() for node, _ in swarm.nodes.values())
        lines = Lines(tmp_path)
        for kind in ("link lost", "aborted", "masked", "rebuilding"):
            assert lines.events(kind) == []

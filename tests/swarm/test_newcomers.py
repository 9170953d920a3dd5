"""All who vote on a step die at once, and only newcomers are left that have copied the state."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.node.data.corpus import Corpus
from planaria.node.driver.attempting import Attempting
from planaria.node.driver.joining import Joining
from planaria.node.report.ledger import audit
from tests.swarm.in_process import LocalSwarm
from tests.swarm.small import small


@pytest.fixture(scope="module")
def corpus(data: Path) -> Corpus:
    return Corpus.open(data)


async def test_the_run_goes_on_from_what_the_newcomers_have(corpus, tmp_path, monkeypatch):
    # When everything seems lost, the registry waits for as many nodes as at the start.
    changes = {"training__validation_microbatches": 0, "swarm__start_grace": 2.0}
    run = small(stages=2, replicas=2, steps=100_000, **changes)
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 2)
        with monkeypatch.context() as patch:
            patch.setattr(Joining, "caught_up", lambda _: {})  # nobody is let in
            for stage in range(3):
                await swarm.kill(stage, 1)
            joiners = [swarm.start(stage, 1) for stage in range(3)]
            since = swarm.committed()
            await swarm.until(
                lambda: all(
                    one.member and one.member.following and one.member.committed > since
                    for one in joiners
                )
            )
            patch.setattr(Attempting, "_if_all_ready", lambda self, _: self.stays())  # no commit
            seats = [node.seat for node, _ in swarm.nodes.values()]
            decided = max(seat.driver.standing.committed for seat in seats)
            await swarm.until(lambda: all(seat.member.committed == decided for seat in seats))
        at = swarm.committed()
        await swarm.kill_at_once((0, 0), (1, 0), (2, 0))
        await swarm.until(lambda: swarm.committed() >= at + 3)
        (resuming,) = swarm.lines.events("resuming")
        assert resuming["step"] == at
        assert "no member that trained is left" in resuming["reason"]
        assert {one.member.lineage for one in joiners} == {1}
    assert audit(tmp_path).exact

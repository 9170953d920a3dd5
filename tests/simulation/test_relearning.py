"""A stage relearns while it trains: its updates enter with commits, under faults, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from unittest.mock import patch

import pytest

from planaria.node.transaction.relearning_progress import RelearningProgress
from planaria.node.transaction.rules import TransactionRules
from simulation.cluster import Host, Trap
from simulation.node import Node
from simulation.ports import Files
from simulation.scenario import Scenario, ScenarioError, run

LESSON = 2
"""The stage that is lost."""


class Beside(Scenario):
    """The only node of a stage is lost for good, and a standby guesses its weights. While these are
    relearned and trained, `happens` names what else happens."""

    happens = ""

    def _rules(self, policy: str | None) -> TransactionRules:
        rules = super()._rules(policy)
        return replace(
            rules,
            stages=4,
            steps=20,
            microbatches=4,
            relearn=True,
            strict=False,
            relearn_seconds=2.0,
        )

    def _relearning(self) -> Mapping[str, float]:
        return {"enough": 0.9, "each_step": self.seed % 2 * 3}

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        stages = [0, *range(rules.stages + 1)]
        hosts = [Host(f"h{i}", stage, False) for i, stage in enumerate(stages)]
        return [*hosts, Host("standby", None, False)]

    def _files(self, rules: TransactionRules, hosts: list[Host]) -> Files:
        for host in hosts:
            host.saves = True
        return Files(save_every=1)

    def _overflowing(self, rules: TransactionRules) -> set[int]:
        return {9} if self.seed % 3 == 0 else set()

    def _plan_faults(self) -> float:
        self.cluster.traps.append(Trap("committed", 3, self._lose_stage))
        self.cluster.traps.append(Trap("rebuilt", 1, self._soon))
        return 30.0

    def _lose_stage(self) -> None:
        for node in self._learners():
            self._crash_for_good(node)

    def _learners(self) -> list[Node]:
        return [node for node in self._some() if LESSON in node.stages]

    def _crash_for_good(self, node: Node) -> None:
        self.cluster.hosts[node.process.host].down = True
        self.cluster.crash(node.process, "for good")

    def _soon(self) -> None:
        if self.happens:
            self.world.after(self.random.uniform(0.0, 3.0), getattr(self, f"_{self.happens}"))

    # --- what happens

    def _learner_dies(self) -> None:
        for node in self._learners():
            self.cluster.crash(node.process, "while it relearns")

    def _driver_dies(self) -> None:
        if (driver := self._driver()) is not None:
            self.cluster.crash(driver.process, "while a stage relearns")

    def _somebody_comes(self) -> None:
        host = Host("late", LESSON, False)
        self.cluster.hosts[host.name] = host
        self.cluster.start(host)


@pytest.mark.parametrize("happens", ["", "learner_dies", "driver_dies", "somebody_comes"])
def test_what_a_stage_relearns_while_it_trains_enters_with_commits(happens: str) -> None:
    counts = Counter[str]()
    for seed in (3, 5):
        kind = type("Happens", (Beside,), {"happens": happens})
        counts += run(seed, policy="checkfree", kind=kind).counts
    assert counts["relearned beside"] > 2
    assert counts["relearned"] >= 2, "each lesson ends"
    assert counts["saved while it relearned"] > 2


def test_updates_after_the_vote_are_caught() -> None:
    with (
        patch.object(RelearningProgress, "offer", lambda tally: tally.made),
        pytest.raises(ScenarioError, match="and has made"),
    ):
        for seed in (18, *range(0, 18, 2)):
            run(seed, policy="checkfree", kind=Beside)

"""Runs that begin from a checkpoint that only some machines have; the others get its weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from planaria.node.transaction.rules import TransactionRules
from planaria.recovery.policy import POLICIES
from simulation.cluster import Host
from simulation.scenario import Scenario, run


class FromCheckpoint(Scenario):
    """One or two machines have the checkpoint; the faults are those of any scenario."""

    def _rules(self, policy: str | None) -> TransactionRules:
        rules = super()._rules(policy)
        needed = rules.policy.twins or rules.policy.checkpoints  # on each machine
        return replace(rules, policy=POLICIES["checkfree"]) if needed else rules

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        hosts = super()._hosts(rules)
        having = set(self.random.sample(range(len(hosts)), self.random.choice([1, 1, 2])))
        for number, host in enumerate(hosts):
            host.origin = number in having
        return hosts


def test_the_weights_that_it_begins_with_are_given_to_who_lacks_them() -> None:
    """They are given at the beginning, and again when a stage is lost with all its nodes."""
    given = Counter[str]()
    for seed in (1, 6):
        given += run(seed, kind=FromCheckpoint).counts
    assert given["origin"]
    assert given["pretrained"]

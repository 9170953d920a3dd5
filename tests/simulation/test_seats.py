"""Swarms that shrink and grow: whoever is left takes the seats of who is gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planaria.node.transaction.rules import TransactionRules
from planaria.recovery.policy import POLICIES
from simulation.cluster import Host, Trap
from simulation.ports import Files
from simulation.scenario import Scenario, run

BETWEEN = 2
"""Commits between two losses."""


class Shrinking(Scenario):
    """Hosts are lost one after the other for good, as long as a rebuild has what it needs, down to
    the last one; then they come back, one after the other. Each has room for all stages."""

    def _rules(self, policy: str | None) -> TransactionRules:
        rules = super()._rules(policy)
        least = 4 if rules.policy.swapped else 2
        stages = self.random.randint(least, least + 1)
        return replace(rules, stages=stages, steps=40, strict=False)

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        stages = rules.stages + 1
        replicas = self.random.choice([1, 1, 2])
        wanted = [stage for stage in range(stages) for _ in range(replicas)]
        return [Host(f"h{i}", stage, False, room=stages) for i, stage in enumerate(wanted)]

    def _files(self, rules: TransactionRules, hosts: list[Host]) -> Files:
        return Files(0, 2 if rules.policy.checkpoints else 0)

    def _overflowing(self, rules: TransactionRules) -> set[int]:
        return set()

    def _plan_faults(self) -> float:
        self.fewest = len(self.cluster.hosts)
        self.after_commits(3, self.lose)
        return 30.0

    def after_commits(self, count: int, then: object) -> None:
        self.cluster.traps.append(Trap("committed", count, then))  # type: ignore[arg-type]

    def lose(self) -> None:
        there = self._some()
        self.fewest = min(self.fewest, len(there))
        able = [node for node in there if self.cluster.recoverable_without([node])]
        if len(there) == 1 or not able:
            self.after_commits(BETWEEN, self.bring_back)
            return
        node = self.random.choice(able)
        self.cluster.hosts[node.process.host].down = True
        self.cluster.crash(node.process, "for good")
        self.after_commits(BETWEEN, self.lose)

    def bring_back(self) -> None:
        gone = [host for host in self.cluster.hosts.values() if host.down]
        if gone:
            host = self.random.choice(gone)
            host.down = False
            self.cluster.start(host)
            self.after_commits(BETWEEN, self.bring_back)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_goes_on_with_whoever_is_left_and_gives_seats_back(policy: str) -> None:
    fewest = []
    for seed in range(2):
        scenario, result = run_of(seed, policy)
        assert result == "finished", f"seed {seed}"
        hosts = scenario.cluster.hosts
        assert not any(host.down for host in hosts.values()), f"seed {seed}: not all came back"
        fewest.append(scenario.fewest)
        members = scenario.cluster.registry.view().members
        assert max(len(member.seats) for member in members) == 1, f"seed {seed}: not given back"
    assert min(fewest) == 1


def run_of(seed: int, policy: str) -> tuple[Shrinking, str]:
    made: list[Shrinking] = []

    class Noted(Shrinking):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            made.append(self)

    outcome = run(seed, policy=policy, kind=Noted).outcome
    return made[0], outcome

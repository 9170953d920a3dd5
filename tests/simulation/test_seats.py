"""Swarms that shrink and grow: remaining nodes take the seats of lost ones."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar, TypeVar

import pytest

from planaria.bootstrap import registry_pb2 as pb
from planaria.node.transaction.rules import TransactionRules
from planaria.recovery.facts import INEXACT
from planaria.recovery.policy import POLICIES
from simulation.cluster import Host, Trap
from simulation.ports import Files
from simulation.registry import Registry
from simulation.scenario import Even, Scenario, run

S = TypeVar("S", bound=Scenario)
BETWEEN = 2
"""Commits between two losses."""


class Shrinking(Even):
    """Hosts are lost one after the other, down to the last one, as long as a rebuild has what it
    needs. Then they come back, one after the other. Each has room for all stages."""

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

    def _plan_faults(self) -> float:
        self.fewest = len(self.cluster.hosts)
        self.after_commits(3, self.lose)
        return 30.0

    def after_commits(self, count: int, then: object) -> None:
        self.cluster.traps.append(Trap("committed", count, then))  # type: ignore[arg-type]

    def lose(self) -> None:
        alive = self._some()
        self.fewest = min(self.fewest, len(alive))
        able = [node for node in alive if self.cluster.recoverable_without([node])]
        if len(alive) == 1 or not able:
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
        scenario, result = run_of(seed, Shrinking, policy)
        assert result == "finished", f"seed {seed}"
        hosts = scenario.cluster.hosts
        assert not any(host.down for host in hosts.values()), f"seed {seed}: not all came back"
        fewest.append(scenario.fewest)
        members = scenario.cluster.registry.view().members
        assert max(len(member.seats) for member in members) == 1, f"seed {seed}: not given back"
    assert min(fewest) == 1


def run_of(seed: int, kind: type[S], policy: str | None = None) -> tuple[S, str]:
    result = run(seed, policy=policy, kind=kind)
    assert isinstance(result.scenario, kind)
    return result.scenario, result.outcome


class Returning(Even):
    """Two hosts have all stages. The one with stage 0 is lost, and comes back with its disk."""

    away: ClassVar = 37.0

    def _rules(self, policy: str | None) -> TransactionRules:
        rules = super()._rules(policy or "checkfree")
        return replace(rules, stages=4, steps=20, strict=False, validation_microbatches=0)

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        return [Host(f"h{stage}", stage, False, saves=True, room=5) for stage in (0, 1)]

    def _files(self, rules: TransactionRules, hosts: list[Host]) -> Files:
        return Files(save_every=3)

    def _plan_faults(self) -> float:
        self.cluster.traps.append(Trap("committed", 8, self.lose))
        return 60.0

    def lose(self) -> None:
        host = self.cluster.hosts["h0"]
        assert host.process is not None and host.node is not None
        self.lost, host.stage, host.down = host.node.stages, None, True
        self.cluster.crash(host.process, "for a while")
        self.world.after(self.away, self.bring_back)

    def bring_back(self) -> None:
        host = self.cluster.hosts["h0"]
        host.down = False
        self.cluster.start(host)


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_stages_wait_for_a_lost_node_that_has_saved_them(seed: int) -> None:
    scenario, result = run_of(seed, Returning)
    counts = scenario.cluster.counts
    assert result == "finished"
    assert (scenario.lost, counts["save"]) == ({0, 2, 4}, 3)
    assert not any(counts[how] for how in INEXACT)


def test_a_run_does_not_stop_while_a_lost_node_may_come_back_with_stage_0() -> None:
    """The twin of stage 0 was at stage 4, which is lost with it."""
    scenario, result = run_of(0, Returning, "redundant")
    assert (result, scenario.lost) == ("finished", {0, 2, 4})
    assert scenario.cluster.counts["stopped"] == 0


class Gone(Returning):
    away = 1000.0


def test_stages_are_guessed_when_a_lost_node_does_not_come_back() -> None:
    scenario, result = run_of(4, Gone)
    counts = scenario.cluster.counts
    assert (result, scenario.lost) == ("finished", {0, 2, 4})
    assert [counts[how] for how in ("waiting", "checkfree", "interpolate", "save")] == [1, 1, 1, 0]


class Noting(Registry):
    """A registry that tells the scenario the giver and the taker of each moved seat."""

    def take_note(self, view: pb.View) -> None:
        moves = re.findall(r"(\w+) takes stage \d+: moves from (\w+)", view.reason)
        for taker, giver in moves:
            self.world.after(0.0, self.moved, giver, taker)

    def moved(self, giver: str, taker: str) -> None:
        self.cluster.counts["moves"] += 1
        for trap in [trap for trap in self.cluster.traps if trap.kind == "moves"]:
            trap.spring(giver, taker)  # type: ignore[call-arg]


class Moving(Even):
    """One host has all stages, and two more join. After a move, its giver or its taker may be lost
    while the state is copied; `losses`: how often."""

    registry = Noting
    losses: ClassVar = 0

    def _rules(self, policy: str | None) -> TransactionRules:
        rules = super()._rules(policy or "checkfree")
        return replace(rules, stages=4, steps=30, microbatches=4, strict=False)

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        hosts = [Host(f"h{i}", None, False, room=rules.stages + 1) for i in range(3)]
        for host in hosts[1:]:
            host.down = True
        return hosts

    def _plan_faults(self) -> float:
        self.left = self.losses
        self.cluster.traps.append(Trap("committed", 2, self.grow))
        self.cluster.traps.append(Trap("moves", 1, self.lose))  # type: ignore[arg-type]
        return 60.0

    def grow(self) -> None:
        for host in self.cluster.hosts.values():
            host.down = False
            self.cluster.start(host)

    def lose(self, giver: str, taker: str) -> None:
        if self.left:
            self.left -= 1
            victim = self.random.choice([giver, taker])
            self.world.after(self.random.uniform(0.0, 1.0), self.crash, victim)

    def crash(self, victim: str) -> None:
        for node in self._some():
            if node.name == victim and self.cluster.recoverable_without([node]):
                self.cluster.counts["died in a move"] += 1
                self.cluster.crash(node.process, "in the midst of a move")


class Losing(Moving):
    losses = 2


KINDS = pytest.mark.parametrize("policy", ["checkfree", "redundant", "checkpoint"])
"""A policy of each kind: guesses, twins, files."""


@KINDS
def test_newcomers_get_their_share_of_the_seats_and_keep_them(policy: str) -> None:
    scenario, result = run_of(0, Moving, policy)
    counts = scenario.cluster.counts
    seats = sorted(len(member.seats) for member in scenario.cluster.registry.view().members)
    assert (result, seats) == ("finished", [1, 2, 2])
    assert 1 <= counts["moves"] <= 2
    assert not any(counts[how] for how in INEXACT)


@KINDS
def test_who_gives_or_takes_a_seat_may_be_lost_meanwhile(policy: str) -> None:
    scenario, result = run_of(1, Losing, policy)
    assert result == "finished"
    assert scenario.cluster.counts["died in a move"]

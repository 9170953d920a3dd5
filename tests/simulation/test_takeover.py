"""The last node of a stage is lost in the middle of a step, and another one takes its seat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest

from planaria.node.driver.attempting import Attempting
from planaria.node.driver.phases import Turn
from planaria.node.transaction.effects import Ballot, Effect
from planaria.node.transaction.member import MemberSide
from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb
from simulation.cluster import Cluster, Host, Machines, Trap
from simulation.fingerprints import TRAINED
from simulation.scenario import Even, Scenario, ScenarioError, run
from simulation.stage import ChainedTwin


class Calm(Even):
    """One node a stage, each with room for all stages; with twins, and without faults. Runs of one
    seed make the same steps, so that their weights can be compared."""

    rest = 14

    def _rules(self, policy: str | None) -> TransactionRules:
        rules = super()._rules("redundant")
        stages = self.random.randint(2, 4)
        return replace(rules, stages=stages, steps=14, strict=False, masking=True)

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        stages = range(rules.stages + 1)
        return [Host(f"h{stage}", stage, False, room=len(stages)) for stage in stages]

    def _plan_faults(self) -> float:
        return 0.0


class Bereft(Calm):
    """The only node of a body stage is lost at any moment of a step; later its host is back."""

    def _plan_faults(self) -> float:
        self.cluster.traps.append(Trap("committed", self.random.randint(2, 4), self._lose_soon))
        self.cluster.traps.append(Trap("committed", 7, self._bring_back))
        return 30.0

    def _lose_soon(self) -> None:
        self.world.after(self.random.uniform(0.0, 1.0), self._lose)

    def _lose(self) -> None:
        self.host = self.cluster.hosts[f"h{self._lost_stage()}"]
        if self.host.process is not None and self.host.process.alive:
            self.host.down = True
            self.cluster.crash(self.host.process, "for good")

    def _lost_stage(self) -> int:
        return self.random.randint(1, self.cluster.rules.stages)

    def _bring_back(self) -> None:
        self.host.down = False
        self.cluster.start(self.host)


class Orphan(Calm):
    """The driver, the only node of stage 0, dies after it has sent a commit to some members. At
    stage 0, only its twin may have applied it."""

    def _plan_faults(self) -> float:
        self.cluster.traps.append(Trap("committed", self.random.randint(2, 4), self._light_fuse))
        self.cluster.traps.append(Trap("rebuilding", 1, self._look))
        return 30.0

    def _light_fuse(self) -> None:
        driver = self._driver()
        assert driver is not None
        driver.machine.fuse = self.random.randint(1, self.cluster.rules.stages)

    def _look(self) -> None:
        twins = self.cluster.twins.keys() - self.cluster.known.keys()
        self.cluster.counts["only a twin"] += any(stage == 0 for _, stage in twins)


class Unlucky(Bereft):
    """Stage 1 has two nodes. The only one of stage 2 is lost, and then the node that takes its
    seat, at any moment. The other node of stage 1 has a twin, which is enough."""

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        hosts = super()._hosts(rules)
        return [*hosts, Host("spare", 1, False, room=len(hosts))]

    def _plan_faults(self) -> float:
        over = super()._plan_faults()
        self.cluster.traps.append(Trap("rebuilding", 1, self._lose_taker_soon))
        return over

    def _lost_stage(self) -> int:
        return 2

    def _lose_taker_soon(self) -> None:
        self.world.after(
            self.random.choice([0.0, 0.1, 1.0]) * self.random.random(), self._strike_it
        )

    def _strike_it(self) -> None:
        takers = [n for n in self.cluster.nodes if {1, 2} <= n.stages]
        for node in takers[:1]:
            self.cluster.crash(node.process, "which has just taken a seat")


class Belated(ChainedTwin):
    """Claims the last update, but has not made it."""

    def apply(self, commit: pb.Commit, lr: float) -> None:
        before = self.optimizer.weights.clone()
        super().apply(commit, lr)
        self.optimizer.weights.copy_(before)


class Drifting(ChainedTwin):
    """Has weights that nobody has committed."""

    def apply(self, commit: pb.Commit, lr: float) -> None:
        super().apply(commit, lr)
        self.optimizer.weights[TRAINED][0] += 1.0


def rash(phase: Attempting, message: pb.Message, now: float) -> Turn:
    """Lets a seat enter before it has its state."""
    return phase.stays(phase._taken_over(now))


class Barging(MemberSide):
    """Enters an attempt with the state that it has."""

    def _entered(self, ballot: Ballot, begin: pb.Begin) -> list[Effect]:
        self.committed = begin.step - 1
        return super()._entered(ballot, begin)


def ended(seed: int, kind: type[Scenario]) -> Cluster:
    """Runs a scenario; returns its cluster."""
    result = run(seed, kind=kind)
    assert result.outcome == "finished"
    return result.scenario.cluster


def weights(cluster: Cluster) -> dict[int, list[float]]:
    """The trained weights, by stage."""
    return {s.stage: s.weights.optimizer.weights[TRAINED].tolist() for s in cluster.seats}


def test_the_step_goes_on_and_the_weights_are_those_of_a_run_without_a_loss() -> None:
    counts = as_without_a_loss(Bereft, (1, 2, 4, 5))
    assert counts["seat taken"] >= 3, "else it was lost between two steps"
    assert counts["aborted"] == 0, "neither by the loss, nor when the seat was given back"


@cache
def calm(seed: int) -> dict[int, list[float]]:
    """The weights after a run without a loss."""
    return weights(ended(seed, Calm))


def as_without_a_loss(kind: type[Calm], seeds: Iterable[int] = range(4)) -> Counter[str]:
    """Counts of what happened in these runs. Checks that they end with the weights of calm ones."""
    counts = Counter[str]()
    for seed in seeds:
        cluster = ended(seed, kind)
        counts += cluster.counts
        assert weights(cluster) == calm(seed), f"seed {seed}"
        members = cluster.registry.view().members
        assert max(len(member.seats) for member in members) == 1, f"seed {seed}: not given back"
    return counts


def test_so_they_are_when_who_takes_the_seat_is_lost_too() -> None:
    counts = as_without_a_loss(Unlucky)
    assert counts["seat taken"] >= 2
    assert counts["aborted"] < 4


def test_a_step_that_nobody_but_a_twin_has_applied_is_kept() -> None:
    assert as_without_a_loss(Orphan, (5, 7))["only a twin"]


def test_a_twin_that_alone_has_a_step_is_held_to_what_it_applied() -> None:
    for seed in (1, 2):
        with pytest.raises(ScenarioError, match=r"I5: .* (never had|never committed)"):
            run(seed, Machines(twin=Drifting), kind=Orphan)


@pytest.mark.parametrize(
    ("machines", "heard", "invariant"),
    [
        (Machines(twin=Belated), Attempting._heard_of_seat, "I5: .* of another history"),
        (Machines(member=Barging), rash, "I[12]: .* starts"),
    ],
)
def test_a_seat_that_enters_with_another_state_is_caught(
    machines: Machines, heard: Callable[..., Turn], invariant: str
) -> None:
    hears = patch.object(Attempting, "_heard_of_seat", heard)
    with hears, pytest.raises(ScenarioError, match=invariant):
        for seed in range(10):
            run(seed, machines, kind=Bereft)

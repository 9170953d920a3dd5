"""Compute threads that hang or are slow, in clusters of production agents."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest

from planaria.node.transaction.rules import TransactionRules
from simulation.cluster import Host, Trap
from simulation.fingerprints import TRAINED
from simulation.network import SILENCE
from simulation.node import Seat
from simulation.scenario import Even, Result, Scenario, run

WITHIN, TIMES = 10.0, 5
"""A step is committed without a hanging replica within so many seconds, or so many usual steps if
these take longer."""


class Sick(Even):
    """Two replicas a stage; the compute thread of one node hangs from some moment of a step on."""

    replicas: ClassVar = 2
    masking: ClassVar[bool] = True
    slowness: ClassVar = math.inf
    standbys: ClassVar = 0
    microbatches: ClassVar = 6

    def _rules(self, policy: str | None) -> TransactionRules:
        rules = super()._rules(policy)
        return replace(
            rules,
            stages=3,
            masking=self.masking,
            steps=12,
            microbatches=self.microbatches,
            relearn=False,
            strict=False,
            progress=20.0,
        )

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        stages = range(rules.stages + 1)
        return [Host(f"{r}{s}", s, False) for r in range(self.replicas) for s in stages]

    def _plan_faults(self) -> float:
        cluster, commits = self.cluster, list[float]()
        rules = replace(cluster.registry.rules, max_replicas=self.replicas)
        cluster.registry.rules = cluster.registry.server.machine.rules = rules
        for _ in range(self.standbys):
            self.world.after(3.0, cluster.add_host)
        notice = cluster.on_event

        def on_event(seat: Seat, kind: str, fields: Mapping[str, Any] | None = None) -> None:
            notice(seat, kind, fields)
            if kind != "committed":
                return
            if cluster.counts["struck"] and not cluster.counts["gap"]:
                usual = statistics.median(b - a for a, b in pairwise(commits))
                cluster.counts["bound"] = math.ceil(1000 * max(WITHIN, TIMES * usual))
                cluster.counts["gap"] = math.ceil(1000 * (self.world.now - commits[-1]))
            commits.append(self.world.now)

        cluster.on_event = on_event  # type: ignore[method-assign]
        wait = self.random.uniform(0.0, 0.4)
        cluster.traps.append(Trap("committed", 6, lambda: self.world.after(wait, self._strike_one)))
        return 30.0

    def _strike_one(self) -> None:
        stages = {2} if self.replicas == 1 else {0, 1, 2, 3}
        node = self.random.choice([n for n in self._some() if n.stages & stages])
        self.world.say(node.name, f"is {self.slowness} times as slow from now on")
        self.cluster.counts["struck"] += 1
        if self.slowness == math.inf:
            node.machine.compute.hang()
        else:
            node.machine.compute.slowness = self.slowness


class SickAborting(Sick):
    masking = False


class Alone(Sick):
    """The last node of a stage hangs, and there is no standby."""

    replicas = 1


class AloneWithStandby(Alone):
    standbys = 1


class AloneWithRoom(Alone):
    """The last node of a stage hangs, and each node has room for a second seat."""

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        return [replace(host, room=2) for host in super()._hosts(rules)]


class AloneAndDamaged(AloneWithStandby):
    """The weights of the hanging node differ from the digest that it reported."""

    def _strike_one(self) -> None:
        super()._strike_one()
        (node,) = [n for n in self.cluster.nodes if n.machine.compute.hangs]
        (seat,) = node.seats.agents.values()
        seat.weights.optimizer.weights[TRAINED] += 1.0


class Slow(Sick):
    """One node is slow enough to hold a step up, but not so slow that it counts as hanging."""

    slowness, microbatches = 20.0, 16

    def _plan_faults(self) -> float:
        self.cluster.pace = 4.0
        return super()._plan_faults()


def finished(seed: int, kind: type[Scenario]) -> Result:
    result = run(seed, policy="checkfree", kind=kind)
    assert result.outcome == "finished", f"seed {seed}"
    assert result.counts["struck"] == 1, f"seed {seed}"
    return result


@pytest.mark.parametrize("seed", range(4))
def test_the_step_is_committed_without_a_replica_that_hangs(seed: int) -> None:
    result = finished(seed, Sick)
    assert result.counts["held up"] >= 1
    assert result.counts["gap"] <= result.counts["bound"]
    assert not result.counts["interpolate"] + result.counts["checkfree"], "no stage was lost"


@pytest.mark.parametrize("seed", range(4))
def test_without_masking_too_it_is_found_and_replaced(seed: int) -> None:
    """If the driver hangs, the registry probes it first."""
    result = finished(seed, SickAborting)
    assert result.counts["held up"] >= 1
    assert result.counts["gap"] <= result.counts["bound"] + 1000 * SILENCE


@pytest.mark.parametrize("seed", range(4))
def test_the_last_node_of_a_stage_is_replaced_when_the_run_has_waited_for_it(seed: int) -> None:
    result = finished(seed, Alone)
    assert result.counts["held up"] >= 1
    assert result.counts["checkfree"] == 1


@pytest.mark.parametrize(
    ("seed", "kind"),
    [(0, AloneWithStandby), (1, AloneWithStandby), (1, AloneWithRoom), (2, AloneWithRoom)],
)
def test_an_heir_copies_the_state_of_a_last_node_that_hangs(
    seed: int, kind: type[Scenario]
) -> None:
    """The node hangs in a pass. In the middle of a commit, nothing could be read from it."""
    result = finished(seed, kind)
    assert result.counts["handover"] >= 1
    assert not result.counts["checkfree"], "nothing was guessed"


@pytest.mark.parametrize("seed", range(2))
def test_nobody_copies_from_a_last_node_that_hangs_what_it_never_was(seed: int) -> None:
    result = finished(seed, AloneAndDamaged)
    assert result.counts["checkfree"] == 1


@pytest.mark.parametrize("seed", range(1, 3))  # their steps mostly compute, rather than wait
def test_what_a_slow_node_has_not_begun_others_do(seed: int) -> None:
    result = finished(seed, Slow)
    assert result.counts["relieved"] >= 1
    assert not result.counts["masked"] + result.counts["aborted"]

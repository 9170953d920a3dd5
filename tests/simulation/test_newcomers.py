"""All voters of a step die during it, and only newcomers that have copied the state are left."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from planaria.node.state.rebuild import Rebuilding
from planaria.node.state.stage_state import StageState
from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb
from simulation.cluster import Host, Trap
from simulation.node import Node
from simulation.scenario import Even, Result, Scenario, ScenarioError, run

LOOK = 0.01
HEARS_LATE = 0.8
"""Seconds that a message takes longer."""


class Newcomers(Even):
    """Each set of hosts has a node of every stage. All sets but the driver's crash, come back and
    follow. The driver hears them late, and so admits none. Once all of them have a state, the nodes
    that trained crash, whatever they are doing."""

    sets: ClassVar = "ab"

    def _rules(self, policy: str | None) -> TransactionRules:
        rules = super()._rules(policy or "checkfree")
        shape = replace(rules, masking=True, stages=2, steps=15, microbatches=2)
        return replace(shape, validation_microbatches=0)

    def _hosts(self, rules: TransactionRules) -> list[Host]:
        stages = range(rules.stages + 1)
        return [Host(f"{name}{stage}", stage, False) for name in self.sets for stage in stages]

    def _plan_faults(self) -> float:
        self.cluster.pace = self.random.choice([1.0, 4.0])
        self.cluster.traps.append(Trap("committed", 3, self._renew))
        return 20.0

    def _renew(self) -> None:
        driver = self._driver()
        if driver is None:
            return
        for host in self.cluster.hosts.values():
            if host.name[0] != driver.process.host[0] and host.process is not None:
                self.cluster.crash(host.process, "with its set")
                self.world.after(0.5, self.cluster.start, host)
                self.cluster.network.latency[host.name, driver.process.host] = HEARS_LATE
        self._wait_for_joiners()

    def _wait_for_joiners(self) -> None:
        joiners = [node for node in self._some() if _follows(node)]
        if len(joiners) < (len(self.sets) - 1) * (self.cluster.rules.stages + 1):
            self.world.after(LOOK, self._wait_for_joiners)
            return
        self.cluster.counts["struck"] += 1
        self.cluster.network.latency.clear()
        for node in self._some():
            if node not in joiners:
                self.cluster.crash(node.process, "with all who trained")


class TheirDriverToo(Newcomers):
    """The newcomers' first driver dies when only some have heard that they go back."""

    sets = "abc"

    def _plan_faults(self) -> float:
        self.cluster.traps.append(Trap("resuming", 1, self._strike_driver))
        return super()._plan_faults()

    def _strike_driver(self) -> None:
        driver = self._driver()
        assert driver is not None
        for host in self.cluster.hosts:
            if self.random.random() < 0.5:
                self.cluster.network.latency[driver.process.host, host] = HEARS_LATE
        self.world.after(HEARS_LATE / 2, self.cluster.crash, driver.process, "having told some")


class Bereaved(Newcomers):
    """The last node that trains stage 1 crashes. Its newcomer, which hears it late, has a state,
    but lacks the last step."""

    def _rules(self, policy: str | None) -> TransactionRules:
        return replace(super()._rules("snapshot"), strict=False)

    def _wait_for_joiners(self) -> None:
        having = [seat for seat in self.cluster.seats if seat.stage == 1 and seat.member.committed]
        trains = [seat for seat in having if not seat.member.following]
        follows = [seat for seat in having if seat.member.following]
        if trains and follows:
            hosts = trains[0].process.host, follows[0].process.host
            self.cluster.network.latency[hosts] = HEARS_LATE
            if follows[0].member.committed < trains[0].member.committed:
                self.cluster.counts["struck"] += 1
                self.cluster.network.latency.clear()
                self.cluster.crash(trains[0].process, "as the last to train its stage")
                return
        self.world.after(LOOK, self._wait_for_joiners)


def _follows(node: Node) -> bool:
    members = [seat.member for seat in node.seats.agents.values()]
    return any(member.following and member.committed for member in members)


def struck(seed: int, kind: type[Scenario]) -> Result:
    result = run(seed, kind=kind)
    assert result.counts["struck"] == 1, f"seed {seed}"
    assert result.outcome == "finished", f"seed {seed}"
    inexact = ("mixed", "interpolate", "snapshot")
    guesses = sum(result.counts[how] for how in inexact)
    assert not guesses, f"seed {seed}"
    return result


@pytest.mark.parametrize("seed", [2, 7])
def test_the_run_goes_on_from_what_the_newcomers_have(seed: int) -> None:
    assert struck(seed, Newcomers).counts["memory"] == 3


@pytest.mark.parametrize("seed", [2, 18, 20])
def test_who_has_not_heard_of_it_before_their_driver_died_goes_back_too(seed: int) -> None:
    assert struck(seed, TheirDriverToo).counts["memory"] >= 3


BEREAVED = [2, 7, 12]
"""Seeds in which no gradient of the last step is left."""


@pytest.mark.parametrize("seed", BEREAVED)
def test_a_stage_goes_on_from_the_older_state_that_its_newcomer_has(seed: int) -> None:
    """The cluster checks that the stage has had this state."""
    assert struck(seed, Bereaved).counts["joiner"] == 1


def test_a_newcomer_whose_state_the_stage_never_had_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Rebuilding._state_in_memory

    def other(self: Rebuilding, sync: pb.Sync) -> StageState:
        state = kept(self, sync)
        state.tensors["weights"][0] += 1.0
        return state

    monkeypatch.setattr(Rebuilding, "_state_in_memory", other)
    with pytest.raises(ScenarioError, match=r"I5: .* by joiner, of weights that it never had"):
        for seed in BEREAVED:
            run(seed, kind=Bereaved)

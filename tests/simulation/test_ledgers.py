"""Ledgers on disks that stall, while the nodes that write them die."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest

from planaria.node.driver import attempting, records
from planaria.node.driver.driver import Driver
from planaria.node.state.reducing import Reducing
from simulation.cluster import Trap
from simulation.scenario import InRows, Scenario, ScenarioError, run


class Stalling(Scenario):
    """Disks take no line for a while, and nodes whose lines may wait are killed."""

    def _plan_faults(self) -> float:
        when = 0.0
        for _ in range(self.random.randint(1, 3)):
            when += self.random.uniform(1.0, 8.0)
            self.world.after(when, self._strike, self._stall_and_die)
        return when

    def _stall_and_die(self) -> float:
        stalled, alive = self.random.uniform(1.0, 8.0), self.random.uniform(0.2, 5.0)
        self.world.say("disks", f"stall for {stalled:.1f} s")
        until = self.world.now + stalled
        self.cluster.files.stalled |= dict.fromkeys(self.cluster.hosts, until)
        deaths = [self._crash_stage_0, self._crash_driver, self._cut_power]
        self.world.after(alive, self._strike, self.random.choice(deaths))
        return max(stalled, alive)


def test_each_step_is_in_a_ledger_whoever_dies_while_its_disk_stalls() -> None:
    for seed in range(3):
        run(seed, kind=Stalling)


async def votes_at_once(reducing: Reducing) -> None:
    """In place of `_wait_for_ledger`: doesn't wait."""


@pytest.mark.parametrize(
    ("of", "name", "faulty", "first"),
    [
        (Reducing, "_wait_for_ledger", votes_at_once, 2),
        (attempting, "unrecorded", lambda ledgers: "", 89),
    ],
)
def test_a_step_that_is_in_no_ledger_is_caught(
    of: object, name: str, faulty: object, first: int
) -> None:
    """Only a death while all ledgers lack more than the last step shows the fault. Begins with the
    seed in which it was first caught."""
    with patch.object(of, name, faulty), pytest.raises(ScenarioError, match="I7: no ledger has"):
        for seed in (*range(first, 100), *range(first)):
            run(seed, kind=Stalling)


# Seeds in which the holders of a step's records are lost with all ledgers that have it.
FEW = (78,)


def few_are_told() -> ExitStack:
    """Patches limits: few members get the records of a step, as in a swarm of a thousand."""
    patches = ExitStack()
    for name in ("LEDGERS", "MEMORIES"):
        patches.enter_context(patch.object(records, name, 1))
    return patches


def test_each_step_is_in_a_ledger_though_few_are_told_what_became_of_it() -> None:
    with few_are_told():
        for seed in FEW:
            run(seed, kind=Stalling)


def test_a_step_that_nobody_is_told_once_more_is_caught() -> None:
    never = patch.object(Driver, "to_note", lambda driver: [])
    with few_are_told(), never, pytest.raises(ScenarioError, match="I7: no ledger has"):
        for seed in FEW:
            run(seed, kind=Stalling)


class Bereft(InRows):
    """All of stage 0 and two record holders die after a commit of the driver, before a ledger has
    the step. Of stage 1, only members without its records get the commit."""

    def _plan_faults(self) -> float:
        self.merciful = False
        self.cluster.traps.append(Trap("committed", self.random.randint(2, 4), self._bereave))
        return 20.0

    def _bereave(self) -> None:
        if (driver := self._driver()) is None:
            return
        self.cluster.counts["bereaved"] += 1
        for node in self._some():
            if 0 in node.stages:
                self.cluster.files.stalled[node.process.host] = self.world.now + 9.0
        holders = [node for node in self._some() if 1 in node.stages]
        for node in holders[: records.MEMORIES]:
            self.cluster.network.latency[driver.process.host, node.process.host] = 9.0
        for node in holders[:2]:
            self.world.after(0.5, self._crash_if_alive, node.process)
        self.world.after(0.5, self._strike, self._crash_stage_0)
        self.world.after(4.0, self.cluster.network.latency.clear)


BEREFT = (0, 1)


def test_a_commit_of_which_those_hear_who_keep_no_records_has_them_all_the_same() -> None:
    for seed in BEREFT:
        assert run(seed, policy="redundant", kind=Bereft).counts["bereaved"]


def test_records_that_are_told_with_the_commit_are_told_too_late() -> None:
    nobody = property(lambda driver: frozenset(), lambda driver, keepers: None)
    late = patch.object(Driver, "keepers", nobody, create=True)
    with late, pytest.raises(ScenarioError, match="I7: no ledger has"):
        for seed in BEREFT:
            run(seed, policy="redundant", kind=Bereft)

"""The run's operator pauses and stops it, whatever else happens."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from planaria.bootstrap.effects import Refused
from planaria.bootstrap.registry_pb2 import PAUSE, STOPPED, TRAIN
from simulation.scenario import LONGEST, Result, Scenario, run

PAUSED = 12.0
"""Seconds until all that can hear of a pause has."""
UNSAVED = 30.0
"""Seconds until all that can be saved is."""


class Commanded(Scenario):
    """Orders come between the faults; half of the runs are stopped."""

    def _plan_faults(self) -> float:
        over, chosen = super()._plan_faults(), self.random
        when = chosen.uniform(0.5, 6.0)
        for _ in range(chosen.randint(1, 3)):
            self.world.after(when, self._command, "pause")
            when += chosen.choice([0.1, 4.0, 25.0]) * chosen.uniform(0.5, 1.0)
            self.world.after(when, self._command, "go")
            when += chosen.uniform(0.1, 3.0)
        if chosen.random() < 0.5:
            self.world.after(when, self._command, "stop")
        return max(over, when)

    def _command(self, word: str) -> None:
        registry = self.cluster.registry
        if not registry.process.responsive:
            if word != "pause":
                self.world.after(1.0, self._command, word)
            return
        before = registry.view()
        with suppress(Refused):  # a run that is being stopped doesn't go on
            self.cluster.counts[word] += registry.server.command(word, "") != ""
        if word == "pause" and before.order != PAUSE:
            self.world.after(PAUSED, self._holds, registry.view().number)

    def _holds(self, number: int) -> None:
        """Who has the view in which the run is paused begins no step."""
        view = self.cluster.registry.view()
        node = self._driver()
        if view.order == PAUSE and node is not None and node.view.number == view.number >= number:
            (driver,) = (s.driver for s in node.seats.agents.values() if s.stage == 0)
            begun = driver.current.state if view.committed else None
            self.cluster.demand(begun is None, "I4", "a step is under way in a paused run")
            self.cluster.counts["held"] += 1

    def run(self) -> Result:
        """A stopped run is over once its nodes are gone, or have nowhere to save."""
        world, cluster, settled = self.world, self.cluster, 0.0
        while (order := cluster.registry.view().order) != STOPPED:
            settled = settled + 0.5 if cluster.settled() and order != PAUSE else 0.0
            if settled and order == TRAIN:
                return Result(cluster.outcome(), world.now, cluster.counts)
            if settled > UNSAVED:
                saving = all(host.saves for host in cluster.hosts.values())
                cluster.demand(not saving, "I4", "a run that is being stopped isn't over")
                return Result("not saved", world.now, cluster.counts)
            if world.now > self.quiet_from + LONGEST:
                cluster.demand(False, "I4", f"not over {LONGEST:.0f} s after the last fault")
            world.run_until(world.now + 0.5)
        newest = cluster.files.newest_common(cluster.rules.stages)
        whole = newest is not None and newest[1] >= max(cluster.confirmed)
        whole = whole or not any(cluster.confirmed)
        cluster.demand(whole, "I4", f"it was stopped, and has saved step {newest}")
        world.run_until(world.now + 20.0)
        stay = [node.name for node in cluster.nodes if node.view.number]
        cluster.demand(not stay, "I4", f"{stay} stay in a stopped run")
        return Result("stopped by its operator", world.now, cluster.counts)


def test_a_run_that_is_paused_holds_and_one_that_is_stopped_is_saved_whole() -> None:
    counts, outcomes = Counter[str](), Counter[str]()
    for seed in range(6):
        result = run(seed, kind=Commanded)
        counts += result.counts
        outcomes[result.outcome] += 1
    assert counts["held"] > 2
    assert outcomes["stopped by its operator"]

"""The run's operator pauses, resumes and stops it and changes its settings, under faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from planaria.bootstrap.effects import Refused
from planaria.bootstrap.operator_orders import changes_in_force, saved
from planaria.bootstrap.registry_pb2 import PAUSE, STOPPED, TRAIN, View
from planaria.bootstrap.rules import MembershipRules
from planaria.node.launch.settings import resettled, with_changes
from planaria.node.run_file import RunFile, dumps
from planaria.node.transaction.rules import TransactionRules
from simulation.cluster import Cluster, Host
from simulation.ports import Files
from simulation.registry import Registry
from simulation.scenario import LONGEST, Result, Scenario, run

PAUSED = 12.0
"""Seconds until every node that can hear of a pause has heard of it."""
LOOK = 0.1
"""Seconds between two checks of the run's step."""
UNSAVED = 30.0
"""Seconds until all stages that can be saved are saved."""


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
        """Checks that a driver with the view in which the run is paused has no step under way."""
        view = self.cluster.registry.view()
        node = self._driver()
        if view.order == PAUSE and node is not None and node.view.number == view.number >= number:
            (driver,) = (s.driver for s in node.seats.agents.values() if s.stage == 0)
            begun = driver.current.state if view.committed else None
            self.cluster.demand(begun is None, "I4", "a step is under way in a paused run")
            self.cluster.counts["held"] += 1

    def run(self) -> Result:
        """Runs to the end. A run that is stopped ends once its nodes have left, or can't save."""
        world, cluster, settled = self.world, self.cluster, 0.0
        while (order := cluster.registry.view().order) != STOPPED:
            settled = settled + 0.5 if cluster.settled() and order != PAUSE else 0.0
            if settled and order == TRAIN:
                return Result(cluster.outcome(), world.now, cluster.counts, self)
            if settled > UNSAVED:
                saving = all(host.saves for host in cluster.hosts.values())
                cluster.demand(not saving, "I4", "a run that is being stopped isn't over")
                return Result("not saved", world.now, cluster.counts, self)
            if world.now > self.quiet_from + LONGEST:
                cluster.demand(False, "I4", f"not over {LONGEST:.0f} s after the last fault")
            world.run_until(world.now + 0.5)
            self.end_soon_if_well()
        newest = cluster.files.newest_common(cluster.rules.stages)
        whole = newest is not None and newest[1] >= max(cluster.confirmed)
        views = cluster.registry.journal.issued.values()
        lost = any("no node is left" in view.reason for view in views)
        whole = whole or lost or cluster.counts["stopped"] or not any(cluster.confirmed)
        cluster.demand(whole, "I4", f"it was stopped, and has saved step {newest}")
        world.run_until(world.now + 20.0)
        stay = [node.name for node in cluster.nodes if node.view.number]
        cluster.demand(not stay, "I4", f"{stay} stay in a stopped run")
        return Result("stopped by its operator", world.now, cluster.counts, self)


def several(kind: type[Scenario]) -> tuple[Counter[str], Counter[str]]:
    """Counts of what happened in six runs, and of their outcomes."""
    counts, outcomes = Counter[str](), Counter[str]()
    for seed in range(6):
        result = run(seed, kind=kind)
        counts += result.counts
        outcomes[result.outcome] += 1
    return counts, outcomes


def test_a_run_that_is_paused_holds_and_one_that_is_stopped_is_saved_whole() -> None:
    counts, outcomes = several(Commanded)
    assert counts["held"] > 2
    assert outcomes["stopped by its operator"]


class ChangingRegistry(Registry):
    """A registry whose cluster follows the settings in its views."""

    def __init__(self, cluster: Cluster) -> None:
        self.run_file = dumps(cluster.run)
        self.resettle = partial(resettled, self._rules_of)
        super().__init__(cluster)

    def _rules_of(self, run: RunFile) -> MembershipRules:
        return replace(self.rules, steps=run.steps)

    def fill_disk(self, seconds: float) -> None:
        """Does nothing: a change that is on no disk would be undone with its registry."""

    def take_note(self, view: View) -> None:
        cluster = self.cluster
        if (changes := changes_in_force(view)) != cluster.changes:
            cluster.changes = changes
            run = cluster.run = with_changes(cluster.run, changes)
            cluster.rules = replace(
                cluster.rules,
                steps=run.steps,
                masking=run.recovery.masking == "reassign",
                validate_every=run.training.validate_every,
                spot_check=run.trust.spot_check,
            )
            cluster.counts["changed"] += 1


class Changed(Scenario):
    """Settings change between the faults, and in the middle of losses."""

    registry = ChangingRegistry

    def _files(self, rules: TransactionRules, hosts: list[Host]) -> Files:
        files = super()._files(rules, hosts)
        for host in hosts:
            host.saves = True
        files.save_every = files.save_every or 1
        return files

    def _plan_faults(self) -> float:
        over, chosen = super()._plan_faults(), self.random
        when = chosen.uniform(0.5, 8.0)
        for _ in range(chosen.randint(1, 3)):
            settings = [
                f"steps={self.cluster.rules.steps + chosen.randint(0, 6)}",
                f"recovery.masking={chosen.choice(['reassign', 'reassign', 'abort'])}",
                f"training.validate_every={chosen.choice([0, 3])}",
                f"trust.spot_check={chosen.choice([0.0, 0.5])}",
                f"saves.every={chosen.randint(1, 3)}",
            ]
            self.world.after(when, self._change, settings)
            when += chosen.choice([0.1, 2.0, 20.0])
        return max(over, when)

    def _change(self, settings: Sequence[str]) -> None:
        registry = self.cluster.registry
        if registry.process.responsive:
            with suppress(Refused):  # a change is pending, or the run is over
                step = registry.server.machine.committed + self.random.randint(0, 3)
                registry.server.command("change", "", settings, step)
                self.cluster.counts["ordered"] += 1
                self.quiet_from = max(self.quiet_from, self.world.now)


class TakenBack(Changed):
    """The run also goes back to saved steps, in the middle of losses."""

    def _plan_faults(self) -> float:
        self.back_at = [self.random.randint(3, 9) for _ in range(2)]
        self.world.after(LOOK, self._look)
        return super()._plan_faults()

    def _look(self) -> None:
        registry = self.cluster.registry
        if registry.process.responsive and self.back_at[-1] <= registry.server.machine.committed:
            self._go_back()
        if self.back_at:
            self.world.after(LOOK, self._look)

    def is_well(self) -> bool:
        return not self.back_at and super().is_well()

    def _go_back(self) -> None:
        server = self.cluster.registry.server
        reports = server.machine.members.seat_reports()
        steps = saved(reports, self.cluster.rules.stages) - {server.machine.committed}
        if steps:
            with suppress(Refused):  # a change is pending
                server.command("back", "", [], self.random.choice(sorted(steps)))
                self.cluster.counts["sent back"] += 1
                self.quiet_from = max(self.quiet_from, self.world.now)
                self.back_at.pop()


def test_settings_change_at_a_commit_for_all_and_what_a_run_goes_back_from_never_counts() -> None:
    counts, outcomes = several(TakenBack)
    assert counts["changed"] > 3
    assert counts["sent back"] > 3
    assert counts["steps lost"] > 2
    assert outcomes["finished"] > 3

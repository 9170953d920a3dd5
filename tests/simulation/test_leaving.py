"""Nodes that are told to leave, in swarms of production agents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from planaria.node.transaction.leaving import APPOINTMENT
from planaria.node.wire.seat_names import node_of, was_added
from simulation.node import Node, Seat
from simulation.scenario import Result, run
from simulation.test_seats import BETWEEN, Shrinking


class Departing(Shrinking):
    """One or two nodes at a time are told to leave, whatever they hold, down to the last one."""

    def _plan_faults(self) -> float:
        notice, cluster = self.cluster.on_event, self.cluster

        def on_event(seat: Seat, kind: str, fields: Mapping[str, Any] | None = None) -> None:
            notice(seat, kind, fields)
            if fields is not None:
                cluster.check_kept(kind, fields)  # each stage was copied before its node left

        cluster.on_event = on_event  # type: ignore[method-assign]
        return super()._plan_faults()

    def lose(self) -> None:
        alive = [node for node in self._some() if not node.retiring]
        self.fewest = min(self.fewest, len(self.cluster.nodes))
        if len(alive) == 1 and len(self.cluster.nodes) > 1:
            self.world.after(1.0, self.lose)  # the last one is taking the others' seats
            return
        if len(alive) == 1:
            self.after_commits(BETWEEN, self.bring_back)
            return
        for node in self.random.sample(alive, min(len(alive) - 1, self.random.choice([1, 1, 2]))):
            self.cluster.retire(node)
        self.after_commits(BETWEEN, self.lose)


@pytest.mark.parametrize("policy", ["checkfree", "redundant"])
def test_what_leaves_is_copied_first_down_to_the_last_node(policy: str) -> None:
    result = run(1, policy=policy, kind=Departing)
    assert isinstance(result.scenario, Departing)
    assert (result.outcome, result.scenario.fewest) == ("finished", 1)


class CutOff(Shrinking):
    """One node after the other is told to leave. It crashes when its heir has its weights, but not
    yet the moments."""

    def _plan_faults(self) -> float:
        self.after_commits(3, self.lose)
        return 30.0

    def lose(self) -> None:
        alive = self._some()
        if len(alive) > 1:
            leaver = self.random.choice(alive)
            self.cluster.retire(leaver)
            self.world.after(0.0, self.watch, leaver)

    def watch(self, leaver: Node) -> None:
        """Crashes the leaver once an heir has only weights. It may have ended before that."""
        if leaver.ended:
            self.after_commits(BETWEEN, self.lose)
            return
        seats = [seat for seat in self.cluster.seats if seat.host is not leaver]
        cut = [seat for seat in seats if seat.states.weights(seat.stage) is not None]
        if any(seat.stage in leaver.stages for seat in cut):
            self.cluster.counts["cut off"] += 1
            self.cluster.hosts[leaver.process.host].down = True
            self.cluster.crash(leaver.process, "before its moments have come")
            self.after_commits(BETWEEN, self.lose)
            return
        self.world.after(0.01, self.watch, leaver)


@pytest.mark.parametrize("policy", ["checkfree", "snapshot"])
def test_whose_moments_are_lost_goes_on_with_the_weights_that_have_come(policy: str) -> None:
    """The cluster checks that the stage has had these weights."""
    counts = Counter[str]()
    for seed in (0, 1):
        result = run(seed, policy=policy, kind=CutOff)
        assert result.outcome == "finished", f"seed {seed}"
        counts += result.counts
    assert counts["cut off"]
    assert counts["weights"]


class Ending(Shrinking):
    """All nodes are told to leave at once, as with Ctrl-C."""

    def _plan_faults(self) -> float:
        self.world.straggling = 0.0  # no other delay is as long as the wait for an heir
        self.retired: list[Node] = []
        self.taken: list[str] = []
        self.after_commits(5, self.end)
        return 30.0

    def end(self) -> None:
        self.began = self.world.now
        self.retired = list(self.cluster.nodes)
        for node in self.retired:
            self.cluster.retire(node)
        self.cluster.on_event = self.on_event  # type: ignore[method-assign]

    def on_event(self, seat: Seat, kind: str, fields: Mapping[str, Any] | None = None) -> None:
        if kind in ("serving", "rebuilding"):
            name = str((fields or {}).get("node", seat.name))
            if self._was_known_to_leave(name):
                self.taken.append(f"{name} {kind}")

    def _was_known_to_leave(self, seat: str) -> bool:
        """Whether the registry knew that the node leaves when it gave the seat. A node's report
        takes a second, if a packet is lost."""
        if not was_added(seat):
            return True
        before = self.cluster.registry.journal.issued[int(seat.rpartition(".")[2]) - 1]
        return any(member.leaving for member in before.members if member.node == node_of(seat))

    def run(self) -> Result:
        while not self.retired or self.cluster.nodes:
            self.world.run_until(self.world.now + 0.01)
        assert not self.taken, "whoever leaves took a seat"
        return Result("ended", self.world.now - self.began, self.cluster.counts, self)


def test_where_all_leave_at_once_nobody_waits_for_an_heir() -> None:
    for seed in range(4):
        seconds = run(seed, policy="checkfree", kind=Ending).seconds
        assert seconds < APPOINTMENT, f"seed {seed}"


class EndingInAnUpdate(Ending):
    """All leave when some may have a commit, but not yet the state that it makes."""

    def _plan_faults(self) -> float:
        self.cluster.files.save_every = 3
        for host in self.cluster.hosts.values():
            host.saves = True
        return super()._plan_faults()

    def end(self) -> None:
        self.world.after(self.random.uniform(0.0, 0.1), self.end_then)

    def end_then(self) -> None:
        seats = [seat for node in self.cluster.nodes for seat in node.seats.agents.values()]
        self.cluster.counts["changing"] += sum(seat.member.changing for seat in seats)
        super().end()


def test_what_is_saved_in_an_update_is_what_comes_of_it() -> None:
    """The cluster checks how each save describes itself."""
    results = [run(seed, policy="checkfree", kind=EndingInAnUpdate) for seed in range(8)]
    assert sum(result.counts["changing"] for result in results)

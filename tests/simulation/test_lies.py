"""Clusters in which one host sends arbitrary messages."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from planaria.bootstrap import membership, views
from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.accusations import Accusations
from planaria.bootstrap.client import RegistryClient
from planaria.bootstrap.service import SERVICE
from planaria.bootstrap.views import sign
from planaria.node.driver.fault_policy import FaultPolicy
from planaria.node.transaction.effects import Ballot
from planaria.node.transaction.member import MemberSide
from simulation.babbling import Babbling
from simulation.byzantine import Dropping, Framing, Lying, Refusing, Slandering, Withholding
from simulation.cluster import Machines, Trap
from simulation.deceit import (
    Abandoned,
    Accusing,
    Deceived,
    DeceivedCrowd,
    DividedCrowd,
    Parted,
)
from simulation.registry import ADDRESS, key_of
from simulation.scenario import Scenario, ScenarioError, run
from simulation.transport import MemoryTransport
from simulation.world import Process
from tests.bootstrap.conftest import identity


def check_caught(kind: type[Scenario], violation: str) -> None:
    """Checks that the violation is caught in one of ten seeds."""
    with pytest.raises(ScenarioError, match=violation):
        for seed in range(10):
            run(seed, kind=kind)


def test_lies_cost_nobody_else_state_or_place() -> None:
    for seed in (0, 1, 12):  # in the last one an accused driver meets an overflow
        assert run(seed, kind=Lying).counts["lies"]


def test_who_says_whatever_can_be_said_is_soon_out_and_costs_nobody_anything() -> None:
    assert sum(run(seed, kind=Babbling).counts["babbled"] for seed in range(2)) > 200


class Talkative(Babbling):
    """Sends less at a time, for longer."""

    lasting = (60.0,)
    at_once = (1,)


def test_where_nobody_is_accused_who_babbles_stays_and_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RegistryClient, "suspect", lambda *_: None)
    check_caught(Talkative, r"I6: .* babbles, and is a member still")


class Obedient(MemberSide):
    """Obeys any sender of a message."""

    def obeys(self, peer: str, ballot: Ballot) -> bool:
        return True


def test_a_member_that_obeys_whoever_speaks_is_caught() -> None:
    with pytest.raises(ScenarioError, match=r"I[1-6]"):
        for seed in (4, *range(20)):
            run(seed, Machines(member=Obedient), kind=Lying)


class Forged(Scenario):
    """The registry restarts without its journal. The first view that it is shown is one that a
    member has forged and signed, with no other member in it."""

    def _plan_faults(self) -> float:
        self.cluster.guilty = set()
        self.cluster.traps.append(Trap("committed", 3, self._forget))
        return 20.0

    def _forget(self) -> None:
        self.known = self.cluster.registry.newest
        self.cluster.registry.crash()
        self.cluster.registry.forget()
        self.world.after(1.0, self._come_back)

    def _come_back(self) -> None:
        liar = self.random.choice(list(self.known.members))
        forged = registry.View(run="run", number=self.known.number + 100, members=[liar])
        sign(forged, identity(liar.node), self.known)
        self.cluster.registry.restart()
        shown = registry.Renewal(node=liar.node, run="run", member=liar, view=forged)
        key_of(self.cluster.network.homes[liar.node]).sign_message(shown, "run")
        process = Process(self.world, "liar")
        transport = MemoryTransport(self.cluster.network, process, "liar")
        stream = transport.channel(ADDRESS).stream(f"{SERVICE}/KeepAlive")
        process.spawn(stream.write(shown.SerializeToString()))
        self.cluster.counts["forged"] += 1
        self.world.after(5.0, self._look)

    def _look(self) -> None:
        issued = self.cluster.registry.newest.number
        between = self.known.number <= issued < self.known.number + 100
        self.cluster.demand(between, "I6", f"view {issued} comes after view {self.known.number}")


def test_a_registry_without_its_journal_believes_its_own_key_and_no_member() -> None:
    result = run(0, kind=Forged)
    assert (result.outcome, result.counts["forged"]) == ("finished", 1)


def test_one_that_believes_whatever_it_is_shown_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (membership, views):
        monkeypatch.setattr(module, "is_genuine", lambda view, key, run: True)
    with pytest.raises(ScenarioError, match="I6"):
        run(0, kind=Forged)


def test_a_faulty_driver_parts_replicas_for_one_step_at_most_and_the_run_says_so() -> None:
    for kind in (Parted, DividedCrowd):
        result = run(len(kind.__name__), kind=kind)
        assert "has signed two commits of step" in result.outcome


def test_whatever_else_a_driver_tells_some_replicas_costs_nothing() -> None:
    assert sum(run(seed, kind=Deceived).counts["deceits"] for seed in range(2)) >= 2
    assert run(0, kind=DeceivedCrowd).counts["deceits"] == 1


def test_a_faulty_driver_that_dies_with_different_commits_applied_stops_the_run() -> None:
    assert sum(run(seed, kind=Abandoned).counts["vanished"] for seed in range(2)) == 2


def test_a_driver_that_accuses_others_evicts_nobody() -> None:
    assert sum(run(seed, kind=Accusing).counts["accusations"] for seed in range(2)) > 5


def test_a_registry_that_believes_the_driver_alone_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Accusations, "_heirs", lambda *_: [])
    check_caught(Accusing, r"I6: .* evicted: .* so I say, according to ")


def test_who_says_without_end_that_it_cannot_reach_another_one_does_not_stop_the_run() -> None:
    for seed, kind in ((2, Slandering), (6, Slandering), (1, Framing)):
        assert run(seed, kind=kind).counts["lies"]


def test_who_closes_its_link_to_whoever_drives_does_not_stop_the_run() -> None:
    for seed in (8, 2):
        assert run(seed, kind=Refusing).counts["lies"]


def test_who_never_votes_or_whose_work_nobody_gets_does_not_stop_the_run() -> None:
    for seed in (2, 4):
        assert run(seed, kind=Withholding).counts["accused"]
    run(37, kind=Withholding)  # the guilty host drives
    for seed in (0, 8):  # in the first seed, the host rests
        assert run(seed, kind=Dropping).counts["lies"]


def test_a_driver_that_believes_every_accusation_is_caught() -> None:
    with patch.object(FaultPolicy, "believes", lambda policy, by, node: True):
        check_caught(Framing, r"I6: .* evicted: .* so I say, according to ")

"""Clusters in which one host says what it likes."""

from __future__ import annotations

import pytest

from planaria.node.transaction.effects import Ballot
from planaria.node.transaction.member import MemberSide
from simulation.byzantine import Lying
from simulation.cluster import Machines
from simulation.scenario import ScenarioError, run


def test_lies_cost_nobody_else_state_or_place() -> None:
    for seed in (*range(5), 12):  # in the last one a driver that is accused meets an overflow
        assert run(seed, kind=Lying).counts["lies"]


class Obedient(MemberSide):
    """Obeys whoever speaks."""

    def obeys(self, peer: str, ballot: Ballot) -> bool:
        return True


def test_a_member_that_obeys_whoever_speaks_is_caught() -> None:
    with pytest.raises(ScenarioError, match=r"I[1-6]"):
        for seed in (4, *range(20)):
            run(seed, Machines(member=Obedient), kind=Lying)

"""Registries that lead in turn, under crashes, freezes and an unreachable store."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest

from planaria.bootstrap.store import Store
from simulation.registries import Registries
from simulation.scenario import Scenario, ScenarioError, run
from tests.bootstrap.fake_etcd import FakeEtcd


class InTurn(Scenario):
    """The usual faults of a cluster; besides, the leading registry is lost again and again."""

    registry = Registries

    def _plan_faults(self) -> float:
        over = super()._plan_faults()
        when = self.random.uniform(1.0, 5.0)
        for _ in range(self.random.randint(2, 4)):
            fault = self.random.choice([self._crash_registry, self._freeze_registry, self._depose])
            self.world.after(when, self._strike, fault)
            when += self.random.uniform(3.0, 12.0)
        return max(over, when)

    def _depose(self) -> float:
        seconds, registries = self.random.uniform(1.0, 12.0), self.cluster.registry
        assert isinstance(registries, Registries)
        registries.leave_etcd(seconds)
        return seconds


def test_invariants_hold_whichever_registry_leads() -> None:
    counts = Counter[str]()
    for seed in range(2):
        counts += run(seed, kind=InTurn).counts
    assert counts["led"] > 4


def test_a_leader_that_neither_reads_nor_compares_is_caught() -> None:
    reads = patch.object(Store, "_read_view", lambda store: None)
    compares = patch.object(FakeEtcd, "_holds", lambda etcd, compare: True)
    with reads, compares, pytest.raises(ScenarioError, match=r"I6: view \d+ comes after view"):
        for seed in range(4):
            run(seed, kind=InTurn)

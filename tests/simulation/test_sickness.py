"""Clusters in which no node dies, but links, disks or nodes are faulty."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import pytest

from planaria.node.driver.divergence import DivergenceRepair
from planaria.node.driver.fault_policy import FaultPolicy
from simulation.scenario import Scenario, ScenarioError, run
from simulation.sickness import Corrupted, Flipped, Miscomputing, Poisoned, Sick, Spoilt


@pytest.mark.parametrize("kind", [Sick, Poisoned, Flipped, Spoilt, Corrupted])
def test_what_is_merely_sick_costs_steps_at_most(kind: type[Scenario]) -> None:
    run(0, kind=kind)


def test_who_has_voted_tells_of_a_gradient_that_was_lost_on_its_way_on() -> None:
    run(51, kind=Sick)


def test_who_computes_wrongly_is_found_and_has_to_go() -> None:
    counts = run(1, kind=Miscomputing).counts
    assert counts["accused"] and counts["computed wrong"]


class Dying(Sick):
    """Each blink lasts 10 s, so long that others give the host up."""

    def _pause(self, left: list[str], right: list[str], seconds: float) -> None:
        super()._pause(left, right, 10.0)


CREDULOUS = patch.object(DivergenceRepair, "compare", lambda repair, vote, step: ([], ""))
"""The driver commits without comparing its replicas."""
LENIENT = patch.object(FaultPolicy, "lets_non_finite_through", lambda policy, training: True)
"""The driver lets non-finite values through, and skips the step."""


@pytest.mark.parametrize(
    ("kind", "faulty", "invariant"),
    [
        (Dying, nullcontext(), "I6: (.* evicted|rebuilding)"),
        (Corrupted, CREDULOUS, "I2: .* its replicas told of others"),
        (Spoilt, LENIENT, "I6: .* skipped"),
    ],
)
def test_what_costs_more_is_caught(
    kind: type[Scenario], faulty: AbstractContextManager[object], invariant: str
) -> None:
    with faulty, pytest.raises(ScenarioError, match=invariant):
        for seed in range(20):
            run(seed, kind=kind)

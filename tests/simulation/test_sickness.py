"""Clusters in which nobody dies, but somebody is sick."""

from __future__ import annotations

import pytest

from simulation.scenario import Scenario, ScenarioError, run
from simulation.sickness import Flipped, Poisoned, Sick


@pytest.mark.parametrize("kind", [Sick, Poisoned, Flipped])
def test_what_is_merely_sick_costs_steps_at_most(kind: type[Scenario]) -> None:
    for seed in range(5):
        run(seed, kind=kind)


class Dying(Sick):
    """One blink is so long that all give the host up."""

    def _pause(self, left: list[str], right: list[str], seconds: float) -> None:
        super()._pause(left, right, 10.0)


def test_an_eviction_of_who_has_done_nothing_wrong_is_caught() -> None:
    with pytest.raises(ScenarioError, match="I6"):
        for seed in range(20):
            run(seed, kind=Dying)

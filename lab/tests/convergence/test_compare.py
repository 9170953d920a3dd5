from __future__ import annotations

import math

import pytest

from planaria_lab.convergence.compare import (
    Spread,
    behind,
    cost,
    iteration_cost,
    loss_at,
    reached,
)

CLEAN = [(0, 8.0), (10, 6.0), (20, 5.0), (30, 4.5), (40, 4.25)]


def test_between_validations_the_loss_is_in_a_line() -> None:
    assert loss_at(CLEAN, 15) == pytest.approx(5.5)
    assert loss_at(CLEAN, 20) == 5.0
    assert loss_at(CLEAN, 99) == 4.25


def test_a_loss_is_reached_when_it_is_not_exceeded_again() -> None:
    assert reached(CLEAN, 5.5) == pytest.approx(15)
    spike = [(0, 8.0), (10, 5.0), (20, 7.0), (30, 5.0)]
    assert reached(spike, 6.0) == pytest.approx(25)
    assert reached(spike, 4.0) == math.inf
    assert reached(spike, 9.0) == 0


def test_a_run_that_is_ten_iterations_late_costs_ten() -> None:
    late = [(0, 8.0), (10, 6.0), (20, 6.0), (30, 5.0), (40, 4.5)]
    assert iteration_cost(late, CLEAN, 20) == pytest.approx(10)
    assert iteration_cost(late, CLEAN, 40) == math.inf
    assert behind(late, CLEAN) == pytest.approx(10)


def test_a_run_that_equals_the_other_costs_nothing() -> None:
    assert iteration_cost(CLEAN, CLEAN, 30) == 0
    assert behind(CLEAN, CLEAN) == 0


def test_who_relearns_together_is_counted_once() -> None:
    validation = [[i, i, loss] for i, loss in CLEAN]
    done = {
        **{"before": 0.3, "stage_tokens": 4000, "stage_updates": 50},
        **{"background_stage_tokens": 1000, "background_stage_updates": 20},
    }
    run = {
        "validation": validation,
        "window": 100,
        "share": 0.125,
        "update_tokens": 40.0,
        "rebuilds": [
            {"iteration": 5, "stage": 2, "relearned": done},
            {"iteration": 5, "stage": 3, "relearned": done},
            {"iteration": 9, "stage": 2, "relearned": done},
            {"iteration": 12, "stage": 2},
        ],
    }
    costs = cost(run, {"validation": validation}, 20)
    assert (costs.difference, costs.iterations, costs.behind) == (0, 0, 0)
    assert (costs.relearned, costs.background) == (15, 4.5)  # 4000 + 50 * 40 tokens, twice
    assert (costs.waited, costs.net, costs.net_waited_for) == (84, 15, 10.5)


def test_a_rolled_back_run_is_compared_after_as_many_iterations() -> None:
    clean = {"validation": [[i, i, loss] for i, loss in CLEAN]}
    back = [[0, 0, 8.0], [10, 10, 6.0], [20, 10, 6.0], [30, 20, 5.0], [40, 30, 4.5], [50, 40, 4.25]]
    run = {"validation": back, "window": 100, "share": 0.1, "rebuilds": []}
    costs = cost(run, clean, 30)
    assert costs.difference == pytest.approx(0.25)
    assert costs.iterations == pytest.approx(10)
    assert costs.behind == pytest.approx(10)


def test_one_seed_has_no_spread() -> None:
    assert Spread.of([1.0, 3.0]) == Spread(2.0, math.sqrt(2))
    assert math.isnan(Spread.of([1.0]).deviation)

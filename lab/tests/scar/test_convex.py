"""Tests of iteration costs on convex problems, their bound, and partial recovery."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from typer.testing import CliRunner

from planaria_lab.origin import KEYS
from planaria_lab.scar import partial
from planaria_lab.scar.command import app
from planaria_lab.scar.convex import (
    DECAY,
    STEP_SIZE,
    Digits,
    Quadratic,
    cross_entropy,
    digits,
    gradient,
    hessian,
    iteration_cost_bound,
    iterations_bound,
    iterations_until,
    norm,
    optimum,
    perturbations_of,
    quadratic_trials,
    random_perturbations,
    rates,
    regression_trials,
    regularised_loss,
    regularised_update,
    time_discounted,
)
from planaria_lab.scar.partial import (
    RestoreCase,
    Runs,
    Saving,
    running_checkpoint,
    truncated_geometric,
)
from planaria_lab.scar.results import confidence, records, saved

# Iterations


def halve(points: np.ndarray) -> np.ndarray:
    return points / 2


def test_iterations_until_it_is_within_the_tolerance_for_good() -> None:
    start = np.array([[8.0], [0.5], [1.0]])
    assert iterations_until(halve, norm, start, 1.0, {}).tolist() == [4, 0, 1]


def test_a_perturbation_is_added_before_the_update_of_its_iteration() -> None:
    start = np.full((3, 1), 8.0)
    # y(3) = 1; y(4) = (1 + delta) / 2, which is below 1 unless delta is 1 or more.
    deltas = {3: np.array([[0.0], [1.0], [-0.9]])}
    assert iterations_until(halve, norm, start, 1.0, deltas).tolist() == [4, 5, 4]


def test_what_was_within_and_is_thrown_out_again_counts_as_outside() -> None:
    start = np.full((1, 1), 8.0)
    # y(9) = 1/64; y(10) is a little more than 4, and y(12) a little more than 1.
    assert iterations_until(halve, norm, start, 1.0, {9: np.array([[8.0]])}).tolist() == [13]


def test_iterations_have_an_end() -> None:
    with pytest.raises(ValueError, match=r"1 trials are not within 1 at iteration 30"):
        iterations_until(lambda points: points, norm, np.full((1, 1), 8.0), 1.0, {}, limit=30)


# The bound


def test_the_bound_by_hand() -> None:
    discounted = time_discounted({0: np.array([1.0]), 2: np.array([0.5])}, c=0.5)
    assert discounted.tolist() == [3.0]  # 1 + 0.5 * 4
    assert iteration_cost_bound(discounted, distance=1.0, c=0.5) == pytest.approx(2.0)
    assert iterations_bound(discounted, 1.0, 0.5, tolerance=0.25) == pytest.approx(4.0)


def test_the_rates_of_a_run() -> None:
    of = rates(np.array([8.0, 2.0, 1.0]), exact=0.9)
    assert of == pytest.approx((math.sqrt(1 / 8), 0.5, 0.9))


values = st.floats(-10, 10, allow_subnormal=False)


@settings(deadline=None)
@given(
    eigenvalues=arrays(np.float64, 4, elements=st.floats(0.1, 1)),
    start=arrays(np.float64, 4, elements=values),
    deltas=st.dictionaries(st.integers(0, 40), arrays(np.float64, (1, 4), elements=values)),
)
def test_no_perturbations_of_a_quadratic_need_more_than_the_theorem_says(
    eigenvalues: np.ndarray, start: np.ndarray, deltas: dict[int, np.ndarray]
) -> None:
    start[0] = 1.0
    eigenvalues[0], eigenvalues[1] = 1.0, 0.1
    quadratic = Quadratic(eigenvalues, start)
    needed = iterations_until(quadratic.update, norm, start[None], 1e-3, deltas)
    norms = {k: norm(delta) for k, delta in deltas.items()} or {0: np.zeros(1)}
    discounted = time_discounted(norms, quadratic.exact_rate)
    most = iterations_bound(discounted, float(np.linalg.norm(start)), quadratic.exact_rate, 1e-3)
    assert needed[0] <= most[0] + 1


@settings(deadline=None)
@given(st.integers(0, 60), st.floats(0.01, 100))
def test_away_from_the_optimum_along_the_slowest_axis_the_bound_is_reached(
    at: int, size: float
) -> None:
    quadratic = Quadratic(np.array([1.0, 0.1]), np.array([0.0, 1.0]))
    deltas = {at: np.array([[0.0, size]])}
    start = quadratic.start[None]
    cost = iterations_until(quadratic.update, norm, start, 1e-4, deltas) - iterations_until(
        quadratic.update, norm, start, 1e-4, {}
    )
    discounted = time_discounted({at: np.array([size])}, 0.9)
    assert cost[0] == pytest.approx(iteration_cost_bound(discounted, 1.0, 0.9)[0], abs=1)


def test_costs_may_exceed_the_bound_with_exact_c_where_the_start_was_easy() -> None:
    # The start lies on the fast axis, so it needs fewer iterations than c predicts. The theorem
    # bounds the difference between c's predictions with and without the perturbation.
    quadratic = Quadratic(np.array([1.0, 0.1]), np.array([1.0, 0.0]))
    deltas = {0: np.array([[0.0, 0.1]])}
    cost = iterations_until(quadratic.update, norm, quadratic.start[None], 1e-3, deltas) - 1
    bound = iteration_cost_bound(time_discounted({0: np.array([0.1])}, 0.9), 1.0, 0.9)
    assert cost[0] == 43
    assert bound[0] < 1


def test_a_golden_quadratic() -> None:
    made = quadratic_trials("one", problem=0, trials=6)
    assert made.unperturbed == 1000
    assert (made.iterations - made.unperturbed).tolist() == [1, -43, 35, 3, 159, -4]
    assert made.rates.mean == pytest.approx(0.9895108, abs=1e-7)
    again = quadratic_trials("one", problem=0, trials=6)
    assert (made.iterations == again.iterations).all()


def test_perturbations_have_the_sizes_asked_for() -> None:
    sizes = np.array([1.0, 10.0, 0.0])
    deltas = random_perturbations(np.random.default_rng(0), sizes, (300, 10))
    assert norm(deltas) == pytest.approx(sizes, rel=0.05)


# Logistic regression


@pytest.fixture(scope="module")
def data() -> Digits:
    return digits()


@pytest.fixture(scope="module")
def best(data: Digits) -> np.ndarray:
    return optimum(data)


def test_a_margin_is_black_and_changes_no_loss(data: Digits) -> None:
    wide = digits(margin=4)
    lit = wide.pixels.any(axis=0)
    assert wide.pixels.shape == (1797, 128)
    assert np.array_equal(wide.pixels[:, lit], data.pixels[:, data.pixels.any(axis=0)])


def test_cross_entropy_and_its_slope(data: Digits) -> None:
    few = Digits(data.pixels[:20], data.labels[:20])
    weights = np.random.default_rng(1).normal(size=(3, 64, 10))
    direction = np.random.default_rng(2).normal(size=(64, 10))
    slope = (gradient(few.pixels, few.labels, weights) * direction).sum(axis=(1, 2))
    ahead, behind = (cross_entropy(few, weights + by * direction) for by in (1e-5, -1e-5))
    assert slope == pytest.approx((ahead - behind) / 2e-5, rel=1e-6)
    assert cross_entropy(few, np.zeros((1, 64, 10))) == pytest.approx(math.log(10))


def test_trials_may_have_batches_of_their_own(data: Digits) -> None:
    weights = np.random.default_rng(1).normal(size=(2, 64, 10))
    batches = np.array([[0, 1, 2], [7, 8, 9]])
    together = gradient(data.pixels[batches], data.labels[batches], weights)
    for trial, batch in enumerate(batches):
        alone = gradient(data.pixels[batch], data.labels[batch], weights[trial : trial + 1])
        assert together[trial] == pytest.approx(alone[0])


def test_the_optimum_is_one(data: Digits, best: np.ndarray) -> None:
    assert regularised_update(data, best[None]) == pytest.approx(best[None], abs=1e-11)
    curvature = np.linalg.eigvalsh(hessian(data, best))
    assert curvature[0] == pytest.approx(DECAY)
    near = best + 1e-3 * np.random.default_rng(0).normal(size=(5, 64, 10))
    assert (regularised_loss(data, near) > regularised_loss(data, best[None])).all()


def test_the_step_size_contracts_from_everywhere(data: Digits) -> None:
    # The softmax's curvature is at most 1/2, so the loss's is at most this, at any point.
    largest = np.linalg.eigvalsh(data.pixels.T @ data.pixels / len(data.labels))[-1] / 2
    assert abs(1 - STEP_SIZE * (largest + DECAY)) < 1 - STEP_SIZE * DECAY


@settings(deadline=None)
@given(seed=st.integers(0, 99), spread=st.floats(0.01, 10))
def test_an_update_contracts_as_the_exact_c_says(
    data: Digits, best: np.ndarray, seed: int, spread: float
) -> None:
    weights = best + spread * np.random.default_rng(seed).normal(size=(2, 64, 10))
    before, after = norm(weights - best), norm(regularised_update(data, weights) - best)
    assert (after <= (1 - STEP_SIZE * DECAY) * before * (1 + 1e-12)).all()


def test_the_kinds_of_perturbations(best: np.ndarray) -> None:
    at = best / 3
    adversarial = at + perturbations_of("adversarial", 7, at, best)
    left = np.linalg.norm(at - best)
    assert (norm(adversarial - best) > left).all()
    assert norm(adversarial - best) == pytest.approx(left + norm(adversarial - at))
    reset = at + perturbations_of("reset", 7, at, best)
    back = (reset == 0).all(axis=2)
    assert np.array_equal(reset[~back], np.broadcast_to(at, reset.shape)[~back])
    assert 0 < back.mean() < 1


# Recovery


def line(rows: int, iterations: int) -> np.ndarray:
    """Return weights [iterations, rows, 1] in which row i grows by i + 1 at each iteration."""
    return np.arange(iterations)[:, None, None] * np.arange(1.0, rows + 1)[:, None]


def test_a_whole_checkpoint_is_the_last_one_before_the_failing_iteration() -> None:
    path = line(4, 20)
    whole = Saving("priority", 1.0, 8)
    for failed, saved_at in {7: 0, 8: 0, 9: 8, 16: 8, 17: 16}.items():
        assert np.array_equal(running_checkpoint(path, failed, whole, 0), path[saved_at])


def test_priority_saves_the_rows_that_changed_most() -> None:
    path = line(4, 20)
    held = running_checkpoint(path, 5, Saving("priority", 1 / 4, 8), 0)
    # Iteration 2 saves row 3, which has changed by 8; iteration 4 row 2, by 12 (row 3: by 8).
    assert held[:, 0].tolist() == [0, 0, 12, 8]


def test_round_saves_the_rows_in_turn() -> None:
    path = line(4, 20)
    held = running_checkpoint(path, 8, Saving("round", 1 / 4, 8), 0)
    assert (held[:, 0] / path[1, :, 0]).tolist() == [2, 4, 6, 0]


def test_every_choice_saves_as_much_in_a_period() -> None:
    path = np.arange(9.0)[:, None, None] * np.ones((64, 10))
    for fraction in partial.FRACTIONS:
        for choice in partial.CHOICES:
            held = running_checkpoint(path, 9, Saving(choice, fraction, 8), 3)
            last = (held == 8).all(axis=1).mean()
            assert last == fraction


def test_a_fraction_of_a_period_is_a_whole_number_of_iterations() -> None:
    with pytest.raises(ValueError, match=r"0.125 of a period of 4 isn't an iteration"):
        running_checkpoint(line(8, 9), 3, Saving("round", 1 / 8, 4), 0)


def test_the_part_of_the_change_in_the_rows_that_changed_most() -> None:
    path = np.stack([line(4, 9)] * 2, axis=1)
    assert partial.concentration(path, 1 / 4) == pytest.approx([16 / 30] * 2)
    assert partial.concentration(path, 1.0) == pytest.approx([1.0] * 2)


@settings(deadline=None)
@given(st.floats(0, 1, exclude_max=True), st.floats(0.001, 0.9), st.integers(1, 80))
def test_failures_come_within_the_run(uniform: float, chance: float, most: int) -> None:
    (failed,) = truncated_geometric(np.array([uniform]), chance, np.array([most]))
    assert 1 <= failed <= most


def test_failures_are_geometric() -> None:
    uniform = (np.arange(100_000) + 0.5) / 100_000
    failed = truncated_geometric(uniform, 0.25, np.full(100_000, 3))
    shares = np.bincount(failed)[1:] / 100_000
    expected = np.array([1, 0.75, 0.75**2])
    assert shares == pytest.approx(expected / expected.sum(), abs=1e-4)


@pytest.fixture(scope="module")
def runs(data: Digits) -> Runs:
    return partial.runs(data, trials=8)


def test_a_run_without_a_loss_needs_about_sixty_iterations(runs: Runs) -> None:
    assert ((runs.unperturbed >= 58) & (runs.unperturbed <= 62)).all()
    assert (runs.failed < runs.unperturbed).all()


def test_restoring_nothing_costs_nothing(runs: Runs) -> None:
    costs = partial.costs(runs, RestoreCase(Saving("priority", 1.0, 8), restored=0.0))
    assert not costs.iterations.any()
    assert not costs.perturbation.any()


def test_partial_recovery_perturbs_by_the_lost_rows_alone(runs: Runs) -> None:
    # Theorem 4.1 holds in every trial, and the perturbation grows with the share.
    saving = Saving("priority", 1.0, 16)
    costs = [partial.costs(runs, RestoreCase(saving, restored)) for restored in (1 / 4, 1 / 2, 1.0)]
    quarter, half, full = (of.perturbation for of in costs)
    assert (quarter < half).all()
    assert (half < full).all()
    assert costs[0].iterations.mean() < costs[1].iterations.mean() < costs[2].iterations.mean()


def test_golden_costs_of_recovery(runs: Runs) -> None:
    costs = partial.costs(runs, RestoreCase(Saving("priority", 1 / 8, 16), restored=1 / 2))
    assert costs.iterations.tolist() == [4, 5, 3, 3, 2, 2, 3, 4]


# Results


def test_confidence_and_what_is_saved() -> None:
    mean, half = confidence([1, 2, 3, 4])
    assert (mean, half) == pytest.approx((2.5, 1.96 * math.sqrt(5 / 3) / 2))
    full = np.array([4.0, 8.0, 12.0])
    assert saved(full / 4, full) == pytest.approx((0.75, 0.75, 0.75))


STORED = Path(__file__).parents[2] / "results" / "scar"


def test_the_tables_are_those_of_the_stored_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (STORED / "convex.jsonl").read_text().splitlines()
    monkeypatch.setattr("planaria_lab.scar.results.records", lambda trials: map(json.loads, lines))
    result = CliRunner().invoke(app, ["run", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    plots = {"choice.png", "partial.png", "quadratic.png", "regression.png"}
    assert {path.name for path in tmp_path.iterdir()} == plots | {"convex.jsonl", "convex.md"}
    assert (tmp_path / "convex.md").read_text() == (STORED / "convex.md").read_text()


def test_stored_results_can_be_made_again() -> None:
    first = json.loads((STORED / "convex.jsonl").read_text().splitlines()[0])
    assert next(records(100)) == {key: first[key] for key in first.keys() - set(KEYS)}


def test_a_regression_that_is_perturbed_less_costs_less() -> None:
    kind, criterion, made = next(regression_trials(6))
    assert (kind, criterion, made.unperturbed) == ("random", "distance", 100)
    by_size = np.argsort(made.norms[50])
    assert (np.diff(made.iterations[by_size]) >= 0).all()
    most = iterations_bound(
        time_discounted(made.norms, made.rates.exact),
        made.distance,
        made.rates.exact,
        made.tolerance,
    )
    assert (made.iterations <= most + 1).all()


def test_a_report_of_nothing_says_what_to_do(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "doesn't exist" in result.output

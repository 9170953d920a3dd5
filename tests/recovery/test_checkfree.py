from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.recovery import checkfree
from planaria.recovery.checkfree import GuessSource, average, guess, neighbour_shares

omegas = st.floats(0, allow_infinity=False, allow_nan=False)
values = st.floats(width=32, allow_infinity=False, allow_nan=False)
pairs = st.lists(st.tuples(values, values), min_size=1, max_size=20)


def columns(rows: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    before, after = torch.tensor(rows, dtype=torch.float32).unbind(1)
    return before.contiguous(), after.contiguous()


def test_algorithm_1() -> None:
    before, after = torch.tensor([1.0, 0.0, -4.0]), torch.tensor([5.0, 8.0, 4.0])
    got = average(before, after, omega_before=3.0, omega_after=1.0)
    assert torch.equal(got, torch.tensor([2.0, 2.0, -2.0]))


@pytest.mark.parametrize(
    ("stage", "method", "expected"),
    [
        (2, "interpolate", [1.0, 3.0]),  # two thirds of stage 1, which is nearer
        (3, "interpolate", [2.0, 2.0]),
        (2, "checkfree", [0.3, 3.7]),  # whatever the distances
        (3, "checkfree", [0.3, 3.7]),
    ],
)
def test_a_guess_has_the_shares_of_its_method(
    stage: int, method: str, expected: list[float]
) -> None:
    sources = [
        GuessSource(1, torch.tensor([0.0, 4.0]), omega=9.0),
        GuessSource(4, torch.tensor([3.0, 1.0]), omega=1.0),
    ]
    weights, omega = guess(stage, method, sources)
    assert weights.tolist() == pytest.approx(expected)
    assert omega == 5.0
    assert guess(stage, method, sources[1:]) == (sources[1].weights, 1.0)


@given(pairs, omegas, omegas)
def test_every_element_lies_between_its_sources(
    rows: list[tuple[float, float]], omega_before: float, omega_after: float
) -> None:
    before, after = columns(rows)
    got = average(before, after, omega_before, omega_after)
    assert (got >= torch.minimum(before, after)).all()
    assert (got <= torch.maximum(before, after)).all()


@given(pairs, omegas, omegas)
def test_sides_can_be_exchanged(
    rows: list[tuple[float, float]], omega_before: float, omega_after: float
) -> None:
    before, after = columns(rows)
    straight = average(before, after, omega_before, omega_after)
    exchanged = average(after, before, omega_after, omega_before)
    assert torch.equal(straight, exchanged)


@given(st.lists(values, min_size=1, max_size=20), omegas, omegas)
def test_equal_neighbours_give_their_own_weights(
    row: list[float], omega_before: float, omega_after: float
) -> None:
    weights = torch.tensor(row, dtype=torch.float32)
    assert torch.equal(average(weights, weights.clone(), omega_before, omega_after), weights)


@given(pairs, st.floats(1e-300, 1e300))
def test_a_neighbour_without_gradient_counts_for_nothing(
    rows: list[tuple[float, float]], omega: float
) -> None:
    before, after = columns(rows)
    assert torch.equal(average(before, after, omega, 0.0), before)
    assert torch.equal(average(before, after, 0.0, omega), after)


def test_sources_stay_as_they_are_and_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    before, after = torch.randn(2, 1003, generator=generator).unbind()
    kept = before.clone(), after.clone()
    whole = average(before, after, 0.3, 0.9)
    monkeypatch.setattr(checkfree, "BLOCK", 64)
    assert torch.equal(average(before, after, 0.3, 0.9), whole)
    assert torch.equal(before, kept[0])
    assert torch.equal(after, kept[1])
    torch.testing.assert_close(whole, 0.25 * before + 0.75 * after)


@given(omegas, omegas)
def test_shares_sum_to_one(omega_before: float, omega_after: float) -> None:
    before, after = neighbour_shares(omega_before, omega_after)
    assert 0 <= before <= 1
    assert before + after == pytest.approx(1, rel=1e-15)
    assert (after, before) == neighbour_shares(omega_after, omega_before)
    if omega_before > omega_after:
        assert before >= after


def test_shares_go_by_the_squared_norms() -> None:
    assert neighbour_shares(9.0, 1.0) == pytest.approx((0.9, 0.1))
    assert neighbour_shares(1.7e308, 1.7e308) == (0.5, 0.5)
    assert neighbour_shares(0.0, 0.0) == (0.5, 0.5)

"""Tests of the choices of which rows a running snapshot sends next."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.recovery.snapshot import NEVER, Layout, choose
from planaria_lab.choices import Choice, ChosenSnapshot, rank_of

LAYOUT = Layout([(5, 3), (3,), (4, 7), (6, 1)])


def weights(step: int) -> torch.Tensor:
    return torch.randn(LAYOUT.values, generator=torch.Generator().manual_seed(step))


def random_choice(distances: torch.Tensor, seed: int) -> list[int]:
    taken = torch.ones(40, dtype=torch.int64)
    chosen: list[int] = choose(rank_of("random", distances, taken, (seed,)), taken, 10).tolist()
    return chosen


def test_a_random_choice_follows_from_its_seed_alone() -> None:
    first = random_choice(torch.zeros(40), 0)
    assert first == random_choice(torch.full((40,), 5.0), 0)
    others = [random_choice(torch.zeros(40), seed) for seed in range(1, 60)]
    assert all(other != first for other in others)
    assert set().union(*others) == set(range(40))


@pytest.mark.parametrize("choice", ["priority", "round", "random"])
@settings(deadline=None, max_examples=20)
@given(fraction=st.floats(0.03, 1), seed=st.integers(0, 5))
def test_every_block_has_come_after_so_many_rounds(
    choice: Choice, fraction: float, seed: int
) -> None:
    sent = ChosenSnapshot(LAYOUT, choice, fraction, "none", False, (seed,))
    rounds = math.ceil(1 / fraction)
    for step in range(1, rounds + 1):
        sent.take(step, [weights(step)])
    assert not (sent.taken == NEVER).any()
    for step in range(rounds + 1, 3 * rounds + 1 if choice == "round" else 0):  # two more rounds
        sent.take(step, [weights(step)])
        assert step - int(sent.taken.min()) < rounds

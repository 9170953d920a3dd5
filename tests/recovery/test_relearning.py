from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from planaria.recovery.learner import (
    Learner,
    Muon,
    error_gradient,
    learn,
    residual_error,
    squared_distance,
)
from planaria.recovery.orders import Run, adjoining, blocks, order, runs
from planaria.recovery.relearning import (
    PULL,
    YOUNG,
    decayed_rate,
    pass_count,
    peak_rate,
    pull,
    sample_parts,
    samples_at_a_time,
    shuffled,
    time_for,
)

Loss = tuple[list[tuple[int, ...]], frozenset[int]]


@st.composite
def losses(draw: st.DrawFn) -> Loss:
    """Draw the orders in use and the lost stages, which may include stage 0."""
    stages = draw(st.integers(1, 9))
    swapped = stages >= 4 and draw(st.booleans())
    lost = draw(st.frozensets(st.integers(0, stages), min_size=1))
    return [order(microbatch, stages, swapped) for microbatch in (0, 1)], lost


@given(losses())
def test_runs_are_the_lost_stages_of_an_order_as_long_as_can_be(loss: Loss) -> None:
    orders, lost = loss
    for visits in orders:
        all_runs = runs(visits, lost)
        assert sorted(s for run in all_runs for s in run.stages) == sorted(lost - {0})
        for run in all_runs:
            assert run.stages == visits[run.start : run.end]
            around = {*visits[max(0, run.start - 1) : run.start], *visits[run.end : run.end + 1]}
            assert not around & lost


@given(losses())
def test_a_route_has_the_runs_of_its_order_one_visit_later(loss: Loss) -> None:
    orders, lost = loss
    for visits in orders:
        shifted = [Run(start + 1, stages) for start, stages in runs(visits, lost)]
        assert list(runs((0, *visits, 0), lost)) == shifted


@given(losses())
def test_blocks_are_a_partition_that_cuts_no_run(loss: Loss) -> None:
    orders, lost = loss
    partition = blocks(orders, lost)
    assert sorted(stage for block in partition for stage in block) == sorted(lost - {0})
    together = [set(run.stages) for visits in orders for run in runs(visits, lost)]
    for stages in together:
        assert any(stages <= set(block) for block in partition)
    for block in partition:
        for stage in block if len(block) > 1 else ():
            assert any(stage in stages and len(stages) > 1 for stages in together)


@given(losses())
def test_adjoining_stages_are_those_next_to_a_block_on_some_route(loss: Loss) -> None:
    orders, lost = loss
    for block in blocks(orders, lost):
        next_to = set()
        for route in ((0, *visits, 0) for visits in orders):
            for a, b in pairwise(route):
                next_to |= {a} if b in block else set()
                next_to |= {b} if a in block else set()
        assert adjoining(orders, block) == tuple(sorted(next_to - set(block)))


def test_swapped_orders_part_what_is_lost_differently() -> None:
    swapped = [order(microbatch, 5, swapped=True) for microbatch in (0, 1)]
    assert runs(swapped[0], {2, 3}) == (Run(1, (2, 3)),)
    assert runs(swapped[1], {2, 3}) == (Run(0, (2,)), Run(2, (3,)))
    assert runs(swapped[1], {1, 2}) == (Run(0, (2, 1)),)
    assert blocks(swapped, {2, 3, 5}) == [(2, 3, 5)]  # 3 and 5 are neighbours when swapped
    assert blocks([swapped[0]], {2, 3, 5}) == [(2, 3), (5,)]
    assert adjoining(swapped, {1}) == (0, 2, 3)


# Parts, rates and passes


@given(st.integers(1, 40), st.integers(1, 50))
def test_parts_are_all_samples_in_order_evenly(samples: int, at_most: int) -> None:
    slices = sample_parts(samples, at_most)
    assert [at for part in slices for at in range(samples)[part]] == list(range(samples))
    sizes = [part.stop - part.start for part in slices]
    assert max(sizes) <= at_most
    assert max(sizes) - min(sizes) <= 1
    assert len(slices) == -(-samples // at_most)


def test_an_update_is_made_of_whole_samples_one_at_least() -> None:
    assert [samples_at_a_time(256, context) for context in (32, 64, 100, 256, 4096)] == [
        8,
        4,
        2,
        1,
        1,
    ]


def test_the_rate_falls_in_a_line_by_whichever_ends_first() -> None:
    assert [decayed_rate(2.0, done / 4) for done in range(5)] == [2.0, 1.5, 1.0, 0.5, 0.0]
    assert decayed_rate(2.0, 0.25, time=0.75) == decayed_rate(2.0, 0.75, time=0.25) == 0.5
    assert decayed_rate(2.0, 0.5, time=1.5) == 0.0  # the last piece may end after the time


@given(st.integers(0, 60), st.integers(0, 50))
def test_each_pass_takes_every_part_once_in_an_order_that_all_know(count: int, a_pass: int) -> None:
    assert sorted(shuffled(count, a_pass)) == list(range(count))
    assert shuffled(count, a_pass) == shuffled(count, a_pass)


def test_passes_differ_in_their_order() -> None:
    assert len({tuple(shuffled(20, a_pass)) for a_pass in range(10)}) == 10
    assert shuffled(5, 0) == [1, 2, 3, 0, 4]  # the same on every machine


# One update


def test_a_matrix_moves_alike_in_all_directions_and_a_vector_stays() -> None:
    stage = nn.Linear(4, 16)
    stage.weight.grad = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    stage.bias.grad = torch.linspace(-1, 1, 16)
    before = copy.deepcopy(stage)
    update = Muon(stage)
    update.step(0.5)
    moved = torch.linalg.svdvals(before.weight - stage.weight) / (0.5 * 2)  # sqrt(16 / 4)
    assert ((moved > 0.67) & (moved < 1.22)).all()
    assert torch.equal(before.bias, stage.bias)
    stage.zero_grad(set_to_none=False)
    update.step(0.5)  # momentum moves it further
    again = torch.linalg.svdvals(before.weight - stage.weight) / (0.5 * 2)
    assert (again > 1.2 * moved).all()


def test_directions_that_nothing_is_learned_about_stay_near_the_guess() -> None:
    """The pull keeps them there. Their gradients are noise, which adds up without it."""
    spread = []
    for strength in (PULL, 0.0):
        stage = nn.Linear(8, 8)
        guess = stage.weight.detach().clone()
        update = Muon(stage, strength)
        generator = torch.Generator().manual_seed(0)
        for number in range(400):
            stage.weight.grad = torch.randn(8, 8, generator=generator)
            update.step(decayed_rate(0.5, number / 400))
        spread.append((stage.weight.detach() - guess).norm().item())
    assert spread[0] < spread[1] / 3


def test_the_size_of_the_gradients_makes_no_difference() -> None:
    moved = []
    for scale in (1.0, 1e-4):
        stage = Residual(0)
        update = Muon(stage)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for parameter in stage.parameters():
                parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
            update.step(0.1)
        moved.append(nn.utils.parameters_to_vector(stage.parameters()))
    torch.testing.assert_close(moved[0], moved[1], atol=1e-3, rtol=1e-3)


# One pair of tensors


class Residual(nn.Module):
    """A stage that computes x plus a small network of x."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.net(x)
        return out


def pairs_of(teachers: list[Residual], count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(count):
        x = torch.randn(2, 3, 8, generator=generator)
        y = x
        for teacher in teachers:
            y = teacher(y).detach()
        pairs.append((x, y))
    return pairs


def learners(stages: list[Residual], lr: float = 1e-2) -> list[Learner]:
    return [Learner(stage, lr) for stage in stages]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_an_update_is_that_of_the_composition(length: int) -> None:
    """The reference is autograd through all stages."""
    pairs = pairs_of([Residual(seed) for seed in range(length)])
    stages = [Residual(100 + seed) for seed in range(length)]
    reference = copy.deepcopy(stages)
    updates = [Muon(stage) for stage in reference]
    chain = learners(stages)
    for x, y in pairs * 3:
        learn(chain, x, y)
        output = nn.Sequential(*reference)(x)
        error = ((output - y) ** 2).sum() / ((y - x) ** 2).sum()
        for stage in reference:
            stage.zero_grad()
        error.backward()
        for update in updates:
            update.step(1e-2)
    for stage, other in zip(stages, reference, strict=True):
        for a, b in zip(stage.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=5e-4)  # factors are rounded


def test_the_error_is_that_of_the_residual_over_all_pairs() -> None:
    teacher, student = Residual(0), Residual(1)
    pairs = pairs_of([teacher])
    missed = added = 0.0
    for x, y in pairs:
        missed += float(((student.net(x).detach() - (y - x)) ** 2).sum())
        added += float(((y - x) ** 2).sum())
    assert residual_error(learners([student]), pairs) == pytest.approx(missed / added, rel=1e-5)
    assert residual_error(learners([teacher]), pairs) == pytest.approx(0, abs=1e-10)
    assert residual_error([Learner(nn.Identity(), 0)], pairs) == 1


def test_relearning_makes_the_error_smaller_and_measuring_changes_nothing() -> None:
    pairs = pairs_of([Residual(0), Residual(1)])
    chain = learners([Residual(2), Residual(3)])
    before = residual_error(chain, pairs)
    assert residual_error(chain, pairs) == before
    for x, y in pairs * 30:
        learn(chain, x, y)
    assert residual_error(chain, pairs) < before / 4


def test_a_pair_to_which_nothing_was_added_teaches_nothing() -> None:
    x = torch.ones(1, 2, 3)
    assert torch.equal(error_gradient(x + 1, x, squared_distance(x, x)), torch.zeros_like(x))
    assert residual_error(learners([Residual(0)]), []) == float("inf")


def test_the_first_body_stage_is_learned_for_longer() -> None:
    assert pass_count(2, [3]) == pass_count(2, [2, 3]) == 2
    assert pass_count(2, [1]) == pass_count(2, [1, 2]) == 8
    assert pass_count(0, [1]) == 0


def test_relearning_has_a_share_of_the_time_since_the_last_loss_within_bounds() -> None:
    assert [time_for(20.0, trained, 0.0) for trained in (0.0, 16.0, 40.0, 1e6)] == [4, 4, 10, 20]
    assert [time_for(20.0, 40.0, spent) for spent in (3.0, 9.0, 60.0)] == [7, 2, 2]
    assert time_for(0.0, 40.0, 3.0) == 0


def test_only_the_first_body_stage_and_what_is_learned_with_it_is_drawn_back() -> None:
    assert pull([2]) == pull([2, 3]) == pull([6]) == 0
    assert pull([1]) == pull([1, 2]) == PULL


def test_weights_that_have_hardly_been_trained_are_moved_by_less() -> None:
    rates = [peak_rate(0.05, step) for step in (0, 1, YOUNG // 2, YOUNG, 10 * YOUNG)]
    assert rates == pytest.approx([0, 0.05 / YOUNG, 0.025, 0.05, 0.05])

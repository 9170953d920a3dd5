from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from recovery.orders import Run, adjoining, blocks, order, runs
from recovery.relearning import (
    CLIP,
    Learner,
    error_gradient,
    learn,
    parts,
    rate,
    residual_error,
    squared_distance,
)


@st.composite
def losses(draw: st.DrawFn) -> tuple[int, list[tuple[int, ...]], frozenset[int]]:
    """Number of body stages, the orders in use, lost stages (0 may be among them)."""
    stages = draw(st.integers(1, 9))
    swapped = stages >= 4 and draw(st.booleans())
    lost = draw(st.frozensets(st.integers(0, stages), min_size=1))
    return stages, [order(microbatch, stages, swapped) for microbatch in (0, 1)], lost


@given(losses())
def test_runs_are_the_lost_stages_of_an_order_as_long_as_can_be(
    loss: tuple[int, list[tuple[int, ...]], frozenset[int]],
) -> None:
    _, orders, lost = loss
    for visits in orders:
        found = runs(visits, lost)
        assert sorted(s for run in found for s in run.stages) == sorted(lost - {0})
        for run in found:
            assert run.stages == visits[run.start : run.end]
            around = {*visits[max(0, run.start - 1) : run.start], *visits[run.end : run.end + 1]}
            assert not around & lost


@given(losses())
def test_a_route_has_the_runs_of_its_order_one_visit_later(
    loss: tuple[int, list[tuple[int, ...]], frozenset[int]],
) -> None:
    _, orders, lost = loss
    for visits in orders:
        shifted = [Run(start + 1, stages) for start, stages in runs(visits, lost)]
        assert list(runs((0, *visits, 0), lost)) == shifted


@given(losses())
def test_blocks_are_a_partition_that_cuts_no_run(
    loss: tuple[int, list[tuple[int, ...]], frozenset[int]],
) -> None:
    _, orders, lost = loss
    found = blocks(orders, lost)
    assert sorted(stage for block in found for stage in block) == sorted(lost - {0})
    together = [set(run.stages) for visits in orders for run in runs(visits, lost)]
    for stages in together:
        assert any(stages <= set(block) for block in found)
    for block in found:
        for stage in block if len(block) > 1 else ():
            assert any(stage in stages and len(stages) > 1 for stages in together)


@given(losses())
def test_adjoining_stages_are_those_next_to_a_block_on_some_route(
    loss: tuple[int, list[tuple[int, ...]], frozenset[int]],
) -> None:
    _, orders, lost = loss
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


# How


@given(st.integers(1, 40), st.integers(0, 50))
def test_parts_are_all_samples_in_order_evenly(samples: int, at_a_time: int) -> None:
    found = parts(samples, at_a_time)
    assert [at for part in found for at in range(samples)[part]] == list(range(samples))
    sizes = [part.stop - part.start for part in found]
    assert max(sizes) <= (at_a_time or samples)
    assert max(sizes) - min(sizes) <= 1
    assert len(found) == (-(-samples // at_a_time) if at_a_time else 1)


def test_the_rate_falls_in_a_line_by_whichever_ends_first() -> None:
    assert [rate(2.0, done / 4) for done in range(5)] == [2.0, 1.5, 1.0, 0.5, 0.0]
    assert rate(2.0, 0.25, time=0.75) == rate(2.0, 0.75, time=0.25) == 0.5
    assert rate(2.0, 0.5, time=1.5) == 0.0  # the last piece may take longer than the time


# One pair


class Adam:
    """Of a module, by torch's own optimizer."""

    def __init__(self, module: nn.Module) -> None:
        self.weights = nn.utils.parameters_to_vector(module.parameters())
        self.parameters = list(module.parameters())
        self.adam = torch.optim.Adam(self.parameters)
        self.zero_gradient()

    def zero_gradient(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def squared_norm(self) -> float:
        return sum(float((p.grad**2).sum()) for p in self.parameters if p.grad is not None)

    def step(self, lr: float, clip_scale: float) -> None:
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad *= clip_scale
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()


class Residual(nn.Module):
    """x plus a little network of x."""

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
    found = []
    for _ in range(count):
        x = torch.randn(2, 3, 8, generator=generator)
        y = x
        for teacher in teachers:
            y = teacher(y).detach()
        found.append((x, y))
    return found


def learners(stages: list[Residual], lr: float = 1e-2) -> list[Learner]:
    return [Learner(stage, Adam(stage), lr) for stage in stages]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_an_update_is_that_of_the_composition(length: int) -> None:
    """Against autograd through all stages, torch's clipping and torch's Adam."""
    pairs = pairs_of([Residual(seed) for seed in range(length)])
    stages = [Residual(100 + seed) for seed in range(length)]
    reference = copy.deepcopy(stages)
    adams = [torch.optim.Adam(stage.parameters(), lr=1e-2) for stage in reference]
    chain = learners(stages)
    for x, y in pairs * 3:
        learn(chain, x, y)
        found = nn.Sequential(*reference)(x)
        error = ((found - y) ** 2).sum() / ((y - x) ** 2).sum()
        for adam in adams:
            adam.zero_grad()
        error.backward()
        for stage, adam in zip(reference, adams, strict=True):
            nn.utils.clip_grad_norm_(stage.parameters(), CLIP)
            adam.step()
    for stage, other in zip(stages, reference, strict=True):
        for a, b in zip(stage.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_error_is_that_of_the_residual_over_all_pairs() -> None:
    teacher, student = Residual(0), Residual(1)
    pairs = pairs_of([teacher])
    missed = added = 0.0
    for x, y in pairs:
        missed += float(((student.net(x).detach() - (y - x)) ** 2).sum())
        added += float(((y - x) ** 2).sum())
    assert residual_error(learners([student]), pairs) == pytest.approx(missed / added, rel=1e-5)
    assert residual_error(learners([teacher]), pairs) == pytest.approx(0, abs=1e-10)
    assert residual_error([Learner(lambda x: x, Adam(student), 0)], pairs) == 1


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

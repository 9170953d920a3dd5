"""Background relearning: it makes the same weights as one process that learns alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from planaria.node.stage.lesson import StageLesson
from planaria.node.state.background_relearning import BackgroundRelearning
from planaria.node.state.boundary import FetchedTensors
from planaria.node.state.relearn import RelearningCourse
from planaria.node.wire import stage_pb2 as pb
from planaria.recovery.learner import (
    Learner,
    Muon,
    error_gradient,
    residual_error,
    squared_distance,
)
from planaria.recovery.relearning import decayed_rate, pull, shuffled, updates_per_check
from tests.node.state.test_relearn import SHAPE, TERMS, Student, alone, crossed, fetched_by, student

PASS = 8 * SHAPE[0]
"""Relearning updates in one pass: one for each sample of 8 pairs."""


def before_enough(
    pairs, enough: float
) -> tuple[Student, StageLesson, FetchedTensors, pb.Relearned]:
    joiner, fetched = student(2), fetched_by(2, pairs)
    lesson = StageLesson(joiner.module, joiner.optimizer, fetched, [2], bf16=False)
    relearned = alone(joiner, pairs, replace(TERMS, enough=enough), made=lesson)
    return joiner, lesson, fetched, relearned


def test_training_goes_on_once_the_guess_is_good_enough() -> None:
    pairs = crossed([2], swapped=False)
    whole = alone(student(2), pairs)
    first = alone(student(2), pairs, replace(TERMS, enough=1e-9))
    assert (first.updates, first.left) == (whole.passes * PASS, 0), "it is never good enough"
    assert first.residual_after == pytest.approx(whole.residual_after)
    enough = (whole.residual_before + whole.residual_after) / 2
    joiner, _, _, relearned = before_enough(pairs, enough)
    assert 0 < relearned.updates < whole.passes * PASS
    assert relearned.updates % updates_per_check(PASS) == 0
    assert relearned.left == whole.passes * PASS - relearned.updates
    assert relearned.residual_after <= enough < relearned.residual_before
    assert len(joiner.updates) == relearned.updates
    at_once = alone(student(2), pairs, replace(TERMS, enough=whole.residual_before))
    assert (at_once.updates, at_once.undone) == (0, False)


@pytest.mark.parametrize("within", [100, 3])
def test_what_is_left_enters_with_commits_as_if_one_process_did_it_all(within: int) -> None:
    pairs = crossed([2], swapped=False)
    whole = alone(student(2), pairs)
    enough = (whole.residual_before + whole.residual_after) / 2
    joiner, lesson, fetched, relearned = before_enough(pairs, enough)
    each_step, generator = 5, torch.Generator().manual_seed(3)
    terms = replace(TERMS, enough=enough, each_step=each_step, within=within)
    course = RelearningCourse(fetched.complete_pairs(), SHAPE[0], terms)
    task = BackgroundRelearning(lesson, course, relearned)

    other = student(2)
    learning = student(2).module
    learner = Learner(learning, 0.0, update=Muon(learning, pull([2])))
    stage = torch.cat([p.detach().flatten() for p in learning.parameters()])
    copy, done, steps = stage.clone(), 0, 0

    def put(flat: torch.Tensor) -> None:
        with torch.no_grad():
            split = torch.split(flat, [p.numel() for p in learning.parameters()])
            for parameter, part in zip(learning.parameters(), split, strict=True):
                parameter.copy_(part.view_as(parameter))

    def learn(updates: int) -> None:
        nonlocal done
        for _ in range(updates):
            a_pass, place = divmod(done, PASS)
            pair, first, end = course.pieces[shuffled(PASS, a_pass)[place]]
            x, y = (tensor[first:end].float() for tensor in pairs[pair])
            learner.lr = decayed_rate(TERMS.lr, done / course.updates, steps / within)
            learner.backward(error_gradient(learner.forward(x), y, squared_distance(y, x)))
            done += 1

    learn(relearned.updates)
    stage = torch.cat([p.detach().flatten() for p in learning.parameters()])
    assert torch.equal(stage, joiner.optimizer.weights)
    while task.left:
        while task.update():
            pass
        offered, left = task.offer()
        assert not task.update(), "what is offered stays"
        assert offered == min(each_step, task.left)
        assert left == (task.left - offered if steps + 1 < within else 0)
        gradient = torch.randn(stage.shape, generator=generator)
        beside = task.take_change(offered)
        for optimizer in (joiner.optimizer, other.optimizer):
            optimizer.gradient.copy_(gradient)
        learn(offered)
        copy = torch.cat([p.detach().flatten() for p in learning.parameters()])
        other.optimizer.weights.copy_(stage)
        other.optimizer.step(1e-3)
        joiner.optimizer.step(1e-3)
        joiner.optimizer.weights.add_(beside)
        stage = other.optimizer.weights + (copy - stage)
        put(stage)
        task.renew()
        steps += 1
        assert task.left == left
        assert torch.equal(joiner.optimizer.weights, stage)
    assert task.steps == steps == min(-(-relearned.left // each_step), within)
    assert task.updates == min(relearned.left, within * each_step)
    newest = [[t.float() for t in ends] for pair, ends in pairs.items() if pair.step == 7]
    assert task.residual() == pytest.approx(residual_error([learner], newest))


def test_what_is_not_finite_is_never_offered() -> None:
    pairs = crossed([2], swapped=False)
    _, lesson, fetched, relearned = before_enough(pairs, 1e3)
    course = RelearningCourse(fetched.complete_pairs(), SHAPE[0], replace(TERMS, lr=1e38))
    task = BackgroundRelearning(lesson, course, relearned)
    while task.update():
        pass
    assert task.offer() == (0, 0)
    assert task.over

"""Partial against full recovery, and what to save next: SCAR's Figures 7 and 8, on the digits.

A trial is a run of stochastic gradient descent with batches of its own, a failure at an iteration
of its own, and rows lost in an order of its own. All three are the same for every kind of recovery,
and the cost of a loss is counted against the same run without the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import torch

from planaria.recovery.snapshot import Layout, choose
from planaria_lab.choices import Choice, rank_of
from planaria_lab.scar.convex import Digits, Floats, Ints, cross_entropy, gradient, norm, untrained

# SCAR's for MNIST: a sixth of the samples at a time until a loss of 2.5e4 over 60,000 samples,
# reached in roughly 60 iterations (appendix C). The learning rate makes it 60 here.
BATCHES: Final = 6  # a pass over the samples
TARGET: Final = 2.5 / 6  # mean cross-entropy
LEARNING_RATE: Final = 0.8
ITERATIONS: Final = 60  # roughly, without a loss
LIMIT: Final = 300

FRACTIONS: Final = (1.0, 1 / 2, 1 / 4, 1 / 8)
LOST: Final = (1 / 4, 1 / 2, 3 / 4)
CHOICES: Final[tuple[Choice, ...]] = ("priority", "round", "random")


class Saving(NamedTuple):
    """Every fraction * period iterations, save that fraction of the rows (section 4.2)."""

    choice: Choice
    fraction: float
    period: int  # iterations in which as many rows are saved as there are


class RestoreCase(NamedTuple):
    saving: Saving
    restored: float  # of the rows: those that are lost, or in full recovery all, 1.0


def cases(period: int) -> Iterator[RestoreCase]:
    """Full recovery, Figure 7 and Figure 8; at fraction 1 all choices are the same."""
    whole = Saving("priority", 1.0, period)
    for restored in (1.0, *LOST):
        yield RestoreCase(whole, restored)
    for fraction in FRACTIONS[1:]:
        for choice in CHOICES:
            yield RestoreCase(Saving(choice, fraction, period), 1 / 2)


class Runs(NamedTuple):
    """Runs without a loss, and what is to be lost in them."""

    data: Digits
    batches: Ints  # [trials, LIMIT, samples]
    path: Floats  # [iterations, trials, rows, 10], until the last trial is at the target
    unperturbed: Ints  # [trials], iterations to the target
    failed: Ints  # [trials], iterations made before the failure; geometric
    order: Ints  # [trials, rows], the rows, in the order in which more and more are lost


def runs(data: Digits, trials: int, seed: int = 7) -> Runs:
    rng = np.random.default_rng([seed])
    batches = np.stack([_batches(rng, len(data.labels)) for _ in range(trials)])
    path = [np.repeat(untrained(data)[None], trials, axis=0)]
    unperturbed = np.full(trials, LIMIT)
    for k in range(LIMIT):
        reached = cross_entropy(data, path[-1]) <= TARGET
        unperturbed = np.where(reached, np.minimum(unperturbed, k), unperturbed)
        if (unperturbed < LIMIT).all():
            break
        path.append(_descend(data, path[-1], batches[:, k]))
    return Runs(
        data=data,
        batches=batches,
        path=np.array(path),
        unperturbed=unperturbed,
        failed=truncated_geometric(rng.random(trials), 2 / ITERATIONS, unperturbed - 1),
        order=np.argsort(rng.random((trials, data.pixels.shape[1])), axis=1),
    )


def concentration(path: Floats, share: float) -> Floats:
    """The part of all squared change [trials] in that share of the rows that changed most.

    `path`: [iterations, trials, rows, columns]; the change is from its first to its last.
    """
    squares = np.square(path[-1] - path[0]).sum(axis=2)
    most = -np.sort(-squares, axis=1)[:, : int(share * squares.shape[1])]
    return np.asarray(most.sum(axis=1) / squares.sum(axis=1))


def truncated_geometric(uniform: Floats, chance: float, most: Ints) -> Ints:
    """The trial of the first success, given that it is among the first `most`: 1..most."""
    within = -np.expm1(most * np.log1p(-chance))
    drawn = np.ceil(np.log1p(-uniform * within) / np.log1p(-chance))
    return np.asarray(np.clip(drawn.astype(np.int64), 1, most))


def _batches(rng: np.random.Generator, samples: int) -> Ints:
    """[LIMIT, samples // BATCHES], pass after pass over the shuffled samples."""
    size = samples // BATCHES
    passes = [rng.permutation(samples)[: size * BATCHES] for _ in range(LIMIT // BATCHES)]
    return np.concatenate(passes).reshape(LIMIT, size)


def _descend(data: Digits, weights: Floats, batch: Ints) -> Floats:
    return weights - LEARNING_RATE * gradient(data.pixels[batch], data.labels[batch], weights)


def running_checkpoint(path: Floats, failed: int, saving: Saving, seed: int) -> Floats:
    """What was saved last of each row, [rows, columns], when iteration `failed` fails.

    `path`: [iterations, rows, columns]. Starts as path[0]; what the failing iteration would have
    saved isn't. The rows are chosen as a node chooses the blocks that it sends, on float32.
    """
    layout = Layout([path.shape[1:]])
    every = int(saving.period * saving.fraction)
    count = int(layout.blocks * saving.fraction)
    if every < 1 or every != saving.period * saving.fraction:
        raise ValueError(f"{saving.fraction} of a period of {saving.period} isn't an iteration")
    checkpoint = torch.from_numpy(path[0].astype(np.float32)).flatten()
    taken_at = torch.zeros(layout.blocks, dtype=torch.int64)
    for k in range(every, failed, every):
        now = torch.from_numpy(path[k].astype(np.float32)).flatten()
        distances = layout.squared_distances(now, checkpoint)
        blocks = choose(rank_of(saving.choice, distances, taken_at, [seed, k]), taken_at, count)
        layout.scatter(checkpoint, blocks, layout.gather(now, blocks))
        taken_at[blocks] = k
    return checkpoint.numpy().astype(np.float64).reshape(path.shape[1:])


class Costs(NamedTuple):
    """The costs of each trial's loss."""

    iterations: Ints  # extra, to the target
    perturbation: Floats  # ||delta||
    loss: Floats  # by which delta raised the cross-entropy


def costs(trained: Runs, case: RestoreCase) -> Costs:
    """`case` in every trial. Raises ValueError where a trial never comes back to the target."""
    trials = np.arange(len(trained.failed))
    before = trained.path[trained.failed, trials]
    saved = np.stack(
        [
            running_checkpoint(trained.path[:, trial], failed, case.saving, seed=trial)
            for trial, failed in enumerate(trained.failed.tolist())
        ]
    )
    restored = np.zeros(trained.order.shape, dtype=bool)
    count = int(case.restored * trained.order.shape[1])
    np.put_along_axis(restored, trained.order[:, :count], True, axis=1)
    weights = np.where(restored[:, :, None], saved, before)
    return Costs(
        iterations=_iterations_to_target(trained, weights) - trained.unperturbed,
        perturbation=norm(weights - before),
        loss=cross_entropy(trained.data, weights) - cross_entropy(trained.data, before),
    )


def _iterations_to_target(trained: Runs, weights: Floats) -> Ints:
    """Iterations from these weights [trials, rows, 10] at each trial's failure on, counted from
    0."""
    result = trained.failed.copy()
    running = np.arange(len(weights))
    while len(running):
        above = cross_entropy(trained.data, weights) > TARGET
        running, weights = running[above], weights[above]
        if (result[running] >= LIMIT).any():
            raise ValueError(f"a trial is above a loss of {TARGET:.3f} at iteration {LIMIT}")
        weights = _descend(trained.data, weights, trained.batches[running, result[running]])
        result[running] += 1
    return result

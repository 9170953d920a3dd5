"""Partial and full recovery, and choices of what to save next: SCAR's Figures 7 and 8, on digits.

A trial is a run of stochastic gradient descent. It draws its batches, the iteration of its failure,
and the order in which rows are lost. These are the same for every kind of recovery. The cost of a
loss is the difference from the same run without the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import torch

from planaria.recovery.snapshot import Layout, choose
from planaria_lab.choices import Choice, rank_of
from planaria_lab.scar.convex import Digits, Floats, Ints, cross_entropy, gradient, norm, untrained

# SCAR's settings for MNIST: batches of a sixth of the samples, until the loss summed over 60,000
# samples is 2.5e4, after roughly 60 iterations (appendix C). LEARNING_RATE makes it 60 here, too.
BATCHES: Final = 6  # in a pass over the samples
TARGET: Final = 2.5 / 6  # mean cross-entropy
LEARNING_RATE: Final = 0.8
ITERATIONS: Final = 60  # roughly, without a loss
LIMIT: Final = 300

FRACTIONS: Final = (1.0, 1 / 2, 1 / 4, 1 / 8)
LOST: Final = (1 / 4, 1 / 2, 3 / 4)
CHOICES: Final[tuple[Choice, ...]] = ("priority", "round", "random")


class Saving(NamedTuple):
    """A way to save: `fraction` of the rows every fraction * period iterations (section 4.2)."""

    choice: Choice
    fraction: float
    period: int  # iterations in which as many rows are saved as there are


class RestoreCase(NamedTuple):
    """A way to save, and the share of the rows that a loss restores from saves."""

    saving: Saving
    restored: float  # share of the rows: the lost ones; 1.0 in full recovery


def cases(period: int) -> Iterator[RestoreCase]:
    """Yield full recovery, then Figure 7's and 8's cases. At fraction 1 all choices are equal."""
    whole = Saving("priority", 1.0, period)
    for restored in (1.0, *LOST):
        yield RestoreCase(whole, restored)
    for fraction in FRACTIONS[1:]:
        for choice in CHOICES:
            yield RestoreCase(Saving(choice, fraction, period), 1 / 2)


class Runs(NamedTuple):
    """Runs without a loss, and the failures that `costs` applies to them."""

    data: Digits
    batches: Ints  # [trials, LIMIT, samples]
    path: Floats  # weights [iterations, trials, rows, 10], until the last trial is at the target
    unperturbed: Ints  # [trials], iterations to the target
    failed: Ints  # [trials], iterations before the failure; geometric
    order: Ints  # [trials, rows], row numbers; a loss of n rows takes the first n


def runs(data: Digits, trials: int, seed: int = 7) -> Runs:
    """Train all trials to the target without a loss, and draw their failures."""
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
    """Return the part [trials] of the squared change in the `share` of the rows that changed most.

    `path`: [iterations, trials, rows, columns]; the change is from its first to its last iteration.
    """
    squares = np.square(path[-1] - path[0]).sum(axis=2)
    most = -np.sort(-squares, axis=1)[:, : int(share * squares.shape[1])]
    return np.asarray(most.sum(axis=1) / squares.sum(axis=1))


def truncated_geometric(uniform: Floats, chance: float, most: Ints) -> Ints:
    """Return draws of the first success of trials with this `chance`, if it is within 1..most.
    `uniform`: random numbers within 0..1, one for each draw."""
    within = -np.expm1(most * np.log1p(-chance))
    drawn = np.ceil(np.log1p(-uniform * within) / np.log1p(-chance))
    return np.asarray(np.clip(drawn.astype(np.int64), 1, most))


def _batches(rng: np.random.Generator, samples: int) -> Ints:
    """Draw batches [LIMIT, samples // BATCHES]; each pass shuffles the samples anew."""
    size = samples // BATCHES
    passes = [rng.permutation(samples)[: size * BATCHES] for _ in range(LIMIT // BATCHES)]
    return np.concatenate(passes).reshape(LIMIT, size)


def _descend(data: Digits, weights: Floats, batch: Ints) -> Floats:
    return weights - LEARNING_RATE * gradient(data.pixels[batch], data.labels[batch], weights)


def running_checkpoint(path: Floats, failed: int, saving: Saving, seed: int) -> Floats:
    """Return the last saved value of each row, [rows, columns], when iteration `failed` fails.

    `path`: [iterations, rows, columns]. The checkpoint starts as path[0]. Iteration `failed` itself
    saves nothing. Rows are chosen in float32, as a node chooses the blocks that it sends. Raises
    ValueError if fraction * period is not a whole number of iterations.
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
    """Costs of the loss in each trial, [trials]."""

    iterations: Ints  # extra iterations to the target
    perturbation: Floats  # ||delta||
    loss: Floats  # increase of the cross-entropy by delta


def costs(trained: Runs, case: RestoreCase) -> Costs:
    """Apply `case` to every trial; return its costs. Raises ValueError if a trial isn't back at the
    target at iteration `LIMIT`."""
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
    """Return the iteration, counted from 0, at which each trial reaches the target. It goes on from
    `weights` [trials, rows, 10] at its failure."""
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

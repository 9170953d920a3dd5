"""Learning-rate schedules: the run's, and the boost after an inexact rebuild."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from planaria.node.run_file import RunFile

Schedule = Literal["cosine", "linear", "constant", "wsd"]
WARMUP: Final = 20
"""Default steps of warm-up in a run that is long enough."""


def peak_of(run: RunFile) -> float:
    """Peak of the learning rate: the run file's, or the default of its model."""
    return run.training.lr or run.config.learning_rate


def warmup_of(run: RunFile) -> int:
    """A run's steps of warm-up: the run file's, or `WARMUP`, but at most a tenth of the run."""
    warmup = run.training.warmup
    return min(WARMUP, run.steps // 10) if warmup is None else warmup


def rate_of(step: int, run: RunFile) -> float:
    """The run's learning rate at a step, the same for all stages. Behind a change of settings it
    rises to the schedule's over `training.rewarm` steps."""
    training, since = run.training, step - run.changed_at
    rate = scheduled_rate(
        step,
        run.steps,
        peak_of(run),
        warmup_of(run),
        training.lr_floor,
        training.schedule,
        training.decay_share,
    )
    rising = 0 < since < training.rewarm and run.changed_at > 0
    return rate * since / training.rewarm if rising else rate


def describe_rate(run: RunFile) -> str:
    """Message about the learning rate, for the start of the run."""
    last = rate_of(run.steps, run)
    muon = f" (matrices of body stages {run.training.muon_lr:g}, by Muon)"
    return (
        f"learning rate: {peak_of(run):g}{muon if run.optimizer == 'muon' else ''} after "
        f"{warmup_of(run)} steps of warm-up, then {run.training.schedule}; {last:g} at step "
        f"{run.steps}"
    )


def warmup_too_long(run: RunFile) -> str | None:
    """Warning if the run ends before its warm-up does."""
    peak, warmup, last = peak_of(run), warmup_of(run), rate_of(run.steps, run)
    if warmup <= run.steps:
        return None
    return (
        f"training.warmup = {warmup} is more than steps = {run.steps}: the learning rate gets no "
        f"higher than {last:g}, {100 * last / peak:.2g}% of training.lr = {peak:g}; choose a "
        "shorter warm-up, or leave it out"
    )


def scheduled_rate(
    step: int,
    steps: int,
    peak: float,
    warmup: int,
    floor: float,
    schedule: Schedule = "cosine",
    decay_share: float = 1.0,
) -> float:
    """Learning rate of step `step` of `steps`, counted from 1: linear warm-up, then `schedule`.

    The first step gets peak / warmup, step `warmup` the peak. `cosine` and `linear` then decrease.
    `wsd` (warm-up, stable, decay: arXiv 2404.06395) keeps the peak until the last decay_share x
    steps, in which it decreases linearly. Step `steps` and any later one get floor x peak.
    `constant` keeps the peak. Raises ValueError for a step before 1.
    """
    if step < 1:
        raise ValueError(f"steps count from 1: there is no step {step}")
    if step <= warmup:
        return peak * step / warmup
    if schedule == "constant":
        return peak
    if schedule == "wsd":
        falls = decay_share * steps
        progress = min(1.0, max(0.0, 1 - (steps - step) / falls))
    else:
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    if schedule != "cosine":
        return peak * (floor + (1 - floor) * (1 - progress))
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def boost(step: int, boosted_at: int, factor: float, over: int) -> float:
    """Scale of the learning rate at a step of a stage rebuilt inexactly (CheckFree, Alg. 1).

    `boosted_at` is the committed step at the rebuild, 0 if there was none: at step 0 a stage is
    still made from the seed. The scale is `factor` at the first step after it and decreases
    linearly to 1 over `over` steps; with `over` = 0 it stays.
    """
    if boosted_at == 0 or step <= boosted_at:
        return 1.0
    if over == 0:
        return factor
    left = max(0.0, 1 - (step - boosted_at - 1) / over)
    return 1 + (factor - 1) * left

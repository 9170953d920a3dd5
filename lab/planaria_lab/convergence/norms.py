"""Gradient norms of the stages without losses; CheckFree's average weighs neighbours by them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from planaria.node.data.mixture import open_data
from planaria.recovery.checkfree import neighbour_shares
from planaria_lab.convergence.study import Job, Study
from planaria_lab.convergence.training import TrainingSwarm
from planaria_lab.origin import origin

NORMS = "norms.jsonl"
EVERY = 10
"""Steps between two measurements."""


class Norms(NamedTuple):
    """The norms of one run: a line of the file."""

    seed: int
    squared: list[list[float]]  # ω (squared norm) of stages 0, 1, .., L after each tenth step
    sizes: list[float]  # root mean square of the elements of each stage's matrices, at the end
    machine: str
    torch: str
    commit: str
    at: int


def measure(job: Job) -> Norms:
    """Train this run without losses; return its norms."""
    swarm = TrainingSwarm(job.run, open_data(job.run.data), job.ablation)
    squared = []
    while swarm.committed < job.run.steps:
        swarm.step()
        if swarm.committed % EVERY == 0:
            squared.append([float(f"{stage.omega:.4g}") for stage in swarm.stages])
    sizes = []
    for stage in swarm.stages:
        matrices = [
            matrix.detach().double() for matrix in stage.module.parameters() if matrix.dim() == 2
        ]
        values = sum(matrix.numel() for matrix in matrices)
        sizes.append(
            math.sqrt(math.fsum(float(matrix.square().sum()) for matrix in matrices) / values)
        )
    return Norms(job.seed, squared, [round(size, 4) for size in sizes], **origin())


def read(path: Path) -> list[Norms]:
    """Return the lines of a file; none if it doesn't exist."""
    if not path.exists():
        return []
    return [Norms(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def table(study: Study, lines: Iterable[Norms]) -> str:
    """Return a Markdown table of medians over the steps from the first losses to the target."""
    first, last = study.losses.after // EVERY, study.target // EVERY
    rows = [
        f"# Gradient norms: {study.title}",
        "",
        f"Medians over the steps {first * EVERY} to {last * EVERY} of the run without losses.",
        "",
        "| seed | on | squared norm of stage 1, over that of stages 2, 3, .. | share of the stage "
        "before in the average that stages 2, 3, .. are guessed from | size of the matrices of "
        "stages 1, 2, .. |",
        "| --- | --- | --- | --- | --- |",
    ]
    for norms in lines:
        measured = norms.squared[first - 1 : last] if first else norms.squared[:last]
        body = range(1, len(norms.sizes))
        over = [median(at[1] / at[stage] for at in measured) for stage in body[1:]]
        shares = [
            median(neighbour_shares(at[stage - 1], at[stage + 1])[0] for at in measured)
            for stage in body[1:-1]
        ]
        cells = [
            str(norms.seed),
            norms.machine,
            ", ".join(f"{x:.0f}" for x in over),
            ", ".join(f"{x:.2f}" for x in shares),
            ", ".join(f"{norms.sizes[stage]:.3f}" for stage in body),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"

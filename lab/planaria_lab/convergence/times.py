"""CheckFree's Table 2, measured here: iterations to a loss from the lab's runs, seconds of an
iteration and of a stall from live swarms."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from planaria_lab.convergence.compare import behind_at_the_end
from planaria_lab.convergence.study import StudyError, read_results

RATES: Final = ("low", "middle", "high")
"""Failure rates, as the study's variants name them."""
ROWS: Final[Mapping[str, str]] = {
    "redundant": "redundant",
    "snapshot": "snapshot",
    "checkpoint": "checkpoint",
    "checkfree, relearned": "checkfree",
    "checkfree": "checkfree",
    "checkfree+": "checkfree+",
}
"""Variant of the study -> policy of the live swarms."""
EACH: Final = 1000
"""The loss to reach is that after this number of iterations without losses."""

Runs = Mapping[tuple[str, int], Mapping[str, Any]]


class PolicyRow(NamedTuple):
    """Times of a policy."""

    step: float  # seconds
    stall: float  # seconds from a loss of a stage to the next commit
    more: tuple[float, ...]  # by rate: iterations to a loss, over those without losses of stages
    minutes: tuple[float, ...]  # by rate


def read_runs(path: Path) -> Runs:
    """Return the runs of a study by variant and seed. Raises StudyError."""
    lines = {(line["variant"], line["seed"]): line for line in read_results(path).values()}
    if not lines:
        raise StudyError(f"{path} has no runs: run the study with `planaria lab run` first")
    return lines


def more_iterations(by_run: Runs, variant: str) -> float:
    """Return a variant's iterations to a loss, over those of the run without lost stages: the mean
    over seeds, from the iterations by which each run is behind at its end."""
    shares = []
    for (name, seed), line in by_run.items():
        if name == variant:
            other = by_run["none", seed]
            steps = other["validation"][-1][0]
            shares.append(steps / (steps - behind_at_the_end(line, other)))
    return statistics.fmean(shares)


def losses_per_iteration(by_run: Runs, rate: str) -> float:
    """Return the scheduled losses per iteration, from `checkfree`, whose runs never roll back."""
    return statistics.fmean(
        len(line["rebuilds"]) / line["validation"][-1][0]
        for (name, _), line in by_run.items()
        if name == f"checkfree, {rate}"
    )


def times(by_run: Runs, live: Mapping[str, Any]) -> dict[str, PolicyRow]:
    """Return a row for each policy. `live`: `policies` of live.json. Redundant computation needs no
    more iterations."""
    rows = {}
    for variant, policy in ROWS.items():
        step = live[policy]["step_seconds"]["mean"]
        stall = live[policy]["stall_seconds"]["median"]
        more = tuple(
            1.0 if variant == "redundant" else more_iterations(by_run, f"{variant}, {rate}")
            for rate in RATES
        )
        minutes = tuple(
            EACH
            * factor
            * (step + losses_per_iteration(by_run, rate) * max(0.0, stall - step))
            / 60
            for factor, rate in zip(more, RATES, strict=True)
        )
        rows[variant] = PolicyRow(step, stall, more, minutes)
    return rows


def table(by_run: Runs, live: Mapping[str, Any]) -> str:
    """Return the policies' times as a Markdown table."""
    losses = ", ".join(f"{rate} {losses_per_iteration(by_run, rate):.3f}" for rate in RATES)
    plain = EACH * live["plain"]["step_seconds"]["mean"] / 60
    lines = [
        f"| policy | s an iteration | stall, s | iterations: {' | '.join(RATES)} "
        f"| minutes: {' | '.join(RATES)} |",
        f"| --- |{' ---: |' * (2 + 2 * len(RATES))}",
    ]
    for name, row in times(by_run, live).items():
        cells = [name, f"{row.step:.3f}", f"{row.stall:.1f}"]
        cells += [f"x {factor:.2f}" for factor in row.more]
        cells += [f"{minutes:.1f}" for minutes in row.minutes]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + (
        f"\n\nTo the loss of {EACH:,} iterations without losses, which take {plain:.1f} minutes "
        f"with no policy. Losses an iteration: {losses}.\n"
    )


def read_live(path: Path) -> Mapping[str, Any]:
    """Return the figures of live swarms by policy. Raises StudyError."""
    try:
        policies: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["policies"]
    except (OSError, ValueError, KeyError) as error:
        raise StudyError(f"can't read {path}: {error}; make it with `planaria lab live`") from error
    if missing := {*ROWS.values(), "plain"} - {*policies}:
        raise StudyError(f"{path} lacks {', '.join(sorted(missing))}: measure all policies")
    return policies

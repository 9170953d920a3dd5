"""The paper's figures 4, 5, 7 and 8: failures endured, stacks and availability by redundancy. The
command `compare` makes its figure 6."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from planaria_lab.spare.endurance import (
    best_availability,
    endured,
    mean_stacks,
    mean_stacks_patched,
)
from planaria_lab.spare.events import DAY, System
from planaria_lab.spare.published import MONTE_CARLO
from planaria_lab.spare.tables import monte_carlo, runs

ROWS = "figures.jsonl"
SCHEMES = ("SPARe+CKPT", "Rep+CKPT")
Row = Mapping[str, Any]
Curves = dict[tuple[int, str], dict[int, float]]
"""(groups, name of the line) -> redundancy -> figure."""


def measure(
    groups: Sequence[int], trials: int, trails: int, deepest: int, seed: int
) -> Iterator[Row]:
    """Yield a row for each redundancy of the paper's tables, by Monte Carlo; then a row for each
    trail of events of each scheme and redundancy, from 2 to `deepest`."""
    for size in groups:
        for r in sorted(r for n, r in MONTE_CARLO if n == size):
            result = monte_carlo(size, r, trials=trials, patched=0, seed=seed)
            figures = {"failures": result.failures, "stacks": result.stacks}
            yield {"groups": size, "how": "Monte Carlo", "redundancy": r, **figures}
        for scheme in SCHEMES:
            for r in range(2, deepest + 1):
                for trail, run in enumerate(runs(System(size), scheme, r, trails, seed)):
                    yield {
                        "groups": size,
                        "how": scheme,
                        "redundancy": r,
                        "trail": trail,
                        "days": run.wall / DAY,
                        "availability": run.availability,
                        "stacks": float(np.mean(run.stacks)),
                        "failures": run.failures,
                        "restarts": run.restarts,
                    }


def curves(rows: Sequence[Row]) -> dict[str, tuple[str, Curves]]:
    """Return the name of each figure -> the label of its axis, and its lines."""
    values: dict[tuple[str, str], defaultdict[tuple[int, int], list[float]]] = {}
    for row in rows:
        for figure in ("failures", "stacks", "availability"):
            if figure in row:
                by_place = values.setdefault((row["how"], figure), defaultdict(list))
                by_place[row["groups"], row["redundancy"]].append(row[figure])
    means = {
        key: {at: float(np.mean(values)) for at, values in by_place.items()}
        for key, by_place in values.items()
    }
    tabled, simulated = means["Monte Carlo", "failures"], means["SPARe+CKPT", "stacks"]
    published = {at: row for at, row in MONTE_CARLO.items() if at in tabled}
    projected = {
        (n, r): best_availability(System(n).save, System(n).mtbf * endured(n, r), System(n).restart)
        for n, r in simulated
    }
    return {
        "figure-4": (
            "failures until a wipe-out",
            _lines(
                {
                    "closed form": {at: endured(*at) for at in tabled},
                    "the paper's Monte Carlo": {at: row.failures for at, row in published.items()},
                    "ours": tabled,
                }
            ),
        ),
        "figure-5": (
            "stacks a step",
            _lines(
                {
                    "replication": {(n, r): float(r) for n, r in tabled},
                    "closed form, with a patch": {at: mean_stacks_patched(*at) for at in tabled},
                    "closed form": {at: mean_stacks(*at) for at in tabled},
                    "the paper's Monte Carlo": {at: row.stacks for at, row in published.items()},
                    "ours": means["Monte Carlo", "stacks"],
                }
            ),
        ),
        "figure-7": (
            "availability",
            _lines(
                {
                    "closed form": projected,
                    **{scheme: means[scheme, "availability"] for scheme in SCHEMES},
                }
            ),
        ),
        "figure-8": (
            "stacks a step, by events",
            _lines(
                {
                    "closed form, with a patch": {at: mean_stacks_patched(*at) for at in simulated},
                    "closed form": {at: mean_stacks(*at) for at in simulated},
                    "SPARe+CKPT": simulated,
                }
            ),
        ),
    }


def _lines(by_name: Mapping[str, Mapping[tuple[int, int], float]]) -> Curves:
    lines: Curves = {}
    for name, by_place in by_name.items():
        for (groups, redundancy), value in sorted(by_place.items()):
            lines.setdefault((groups, name), {})[redundancy] = value
    return lines


def figures(
    groups: Sequence[int], trials: int, trails: int, deepest: int, seed: int, out: Path
) -> None:
    """Measure; write rows and plots to the folder `out`."""
    from planaria_lab.origin import origin
    from planaria_lab.spare.plots import plot_by_redundancy

    made = origin()
    rows = [{**row, **made} for row in measure(groups, trials, trails, deepest, seed)]
    out.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (out / ROWS).write_text(text, encoding="utf-8")
    for name, (label, lines) in curves(rows).items():
        plot_by_redundancy(lines, label, out / f"{name}.png")

"""Measurements of what blocking and overlapped saves cost a live swarm, by ECRL's matrix.

A *suite* is a rate of storage and an interval between saves. A *block* runs each suite's swarms
one after the other. They differ in how they save and whether they are killed. A swarm is compared
with the swarm of its suite and block that never saves. The two run minutes apart at most, so that
changes of the machine's load affect both. Every second block has the opposite order. Each swarm is
a row; an interrupted measurement continues with the missing rows.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from json import dumps
from operator import itemgetter
from pathlib import Path
from shutil import rmtree
from typing import Any, Final, NamedTuple

from planaria.node.run_file import RunFile
from planaria_lab.convergence.study import append_result, read_results
from planaria_lab.lines import COLORS
from planaria_lab.origin import origin
from planaria_lab.saves.swarm import SavesError, Saving, measure

RUN: Final = """
name = "saves"
steps = 24
[model]
preset = "tiny"
dim = 256
stages = 2
layers = 2
[training]
optimizer = "adamw"
batch = 4
microbatch = 1
warmup = 5
validation_microbatches = 0
"""
KILLED_AT: Final = 21
STORAGES: Final = (0.0, 20.0)  # MB/s for each node; 0: no limit but the disk
INTERVALS: Final = (2, 8)  # steps
VARIANTS: Final[Mapping[str, tuple[Any, int, bool]]] = {
    "none": ("none", 1, False),
    "blocking": ("blocking", 1, False),
    "overlapped, 1": ("overlapped", 1, False),
    "overlapped, 4": ("overlapped", 4, False),
    "blocking, killed": ("blocking", 1, True),
    "overlapped, 4, killed": ("overlapped", 4, True),
}
"""Variant -> mode, writes in flight, whether all processes are killed once."""
NONE: Final = "none"
PAIRS: Final = (
    ("overlapped, 1", "blocking"),
    ("overlapped, 4", "blocking"),
    ("overlapped, 4, killed", "blocking, killed"),
)
ROWS, TABLE, PLOT = "swarms.jsonl", "table.md", "goodput.png"
SCRATCH: Final = Path("out/saves")

Row = Mapping[str, Any]


class Suite(NamedTuple):
    """A rate of storage and an interval between saves."""

    storage: float  # MB/s, as in Saving
    every: int  # steps

    def __str__(self) -> str:
        storage = f"{self.storage:g} MB/s" if self.storage else "own disk"
        return f"{storage}, every {self.every} steps"


SUITES: Final = [Suite(storage, every) for storage in STORAGES for every in INTERVALS]


class Turn(NamedTuple):
    """One swarm to measure."""

    block: int
    suite: Suite
    variant: str

    @property
    def saving(self) -> Saving:
        mode, in_flight, killed = VARIANTS[self.variant]
        every, storage = self.suite.every, self.suite.storage
        return Saving(mode, every, in_flight, storage, KILLED_AT if killed else 0)

    def key(self, run: RunFile) -> str:
        """Return the digest of all settings of this measurement."""
        shown = run.model_dump(mode="json", exclude={"data": {"path"}}, exclude_defaults=True)
        fields = [shown, self.block, asdict(self.saving)]
        return sha256(dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def turns(blocks: int) -> Iterator[Turn]:
    """Yield the swarms in the order of measuring."""
    for block in range(blocks):
        for suite in SUITES:
            for variant in [*VARIANTS][:: -1 if block % 2 else 1]:
                yield Turn(block, suite, variant)


def measure_all(run: RunFile, blocks: int, out: Path, say: Callable[[str], None]) -> list[Row]:
    """Measure the swarms that have no row in `out`; return all rows. Raises SavesError, SwarmError,
    StudyError."""
    out.mkdir(parents=True, exist_ok=True)
    lines = read_results(out / ROWS)
    todo = [turn for turn in turns(blocks) if turn.key(run) not in lines]
    for number, turn in enumerate(todo):
        rmtree(SCRATCH, ignore_errors=True)
        load = os.getloadavg()[0]
        outcome = measure(run, turn.saving, SCRATCH)
        row = {
            "key": turn.key(run),
            "block": turn.block,
            "suite": turn.suite._asdict(),
            "variant": turn.variant,
            "load": round(load, 1),
            **origin(),
            **asdict(outcome),
        }
        append_result(out / ROWS, row)
        lines[row["key"]] = row
        goodput = f"{outcome.steps / outcome.wall:.2f} steps/s, load {load:.1f}"
        say(f"{number + 1} of {len(todo)}: {turn.suite}, {turn.variant}: {goodput}")
    return [*lines.values()]


# --- comparisons


class Compared(NamedTuple):
    """Figures of a variant in a suite, block by block. Goodputs are shares of the goodput of the
    swarm that never saves."""

    suite: Suite
    variant: str
    goodput: list[float]  # by the wall clock, downtime included, as ECRL has it
    own: list[float]  # by the run's summary: without the time in which no registry ran
    parts: dict[str, list[float]]  # shares of the swarm's own wall clock
    down: list[float]  # seconds
    lost: list[int]  # steps that were made again
    saves: list[int]
    equal: int  # swarms whose losses equal those of the first swarm that never saved
    apart: float  # largest difference from these losses


PARTS: Final = ("compute and all else", "copied", "blocked", "down", "again")


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Compare each variant of each suite with `none`. Raises SavesError if no row is of `none`."""
    plain = {(row["block"], _suite(row)): row for row in rows if row["variant"] == NONE}
    if not plain:
        raise SavesError("no swarm without saves has been measured yet")
    losses = next(iter(plain.values()))["losses"]
    results = []
    for suite in SUITES:
        for variant in VARIANTS:
            own = [
                (row, plain[row["block"], suite])
                for row in sorted(rows, key=itemgetter("block"))
                if (_suite(row), row["variant"]) == (suite, variant)
                and (row["block"], suite) in plain
            ]
            if own:
                results.append(_compared(suite, variant, own, losses))
    return results


def _suite(row: Row) -> Suite:
    return Suite(**row["suite"])


def _compared(
    suite: Suite, variant: str, pairs: Sequence[tuple[Row, Row]], losses: Sequence[float]
) -> Compared:
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    for row, _ in pairs:
        rest = row["wall"] - sum(row[part] for part in PARTS[1:])
        for part in PARTS:
            parts[part].append(row.get(part, rest) / row["wall"])
    apart = [
        max(abs(a - b) for a, b in zip(row["losses"], losses, strict=True)) for row, _ in pairs
    ]
    return Compared(
        suite=suite,
        variant=variant,
        goodput=[plain["wall"] / row["wall"] for row, plain in pairs],
        own=[row["goodput"] / plain["goodput"] for row, plain in pairs],
        parts=parts,
        down=[row["down"] for row, _ in pairs],
        lost=[row["lost"] for row, _ in pairs],
        saves=[row["saves"] for row, _ in pairs],
        equal=apart.count(0.0),
        apart=max(apart),
    )


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown table: medians over the blocks, with minimum and maximum; of the parts of
    the wall clock, means, since these add up."""
    results = compared(rows)
    by_name = {(result.suite, result.variant): result for result in results}
    loads = [row["load"] for row in rows]
    machines = ", ".join(sorted({row["machine"] for row in rows}))
    lines = [
        f"{len(rows)} swarms, {1 + max(row['block'] for row in rows)} blocks; load "
        f"{min(loads):.0f} to {max(loads):.0f} ({machines}).",
        "",
        "| suite | saves | goodput, of none's | own goodput, of none's | "
        + " | ".join(f"{part}, %" for part in PARTS)
        + " | down, s | steps made again | losses equal |",
        "| --- | --- | ---: | ---: |" + " ---: |" * (len(PARTS) + 3),
    ]
    for result in results:
        parts = " | ".join(f"{100 * statistics.fmean(result.parts[part]):.1f}" for part in PARTS)
        down, lost = "-", "-"
        if VARIANTS[result.variant][2]:
            down, lost = _range(result.down, 1), _range(result.lost, 0)
        apart = f", others {result.apart:.0e} at most" if result.apart else ""
        equal = f"{result.equal} of {len(result.lost)}{apart}"
        lines.append(
            f"| {result.suite} | {result.variant} | {_range(result.goodput)} "
            f"| {_range(result.own)} | {parts} | {down} | {lost} | {equal} |"
        )
    lines += ["", "| suite | " + " | ".join(f"{a} / {b}" for a, b in PAIRS) + " |"]
    lines += ["| --- |" + " ---: |" * len(PAIRS)]
    for suite in SUITES:
        pairs = [(by_name.get((suite, a)), by_name.get((suite, b))) for a, b in PAIRS]
        cells = [
            _range([x / y for x, y in zip(a.goodput, b.goodput, strict=False)]) if a and b else "-"
            for a, b in pairs
        ]
        lines.append(f"| {suite} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _range(values: Sequence[float], digits: int = 3) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plot the goodput of each variant, a dot for each block, and the parts of its wall clock."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    results = compared(rows)
    figure = Figure(figsize=(11, 1.6 + 0.3 * len(results)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = [place + SUITES.index(result.suite) for place, result in enumerate(results)]
    for place, result in zip(places, results, strict=True):
        left.barh(place, statistics.median(result.goodput), color=COLORS[0], alpha=0.3, height=0.7)
        left.plot(result.goodput, [place] * len(result.goodput), "o", color=COLORS[0], markersize=4)
    begun = [0.0] * len(results)
    for color, part in zip(COLORS, PARTS, strict=False):
        shares = [statistics.fmean(result.parts[part]) for result in results]
        right.barh(places, shares, left=begun, color=color, height=0.7, label=part)
        begun = [a + b for a, b in zip(begun, shares, strict=True)]
    names = [
        f"{result.suite}: {NONE}" if result.variant == NONE else result.variant
        for result in results
    ]
    left.set_yticks(places, names)
    left.invert_yaxis()
    left.set_xlabel("steps by the wall clock, of those without saves")
    right.set_xlabel("where the wall clock went (shares, means)")
    figure.legend(
        *right.get_legend_handles_labels(), frameon=False, ncols=5, loc="outside upper right"
    )
    left.axvline(1, color="#404040", linewidth=0.8)
    for axes in (left, right):
        axes.grid(axis="x", color="#e6e6e6")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def write_results(rows: Sequence[Row], out: Path) -> str:
    """Write table and plot to the folder `out`; return the table."""
    text = table(rows)
    (out / TABLE).write_text(text, encoding="utf-8")
    plot(rows, out / PLOT)
    return text

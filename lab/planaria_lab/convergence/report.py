"""Table and plots of a study, from the results it has so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from planaria_lab.convergence.compare import CostOfLosses, Spread, cost, curve_of, loss_at
from planaria_lab.convergence.study import Study
from planaria_lab.lines import COLORS, distinct_style, name_at_the_ends
from planaria_lab.origin import paired

matplotlib.use("agg")

Line = Mapping[str, Any]


@dataclass(frozen=True)
class VariantRow:
    """The results of a variant over its seeds."""

    name: str
    runs: Sequence[Line]
    others: Sequence[Line]  # the baseline's run for each of `runs`
    costs: Sequence[CostOfLosses]
    unpaired: int = 0  # runs by another processor or torch than the baseline's

    @property
    def seeds(self) -> str:
        """The table's cell: number of seeds that are compared, with reservations."""
        words = [str(len(self.runs))]
        pairs = zip(self.runs, self.others, strict=True)
        if any(run.get("commit") != other.get("commit") for run, other in pairs):
            words.append("other commit")
        if self.unpaired:
            words.append(f"{self.unpaired} unpaired")
        return ", ".join(words)

    def spread(self, figure: Callable[[CostOfLosses], float]) -> Spread:
        """Return mean and deviation of a figure over the seeds."""
        return Spread.of([figure(cost) for cost in self.costs])

    @property
    def losses(self) -> float:
        """The mean number of rebuilds in a run."""
        return sum(len(run["rebuilds"]) for run in self.runs) / max(1, len(self.runs))


def rows(study: Study, lines: Mapping[tuple[str, int], Line]) -> list[VariantRow]:
    """Return a row for each variant, with the seeds that have both its run and the baseline's, if
    these are paired. `lines`: by variant and seed."""
    compared = []
    for variant in study.variants:
        keys = [((variant.name, seed), (study.baseline, seed)) for seed in study.seeds]
        both = [(lines[own], lines[other]) for own, other in keys if {own, other} <= lines.keys()]
        runs = [run for run, other in both if paired(run, other)]
        others = [other for run, other in both if paired(run, other)]
        costs = [cost(run, other, study.target) for run, other in zip(runs, others, strict=True)]
        unpaired = len(both) - len(runs)
        compared.append(VariantRow(variant.name, runs, others, costs, unpaired))
    return compared


def table(study: Study, compared: Sequence[VariantRow], file: Path) -> str:
    """Return the results as a Markdown table. `file`: path of the study's file."""
    named = {row.name: row for row in compared}
    references = {v.name: named.get(v.reference or study.reference) for v in study.variants}
    relative = any(references.values())
    texts = sorted(study.texts)
    heads = ["variant", "seeds", "losses", "loss at the end", "above the baseline"]
    heads += ["share of the reference"] if relative else []
    heads += [f"extra iterations to the loss of step {study.target}", "iterations behind"]
    relearned = any(cost.relearned for row in compared for cost in row.costs)
    background = any(cost.background for row in compared for cost in row.costs)
    heads += ["relearning, iterations of computing"] if relearned else []
    heads += ["... in the background"] if background else []
    heads += ["... of waiting"] if relearned else []
    heads += ["behind and computing, share of the reference"] if relearned and relative else []
    heads += ["... without the background's"] if background and relative else []
    heads += [f"perplexity, {name}" for name in ("held out", *texts)] if texts else []
    made = f"Made by `planaria lab run {file} && planaria lab report {file}`."
    lines = [f"# {study.title}", "", _machines(compared), made, ""]
    lines += [f"Mean ± standard deviation over the seeds; `{study.baseline}` is the baseline."]
    lines += _referred(references) + _reserved(compared)
    lines += ["", "| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for row in compared:
        cells = [row.name, row.seeds, f"{row.losses:.1f}"]
        if not row.costs:
            lines.append("| " + " | ".join(cells + ["-"] * (len(heads) - 3)) + " |")
            continue
        cells += [_plain(row.spread(lambda c: c.final), 4)]
        cells += [_plain(row.spread(lambda c: c.difference), 4, sign=True)]
        reference = references[row.name]
        cells += [_share(row, reference, lambda c: c.difference)] if relative else []
        cells += [_reached(row), _plain(row.spread(lambda c: c.behind), 0)]
        if relearned:
            cells += [_plain(row.spread(lambda c: c.relearned), 1)]
            cells += [_plain(row.spread(lambda c: c.background), 1)] if background else []
            cells += [_plain(row.spread(lambda c: c.waited), 0)]
            cells += [_share(row, reference, lambda c: c.net)] if relative else []
            if background and relative:
                cells += [_share(row, reference, lambda c: c.net_waited_for)]
        if texts:
            ends = [[run["validation"][-1][2] for run in row.runs]]
            ends += [[run["texts"][name] for run in row.runs] for name in texts]
            cells += [_plain(Spread.of([math.exp(x) for x in end]), 2) for end in ends]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _referred(references: Mapping[str, VariantRow | None]) -> list[str]:
    """Return lines that name each variant's reference, if there are several references."""
    names_by_reference: dict[str, list[str]] = {}
    for name, row in references.items():
        if row is not None:
            names_by_reference.setdefault(row.name, []).append(name)
    if len(names_by_reference) < 2:
        return []
    return [
        "",
        *(
            f"- `{name}` is the reference of: {', '.join(names_by_reference[name])}."
            for name in names_by_reference
        ),
    ]


def _reserved(compared: Sequence[VariantRow]) -> list[str]:
    """Return lines that explain the words beside numbers of seeds, if there are any."""
    meanings = {
        "other commit": "the baseline's run was made at another commit of the same arithmetic",
        "unpaired": "another processor or torch did the baseline's run, so it isn't compared",
    }
    used = [word for word in meanings if any(word in row.seeds for row in compared)]
    return ["", *(f"- {word}: {meanings[word]}." for word in used)] if used else []


def _machines(compared: Sequence[VariantRow]) -> str:
    names = sorted({run["machine"] for row in compared for run in row.runs})
    seconds = sum(run["seconds"] for row in compared for run in row.runs)
    runs = sum(len(row.runs) for row in compared)
    return (
        f"{runs} runs, {seconds / 60:.0f} minutes if one came after the other ({', '.join(names)})."
    )


def _plain(spread: Spread, digits: int, sign: bool = False) -> str:
    mean = f"{spread.mean:{'+' if sign else ''}.{digits}f}"
    return mean if math.isnan(spread.deviation) else f"{mean} ± {spread.deviation:.{digits}f}"


def _share(
    row: VariantRow, relative: VariantRow | None, figure: Callable[[CostOfLosses], float]
) -> str:
    """Return the quotient of a figure's sums over the seeds that both rows have. A single seed's
    quotient may divide by almost 0."""
    if relative is None:
        return "-"
    ours, theirs = (
        {run["seed"]: figure(cost) for run, cost in zip(each.runs, each.costs, strict=True)}
        for each in (row, relative)
    )
    both = ours.keys() & theirs.keys()
    whole = math.fsum(theirs[seed] for seed in both)
    return f"{math.fsum(ours[seed] for seed in both) / whole:.2f}" if whole else "-"


def _reached(row: VariantRow) -> str:
    finite = [cost.iterations for cost in row.costs if math.isfinite(cost.iterations)]
    if not finite:
        return "not reached"
    missed = len(row.costs) - len(finite)
    mean = _plain(Spread.of(finite), 0, sign=True)
    return f"{mean} ({missed} of {len(row.costs)} seeds never)" if missed else mean


# --- plots


def plot_curves(study: Study, compared: Sequence[VariantRow], path: Path) -> None:
    """Plot validation loss against iterations, and below it the difference from the baseline of the
    same seed: mean and range over the seeds. Ticks mark the first seed's losses of stages."""
    figure = Figure(figsize=(11, 8))
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.subplots_adjust(left=0.07, right=0.76, top=0.95, bottom=0.1, hspace=0.1)
    shown = [row for row in compared if row.runs and row.name in (study.plotted or [row.name])]
    for place, row in enumerate(shown):
        at = [iteration for iteration, _ in curve_of(row.others[0])]
        losses = [[loss_at(curve_of(run), i) for run in row.runs] for i in at]
        others = [[loss_at(curve_of(other), i) for other in row.others] for i in at]
        above = [
            [a - b for a, b in zip(*pair, strict=True)] for pair in zip(losses, others, strict=True)
        ]
        style = distinct_style(place, len(shown), len(at))
        label = study.labels.get(row.name, row.name)
        upper.plot(at, [sum(v) / len(v) for v in losses], label=label, **style)
        _draw(lower, at, above, style, label)
    upper.set_xlim(0, at[-1])
    for axes in (upper, lower):  # limits: the range after the first sixth
        late = [value for line in axes.get_lines() for value in line.get_ydata()[len(at) // 6 :]]
        room = 0.06 * (max(late) - min(late))
        axes.set_ylim(min(late) - room, max(late) + room)
    upper.set_ylabel("validation loss, nats a token")
    upper.set_title(study.title, loc="left")
    lower.set_ylabel(f"nats above '{study.labels.get(study.baseline, study.baseline)}'")
    seeds = max(len(row.runs) for row in shown)
    over = f"lines: mean of {seeds} seeds, shaded: lowest to highest; " if seeds > 1 else ""
    lower.set_xlabel(f"iteration\n{over}ticks: a stage is lost, with the first seed")
    for axes in (upper, lower):
        _mark_losses(axes, shown)
        axes.grid(color="#e6e6e6")
        axes.spines[["top", "right"]].set_visible(False)
        name_at_the_ends(axes)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _draw(
    axes: Any,
    at: Sequence[int],
    values: Sequence[Sequence[float]],
    style: Mapping[str, Any],
    name: str,
) -> None:
    axes.plot(at, [sum(v) / len(v) for v in values], label=name, **style)
    low, high = [min(v) for v in values], [max(v) for v in values]
    axes.fill_between(at, low, high, color=style["color"], alpha=0.12, linewidth=0)


def _mark_losses(axes: Any, shown: Sequence[VariantRow]) -> None:
    seen = {line["iteration"] for row in shown for run in row.runs[:1] for line in run["rebuilds"]}
    for iteration in seen:
        axes.axvline(iteration, ymax=0.025, color="#404040", linewidth=1.2)


def plot_costs(study: Study, compared: Sequence[VariantRow], path: Path) -> None:
    """Plot how far above the baseline each variant ends: a dot for each seed, a bar for the
    mean."""
    shown = [row for row in compared if row.costs and row.name != study.baseline]
    figure = Figure(figsize=(9, 1.4 + 0.34 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(shown):
        values = [cost.difference for cost in row.costs]
        axes.barh(place, sum(values) / len(values), color=COLORS[0], alpha=0.3, height=0.62)
        axes.plot(values, [place] * len(values), "o", color=COLORS[0], markersize=4)
    axes.margins(y=0.01)
    names = [study.labels.get(row.name, row.name) for row in shown]
    axes.set_yticks(range(len(shown)), names)
    axes.invert_yaxis()
    axes.axvline(0, color="#404040", linewidth=0.8)
    baseline = study.labels.get(study.baseline, study.baseline)
    axes.set_xlabel(
        f"validation loss at the end, nats a token above '{baseline}'\n"
        "dot: a seed, bar: their mean; further to the right is worse"
    )
    figure.suptitle(study.title, x=0.01, ha="left")
    axes.grid(axis="x", color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)

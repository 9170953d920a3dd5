"""Records of SCAR's experiments on convex problems, and their tables and plots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from planaria_lab.scar import convex, partial
from planaria_lab.scar.convex import (
    Floats,
    Trials,
    iteration_cost_bound,
    iterations_bound,
    time_discounted,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]  # a line of the results; `of` lists its identifying keys

PROBLEMS: Final = 20  # quadratics; the first is plotted
PERIODS: Final = (8, 16, 32)
MARGINS: Final = (0, 4)  # black columns to each side of the digits
COLOURS: Final = {"priority": "#1b7837", "round": "#2166ac", "random": "#b35806", "full": "#444444"}

# Records


def records(trials: int) -> Iterator[Record]:
    """Run all experiments; yield each record when it is done."""
    fields: Record
    for problem in range(PROBLEMS):
        for kind in ("one", "any"):
            trials_run = convex.quadratic_trials(kind, problem, 10 * trials)
            fields = {"figure": "quadratic", "kind": kind, "problem": problem}
            yield _record(
                fields, bounded(trials_run) | (points(trials_run) if problem == 0 else {})
            )
    for kind, criterion, trials_run in convex.regression_trials(trials):
        fields = {"figure": "regression", "kind": kind, "criterion": criterion}
        yield _record(fields, bounded(trials_run) | points(trials_run))
    for margin in MARGINS:
        runs = partial.runs(convex.digits(margin), trials)
        half_way = runs.path[partial.ITERATIONS // 2 - 8 : partial.ITERATIONS // 2 + 1]
        eighth = partial.concentration(half_way, 1 / 8)
        yield _record({"figure": "concentration", "margin": margin}, {"eighth": _short(eighth)})
        for period in PERIODS:
            for case in partial.cases(period):
                fields = {"figure": "recovery", "margin": margin, "restored": case.restored}
                fields |= case.saving._asdict()
                costs = partial.costs(runs, case)
                yield _record(
                    fields, {name: _short(value) for name, value in costs._asdict().items()}
                )


def _record(fields: Record, content: Record) -> Record:
    return {"of": list(fields)} | fields | content


def _short(values: Iterable[float]) -> list[float]:
    """Round to six digits, so that a file doesn't change with the last bits of a sum."""
    return [float(f"{value:.6g}") for value in values]


def bounded(trials: Trials) -> Record:
    """Compare the costs of perturbed trials with the bound, for each estimate of c."""
    costs = trials.iterations - trials.unperturbed
    result: Record = {"unperturbed": trials.unperturbed}
    for name, c in trials.rates._asdict().items():
        discounted = time_discounted(trials.norms, c)
        perturbed = discounted > 0
        bound = iteration_cost_bound(discounted[perturbed], trials.distance, c)
        needed = iterations_bound(discounted[perturbed], trials.distance, c, trials.tolerance)
        # Iterations are whole numbers: a cost less than one above the bound isn't above it.
        comparison = {
            "c": c,
            "above": np.mean(costs[perturbed] >= bound + 1),
            "worst": np.max(costs[perturbed] - bound),
            "share": np.median(costs[perturbed] / bound),
            "needed_above": np.mean(trials.iterations[perturbed] >= needed + 1),
        }
        result[name] = dict(zip(comparison, _short(comparison.values()), strict=True))
    return result


def points(trials: Trials) -> Record:
    """Return the points of a plot: the cost and the perturbation of each trial."""
    return {
        "distance": trials.distance,
        "norms": _short(time_discounted(trials.norms, 1)),
        "discounted": _short(time_discounted(trials.norms, trials.rates.mean)),
        "perturbed_at": list(trials.norms),
        "costs": (trials.iterations - trials.unperturbed).tolist(),
    }


def pick(results: Iterable[Record], **fields: object) -> list[Record]:
    """Return the records that have these fields."""
    return [record for record in results if all(record.get(k) == v for k, v in fields.items())]


def confidence(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half the width of its 95 % confidence interval (normal)."""
    half = 1.96 * np.std(values, ddof=1) / np.sqrt(len(values))
    return float(np.mean(values)), float(half)


def saved(costs: Floats, full: Floats) -> tuple[float, float, float]:
    """Return 1 - mean(costs) / mean(full), and its 95 % interval by bootstrap of paired trials."""
    rng = np.random.default_rng(95)
    drawn = rng.integers(len(costs), size=(2_000, len(costs)))
    ratios = 1 - costs[drawn].mean(axis=1) / full[drawn].mean(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(1 - costs.mean() / full.mean()), float(low), float(high)


# Tables


def tables(results: Sequence[Record]) -> str:
    """Return all tables as a Markdown page."""
    recoveries = pick(results, figure="recovery")
    plain = pick(recoveries, margin=0, fraction=1.0)
    halves = [record for record in recoveries if record["restored"] in (1.0, 1 / 2)]
    parts = [
        "# SCAR on convex problems: tables",
        f"## Figure 3: {PROBLEMS} quadratics, mean (least to most) over them",
        _quadratic_table(results),
        "## Figures 5 and 6: logistic regression on digits, by gradient descent",
        _regression_table(results),
        "## Figure 7: partial recovery from whole checkpoints",
        _recovery_table(plain, recoveries),
        "## Figure 8: what to save next, half of the rows lost",
        _concentrations(results),
        _recovery_table(halves, recoveries),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


RATES: Final = {"mean": "mean of the run", "largest": "largest of the run", "exact": "exact"}


def _quadratic_table(results: Sequence[Record]) -> str:
    def spread(values: Floats, form: str) -> str:
        return f"{values.mean():{form}} ({values.min():{form}} to {values.max():{form}})"

    rows = []
    for kind, words in {"one": "one, at 500", "any": "p = 0.001 at each"}.items():
        problems = pick(results, figure="quadratic", kind=kind)
        for name, label in RATES.items():
            columns = {
                key: np.array([record[name][key] for record in problems])
                for key in ("c", "above", "worst", "share", "needed_above")
            }
            rows.append(
                [
                    words,
                    label,
                    spread(columns["c"], ".4f"),
                    spread(columns["above"], ".0%"),
                    spread(columns["worst"], ".0f"),
                    spread(columns["share"], ".2f"),
                    spread(columns["needed_above"], ".0%"),
                ]
            )
    return _table(["perturbations", *BOUND_COLUMNS], rows)


BOUND_COLUMNS: Final = (
    "c",
    "its value",
    "trials that cost more than the bound",
    "the worst by (iterations)",
    "median cost / bound",
    "trials that need more than log((d + Δ) / ε) / log(1/c)",
)


def _regression_table(results: Sequence[Record]) -> str:
    rows = []
    for record in pick(results, figure="regression"):
        for name, label in RATES.items():
            figures = record[name]
            rows.append(
                [
                    f"{record['kind']}, until the {record['criterion']}",
                    label,
                    f"{figures['c']:.4f}",
                    f"{figures['above']:.0%}",
                    f"{figures['worst']:.1f}",
                    f"{figures['share']:.2f}",
                    # The theorem, and so the last column, is about distances only.
                    f"{figures['needed_above']:.0%}" if record["criterion"] == "distance" else "",
                ]
            )
    return _table(["perturbation", *BOUND_COLUMNS], rows)


def _recovery_table(shown: Iterable[Record], recoveries: Sequence[Record]) -> str:
    rows = []
    for record in shown:
        whole = record["restored"] == 1
        (full,) = pick(recoveries, margin=record["margin"], period=record["period"], restored=1.0)
        mean, half = confidence(record["iterations"])
        share, low, high = saved(np.array(record["iterations"]), np.array(full["iterations"]))
        squares, of_full = (np.square(which["perturbation"]).mean() for which in (record, full))
        rows.append(
            [
                data_name(record["margin"]),
                str(record["period"]),
                "any" if whole else str(Fraction(record["restored"])),
                "full" if whole else "partial",
                "" if record["fraction"] == 1 else record["choice"],
                str(Fraction(record["fraction"])),
                f"{mean:.2f} ± {half:.2f}",
                "" if whole else f"{share:.0%} ({low:.0%} to {high:.0%})",
                f"{squares / of_full:.2f}",
                f"{np.mean(record['loss']) / np.mean(full['loss']):.2f}",
            ]
        )
    head = ["data", "C", "lost", "recovery", "choice", "r", "iteration cost", "less than full"]
    return _table([*head, "‖δ‖², of full's", "loss raised by, of full's"], rows)


def _concentrations(results: Sequence[Record]) -> str:
    parts = [
        f"{np.mean(record['eighth']):.0%} ({data_name(record['margin'])})"
        for record in pick(results, figure="concentration")
    ]
    return (
        "The eighth of the rows that changed most in the 8 iterations before iteration 30 has "
        f"this part of the squared change: {', '.join(parts)}."
    )


def data_name(margin: int) -> str:
    return "digits with a margin" if margin else "digits"


# Plots


def plot(results: Sequence[Record], out: Path) -> None:
    """Write the four plots to the folder `out`."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    def save(name: str) -> None:
        plt.tight_layout()
        plt.savefig(out / name, dpi=120)
        plt.close()

    _, axes = plt.subplots(1, 3, figsize=(14, 4.4))
    _plot_quadratic(results, axes)
    save("quadratic.png")
    _, axes = plt.subplots(2, 3, figsize=(14, 8), sharey="row")
    for axis, record in zip(axes.T.flatten(), pick(results, figure="regression"), strict=True):
        _plot_bound(axis, record, "norms", "‖δ‖ at iteration 50")
        if record["kind"] == "reset":
            axis.set_xscale("linear")
        axis.set_title(f"{record['kind']}, until the {record['criterion']} of iteration 100")
    axes[0, 0].legend(frameon=False)
    save("regression.png")
    _, axes = plt.subplots(1, len(PERIODS), figsize=(13, 4.2))
    for axis, period in zip(axes, PERIODS, strict=True):
        _plot_partial(axis, pick(results, figure="recovery", margin=0, period=period))
    axes[0].legend(frameon=False)
    save("partial.png")
    _, axes = plt.subplots(len(MARGINS), len(PERIODS), figsize=(13, 7.6))
    for row, margin in zip(axes, MARGINS, strict=True):
        for axis, period in zip(row, PERIODS, strict=True):
            _plot_choice(axis, pick(results, figure="recovery", margin=margin, period=period))
    axes[0, 0].legend(frameon=False, fontsize=8)
    save("choice.png")


def _plot_quadratic(results: Sequence[Record], axes: Sequence[Axes]) -> None:
    (single,), (several,) = (
        pick(results, figure="quadratic", kind=kind, problem=0) for kind in ("one", "any")
    )
    _plot_bound(axes[0], single, "norms", "‖δ‖")
    axes[0].set_title("one perturbation, at iteration 500")
    _plot_bound(axes[1], single, "discounted", "Δ (time-discounted)")
    axes[1].set_title("one perturbation, at iteration 500")
    _plot_bound(axes[2], several, "discounted", "Δ (time-discounted)")
    axes[2].set_title("perturbations with p = 0.001 at each iteration")
    axes[0].legend(frameon=False)


def _plot_bound(axis: Axes, record: Record, x: str, label: str) -> None:
    """Plot the costs against ||delta|| (`norms`) or Delta_T (`discounted`), and the bound."""
    values, costs = np.array(record[x]), np.array(record["costs"])
    hit = values > 0
    axis.scatter(values[hit], costs[hit], s=7, alpha=0.45, color="#2166ac", label="a trial")
    along = np.geomspace(values[hit].min(), values[hit].max(), 100)
    c = record["mean"]["c"]
    discounted = along if x == "discounted" else along / c ** record["perturbed_at"][0]
    bound = iteration_cost_bound(discounted, record["distance"], c)
    axis.plot(along, bound, color="#b2182b", label="bound, c = mean of the run")
    if x == "norms":
        c = record["exact"]["c"]
        bound = iteration_cost_bound(along / c ** record["perturbed_at"][0], record["distance"], c)
        axis.plot(along, bound, "--", color="#b2182b", label="bound, exact c")
    axis.axhline(0, color="#bbbbbb", linewidth=0.8, zorder=0)
    axis.set(xscale="log", xlabel=label, ylabel="iteration cost")


def _plot_partial(axis: Axes, shown: Sequence[Record]) -> None:
    (full,) = pick(shown, restored=1.0)
    mean, half = confidence(full["iterations"])
    axis.axhline(mean, color=COLOURS["full"], linestyle="--", label="full recovery")
    axis.axhspan(mean - half, mean + half, color=COLOURS["full"], alpha=0.12, linewidth=0)
    wholes = [record for record in pick(shown, fraction=1.0) if record["restored"] < 1]
    means, halves = zip(*(confidence(record["iterations"]) for record in wholes), strict=True)
    lost = [str(Fraction(record["restored"])) for record in wholes]
    axis.bar(lost, means, yerr=halves, capsize=4, width=0.6, color="#92c5de", label="partial")
    axis.set(xlabel="share of the rows lost", ylabel="iteration cost", ylim=(0, None))
    axis.set_title(f"a checkpoint every {full['period']} iterations")


def _plot_choice(axis: Axes, shown: Sequence[Record]) -> None:
    (full,) = pick(shown, restored=1.0)
    mean, _ = confidence(full["iterations"])
    axis.axhline(mean, color=COLOURS["full"], linestyle="--", label="full recovery, r = 1")
    whole = pick(shown, fraction=1.0, restored=1 / 2)
    for shift, choice in zip((-0.04, 0, 0.04), partial.CHOICES, strict=True):
        chosen = [*whole, *(r for r in pick(shown, choice=choice) if r["fraction"] < 1)]
        means, halves = zip(*(confidence(record["iterations"]) for record in chosen), strict=True)
        places = np.arange(len(chosen)) + shift
        axis.errorbar(
            places, means, halves, capsize=3, marker="o", color=COLOURS[choice], label=choice
        )
    axis.set_xticks(range(len(partial.FRACTIONS)), [str(Fraction(f)) for f in partial.FRACTIONS])
    axis.set(xlabel="r", ylabel="iteration cost", ylim=(0, None))
    axis.set_title(f"{data_name(full['margin'])}, C = {full['period']}")

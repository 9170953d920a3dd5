"""Tables of what SPARe endures and costs, by Monte Carlo and by events, beside the paper's."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import typer
from numpy.typing import NDArray

from planaria_lab.spare.endurance import endured, mean_stacks, mean_stacks_patched
from planaria_lab.spare.events import DAY, MICROBATCHES, SCHEMES, System, WallTime, train
from planaria_lab.spare.golomb import place
from planaria_lab.spare.masking import Stacks, WipedOut, reorder, shallowest, stack
from planaria_lab.spare.published import MONTE_CARLO, REPLICATION, SPARE

Ints = NDArray[np.int64]


def first_wipe_out(hosts: Ints, order: Ints) -> int:
    """Return the number of failures, in this order, until a type has no host left.

    hosts: (types, r); order: a permutation of the groups.
    """
    when = np.empty(len(order), dtype=np.int64)
    when[order] = np.arange(1, len(order) + 1)
    return int(when[hosts].max(axis=1).min())


def depths(stacks: Stacks, order: Ints, failures: int) -> Ints:
    """Return the smallest depth after the first k groups of `order` are lost, for k = 0 to
    failures - 1: int64, (failures,). The stacks must endure all of these losses.

    Depths never fall with k, so few values of k need a flow. If a depth is the least that even load
    allows, it also holds for all smaller k with the same least depth.
    """

    def least(lost: int) -> int:
        return -(-stacks.types // (len(order) - lost))

    def needed(lost: int) -> int:
        return shallowest(stacks.without(order[:lost].tolist()))

    deepest_by_failure = np.empty(failures, dtype=np.int64)
    end = failures
    while end > 0:
        depth = needed(end - 1)
        key = least if depth == least(end - 1) else needed
        begin = bisect_left(range(end - 1), depth, key=key)
        deepest_by_failure[begin:end] = depth
        end = begin
    return deepest_by_failure


def patches(stacks: Stacks, order: Ints) -> list[int]:
    """Return the most places that a survivor computes additionally in the step of each failure, in
    this order, until a wipe-out."""
    more = []
    for group in order.tolist():
        result = reorder(stacks, [group])
        if isinstance(result, WipedOut):
            break
        more.append(result.patch_depth)
        stacks = result.stacks
    return more


@dataclass(frozen=True)
class Endured:
    """Averages over trials, with standard errors."""

    failures: float
    failures_error: float
    stacks: float
    stacks_error: float
    patch: float  # additional stacks in the step of a failure


def monte_carlo(
    groups: int, redundancy: int, *, parts: int = 1, trials: int, patched: int, seed: int
) -> Endured:
    """Simulate failures in random order until the first wipe-out; return averages.

    Failures are averaged over 100 times as many trials, since they need no flow. Patches are
    averaged over `patched` trials, since each of their failures runs the controller.
    """
    hosts, rng = place(groups, redundancy), np.random.default_rng([seed, groups, redundancy])
    orders = [rng.permutation(groups) for _ in range(100 * trials)]
    failures = np.array([first_wipe_out(hosts, order) for order in orders])
    start = stack(hosts, parts)
    stacks = [
        depths(start, order, int(count)).mean() / parts
        for order, count in zip(orders[:trials], failures, strict=False)
    ]
    patch = [np.mean(patches(start, order)) / parts for order in orders[:patched]]
    return Endured(
        float(failures.mean()),
        float(failures.std() / len(failures) ** 0.5),
        float(np.mean(stacks)),
        float(np.std(stacks) / len(stacks) ** 0.5),
        float(np.mean(patch)) if patch else float("nan"),
    )


def mape(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the mean absolute percentage error of `ours`."""
    return float(np.mean([abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]) * 100)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(head), ["---:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    typer.echo(f"{text}\n{path}")


def tables(groups: Sequence[int], trials: int, patched: int, seed: int, out: Path) -> None:
    """Write failures and stacks by redundancy, beside the paper's tables 4 to 6; a file for each
    number of groups."""
    for size in groups:
        published = {r: row for (n, r), row in MONTE_CARLO.items() if n == size}
        if not published:
            sizes = sorted({groups for groups, _ in MONTE_CARLO})
            raise typer.BadParameter(f"{size} groups: the paper has only {sizes}")
        ours = {
            r: monte_carlo(size, r, trials=trials, patched=patched, seed=seed) for r in published
        }
        head = ["r", "failures: theory", "paper's MC", "ours", "±", "stacks: theory", "paper's MC"]
        head += ["ours", "±", "with patch: theory", "ours"]
        rows = [
            [
                str(r),
                f"{endured(size, r):.1f}",
                f"{row.failures}",
                f"{ours[r].failures:.1f}",
                f"{ours[r].failures_error:.1f}",
                f"{mean_stacks(size, r):.2f}",
                f"{row.stacks:.2f}",
                f"{ours[r].stacks:.3f}",
                f"{ours[r].stacks_error:.3f}",
                f"{mean_stacks_patched(size, r):.2f}",
                f"{ours[r].stacks + ours[r].patch:.2f}",
            ]
            for r, row in published.items()
        ]
        errors = [
            (name, mape([getattr(ours[r], name) for r in published], theirs), mape(theory, theirs))
            for name, theirs, theory in (
                (
                    "failures",
                    [row.failures for row in published.values()],
                    [endured(size, r) for r in published],
                ),
                (
                    "stacks",
                    [row.stacks for row in published.values()],
                    [mean_stacks(size, r) for r in published],
                ),
            )
        ]
        note = "".join(
            f"\nMean absolute percentage error of {name} against the paper's Monte Carlo: ours "
            f"{a:.2f} %, theory {b:.2f} %.\n"
            for name, a, b in errors
        )
        write(out / f"tables-{size}.md", f"# {size} groups\n\n{markdown(head, rows)}{note}")


def granularity(
    groups: Sequence[int],
    redundancy: Sequence[int],
    parts: Sequence[int],
    trials: int,
    seed: int,
    out: Path,
) -> None:
    """Write computation by the number of microbatches in a shard, at the same failures."""
    from planaria_lab.spare.plots import plot_depths

    rows, curves = [], {}
    for size in groups:
        for r in redundancy:
            hosts, rng = place(size, r), np.random.default_rng([seed, size, r])
            orders = [rng.permutation(size) for _ in range(trials)]
            failures = [first_wipe_out(hosts, order) for order in orders]
            even = np.mean([np.mean(size / (size - np.arange(k))) for k in failures])
            needs = []
            for cut in parts:
                start = stack(hosts, cut)
                needed = [depths(start, o, k) / cut for o, k in zip(orders, failures, strict=True)]
                needs.append(f"{np.mean([d.mean() for d in needed]):.2f}")
                curves[size, r, cut] = needed[0]
            patch = [np.mean(patches(stack(hosts, cut), orders[0])) / cut for cut in (1, 4)]
            rows.append(
                [str(size), str(r), f"{np.mean(failures):.0f}", *needs, f"{even:.2f}"]
                + [f"{p:.2f}" for p in patch]
            )
    head = ["N", "r", "failures endured", *(f"stacks, m = {cut}" for cut in parts), "N/(N-k)"]
    head += ["patch, m = 1", "patch, m = 4"]
    plot_depths(curves, out / "granularity.png")
    write(out / "granularity.md", markdown(head, rows))


def compare(groups: Sequence[int], trails: int, deepest: int, seed: int, out: Path) -> None:
    """Write time-to-train and availability of SPARe, replication and checkpoints alone, beside the
    paper's table 2; and how much the assumptions matter."""
    from planaria_lab.spare.plots import plot_by_redundancy

    curves: dict[tuple[int, str], dict[int, list[WallTime]]] = {}
    rows = []
    for size in groups:
        system = System(size)
        for name in SCHEMES:
            if name == MICROBATCHES:  # its controller is slower, so one redundancy and trail
                by_redundancy = {9: runs(system, name, 9, 1, seed)}
            else:
                by_redundancy = {
                    r: runs(system, name, r, trails, seed) for r in range(2, deepest + 1)
                }
            curves[size, name] = by_redundancy
            best = min(by_redundancy, key=lambda r: days(by_redundancy[r]))
            rows.append(
                [str(size), name, str(best), *cells(by_redundancy[best]), published(size, name)]
            )
        alone = [
            train(system, SCHEMES["Rep+CKPT"](size, 1), seed + trail, limit=5 * DAY)
            for trail in range(trails)
        ]
        done = np.mean([run.steps for run in alone]) / system.steps
        rows.append([str(size), "CKPT-only", "1", f"{5 / done:.0f} (extrapolated)"])
        rows[-1] += [*cells(alone)[1:], "a few steps"]
        typer.echo(f"{size} groups: done", err=True)
    plot_by_redundancy(
        {
            key: {r: days(outcomes) for r, outcomes in by_redundancy.items() if days(outcomes) < 10}
            for key, by_redundancy in curves.items()
        },
        "days to train",
        out / "compare.png",
    )
    head = ["N", "scheme", "best r", "days", "availability", "outside restarts", "stacks a step"]
    head += ["failures", "restarts", "paper: days, availability, r"]
    gains = [
        [
            str(size),
            *(
                f"{gain(curves[size, 'SPARe+CKPT'], curves[size, other]):.1f} %"
                for other in ("Rep+CKPT", "Rep+CKPT in sets")
            ),
            f"{gain(curves[size, MICROBATCHES], curves[size, 'Rep+CKPT']):.1f} %",
            f"{(1 - SPARE[size].days / REPLICATION[size].days) * 100:.1f} %",
        ]
        for size in groups
    ]
    write(
        out / "compare.md",
        markdown(head, rows)
        + "\nGain of the best SPARe over the best replication, in time-to-train:\n\n"
        + markdown(
            ["N", "over Rep", "over Rep in sets", "by microbatches over Rep", "paper, over Rep"],
            gains,
        )
        + "\nThe same with other assumptions (SPARe r = 9; the better of Rep r = 2, 3):\n\n"
        + sensitivity(groups, trails, seed),
    )


def sensitivity(groups: Sequence[int], trails: int, seed: int) -> str:
    """Return a table of time-to-train under other assumptions, one changed at a time."""
    variants: dict[str, dict[str, object]] = {
        "as above": {},
        "Weibull shape 0.7": {"shape": 0.7},
        "Weibull shape 0.9": {"shape": 0.9},
        "exponential": {"shape": 1.0},
        "Weibull gaps of the whole system": {"clocks": "system"},
        "saves of 30 s": {"save": 30.0},
        "saves of 180 s": {"save": 180.0},
        "a step of 10 s": {"compute": 9.0, "reduce_each": 0.001},
    }
    rows = []
    for label, changes in variants.items():
        row = [label]
        for size in groups:
            system = replace(System(size), **changes)  # type: ignore[arg-type]
            spare = runs(system, "SPARe+CKPT", 9, 1, seed)
            rep = min((runs(system, "Rep+CKPT", r, trails, seed) for r in (2, 3)), key=days)
            row.append(
                f"{days(spare):.2f} ({up(spare)}) / {days(rep):.2f} ({up(rep)}): "
                f"{(1 - days(spare) / days(rep)) * 100:.1f} %"
            )
        rows.append(row)
    return markdown(["", *(f"N = {size}" for size in groups)], rows)


def runs(system: System, name: str, redundancy: int, trails: int, seed: int) -> list[WallTime]:
    """Simulate `trails` trainings with the scheme `name` of `SCHEMES`."""
    return [
        train(system, SCHEMES[name](system.groups, redundancy), seed + trail)
        for trail in range(trails)
    ]


def days(outcomes: Sequence[WallTime]) -> float:
    return float(np.mean([outcome.wall for outcome in outcomes])) / DAY


def up(outcomes: Sequence[WallTime]) -> str:
    return f"{np.mean([outcome.availability for outcome in outcomes]):.1%}"


def cells(outcomes: Sequence[WallTime]) -> list[str]:
    return [
        f"{days(outcomes):.2f}",
        up(outcomes),
        f"{np.mean([outcome.up for outcome in outcomes]):.1%}",
        f"{np.mean([np.mean(outcome.stacks) for outcome in outcomes]):.2f}",
        f"{np.mean([outcome.failures for outcome in outcomes]):.0f}",
        f"{np.mean([outcome.restarts for outcome in outcomes]):.1f}",
    ]


def published(size: int, name: str) -> str:
    row = {"SPARe+CKPT": SPARE, "Rep+CKPT": REPLICATION}.get(name, {}).get(size)
    if row is None:
        return ""
    return f"{row.days}, {row.availability:.1%}, {row.redundancy or 'lost'}"


def gain(ours: dict[int, list[WallTime]], theirs: dict[int, list[WallTime]]) -> float:
    """Return how much less time the best of `ours` takes than the best of `theirs`, in percent."""
    return (1 - min(map(days, ours.values())) / min(map(days, theirs.values()))) * 100

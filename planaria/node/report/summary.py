"""Summary of a run: the figures of `summary.json`, and the plot of its loss.

Events are those of the nodes' event logs and of the swarm's own, sorted by time. Lines are those of
the merged ledger, by step. A resumed run has all its parts in one folder.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.filesize import decimal

from planaria.node.report import events
from planaria.node.report.ledger import Audit, Line
from planaria.node.report.wall_clock import PARTS
from planaria.node.run_file import RunFile
from planaria.node.wire.seat_names import node_of, was_added
from planaria.recovery.facts import COPIED, ORIGIN, OWN

NOTICED_LATE = 1.0
"""Maximum seconds from a process's end to its `exited` event."""


def summarize(
    run: RunFile,
    lines: Sequence[Line],
    audit: Audit,
    entries: Sequence[events.Entry],
    stopped: str = "",
) -> dict[str, Any]:
    """The content of `summary.json`. `run` has `model.stages`; times are in seconds. `stopped`: why
    the run ended before its last step, or empty (null in the file).

    Figures without records are None (losses) or 0.
    """
    counted = [entry for part in parts_of_run(entries) for entry in part]
    aborted = sum(isinstance(entry.event, events.Aborted) for entry in counted)
    rolled_back = sum(back.lost - back.to for back in rollbacks(counted))
    places = (run.model.body_stages + 1) * run.swarm.replicas
    tokens = sum(line["tokens"] for line in lines)
    seconds = seconds_of_training(lines, entries)
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    return {
        "steps": len(lines),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
        "loss": {
            "first": losses[0] if losses else None,
            "last": losses[-1] if losses else None,
            "validation": last_validation(counted),
        },
        "rebuilds": rebuilds(counted),
        "rolled_back_steps": rolled_back,
        "attempts": {
            "started": len(lines) + rolled_back + aborted,
            "committed": len(lines),
            "aborted": aborted,
            "masked": sum(isinstance(entry.event, events.AttemptMasked) for entry in counted),
        },
        "audit": {
            "expected": audit.expected,
            "duplicates": audit.duplicates,
            "missing": audit.missing,
            "extra": audit.extra,
        },
        "goodput": len(lines) / seconds if seconds > 0 else 0.0,
        "wall": wall_seconds(entries, places),
        "cost": {"policy": run.recovery.policy, **cost_of_policy(entries, places)},
        "skipped_steps": sum(line["skipped"] for line in lines),
        "failed_saves": sum(isinstance(entry.event, events.SaveFailed) for entry in entries),
        "replicas_identical": replicas_identical(entries),
        "stopped": stopped or None,
        "policy": run.recovery.policy,
        "seed": run.seed,
    }


def read_summary(folder: Path) -> dict[str, Any]:
    """The content of a folder's `summary.json`; empty while the run isn't over."""
    try:
        content: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content


def parts_of_run(entries: Iterable[events.Entry]) -> list[list[events.Entry]]:
    """The events of each start of the swarm, without events (except commits) after the swarm is
    being ended. A part begins with a start of the registry, unless this replaces one that has just
    exited."""
    runs: list[list[events.Entry]] = [[]]
    ended = False
    exited = False  # the registry, with no start since
    for entry in entries:
        match entry.event:
            case events.Started(slot=slot):
                if slot == "registry" and not exited:
                    ended = False
                    if runs[-1]:
                        runs.append([])
                exited = False
            case events.Exited(slot=slot):
                exited = slot == "registry"
        if not ended or isinstance(entry.event, events.Committed):
            runs[-1].append(entry)
        ended = ended or isinstance(entry.event, events.SwarmEnding)
    return runs


def seconds_of_training(lines: Sequence[Line], entries: Iterable[events.Entry]) -> float:
    """Seconds from the first begin to the last commit, without pauses between parts of the run."""
    if not lines:
        return 0.0
    runs = [part for part in parts_of_run(entries) if part]
    commits = [
        entry.time for part in runs for entry in part if isinstance(entry.event, events.Committed)
    ]
    begun = min([lines[0]["time"] - lines[0]["seconds"], *commits])
    last = lines[-1]["time"]
    gaps = [(before[-1].time, after[0].time) for before, after in pairwise(runs)]
    between = sum(max(0.0, min(to, last) - max(since, begun)) for since, to in gaps)
    return float(last - begun - between)


class Rollback(NamedTuple):
    """A rollback of all stages from step `lost` to step `to`."""

    lost: int
    to: int
    resumed: bool  # from files, with nothing else left; else by policy
    exact: bool  # all states are of step `to`


def _rollback(lost: int, event: events.RolledBack | events.Resuming) -> Rollback:
    if isinstance(event, events.Resuming):
        return Rollback(lost, event.step, True, event.exact)
    return Rollback(lost, event.step, False, True)


def rollbacks(entries: Iterable[events.Entry]) -> Iterator[Rollback]:
    committed = 0
    for entry in entries:
        match entry.event:
            case events.Committed(step=step):
                committed = step
            case events.RolledBack(step=to) | events.Resuming(step=to) as event:
                yield _rollback(max(committed, to), event)
                committed = to


def last_validation(entries: Iterable[events.Entry]) -> float | None:
    """The run's newest validation loss, nats a token."""
    losses = [entry.event.loss for entry in entries if isinstance(entry.event, events.Validated)]
    return losses[-1] if losses and math.isfinite(losses[-1]) else None


def rebuilds(entries: Iterable[events.Entry]) -> list[dict[str, Any]]:
    """A row for each rebuild; in a rollback of all stages, for each lost stage.

    `exact`, `fallback`, `relearned`, `oldest_step`, `perturbation`, `rolled_back` and
    `first_commit_seconds` are present only where they apply.
    """
    rows: list[dict[str, Any]] = []
    committed = 0
    for part in parts_of_run(entries):
        ordered: dict[str, events.RebuildOrdered] = {}  # by node
        with_state: set[str | None] = set()  # nodes that have had a state
        back: Rollback | None = None  # since the last commit
        stages_done: set[int] = set()  # stages with a row since then
        for entry in part:
            match entry.event:
                case events.Committed(step=step):
                    committed, back = step, None
                case events.Applied():
                    with_state.add(entry.node)
                case events.RebuildOrdered(node=node) as order:
                    ordered[node] = order
                case events.RolledBack(step=to) | events.Resuming(step=to) as event:
                    back = _rollback(back.lost if back else committed, event)
                    committed, stages_done = to, set()
                case events.RelearnedBeside() as relearning:
                    _add_beside(rows, relearning)
                case events.StageRebuilt(node=node, method=method) if method == ORIGIN:
                    with_state.add(node)  # no loss: the run begins
                case events.StageRebuilt(node=node, stage=stage) as rebuilt:
                    if node in ordered or back is None:
                        rows.append(
                            _rebuild_row(rebuilt, entry.time, ordered.pop(node, None), part)
                        )
                    elif node not in with_state and stage not in stages_done:
                        stages_done.add(stage)
                        rows.append(_rebuild_row(rebuilt, entry.time, back, part))
                    with_state.add(node)
    return rows


def _add_beside(rows: Sequence[dict[str, Any]], relearning: events.RelearnedBeside) -> None:
    """Add the background relearning of the stage to its last rebuild."""
    for row in reversed(rows):
        if row["stage"] == relearning.stage and "relearned" in row:
            figures = events.fields(relearning)
            keys = ("residual", "updates", "left", "steps", "seconds")
            row["relearned"]["beside"] = {key: figures[key] for key in keys}
            return


def _rebuild_row(
    rebuilt: events.StageRebuilt,
    at: float,
    cause: events.RebuildOrdered | Rollback | None,
    entries: Sequence[events.Entry],
) -> dict[str, Any]:
    """A rebuild's row in the summary. `at`: Unix seconds. `cause`: the driver's order, or the
    rollback."""
    loss_entry = _loss_before(rebuilt, at, entries)
    noticed = noticed_at(rebuilt, at, entries)
    figures = events.fields(rebuilt)
    row = {key: figures[key] for key in ("stage", "method", "step", "sources", "bytes")}
    row["detect_seconds"] = max(0.0, noticed - loss_entry.time) if loss_entry else 0.0
    row["rebuild_seconds"] = rebuilt.rebuild_seconds
    row["stall_seconds"] = stall_seconds(rebuilt, at, entries)
    if cause is not None:
        row["exact"] = cause.exact
    if isinstance(cause, events.RebuildOrdered):
        row["fallback"] = cause.fallback
    if isinstance(cause, Rollback) and cause.lost > cause.to:
        row["rolled_back"] = {"from": cause.lost, "to": cause.to}
    optional = ("relearned", "oldest_step", "mean_step", "perturbation")
    row |= {key: figures[key] for key in optional if key in figures}
    commits = (entry.time for entry in entries if isinstance(entry.event, events.Committed))
    first = next((time for time in commits if time >= at), None)
    if first is not None:
        row["first_commit_seconds"] = first - noticed
    return row


def noticed_at(rebuilt: events.StageRebuilt, at: float, entries: Sequence[events.Entry]) -> float:
    """When any node first noticed the loss that the rebuild repairs, Unix seconds. Without a loss
    (an evicted node returned): when the driver began to wait. `at`: time of the rebuild, Unix
    seconds."""
    loss_entry, stage = _loss_before(rebuilt, at, entries), rebuilt.stage
    if loss_entry is not None:
        late = NOTICED_LATE if isinstance(loss_entry.event, events.Exited) else 0.0
        for entry in entries:
            match entry.event:
                case events.LinkLost(peer=node) | events.NodeLost(node=node):
                    noticed = node_of(node) == loss_entry.node
                case events.RebuildOrdered(stage=ordered_stage):
                    noticed = ordered_stage == stage
                case _:
                    noticed = False
            if noticed and entry.time >= loss_entry.time - late:
                return entry.time
    return at - rebuilt.stall_seconds


def stall_seconds(
    rebuilt: events.StageRebuilt, at: float, entries: Sequence[events.Entry]
) -> float:
    """Seconds without training; a new driver has counted only the last part. `at`: time of the
    rebuild, Unix seconds."""
    if rebuilt.method in (*COPIED, ORIGIN):
        return rebuilt.stall_seconds
    return max(rebuilt.stall_seconds, at - noticed_at(rebuilt, at, entries))


def _loss_before(
    rebuilt: events.StageRebuilt, at: float, entries: Sequence[events.Entry]
) -> events.Entry | None:
    """The newest loss in the slot of the rebuilt seat's process. It counts if it was of the same
    stage, and the node is the process's first and joined for this seat. A seat added to an earlier
    node replaces the last loss at the stage, unless its state was copied from a replica."""
    if was_added(rebuilt.node):
        copied = rebuilt.method in COPIED
        return None if copied else _last_loss_at(rebuilt.stage, at, entries)
    node = node_of(rebuilt.node)
    nodes: dict[int, list[str | None]] = {}  # by process, in order
    starts: dict[int, tuple[str, float]] = {}  # by process: slot and time
    for entry in entries:
        match entry.event:
            case events.Joined(pid=pid):
                nodes.setdefault(pid, []).append(entry.node)
            case events.Started(slot=slot, pid=pid):
                starts.setdefault(pid, (slot, entry.time))
    process = next((pid for pid, names in nodes.items() if node in names), None)
    if process is None or nodes[process][0] != node or process not in starts:
        return None
    slot, started = starts[process]
    for entry in reversed(entries):
        match entry.event:
            case (events.Killed() | events.Exited()) as loss if (
                loss.slot == slot and loss.node is not None
            ):
                if entry.time <= started:
                    return entry if loss.stage == rebuilt.stage else None
    return None


def _last_loss_at(stage: int, at: float, entries: Iterable[events.Entry]) -> events.Entry | None:
    """The newest loss of a node with a seat at the stage, unless rebuilt since."""
    seats: set[str | None] = set()
    newest = None
    for entry in entries:
        match entry.event:
            case events.Serving(stage=at_stage) if at_stage == stage:
                seats.add(entry.node)
            case events.GivenBack(stage=at_stage) if at_stage == stage:
                seats.discard(entry.node)
            case (events.Killed() | events.Exited()) as loss if entry.time <= at:
                if loss.node in {node_of(seat or "") for seat in seats}:
                    newest = entry
            case events.StageRebuilt(stage=at_stage) if at_stage == stage and entry.time < at:
                newest = None
    return newest


def wall_seconds(entries: Iterable[events.Entry], places: int) -> dict[str, float]:
    """Seconds by part, averaged over the run's places (stages times replicas), each of which may
    have had several nodes in sequence."""
    newest = {entry.node: entry.event for entry in entries if isinstance(entry.event, events.Wall)}
    return {
        part: sum(getattr(wall, part) for wall in newest.values()) / places
        for part in (*PARTS, "total")
    }


def cost_of_policy(entries: Iterable[events.Entry], places: int) -> dict[str, Any]:
    """Cost of the policy, by all nodes' last events: `extra_bytes` sent and written in all;
    `memory_bytes` of the present nodes in all `places`. `critical_seconds` of the compute thread
    are averaged over the places. `parts_of_run` has the same by kind of redundant state."""
    slots: dict[int, str] = {}  # process id -> slot
    place_of: dict[str | None, str] = {}  # node -> slot
    by_node: dict[str | None, events.CostSoFar] = {}  # node -> its last event
    by_place: dict[str | None, events.CostSoFar] = {}  # place -> the last event of its newest node
    for entry in entries:
        match entry.event:
            case events.Started(slot=slot, pid=pid):
                slots[pid] = slot
            case events.Joined(pid=pid) if pid in slots:
                place_of[entry.node] = slots[pid]
            case events.CostSoFar() as event:
                by_node[entry.node] = by_place[place_of.get(entry.node, entry.node)] = event

    def total(part: str = "") -> dict[str, Any]:
        whole = sum((_share(event, part) for event in by_node.values()), events.HoldingCost())
        return {
            "extra_bytes": whole.extra_bytes,
            "memory_bytes": sum(_share(event, part).memory_bytes for event in by_place.values()),
            "critical_seconds": whole.critical_seconds / places,
        }

    names = sorted({name for event in by_node.values() for name in event.parts})
    return {**total(), "parts": {name: total(name) for name in names}}


def _share(event: events.CostSoFar, part: str) -> events.HoldingCost:
    """Cost of one part, or of all if it is empty."""
    if part:
        return event.parts.get(part, events.HoldingCost())
    return events.HoldingCost(event.extra_bytes, event.memory_bytes, event.critical_seconds)


def replicas_identical(entries: Sequence[events.Entry]) -> bool:
    """Whether all replicas of a stage had the same digest of weights after every step. A step
    repeated after a rollback, or after the loss of all its replicas, counts separately. Seats whose
    stage no event names are left out."""
    digests: dict[tuple[int, ...], set[str]] = {}
    stages = {
        each.node: each.event.stage for each in entries if isinstance(each.event, events.Serving)
    }
    losses: Counter[int] = Counter()  # stage -> number of losses
    for entry in entries:
        match entry.event:
            case events.Diverged():
                return False
            case events.StageRebuilt(stage=stage, method=method) if method not in COPIED:
                losses[stage] += 1
            case events.Applied(lineage=lineage, step=step, digest=digest) if entry.node in stages:
                stage = stages[entry.node]
                digests.setdefault((lineage, losses[stage], stage, step), set()).add(digest)
    return all(len(replicas) == 1 for replicas in digests.values())


def summary_sentences(summary: dict[str, Any]) -> Iterator[str]:
    """The essence of a summary, in sentences."""
    loss = {key: "-" if value is None else f"{value:.4f}" for key, value in summary["loss"].items()}
    yield (
        f"{summary['steps']} steps, {summary['tokens']:,} tokens, "
        f"{summary['tokens_per_second']:,.0f} tokens/s; loss {loss['first']} at first, "
        f"{loss['last']} at last, {loss['validation']} in validation"
    )
    for rebuild in summary["rebuilds"]:
        if not _is_of_rollback(rebuild):
            yield _rebuild_sentence(rebuild)
    resumed = sorted({rebuild["step"] for rebuild in filter(_is_of_rollback, summary["rebuilds"])})
    if resumed:
        yield f"resumed at step {', '.join(map(str, resumed))}"
    if summary["rolled_back_steps"]:
        yield f"committed steps repeated after rollbacks: {summary['rolled_back_steps']}"
    cost = summary["cost"]
    if cost["extra_bytes"] or cost["memory_bytes"]:
        yield (
            f"redundant state for {cost['policy']}: {decimal(cost['extra_bytes'])} sent or "
            f"written, {decimal(cost['memory_bytes'])} of memory, "
            f"{cost['critical_seconds']:.2f} s of computing time at each node"
        )
    if summary["skipped_steps"]:
        steps = summary["skipped_steps"]
        yield f"steps skipped for a gradient that was not finite, or far too long: {steps}"
    if summary["failed_saves"]:
        yield f"saves that failed: {summary['failed_saves']}; the nodes' logs say why"
    audit, attempts = summary["audit"], summary["attempts"]
    yield (
        f"audit: {audit['expected']:,} samples expected, {audit['duplicates']} duplicates, "
        f"{audit['missing']} missing, {audit['extra']} extra; attempts: {attempts['started']} "
        f"started, {attempts['aborted']} aborted; replicas "
        f"{'identical' if summary['replicas_identical'] else 'NOT identical'}"
    )


def _rebuild_sentence(row: Mapping[str, Any]) -> str:
    fallback = " (a fallback)" if row.get("fallback") else ""
    others = {"kind": events.StageRebuilt.kind, "time": 0.0, "node": "", "fetch_seconds": 0.0}
    entry = events.parse({**others, **row})
    assert entry is not None and isinstance(entry.event, events.StageRebuilt)
    return (
        f"stage {row['stage']} rebuilt by {row['method']}{fallback} at step {row['step']}: noticed "
        f"in {row['detect_seconds']:.2f} s, {decimal(row['bytes'])} in "
        f"{row['rebuild_seconds']:.2f} s, stalled {row['stall_seconds']:.2f} s{entry.event.quality}"
    )


def draw_loss(
    run: RunFile, lines: Sequence[Line], entries: Sequence[events.Entry], path: Path
) -> None:
    """Write a PNG: loss against step, with losses of nodes, rebuilds and validations marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    counted = [entry for part in parts_of_run(entries) for entry in part]
    figure = Figure(figsize=(9, 5), dpi=120)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0.08, 0.1, 0.9, 0.83))
    steps = [line["step"] for line in lines]
    losses = [math.nan if line["loss"] is None else line["loss"] for line in lines]
    axes.plot(steps, losses, color=_INK, linewidth=1.6, label="training", zorder=3)
    if validations := _validations(counted):
        axes.plot(
            *zip(*validations.items(), strict=True),
            linestyle="none",
            marker="D",
            markersize=6,
            color=_VALIDATION,
            markeredgecolor="white",
            label=f"validation, {list(validations.values())[-1]:.3f} at the end",
            zorder=4,
        )
    end = max([run.steps, *steps])
    for number, (at, text) in enumerate(plot_marks(counted)):
        step = min(at, end)  # the run may have gone back from a later one
        beside = "left" if step < 0.8 * end else "right"
        axes.axvline(step, color=_LOSS, linewidth=1, linestyle=(0, (4, 3)), zorder=2)
        axes.annotate(
            text,
            xy=(step, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4 if beside == "left" else -4, -6 - 28 * (number % 3)),
            textcoords="offset points",
            ha=beside,
            va="top",
            fontsize=8,
            color=_LOSS,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            zorder=5,
        )
    axes.set_xlim(0, 1.02 * end)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    axes.set_title(f"{run.name}: {len(lines)} of {run.steps} steps committed", loc="left")
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if steps or validations:
        axes.legend(loc="lower left", frameon=False)
    # `savefig` would draw all of it twice, once for its layout.
    canvas.print_png(path)  # type: ignore[no-untyped-call]


_INK, _LOSS, _VALIDATION = "#1f4e79", "#b03a2e", "#2e8b57"


def _validations(entries: Iterable[events.Entry]) -> dict[int, float]:
    """Losses by step, but those of steps that the run has undone."""
    losses: dict[int, float] = {}
    for entry in entries:
        match entry.event:
            case events.Validated(step=step, loss=loss) if math.isfinite(loss):
                losses[step] = loss
            case events.Resuming(step=step) | events.RolledBack(step=step):
                losses = {at: loss for at, loss in losses.items() if at <= step}
    return losses


def plot_marks(entries: Sequence[events.Entry]) -> list[tuple[int, str]]:
    """Annotations of the plot by step: rebuilds of stages with their methods, nodes killed at
    stages that survived, and rollbacks."""
    counts: dict[int, dict[int, Counter[str]]] = {}  # step -> stage -> methods
    rebuilt: set[tuple[int, int]] = set()  # stage, current step
    for row in rebuilds(entries):
        step = row.get("rolled_back", {"from": row["step"]})["from"]
        rebuilt.add((row["stage"], step + 1))
        if not _is_of_rollback(row):
            counts.setdefault(step, {}).setdefault(row["stage"], Counter())[row["method"]] += 1
    for entry in entries:
        match entry.event:
            case events.Killed(stage=stage, step=step) if (stage, step) not in rebuilt:
                counts.setdefault(step, {}).setdefault(stage, Counter())["node killed"] += 1
    texts = {
        step: [f"stage {stage}: {_methods(by_stage[stage])}" for stage in sorted(by_stage)]
        for step, by_stage in counts.items()
    }
    for back in rollbacks(entries):
        change = f"rolled back to {back.to}" if back.lost > back.to else f"at step {back.to}"
        text = f"resumed, {change}" if back.resumed else change
        texts.setdefault(back.lost, []).append(text)
    return [(step, "\n".join(lines)) for step, lines in sorted(texts.items())]


def _is_of_rollback(row: Mapping[str, Any]) -> bool:
    """Whether the row is part of a rollback of all stages."""
    return row["method"] in OWN and "fallback" not in row  # else it was ordered for its stage


def _methods(methods: Counter[str]) -> str:
    return ", ".join(f"{m} x{n}" if n > 1 else m for m, n in methods.items())

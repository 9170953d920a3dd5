"""What a run came to: the figures of `summary.json`, and the picture of its loss.

Events are lines of the nodes' event logs and of the swarm's own, sorted by time. Lines are those of
the merged ledger, by step. A run that was resumed has all its parts in one folder.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.filesize import decimal

from planaria.node.report.ledger import Audit, Line
from planaria.node.report.wall_clock import PARTS
from planaria.node.run_file import RunFile

Event = Mapping[str, Any]

NOTICED_LATE = 1.0
"""Seconds by which the time of an `exited` event may be behind the process's end."""
NOTHING: Event = {"extra_bytes": 0, "memory_bytes": 0, "critical_seconds": 0.0}


def summarize(
    run: RunFile, lines: Sequence[Line], audit: Audit, events: Sequence[Event]
) -> dict[str, Any]:
    """The content of `summary.json`. `run` says `model.stages`; seconds everywhere.

    Figures that nothing was recorded for are None (losses) or 0.
    """
    counted = [event for part in parts(events) for event in part]
    aborted = sum(event["kind"] == "aborted" for event in counted)
    rolled_back = sum(back.lost - back.to for back in goings_back(counted))
    places = ((run.model.stages or 0) + 1) * run.swarm.replicas
    tokens = sum(line["tokens"] for line in lines)
    seconds = seconds_of_training(lines, events)
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
            "masked": sum(event["kind"] == "masked" for event in counted),
        },
        "audit": {
            "expected": audit.expected,
            "duplicates": audit.duplicates,
            "missing": audit.missing,
            "extra": audit.extra,
        },
        "goodput": len(lines) / seconds if seconds > 0 else 0.0,
        "wall": wall(events, places),
        "cost": {"policy": run.recovery.policy, **cost(events, places)},
        "failed_saves": sum(event["kind"] == "save failed" for event in events),
        "replicas_identical": replicas_identical(events),
        "policy": run.recovery.policy,
        "seed": run.seed,
    }


def parts(events: Iterable[Event]) -> list[list[Event]]:
    """The events of each time that a swarm ran, without what happens, but for commits, because its
    processes are being ended. A swarm begins with its registry; one that is started in place of
    another comes right after the other's exit."""
    found: list[list[Event]] = [[]]
    ended = False
    exited = False  # the registry, and nothing has been started since
    for event in events:
        kind, is_registry = event["kind"], event.get("slot") == "registry"
        if kind == "started" and is_registry and not exited:
            ended = False
            if found[-1]:
                found.append([])
        if kind in ("started", "exited"):
            exited = kind == "exited" and is_registry
        if not ended or kind == "committed":
            found[-1].append(event)
        ended = ended or kind == "ending"
    return found


def seconds_of_training(lines: Sequence[Line], events: Iterable[Event]) -> float:
    """From the first begin to the last commit, but for the time between two parts of the run."""
    if not lines:
        return 0.0
    ran = [part for part in parts(events) if part]
    commits = [event["time"] for part in ran for event in part if event["kind"] == "committed"]
    begun = min([lines[0]["time"] - lines[0]["seconds"], *commits])
    last = lines[-1]["time"]
    gaps = [(before[-1]["time"], after[0]["time"]) for before, after in pairwise(ran)]
    between = sum(max(0.0, min(to, last) - max(since, begun)) for since, to in gaps)
    return float(last - begun - between)


class GoingBack(NamedTuple):
    """All stages went back from step `lost` to step `to`, where the run went on."""

    lost: int
    to: int
    resumed: bool  # from files, with nothing else left; else a policy's roll back


def goings_back(events: Iterable[Event]) -> Iterator[GoingBack]:
    committed = 0
    for event in events:
        match event["kind"]:
            case "committed":
                committed = event["step"]
            case "rolled back" | "resuming":
                to = event["step"]
                yield GoingBack(max(committed, to), to, event["kind"] == "resuming")
                committed = to


def last_validation(events: Iterable[Event]) -> float | None:
    """The newest validation loss, nats a token."""
    found = [event["loss"] for event in events if event["kind"] == "validated"]
    return found[-1] if found else None


def rebuilds(events: Iterable[Event]) -> list[dict[str, Any]]:
    """A row for each rebuild; where all stages go back, for each stage that had been lost.

    `exact`, `fallback`, `relearned`, `oldest_step`, `perturbation`, `rolled_back` and
    `first_commit_seconds` are there only where they apply.
    """
    rows: list[dict[str, Any]] = []
    committed = 0
    for part in parts(events):
        ordered: dict[str, Event] = {}  # node -> what the driver told it to do
        holding: set[str] = set()  # nodes that have had the state of a step
        back: Event = {}  # where all stages have gone since the last commit
        there: set[int] = set()  # stages with a row since then
        for event in part:
            match event["kind"]:
                case "committed":
                    committed, back = event["step"], {}
                case "applied":
                    holding.add(event["node"])
                case "rebuilding":
                    ordered[event["node"]] = event
                case "rolled back" | "resuming":
                    lost = back["from"] if back else committed
                    back = {"from": lost, "to": event["step"], "exact": event.get("exact", True)}
                    committed, there = event["step"], set()
                case "rebuilt":
                    node, stage = event["node"], event["stage"]
                    if node in ordered or not back:
                        rows.append(_row(event, ordered.pop(node, {}), part))
                    elif node not in holding and stage not in there:
                        there.add(stage)
                        rows.append(_row(event, back, part))
                    holding.add(node)
    return rows


def _row(rebuilt: Event, why: Event, events: Sequence[Event]) -> dict[str, Any]:
    """`why`: the driver's order, or where all stages went back."""
    loss = _replaced(rebuilt["node"], events)
    noticed = noticed_at(rebuilt, events)
    keys = ("stage", "method", "step", "sources", "bytes")
    row: dict[str, Any] = {key: rebuilt[key] for key in keys}
    row["detect_seconds"] = max(0.0, noticed - loss["time"]) if loss else 0.0
    row["rebuild_seconds"] = rebuilt["rebuild_seconds"]
    row["stall_seconds"] = stall_seconds(rebuilt, events)
    row |= {key: why[key] for key in ("exact", "fallback") if key in why}
    if why.get("from", 0) > why.get("to", 0):
        row["rolled_back"] = {"from": why["from"], "to": why["to"]}
    optional = ("relearned", "oldest_step", "mean_step", "perturbation")
    row |= {key: rebuilt[key] for key in optional if key in rebuilt}
    commits = (event["time"] for event in events if event["kind"] == "committed")
    first = next((time for time in commits if time >= rebuilt["time"]), None)
    if first is not None:
        row["first_commit_seconds"] = first - noticed
    return row


def noticed_at(rebuilt: Event, events: Sequence[Event]) -> float:
    """When anyone first noticed the loss of the node whose place the rebuilt one took, Unix
    seconds; if it took nobody's (it had been dropped, and came back), when the driver began to
    wait."""
    loss, stage = _replaced(rebuilt["node"], events), rebuilt["stage"]
    if loss is not None:
        victim = loss["node"]
        late = NOTICED_LATE if loss["kind"] == "exited" else 0.0
        for event in events:
            noticed = (
                (event["kind"] == "link lost" and event["peer"] == victim)
                or (event["kind"] == "lost" and event["node"] == victim)
                or (event["kind"] == "rebuilding" and event["stage"] == stage)
            )
            if noticed and event["time"] >= loss["time"] - late:
                return float(event["time"])
    return float(rebuilt["time"] - rebuilt["stall_seconds"])


def stall_seconds(rebuilt: Event, events: Sequence[Event]) -> float:
    """For how long nothing was trained; a driver that is new itself has seen only the end of it."""
    seen = float(rebuilt["stall_seconds"])
    if rebuilt["method"] == "replica":
        return seen
    return max(seen, float(rebuilt["time"]) - noticed_at(rebuilt, events))


def _replaced(node: str, events: Sequence[Event]) -> Event | None:
    """The newest loss in the place of `node`'s process, if this is that process's first node."""
    joined = [event for event in events if event["kind"] == "joined"]
    process = next((event["pid"] for event in joined if event["node"] == node), None)
    if process is None or next(e["node"] for e in joined if e["pid"] == process) != node:
        return None
    started = next((e for e in events if e["kind"] == "started" and e["pid"] == process), None)
    if started is None:
        return None
    losses = [
        event
        for event in events
        if event["kind"] in ("killed", "exited")
        and event["slot"] == started["slot"]
        and event["node"] is not None
        and event["time"] <= started["time"]
    ]
    return losses[-1] if losses else None


def wall(events: Iterable[Event], places: int) -> dict[str, float]:
    """Seconds by what they went to, averaged over the run's places (stages times replicas), each of
    which may have been served by several nodes, one after the other."""
    newest = {event["node"]: event for event in events if event["kind"] == "wall"}
    return {
        part: sum(event[part] for event in newest.values()) / places for part in (*PARTS, "total")
    }


def cost(events: Iterable[Event], places: int) -> dict[str, Any]:
    """What the policy took, failures or not, by all nodes' last words: `extra_bytes` sent and
    written in all, `memory_bytes` held in all `places` by those who have them now,
    `critical_seconds` of the compute thread, averaged over the places. `parts` has the same for
    each thing that is kept.
    """
    slots: dict[int, str] = {}  # process id -> slot
    place_of: dict[str, str] = {}  # node -> slot
    ever: dict[str, Event] = {}  # node -> its last word
    now: dict[str, Event] = {}  # place -> the last word of its newest node
    for event in events:
        match event["kind"]:
            case "started":
                slots[event["pid"]] = event["slot"]
            case "joined":
                node = str(event["node"])
                place_of[node] = slots.get(event["pid"], node)
            case "cost":
                node = str(event["node"])
                ever[node] = now[place_of.get(node, node)] = event

    def total(part: str = "") -> dict[str, Any]:
        told = [_share(event, part) for event in ever.values()]
        return {
            "extra_bytes": sum(one["extra_bytes"] for one in told),
            "memory_bytes": sum(_share(event, part)["memory_bytes"] for event in now.values()),
            "critical_seconds": sum(one["critical_seconds"] for one in told) / places,
        }

    names = sorted({name for event in ever.values() for name in event["parts"]})
    return {**total(), "parts": {name: total(name) for name in names}}


def _share(cost: Event, part: str) -> Event:
    """What a `cost` event says of a part, or of all if that is empty."""
    found: Event = cost["parts"].get(part, NOTHING) if part else cost
    return found


def replicas_identical(events: Iterable[Event]) -> bool:
    """Whether all nodes of a stage had the same weights after every step, by their digests. A step
    that is made again, by other weights or after the loss of all that had made it, is another."""
    digests: dict[tuple[int, ...], set[str]] = {}
    stages: dict[str, int] = {}
    lives: Counter[int] = Counter()  # stage -> how often it was lost
    for event in events:
        match event:
            case {"kind": "diverged"}:
                return False
            case {"kind": "serving", "node": node, "stage": stage}:
                stages[node] = stage
            case {"kind": "rebuilt", "stage": stage, "method": method} if method != "replica":
                lives[stage] += 1
            case {"kind": "applied", "node": node, "lineage": lineage, "step": step}:
                stage = stages[node]
                of_step = digests.setdefault((lineage, lives[stage], stage, step), set())
                of_step.add(event["digest"])
    return all(len(found) == 1 for found in digests.values())


def tell(summary: dict[str, Any]) -> Iterator[str]:
    """The essence of a summary, in sentences."""
    loss = {key: "-" if value is None else f"{value:.4f}" for key, value in summary["loss"].items()}
    yield (
        f"{summary['steps']} steps, {summary['tokens']:,} tokens, "
        f"{summary['tokens_per_second']:,.0f} tokens/s; loss {loss['first']} at first, "
        f"{loss['last']} at last, {loss['validation']} in validation"
    )
    for rebuild in summary["rebuilds"]:
        if not _resumed(rebuild):
            yield _rebuild(rebuild)
    resumed = sorted({rebuild["step"] for rebuild in filter(_resumed, summary["rebuilds"])})
    if resumed:
        yield f"resumed from saves of step {', '.join(map(str, resumed))}"
    if summary["rolled_back_steps"]:
        yield f"committed steps that had to be made again: {summary['rolled_back_steps']}"
    cost = summary["cost"]
    if cost["extra_bytes"] or cost["memory_bytes"]:
        yield (
            f"kept ready for losses, {cost['policy']}: {decimal(cost['extra_bytes'])} sent or "
            f"written, {decimal(cost['memory_bytes'])} of memory, "
            f"{cost['critical_seconds']:.2f} s of computing time at each node"
        )
    if summary["failed_saves"]:
        yield f"saves that failed: {summary['failed_saves']}; the nodes' logs say why"
    audit, attempts = summary["audit"], summary["attempts"]
    yield (
        f"audit: {audit['expected']:,} samples expected, {audit['duplicates']} duplicates, "
        f"{audit['missing']} missing, {audit['extra']} extra; attempts: {attempts['started']} "
        f"started, {attempts['aborted']} aborted; replicas "
        f"{'identical' if summary['replicas_identical'] else 'NOT identical'}"
    )


def _rebuild(row: Mapping[str, Any]) -> str:
    fallback = " (a fallback)" if row.get("fallback") else ""
    return (
        f"stage {row['stage']} rebuilt by {row['method']}{fallback} at step {row['step']}: noticed "
        f"in {row['detect_seconds']:.2f} s, {decimal(row['bytes'])} in "
        f"{row['rebuild_seconds']:.2f} s, stalled {row['stall_seconds']:.2f} s{quality(row)}"
    )


def quality(rebuilt: Mapping[str, Any]) -> str:
    """How near a rebuild came to what was lost, as far as that is known: the end of a sentence."""
    parts = []
    if "oldest_step" in rebuilt:
        parts.append(f"oldest block of step {rebuilt['oldest_step']}")
    if rebuilt.get("perturbation") is not None:
        parts.append(f"perturbation {rebuilt['perturbation']:.3g}")
    if relearned := rebuilt.get("relearned"):
        parts.append(_relearned(relearned))
    return "".join(f"; {part}" for part in parts)


def _relearned(result: Mapping[str, Any]) -> str:
    before, after = result["residual_before"], result["residual_after"]
    if before is None:
        return "not relearned: no boundary tensors were whole"
    passes, seconds = result["passes"], result["seconds"]
    now = "-" if after is None else f"{after:.3g}"
    undone = ", which is worse and undone" if result.get("undone") else ""
    return f"relearned: residual {before:.3g} -> {now} in {passes} passes, {seconds:.1f} s{undone}"


def draw_loss(run: RunFile, lines: Sequence[Line], events: Sequence[Event], path: Path) -> None:
    """Write a PNG: loss against step, with losses of nodes, rebuilds and validations marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    counted = [event for part in parts(events) for event in part]
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [line["step"] for line in lines]
    losses = [math.nan if line["loss"] is None else line["loss"] for line in lines]
    axes.plot(steps, losses, color=_INK, linewidth=1.6, label="training", zorder=3)
    validations = {
        event["step"]: event["loss"]
        for event in counted
        if event["kind"] == "validated" and event["loss"] is not None
    }
    if validations:
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
    for number, (step, text) in enumerate(marks(counted)):
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
    figure.savefig(path, format="png")


_INK, _LOSS, _VALIDATION = "#1f4e79", "#b03a2e", "#2e8b57"


def marks(events: Sequence[Event]) -> list[tuple[int, str]]:
    """What to mark in the picture: at which step which stage was rebuilt, and how, or a node of it
    killed while others kept the stage alive; and where all stages went back to an older step."""
    found: dict[int, dict[int, Counter[str]]] = {}  # step -> stage -> methods
    rebuilt: set[tuple[int, int]] = set()  # stage, step that was under way
    for row in rebuilds(events):
        step = row.get("rolled_back", {"from": row["step"]})["from"]
        rebuilt.add((row["stage"], step + 1))
        if not _resumed(row):
            found.setdefault(step, {}).setdefault(row["stage"], Counter())[row["method"]] += 1
    for event in events:
        if event["kind"] == "killed" and (event["stage"], event["step"]) not in rebuilt:
            of_step = found.setdefault(event["step"], {})
            of_step.setdefault(event["stage"], Counter())["node killed"] += 1
    texts = {
        step: [f"stage {stage}: {_methods(of_step[stage])}" for stage in sorted(of_step)]
        for step, of_step in found.items()
    }
    for back in goings_back(events):
        what = f"rolled back to {back.to}" if back.lost > back.to else f"at step {back.to}"
        text = f"resumed, {what}" if back.resumed else what
        texts.setdefault(back.lost, []).append(text)
    return [(step, "\n".join(lines)) for step, lines in sorted(texts.items())]


def _resumed(row: Mapping[str, Any]) -> bool:
    """Whether all stages have such a row, since the run went on from files."""
    return row["method"] == "save" and not row.get("fallback")


def _methods(methods: Counter[str]) -> str:
    return ", ".join(f"{m} x{n}" if n > 1 else m for m, n in methods.items())

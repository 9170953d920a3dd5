"""What a run came to: the figures of `summary.json`, and the picture of its loss.

Events are lines of the nodes' event logs and of the swarm's own, sorted by time. Lines are those of
the merged ledger, by step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from node.ledger import Audit, Line
from node.run_file import RunFile, policy_of
from node.wall_clock import PARTS

Event = Mapping[str, Any]

NOTICED_LATE = 1.0
"""Seconds by which the time of an `exited` event may be behind the process's end."""


def summarize(
    run: RunFile, lines: Sequence[Line], audit: Audit, events: Sequence[Event]
) -> dict[str, Any]:
    """The content of `summary.json`. `run` says `model.stages`; seconds everywhere.

    Figures that nothing was recorded for are None (losses) or 0.
    """
    counted = _before_the_end(events)
    kinds = Counter(event["kind"] for event in counted)
    tokens = sum(line["tokens"] for line in lines)
    seconds = lines[-1]["time"] - (lines[0]["time"] - lines[0]["seconds"]) if lines else 0.0
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
        "attempts": {
            "started": len(lines) + kinds["aborted"],
            "committed": len(lines),
            "aborted": kinds["aborted"],
        },
        "audit": {
            "expected": audit.expected,
            "duplicates": audit.duplicates,
            "missing": audit.missing,
            "extra": audit.extra,
        },
        "goodput": len(lines) / seconds if seconds > 0 else 0.0,
        "wall": wall(events, places=((run.model.stages or 0) + 1) * run.swarm.replicas),
        "replicas_identical": replicas_identical(events),
        "policy": policy_of(run),
        "seed": run.seed,
    }


def _before_the_end(events: Sequence[Event]) -> list[Event]:
    """Without what happens because the swarm's processes are being ended."""
    end = min((event["time"] for event in events if event["kind"] == "ending"), default=math.inf)
    return [event for event in events if event["time"] <= end]


def last_validation(events: Iterable[Event]) -> float | None:
    """The newest validation loss, nats a token."""
    found = [event["loss"] for event in events if event["kind"] == "validated"]
    return found[-1] if found else None


def rebuilds(events: Sequence[Event]) -> list[dict[str, Any]]:
    keys = ("stage", "method", "step", "sources", "bytes")
    return [
        {
            **{key: event[key] for key in keys},
            "detect_seconds": detect_seconds(event, events),
            "rebuild_seconds": event["rebuild_seconds"],
            "stall_seconds": event["stall_seconds"],
        }
        for event in events
        if event["kind"] == "rebuilt"
    ]


def detect_seconds(rebuilt: Event, events: Sequence[Event]) -> float:
    """From the loss of the node whose place the rebuilt one took to the first who noticed; 0 when
    it took nobody's (it had been dropped, and came back)."""
    loss = _replaced(rebuilt["node"], events)
    if loss is None:
        return 0.0
    victim, stage = loss["node"], rebuilt["stage"]
    late = NOTICED_LATE if loss["kind"] == "exited" else 0.0
    for event in events:
        noticed = (
            (event["kind"] == "link lost" and event["peer"] == victim)
            or (event["kind"] == "lost" and event["node"] == victim)
            or (event["kind"] == "rebuilding" and event["stage"] == stage)
        )
        if noticed and event["time"] >= loss["time"] - late:
            return max(0.0, float(event["time"] - loss["time"]))
    return 0.0


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


def replicas_identical(events: Sequence[Event]) -> bool:
    """Whether all nodes of a stage had the same weights after every step, by their digests."""
    if any(event["kind"] == "diverged" for event in events):
        return False
    stages = {event["node"]: event["stage"] for event in events if event["kind"] == "serving"}
    digests: dict[tuple[int, int, int], set[str]] = {}
    for event in events:
        if event["kind"] == "applied":
            key = stages[event["node"]], event["lineage"], event["step"]
            digests.setdefault(key, set()).add(event["digest"])
    return all(len(found) == 1 for found in digests.values())


def draw_loss(run: RunFile, lines: Sequence[Line], events: Sequence[Event], path: Path) -> None:
    """Write a PNG: loss against step, with losses of nodes, rebuilds and validations marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    counted = _before_the_end(events)
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [line["step"] for line in lines]
    losses = [math.nan if line["loss"] is None else line["loss"] for line in lines]
    axes.plot(steps, losses, color=_INK, linewidth=1.6, label="training", zorder=3)
    validations = [(e["step"], e["loss"]) for e in counted if e["kind"] == "validated"]
    if validations:
        axes.plot(
            *zip(*validations, strict=True),
            linestyle="none",
            marker="D",
            markersize=6,
            color=_VALIDATION,
            markeredgecolor="white",
            label=f"validation, {validations[-1][1]:.3f} at the end",
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


def marks(events: Iterable[Event]) -> list[tuple[int, str]]:
    """What to mark in the picture: at which step which stage was rebuilt, and how, or a node of it
    killed while others kept the stage alive."""
    events = list(events)
    rebuilt = [event for event in events if event["kind"] == "rebuilt"]
    at_once = {(event["stage"], event["step"] + 1) for event in rebuilt}
    found: dict[int, dict[int, Counter[str]]] = {}  # step -> stage -> methods
    for event in events:
        if event["kind"] == "rebuilt":
            method = event["method"]
        elif event["kind"] == "killed" and (event["stage"], event["step"]) not in at_once:
            method = "node killed"
        else:
            continue
        of_step = found.setdefault(event["step"], {})
        of_step.setdefault(event["stage"], Counter())[method] += 1
    return [
        (step, "\n".join(f"stage {stage}: {_methods(of_step[stage])}" for stage in sorted(of_step)))
        for step, of_step in sorted(found.items())
    ]


def _methods(methods: Counter[str]) -> str:
    return ", ".join(f"{m} x{n}" if n > 1 else m for m, n in methods.items())

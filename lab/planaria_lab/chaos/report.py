"""Markdown tables of the outcomes of one or more swarms under faults."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from planaria_lab.chaos.outcome import NOBODYS
from planaria_lab.chaos.schedule import KINDS, LOSSES

TABLE: Final = "table.md"
Outcome = Mapping[str, Any]


def read_outcomes(folder: Path) -> list[Outcome]:
    """Read all outcomes in a folder, sorted by file name. Raises ValueError for a JSON file that is
    not an outcome."""
    outcomes = []
    for path in sorted(folder.glob("*.json")):
        try:
            outcomes.append(json.loads(path.read_text(encoding="utf-8")))
            outcomes[-1]["setting"]["seed"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not an outcome of `planaria lab chaos`: {error}"
            ) from error
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """Return Markdown tables of the runs, faults, restored stages, evictions, and resources of
    processes."""
    parts = [_runs(outcomes), _faults(outcomes)]
    if any(run.get("restored") for run in outcomes):
        parts.append(_restored(outcomes))
    parts += [_evictions(outcomes), _appetites(outcomes)]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _runs(outcomes: Sequence[Outcome]) -> Iterator[str]:
    steps = sum(run["steps"] for run in outcomes)
    minutes = sum(run["seconds"] for run in outcomes) / 60
    yield f"{len(outcomes)} runs, {minutes:.0f} minutes, {steps:,} steps committed."
    audits = [run["audit"] for run in outcomes]
    yield ""
    yield "| | |"
    yield "| --- | ---: |"
    for key in ("expected", "duplicates", "missing", "extra"):
        yield f"| audit: {key} | {sum(audit.get(key, 0) for audit in audits):,} |"
    yield f"| runs that can't be audited | {sum('error' in audit for audit in audits)} |"
    at_last = sum(bool(run["differing"]["at_last"]) for run in outcomes)
    differed = sum(run["differing"]["steps"] for run in outcomes)
    yield f"| runs whose replicas differ at the end | {at_last} |"
    yield f"| steps after which replicas of a stage differed | {differed} |"
    yield f"| runs that did not go on | {sum(bool(run['stuck']) for run in outcomes)} |"
    yield f"| steps committed as skipped | {sum(run['skipped'] for run in outcomes)} |"
    yield f"| attempts aborted | {sum(run['aborted'] for run in outcomes)} |"
    yield f"| attempts that went on without a node | {sum(run['masked'] for run in outcomes)} |"
    ended = Counter(e["blame"] or "none" for run in outcomes for e in run["exits"])
    for blame, count in sorted(ended.items()):
        yield f"| processes that ended by themselves, fault: {blame} | {count} |"
    rebuilds = sum((Counter(run["rebuilds"]) for run in outcomes), Counter[str]())
    for method, count in sorted(rebuilds.items()):
        yield f"| rebuilt by {method} | {count} |"


def _faults(outcomes: Sequence[Outcome]) -> Iterator[str]:
    times = sum((Counter(run["faults"]) for run in outcomes), Counter[str]())
    lost: defaultdict[str, float] = defaultdict(float)
    evicted = Counter((e["fault"], not e["blame"]) for o in outcomes for e in o["evictions"])
    for run in outcomes:
        for kind, steps in run["steps_lost"].items():
            lost[kind] += steps
    columns = ("times", "noticed, s", "longest stop, s", "steps lost", "for each")
    yield f"| fault | {' | '.join((*columns, 'evicted for it', 'innocent'))} |"
    yield f"| --- |{' ---: |' * (len(columns) + 2)}"
    for kind in [*(kind for kind in KINDS if times[kind]), NOBODYS]:
        each = f"{lost[kind] / times[kind]:.1f}" if times[kind] else "-"
        count = times[kind] or "-"
        evictions = f"{evicted[kind, False]} | {evicted[kind, True]}"
        tolls = [toll for run in outcomes for toll in run["tolls"] if toll["kind"] == kind]
        noticed = _spread([toll["noticed"] for toll in tolls if toll["noticed"] is not None])
        stop = _spread([toll["stop"] for toll in tolls])
        yield f"| {kind} | {count} | {noticed} | {stop} | {lost[kind]:.1f} | {each} | {evictions} |"


def _restored(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Return a table of restored stages, with a row per policy, number of replicas and fault."""
    stages: defaultdict[tuple[str, int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for run in outcomes:
        setting = run["setting"]
        for kind in run["faults"]:
            if kind in LOSSES:
                stages[setting["policy"], setting["replicas"], kind]
        for stage in run.get("restored", ()):
            stages[setting["policy"], setting["replicas"], stage["fault"]].append(stage)
    columns = ("nodes a stage", "fault", "times", "stages restored by", "steps ago", "stall, s")
    yield f"| policy | {' | '.join(columns)} |"
    yield "| --- | ---: | --- | ---: | --- | ---: | ---: |"
    for (policy, replicas, fault), rows in sorted(stages.items()):
        times = sum(
            run["faults"].get(fault, 0)
            for run in outcomes
            if (run["setting"].get("policy"), run["setting"]["replicas"]) == (policy, replicas)
        )
        methods = Counter(f"{row['method']}{' (exact)' * row['exact']}" for row in rows)
        by = ", ".join(f"{count} {method}" for method, count in sorted(methods.items())) or "-"
        late = _spread([row["late"] for row in rows if row["late"] is not None])
        stall = _spread([row["stall"] for row in rows])
        yield f"| {policy} | {replicas} | {fault} | {times or '-'} | {by} | {late} | {stall} |"


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    return f"{statistics.median(seconds):.1f}, at most {max(seconds):.1f}"


def _evictions(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Return a table of evictions by fault and reason. Reasons are without names and numbers."""
    counts = Counter(
        (e["fault"], "innocent" * (not e["blame"]), "last" * e["last"], _gist(e["reason"]))
        for run in outcomes
        for e in run["evictions"]
    )
    if not counts:
        yield "No node was evicted."
        return
    yield "| evictions: fault | innocent | last holder | reason | times |"
    yield "| --- | --- | --- | --- | ---: |"
    for (fault, innocent, last, reason), count in sorted(counts.items()):
        yield f"| {fault} | {innocent} | {last} | {reason} | {count} |"


def _gist(reason: str) -> str:
    """Return the first part of a reason, with "..." for nodes, addresses and numbers, so that equal
    reasons of different nodes are counted together."""
    words = reason.split(";")[0].split()
    gist = ["..." if any(letter.isdigit() for letter in word) else word for word in words]
    return re.sub(r"(\.\.\. )+", "... ", " ".join(gist)).replace("|", "/")


def _appetites(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Return a table of the processes that have a slope; if none has, of all processes."""
    rows = [(run["setting"]["seed"], a) for run in outcomes for a in run["appetites"]]
    long = [row for row in rows if row[1]["slope"] is not None]
    yield "| process | minutes | RSS, MiB | slope, MiB an hour | descriptors | threads |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for seed, a in long or rows:
        rss = " to ".join(f"{size / 2**20:.0f}" for size in a["rss"])
        descriptors, threads = (" to ".join(map(str, a[k])) for k in ("descriptors", "threads"))
        slope = "-" if a["slope"] is None else f"{60 * a['slope']:.0f}"
        minutes = f"{a['seconds'] / 60:.1f}"
        yield (
            f"| {a['slot']} of seed {seed} | {minutes} | {rss} | {slope} | {descriptors} | "
            f"{threads} |"
        )

"""What a run of `planaria up` leaves: events, ledger, summary, picture, and what went wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from planaria.bootstrap.files import replace_file
from planaria.node.machine.extras import remedy
from planaria.node.report.event_log import LineReader
from planaria.node.report.events import entries
from planaria.node.report.ledger import (
    MERGED,
    Audit,
    Ledger,
    LedgerError,
    Line,
    audit_merged,
    merge,
)
from planaria.node.report.summary import draw_loss, summarize, summary_sentences
from planaria.node.run_file import RunFile

NOTHING = Audit(expected=0, duplicates=0, missing=0, extra=0, steps=0, superseded=0)


class Ending(NamedTuple):
    status: int  # exit status of `planaria up`
    reason: str  # empty: the run is finished


def wrap_up(run: RunFile, out: Path, console: Console, ending: Ending) -> Ending:
    """Write a run's results, and print the essence. Returns the ending, with all problems."""
    problems = [ending.reason] if ending.reason else []
    records = list(read_events(out / "logs"))
    _write(out / "events.jsonl", "".join(json.dumps(event) + "\n" for event in records), problems)
    events = entries(records)
    lines, audit = _merge_ledgers(out, problems)
    summary = summarize(run, lines, audit, events, ending.reason)
    _write(out / "summary.json", json.dumps(summary, indent=1) + "\n", problems)
    try:
        draw_loss(run, lines, events, out / "loss.png")
    except OSError as error:
        problems.append(f"can't write {out / 'loss.png'}: {error.strerror}")
    except ModuleNotFoundError as error:
        missing = f"no loss.png: {remedy(error)}"
        console.print(missing, markup=False, highlight=False, soft_wrap=True)
    if not ending.reason:
        problems += shortcomings(run, summary)
    for sentence in summary_sentences(summary):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    written = ", ".join(sorted(path.name for path in out.iterdir()))
    console.print(f"{out} has {written}", markup=False, highlight=False, soft_wrap=True)
    for problem in problems:
        print_error(console, problem)
    return Ending(ending.status or (1 if problems else 0), "\n".join(problems))


def print_error(console: Console, problem: str) -> None:
    console.print("error:", style="bold red", end=" ")
    console.print(problem, markup=False, highlight=False, soft_wrap=True)


def _write(path: Path, text: str, problems: list[str]) -> None:
    """Write a result file atomically; append an error to the problems."""
    try:
        replace_file(path, text.encode())
    except OSError as error:
        problems.append(f"can't write {path}: {error.strerror}")


def read_events(logs: Path) -> Iterator[dict[str, Any]]:
    """All events in a folder of logs, sorted by time."""
    events = [event for path in logs.glob("events-*.jsonl") for event in LineReader(path).lines()]
    yield from sorted(events, key=lambda event: float(event["time"]))


def _merge_ledgers(out: Path, problems: list[str]) -> tuple[list[Line], Audit]:
    paths = sorted(path for path in (out / "logs").glob("ledger-*.jsonl") if path.stat().st_size)
    if not paths:
        return [], NOTHING
    try:
        merged = merge(paths)
        audit = audit_merged(merged)
    except LedgerError as error:
        problems.append(str(error))
        return [], NOTHING
    with closing(Ledger(out / MERGED, merged.header)) as ledger:
        for line in merged.lines:
            ledger.append(line)
    if ledger.file.trouble:
        problems.append(ledger.file.trouble)
    return merged.lines, audit


def shortcomings(run: RunFile, summary: dict[str, Any]) -> list[str]:
    """Failures of a finished run by its summary, in sentences."""
    problems = []
    if summary["steps"] != run.steps:
        problems.append(f"only {summary['steps']} of {run.steps} steps are in the ledger")
    audit = {k: v for k, v in summary["audit"].items() if k != "expected" and v}
    if audit:
        problems.append(f"the audit found wrong samples: {audit}")
    if not summary["replicas_identical"]:
        problems.append("the replicas of a stage are not identical; don't trust these weights")
    return problems

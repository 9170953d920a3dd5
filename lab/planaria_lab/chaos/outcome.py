"""The outcome of a swarm under faults: steps lost by fault, evictions, audit, replicas, resources.

`judge` computes it from the files that swarm.py and the nodes wrote; it is stored as JSON. `broken`
lists the promises that were not kept.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from planaria.node.local.results import read_events
from planaria.node.report.event_log import LineReader
from planaria.node.report.events import (
    Aborted,
    Applied,
    AttemptMasked,
    Committed,
    Entry,
    Exited,
    Joined,
    Killed,
    LinkLost,
    RebuildOrdered,
    RolledBack,
    Severity,
    StageRebuilt,
    Started,
    SwarmEnding,
    entries,
)
from planaria.node.report.ledger import LedgerError, audit
from planaria.node.wire.seat_names import node_of
from planaria.recovery.facts import INEXACT
from planaria_lab.chaos.schedule import EVERYBODY, KINDS, REGISTRY
from planaria_lab.chaos.swarm import FAULTS, NODES, TAKEN, VIEWS, Taken

AFTERMATH: Final = 10.0
"""Seconds after the end of a fault during which lost steps still count as its effect."""
LATE: Final = 1.5
"""Steps count as lost if a gap between two commits is longer than this times the median gap."""
REMEMBERED: Final = 30.0
"""Seconds after the end of a fault during which its node may still be evicted or end for it."""
WARM: Final = 120.0
"""First seconds of a process's life, which the slope of its memory leaves out."""
GONE: Final = re.compile(r"\b([0-9a-f]{12}) \([^)]*\) is gone: (.*?)(?=; [0-9a-f]{12} \(|$)")
NOBODYS: Final = "no fault"
COPIED: Final = {"replica", "handover"}
"""Rebuild methods by which a stage that was not lost gets another node."""


class Began(NamedTuple):
    """A fault that was injected, with its times in Unix seconds."""

    kind: str
    slot: str
    time: float
    end: float
    pid: int | None
    others: Sequence[str] = ()
    stages: Sequence[int] = ()  # stages that the nodes of its slots served

    @property
    def guilty(self) -> bool:
        return KINDS[self.kind].blame == "guilty"

    def hits(self, slot: str) -> bool:
        return self.slot in (slot, EVERYBODY) or slot in self.others


class Change(NamedTuple):
    """A view that the registry issued. `members`: seat id -> stage."""

    time: float
    number: int
    reason: str
    members: Mapping[str, int]


@dataclass(frozen=True)
class RunRecord:
    """What was recorded of one run, until its processes were ended."""

    faults: Sequence[Began]
    views: Sequence[Change]
    events: Sequence[Entry]
    taken: Sequence[Taken]
    gone: Mapping[str, str] = field(default_factory=dict)
    """Node -> why the registry removed it, from the registry's logs."""

    @staticmethod
    def read(out: Path) -> RunRecord:
        faults = [
            Began(
                line["kind"],
                line["slot"],
                line["time"],
                line["time"] + line["seconds"],
                line["pid"],
                line["others"],
                line["stages"],
            )
            for line in _lines(out / FAULTS)
        ]
        views = [
            Change(line["time"], line["number"], line["reason"], dict(line["members"]))
            for line in _lines(out / VIEWS)
        ]
        logs = sorted((out / "logs").glob("registry*.log"))
        text = "\n".join(log.read_text(errors="replace") for log in logs)
        reasons = {
            node: reason for line in text.splitlines() for node, reason in GONE.findall(line)
        }
        events = entries(read_events(out / "logs"))
        ending = [n for n, entry in enumerate(events) if isinstance(entry.event, SwarmEnding)]
        events = events[: ending[-1] if ending else None]
        return RunRecord(
            faults, views, events, [Taken(**line) for line in _lines(out / TAKEN)], reasons
        )

    def slots(self) -> dict[str | None, str]:
        """Map each node to the slot of its process."""
        by_pid = {e.event.pid: e.event.slot for e in self.events if isinstance(e.event, Started)}
        joined = [entry for entry in self.events if isinstance(entry.event, Joined)]
        return {
            entry.node: by_pid[entry.event.pid]
            for entry in joined
            if isinstance(entry.event, Joined) and entry.event.pid in by_pid
        }

    def guilty_of(self, slot: str, at: float) -> str:
        """Return the kind of the newest guilty fault at the slot that was active at most
        `REMEMBERED` before the time `at`; empty: none."""
        kinds = [
            fault.kind
            for fault in self.faults
            if fault.hits(slot) and fault.guilty and fault.time <= at <= fault.end + REMEMBERED
        ]
        return kinds[-1] if kinds else ""

    def wrong_at(self, slot: str, at: float) -> str:
        """Return the kind of the newest fault at the slot that was active at most `AFTERMATH`
        before the time `at`; if there was none, of a fault elsewhere, or NOBODYS."""
        near = [fault for fault in self.faults if fault.time <= at <= fault.end + AFTERMATH]
        near.sort(key=lambda fault: fault.hits(slot))
        return near[-1].kind if near else NOBODYS


def _lines(path: Path) -> list[dict[str, Any]]:
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


# --- steps


def steps_lost(commits: Sequence[float], faults: Sequence[Began]) -> dict[str, float]:
    """Compute the steps lost by each kind of fault, and without a fault (NOBODYS). `commits`: their
    times in Unix seconds, in order.

    The usual gap between two commits is the median gap. A gap longer than `LATE` times that counts
    as length / usual - 1 lost steps. They are shared equally among the faults during the gap and
    those that ended at most `AFTERMATH` before it.
    """
    lost: defaultdict[str, float] = defaultdict(float)
    gaps = [later - earlier for earlier, later in pairwise(commits)]
    usual = statistics.median(gaps) if gaps else 0.0
    for earlier, later in pairwise(commits):
        if later - earlier <= LATE * usual:
            continue
        kinds = [f.kind for f in faults if f.time <= later and f.end + AFTERMATH >= earlier]
        for kind in kinds or [NOBODYS]:
            lost[kind] += ((later - earlier) / usual - 1) / len(kinds or [NOBODYS])
    return dict(lost)


class Toll(NamedTuple):
    """How long one fault went unnoticed, and how long it stopped commits, both in seconds.

    `noticed`: until another node named the faulty one in an event, or a view was without it (None:
    neither). `stop`: the longest gap between commits from the fault to `AFTERMATH` after its end.
    """

    kind: str
    noticed: float | None
    stop: float


def tolls(record: RunRecord, commits: Sequence[float]) -> list[Toll]:
    """Compute the toll of each fault, in the order in which faults began. `commits`: as in
    `steps_lost`."""
    measured = []
    for fault in record.faults:
        until = fault.end + AFTERMATH
        near = [(a, b) for a, b in pairwise(commits) if b >= fault.time and a <= until]
        stop = max((b - a for a, b in near), default=0.0)
        noticed = _noticed(record, fault)
        measured.append(Toll(fault.kind, noticed and round(noticed, 3), round(stop, 3)))
    return measured


def _noticed(record: RunRecord, fault: Began) -> float | None:
    joined = [
        entry.node
        for entry in record.events
        if isinstance(entry.event, Joined)
        and entry.event.pid == fault.pid
        and entry.time <= fault.time
    ]
    if not joined or joined[-1] is None:
        return None
    node, last = joined[-1], fault.end + AFTERMATH
    named = [
        entry.time
        for entry in record.events
        if (entry.event.severity >= Severity.NOTICE or isinstance(entry.event, LinkLost))
        and not isinstance(entry.event, Killed | Exited)
        and node_of(entry.node or "") != node
        and node in entry.sentence
    ]
    dropped = [
        b.time
        for a, b in pairwise(record.views)
        if node in set(map(node_of, a.members)) - set(map(node_of, b.members))
    ]
    times = [time for time in (*named, *dropped) if fault.time <= time <= last]
    return min(times) - fault.time if times else None


# --- dropped members


class Eviction(NamedTuple):
    """A seat that the registry removed.

    `blame`: the guilty fault of its node, or that its process had ended; empty: it was innocent.
    `fault`: the same, or else the kind of any other fault at that time (`RunRecord.wrong_at`).
    `last`: the seat had the stage's state, and no other member had it.
    """

    node: str
    slot: str
    stage: int
    reason: str
    blame: str
    fault: str
    last: bool
    after: float  # seconds since the first view


def evictions(record: RunRecord) -> list[Eviction]:
    """Return the members that the registry removed, from its views. Members that left by
    themselves, moved, or gave back their seat are left out."""
    slots = record.slots()
    first_had: dict[str | None, float] = {}
    ended = {e.event.pid: e.time for e in record.events if isinstance(e.event, Exited)}
    pids = {e.node: e.event.pid for e in record.events if isinstance(e.event, Joined)}
    for entry in record.events:
        if isinstance(entry.event, Applied):
            first_had.setdefault(entry.node, entry.time)
    evicted = []
    for before, after in pairwise(record.views):
        if after.time >= record.events[-1].time:  # the swarm is being ended
            break
        for seat in before.members.keys() - after.members.keys():
            node, stage = node_of(seat), before.members[seat]
            slot = slots.get(node, "")
            others = [
                other
                for other, held_stage in before.members.items()
                if held_stage == stage and other != seat
            ]
            reason = record.gone.get(node, after.reason)
            moved = any(f"{node} {verb}" in after.reason for verb in ("gives back", "takes"))
            if reason.startswith("left:") or (moved and node not in record.gone):
                continue
            exit_time = ended.get(pids.get(node, 0), float("inf"))
            blame = record.guilty_of(slot, after.time)
            if not blame and exit_time <= after.time + 1.0:
                blame = "its process had ended"
            last = seat in first_had and not any(
                first_had.get(other, after.time) < after.time for other in others
            )
            since = after.time - record.views[0].time
            fault = blame or record.wrong_at(slot, after.time)
            evicted.append(Eviction(node, slot, stage, reason, blame, fault, last, round(since, 1)))
    return evicted


class Exit(NamedTuple):
    """A process that ended without being killed by the lab."""

    slot: str
    how: str
    blame: str  # as in Eviction
    log: str


def exits(record: RunRecord) -> list[Exit]:
    exited = [entry for entry in record.events if isinstance(entry.event, Exited)]
    return [
        Exit(e.event.slot, e.event.how, record.guilty_of(e.event.slot, e.time), e.event.log)
        for e in exited
        if isinstance(e.event, Exited)
    ]


# --- weights


class Differing(NamedTuple):
    """Differences between the weights of replicas, found by digests.

    `at_last`: stages whose nodes differ after the newest step that several of them have applied.
    `steps`: number of steps after which nodes of a stage differed, over all stages.
    """

    at_last: list[int]
    steps: int


def differing(events: Iterable[Entry]) -> Differing:
    stages: dict[str, int] = {}
    digests: defaultdict[int, defaultdict[tuple[int, int], set[str]]]
    digests = defaultdict(lambda: defaultdict(set))
    nodes: defaultdict[tuple[int, int, int], set[str]] = defaultdict(set)
    for entry in events:
        node = entry.node or ""
        if entry.event.kind == "serving":
            stages[node] = int(getattr(entry.event, "stage", 0))
        elif isinstance(entry.event, Applied) and node in stages:
            stage, age = stages[node], (entry.event.lineage, entry.event.step)
            digests[stage][age].add(entry.event.digest)
            nodes[stage, *age].add(node)
    at_last = []
    for stage, by_age in digests.items():
        common = [age for age in by_age if len(nodes[stage, *age]) > 1]
        if common and len(by_age[max(common)]) > 1:
            at_last.append(stage)
    steps = sum(len(different) > 1 for by_age in digests.values() for different in by_age.values())
    return Differing(sorted(at_last), steps)


def guesses(record: RunRecord) -> list[tuple[int, str, str]]:
    """Return the rebuilds that were not exact: stage, method, and the guilty faults that its nodes
    had (empty: no node of the stage had died or done anything wrong)."""
    inexact = {
        entry.event.node: entry.event.stage
        for entry in record.events
        if isinstance(entry.event, RebuildOrdered) and not entry.event.exact
    }
    guessed = []
    for entry in record.events:
        match entry.event:
            case StageRebuilt(node=node, stage=stage, method=method) if node in inexact:
                blame = {
                    fault.kind
                    for fault in record.faults
                    if fault.guilty
                    and stage in fault.stages
                    and fault.time <= entry.time <= fault.end + 2 * REMEMBERED
                }
                del inexact[node]
                guessed.append((stage, method, ", ".join(sorted(blame))))
    return guessed


class Restored(NamedTuple):
    """A stage whose state was restored from another source than a replica.

    `late`: by how many steps the restored state is old; None: it was guessed. For a snapshot it is
    the mean over its rows, for a checkpoint the steps that all stages go back. `fault`: the newest
    guilty fault before it, of any node. `stall`: seconds without training. `reason`: the driver's
    reason for the rebuild.
    """

    stage: int
    method: str
    exact: bool
    late: float | None
    fault: str
    stall: float
    reason: str


def restored(record: RunRecord) -> list[Restored]:
    """Return the restored stages, in the order in which they trained again."""
    orders: dict[str, RebuildOrdered] = {}
    stages, back = [], 0
    for entry in record.events:
        match entry.event:
            case RolledBack(lost=lost, step=step):
                back = lost - step
            case RebuildOrdered() as order:
                orders[order.node] = order
            case StageRebuilt(method=method) as event if method not in COPIED:
                ordered = orders.pop(event.node) if event.node in orders else None
                kinds = [f.kind for f in record.faults if f.guilty and f.time <= entry.time]
                stages.append(
                    Restored(
                        event.stage,
                        method,
                        ordered is not None and ordered.exact,
                        back if method == "checkpoint" else _late(event),
                        kinds[-1] if kinds else NOBODYS,
                        event.stall_seconds,
                        "" if ordered is None else ordered.reason,
                    )
                )
    return stages


def _late(rebuilt: StageRebuilt) -> float | None:
    if rebuilt.method in INEXACT:
        return None
    if rebuilt.mean_step is not None:
        return rebuilt.step - rebuilt.mean_step
    steps = [source.step for source in rebuilt.sources if source.step is not None]
    return float(rebuilt.step - min(steps, default=rebuilt.step))


# --- what processes take


class Appetite(NamedTuple):
    """The resources of one process over `seconds` of its life.

    `rss` (bytes), `descriptors` and `threads` are pairs: after `SETTLED` seconds, and at the end.
    `slope`: MiB of RSS per minute after the first `WARM` seconds; None: it lived for less than
    twice `WARM`.
    """

    slot: str
    seconds: float
    rss: tuple[int, int]
    descriptors: tuple[int, int]
    threads: tuple[int, int]
    slope: float | None


SETTLED: Final = 20.0
"""Seconds that a process has to start up."""


def appetites(samples_taken: Sequence[Taken]) -> list[Appetite]:
    """Return the resources of every process that lived for at least `SETTLED` seconds."""
    by_pid: defaultdict[int, list[Taken]] = defaultdict(list)
    for sample in samples_taken:
        by_pid[sample.pid].append(sample)
    results = []
    for samples in by_pid.values():
        begun, last = samples[0].time, samples[-1]
        settled = [sample for sample in samples if sample.time >= begun + SETTLED]
        if not settled:
            continue
        first, warm = settled[0], [sample for sample in samples if sample.time >= begun + WARM]
        slope = None
        if last.time - begun >= 2 * WARM:
            fit = statistics.linear_regression([w.time for w in warm], [w.rss for w in warm])
            slope = fit.slope * 60 / 2**20
        results.append(
            Appetite(
                last.slot,
                last.time - begun,
                (first.rss, last.rss),
                (first.descriptors, last.descriptors),
                (first.threads, last.threads),
                slope,
            )
        )
    return sorted(results)


# --- all of it


def judge(out: Path, setting: Mapping[str, Any], stuck: str) -> dict[str, Any]:
    """Compute the outcome of the run that has written to `out`, for JSON. `setting`: the options of
    the run. `stuck`: why it did not go on at the end; empty: it did."""
    for path in out.glob(f"{NODES}/*/*.jsonl"):
        shutil.copy(path, out / "logs")  # as if all nodes had one folder
    record = RunRecord.read(out)
    commits = {e.event.step: e.time for e in record.events if isinstance(e.event, Committed)}
    times = sorted(commits.values())
    gaps = [later - earlier for earlier, later in pairwise(times)]
    counts = Counter(entry.event.kind for entry in record.events)
    try:
        samples = audit(out / "logs")
        audited: dict[str, Any] = {
            key: getattr(samples, key)
            for key in ("expected", "duplicates", "missing", "extra", "steps")
        }
    except LedgerError as error:
        audited = {"error": str(error)}
    outcome = {
        "setting": dict(setting),
        "stuck": stuck,
        "steps": len(times),
        "seconds": times[-1] - times[0] if times else 0.0,
        "usual_step_seconds": statistics.median(gaps) if gaps else None,
        "faults": dict(Counter(fault.kind for fault in record.faults)),
        "steps_lost": steps_lost(times, record.faults),
        "tolls": [toll._asdict() for toll in tolls(record, times)],
        "skipped": len(skipped(out / "logs")),
        "aborted": counts[Aborted.kind],
        "masked": counts[AttemptMasked.kind],
        "evictions": [eviction._asdict() for eviction in evictions(record)],
        "exits": [process._asdict() for process in exits(record)],
        "guesses": [
            dict(zip(("stage", "method", "blame"), g, strict=True)) for g in guesses(record)
        ],
        "rebuilds": dict(
            Counter(e.event.method for e in record.events if isinstance(e.event, StageRebuilt))
        ),
        "restored": [stage._asdict() for stage in restored(record)],
        "audit": audited,
        "differing": differing(record.events)._asdict(),
        "appetites": [appetite._asdict() for appetite in appetites(record.taken)],
    }
    return {**outcome, "broken": broken(outcome)}


def skipped(logs: Path) -> set[int]:
    """Return the steps that any ledger has as committed without an update."""
    lines = [line for path in logs.glob("ledger-*.jsonl") for line in LineReader(path).lines()]
    return {line["step"] for line in lines if line.get("skipped")}


def broken(outcome: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each promise that was not kept."""
    sentences = []
    if outcome["stuck"]:
        sentences.append(f"the swarm stopped training: {outcome['stuck']}")
    audited = outcome["audit"]
    if "error" in audited:
        sentences.append(f"the ledger can't be audited: {audited['error']}")
    elif any(audited[key] for key in ("duplicates", "missing", "extra")):
        sentences.append(f"samples were lost or trained twice: {audited}")
    if stages := outcome["differing"]["at_last"]:
        sentences.append(f"replicas differ at the end in stages {stages}")
    for eviction in outcome["evictions"]:
        if eviction["last"] and not eviction["blame"]:
            sentences.append(
                f"{eviction['node']}, the last holder of stage {eviction['stage']}, was evicted "
                f"though it had done nothing wrong: {eviction['reason']}"
            )
    for guess in outcome["guesses"]:
        if not guess["blame"]:
            sentences.append(
                f"stage {guess['stage']} was guessed by {guess['method']} though none of "
                "its nodes had died"
            )
    for ended in outcome["exits"]:
        if not ended["blame"] and ended["slot"] != REGISTRY:
            innocent = f"{ended['slot']} {ended['how']} though it had done nothing wrong"
            sentences.append(f"{innocent}; its log is {ended['log']}")
    return sentences

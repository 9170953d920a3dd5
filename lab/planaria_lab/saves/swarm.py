"""A live swarm that saves, loses all its processes, and continues from its saves on disk.

As ECRL has it: processes get SIGKILL right after a step was committed, all at once and the registry
with them, and a supervisor starts them anew, as `planaria up --resume` does.
"""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console

from planaria.bootstrap.errors import UserError
from planaria.node.launch.own_folders import folder_options
from planaria.node.local.plan import ADDRESS, SwarmPlan, create_folder, resume_from, write_plan
from planaria.node.local.results import Ending, wrap_up
from planaria.node.local.resume import RUN_FILE
from planaria.node.machine.processes import PLANARIA, Processes
from planaria.node.report.event_log import EventLog
from planaria.node.report.events import Started, SwarmEnding
from planaria.node.run_file import RunFile, override
from planaria_lab.saves.saving_node import run_saving

DEADLINE: Final = 180.0
"""Seconds that a swarm has for its steps."""
LOOK: Final = 0.01
"""Seconds between two looks at its ledgers."""
FIRST: Final = 3
"""Step from which on seconds count: before it processes warm up."""


class SavesError(UserError):
    """The measurement can't begin or go on; the message says why and what to do."""


@dataclass(frozen=True)
class Saving:
    """The way in which a swarm saves, and the failure that happens to it."""

    mode: Literal["none", "blocking", "overlapped"]
    every: int = 1  # steps
    in_flight: int = 1  # writes not yet on disk; of no account with "blocking"
    storage: float = 0.0  # MB/s that it takes of each node; 0: what the disk can
    killed_at: int = 0  # step after whose commit all are killed; 0: nothing happens

    @property
    def arguments(self) -> list[str]:
        """For saving_node.py."""
        slow = ["--storage", f"{self.storage:g}"] if self.storage else []
        return [*(["--blocking"] if self.mode == "blocking" else []), *slow]

    def of(self, run: RunFile) -> RunFile:
        """The resolved run as it saves."""
        return override(
            run,
            saves__every=self.every,
            saves__in_flight=self.in_flight,
            saves__keep=max(run.saves.keep, 2 + self.in_flight),
        )


@dataclass(frozen=True)
class Measured:
    """What it came to. Seconds, from the commit of step FIRST to that of the last step; those of
    saves are the slowest stage's at each save, added up."""

    wall: float
    steps: int  # committed in these seconds, each counted once
    copied: float  # of the compute thread: state copied to memory for a writer
    blocked: float  # of the compute thread: waiting for the disk
    written: float  # until saves were on disk, wherever that passed
    saves: int  # on disk at the end or before
    down: float  # from the kill to the first commit after it
    again: float  # from there until the step before the kill was committed again
    lost: int  # steps that were committed twice
    goodput: float  # steps a second, as the run's own summary has it
    losses: list[float]  # of each step, nats a token


def measure(run: RunFile, saving: Saving, out: Path) -> Measured:
    """Train a resolved run in `out`. Raises SavesError, SwarmError."""
    save_dir = None if saving.mode == "none" else out / "saves"
    plan = SwarmPlan(saving.of(run), out.absolute(), save_dir and save_dir.absolute(), "cpu")
    create_folder(plan)
    write_plan(plan)
    timed = out / "timed"
    timed.mkdir()
    slots = [f"{stage}.0" for stage in range(run.model.body_stages + 1)]
    killed = 0.0
    before: list[dict[str, Any]] = []
    if saving.killed_at:
        with _life(plan, slots, saving) as processes:
            _until(plan, saving.killed_at, processes)
            for pid in processes.running().values():
                os.kill(pid, signal.SIGKILL)
            killed = time.time()
        before = commits(plan.out)
        resume_from(plan, plan, slots)
    with _life(plan, slots, saving) as processes:
        _until(plan, run.steps, processes)
        log = EventLog(plan.out / "logs", "up")
        log.write(SwarmEnding())
        log.close()
    if why := wrap_up(plan.run, plan.out, Console(file=io.StringIO()), Ending(0, "")).reason:
        raise SavesError(f"{out} isn't whole:\n{why}")
    lines = [line for path in sorted(timed.glob("*.jsonl")) for line in _lines(path)]
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    after = [line for line in commits(plan.out) if line not in before]
    return of_lines(before, after, lines, killed, summary["goodput"])


# --- processes


@contextmanager
def _life(plan: SwarmPlan, slots: Sequence[str], saving: Saving) -> Iterator[Processes]:
    """Registry and nodes, until the block ends."""
    logs = plan.out / "logs"
    processes = Processes(logs, {"OMP_NUM_THREADS": "1"}, PLANARIA, run_saving)
    events = EventLog(logs, "up")

    def start(slot: str, *arguments: str) -> None:
        events.write(Started(slot=slot, pid=processes.start(slot, arguments)))

    try:
        address = plan.out / ADDRESS
        start(
            *("registry", "bootstrap", "--run", str(plan.out / RUN_FILE)),
            *("--listen", "127.0.0.1:0", "--address-file", str(address)),
            *("--journal", str(plan.kept.journal)),
        )
        deadline = time.monotonic() + DEADLINE
        while not address.exists():
            if processes.ended() or time.monotonic() > deadline:
                raise SavesError(f"the registry didn't start to listen; its log is in {logs}")
            time.sleep(LOOK)
        for slot in slots:
            saves = "none" if plan.save_dir is None else str(plan.save_dir / slot)
            start(
                *(slot, "--timed", str(plan.out / "timed"), *saving.arguments, "node"),
                *("--join", address.read_text().strip(), "--stage", slot.partition(".")[0]),
                *("--listen", "127.0.0.1:0", "--device", "cpu", "--cloud", "none"),
                *("--out", str(logs), "--threads", "1", "--save-dir", saves, "--seats", "1"),
                *folder_options(plan.run),
            )
        yield processes
    finally:
        processes.kill_all()
        events.close()


def _until(plan: SwarmPlan, step: int, processes: Processes) -> None:
    """Until it is committed."""
    deadline = time.monotonic() + DEADLINE
    while max((line["step"] for line in commits(plan.out)), default=0) < step:
        ended = processes.ended()
        if ended or time.monotonic() > deadline:
            why = (
                f"{ended} ended" if ended else f"step {step} was not committed in {DEADLINE:.0f} s"
            )
            raise SavesError(f"{why}; logs are in {plan.out / 'logs'}")
        time.sleep(LOOK)


def commits(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's ledgers in the order of time, those of steps that were made again
    too."""
    lines = [
        line
        for path in (out / "logs").glob("ledger-*.jsonl")
        for line in _lines(path)
        if "step" in line
    ]
    return sorted(lines, key=lambda line: float(line["time"]))


def _lines(path: Path) -> list[dict[str, Any]]:
    """The file's lines, without an unfinished last one."""
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


# --- where the time went


def of_lines(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    timed: Sequence[Mapping[str, Any]],
    killed: float,
    goodput: float,
) -> Measured:
    """By the ledgers' lines `before` and `after` a kill, in the order of time, and those of
    saving_node.py; `killed`: Unix seconds. Where nobody was killed all are `after`."""
    committed = [*before, *after]
    begun = next(line["time"] for line in committed if line["step"] == FIRST)
    down = again = 0.0
    lost = 0
    if before:
        newest = max(line["step"] for line in before)
        down = after[0]["time"] - killed
        lost = newest - after[0]["step"] + 1
        reached = [line["time"] for line in after if line["step"] == newest]
        again = reached[0] - after[0]["time"] if reached else 0.0
    losses = {line["step"]: line["loss"] for line in committed}
    counted = [line for line in timed if line["step"] > FIRST]
    blocked, critical = _slowest(counted, "waited"), _slowest(counted, "critical")
    return Measured(
        wall=committed[-1]["time"] - begun,
        steps=len(losses) - FIRST,
        copied=critical - blocked,
        blocked=blocked,
        written=_slowest(counted, "write"),
        saves=sum("write" in line for line in counted),
        down=down,
        again=again,
        lost=lost,
        goodput=goodput,
        losses=[losses[step] for step in sorted(losses)],
    )


def _slowest(timed: Sequence[Mapping[str, Any]], kind: str) -> float:
    """Seconds, of the slowest stage at each save, added up; a step that was made twice counts
    twice."""
    of_stage: dict[tuple[int, int], list[float]] = {}
    for line in timed:
        if kind in line:
            of_stage.setdefault((line["stage"], line["step"]), []).append(line[kind])
    by_save: dict[tuple[int, int], float] = {}
    for (_, step), seconds in of_stage.items():
        for turn, value in enumerate(seconds):
            by_save[step, turn] = max(value, by_save.get((step, turn), 0.0))
    return sum(by_save.values())

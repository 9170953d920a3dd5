"""A live swarm that saves, loses all its processes, and continues from its saves on disk.

The failure is ECRL's: right after the commit of a step, all processes get SIGKILL at once, the
registry too. Then a supervisor starts them again, as `planaria up --resume` does.
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
"""Most seconds that a swarm may take for its steps."""
LOOK: Final = 0.01
"""Seconds between two readings of a swarm's ledgers."""
FIRST: Final = 3
"""Step from whose commit seconds are counted: earlier ones are warm-up of the processes."""


class SavesError(UserError):
    """A measurement can't begin or go on; the message says why."""


@dataclass(frozen=True)
class Saving:
    """How a swarm saves, and when its processes are killed."""

    mode: Literal["none", "blocking", "overlapped"]
    every: int = 1  # steps
    in_flight: int = 1  # most writes not yet on disk; has no effect with "blocking"
    storage: float = 0.0  # MB/s that it accepts from each node; 0: no limit but the disk
    killed_at: int = 0  # step after whose commit all processes are killed; 0: none is

    @property
    def arguments(self) -> list[str]:
        """The options of saving_node.py."""
        slow = ["--storage", f"{self.storage:g}"] if self.storage else []
        return [*(["--blocking"] if self.mode == "blocking" else []), *slow]

    def of(self, run: RunFile) -> RunFile:
        """Return the resolved run with this way to save."""
        return override(
            run,
            saves__every=self.every,
            saves__in_flight=self.in_flight,
            saves__keep=max(run.saves.keep, 2 + self.in_flight),
        )


@dataclass(frozen=True)
class Measured:
    """Figures of one swarm. Times are in seconds, between the commits of step FIRST and of the last
    step. Those of saves are the sum, over saves, of the slowest stage's."""

    wall: float
    steps: int  # committed in `wall`, each counted once
    copied: float  # of the compute thread: it copied state to memory for a writer
    blocked: float  # of the compute thread: it waited for the disk
    written: float  # until saves were on disk, in any thread
    saves: int  # of all stages, that were on disk; those of steps up to FIRST don't count
    down: float  # from the kill to the first commit after it
    again: float  # from that commit until the last step before the kill was committed again
    lost: int  # steps that were committed twice
    goodput: float  # steps a second, by the run's summary
    losses: list[float]  # of each step, nats a token


def measure(run: RunFile, saving: Saving, out: Path) -> Measured:
    """Train a resolved run in folder `out`; return its figures. Raises SavesError, SwarmError."""
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
        raise SavesError(f"the swarm in {out} did not finish:\n{why}")
    lines = [line for path in sorted(timed.glob("*.jsonl")) for line in _lines(path)]
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    after = [line for line in commits(plan.out) if line not in before]
    return of_lines(before, after, lines, killed, summary["goodput"])


# --- processes


@contextmanager
def _life(plan: SwarmPlan, slots: Sequence[str], saving: Saving) -> Iterator[Processes]:
    """Start the registry and a node for each slot; kill them when the block ends."""
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
    """Wait until `step` is committed. Raises SavesError after DEADLINE, or if a process ends."""
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
    """Return the lines of a run's ledgers in order of time. Steps that were made again have two."""
    lines = [
        line
        for path in (out / "logs").glob("ledger-*.jsonl")
        for line in _lines(path)
        if "step" in line
    ]
    return sorted(lines, key=lambda line: float(line["time"]))


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, without an unfinished last line."""
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


# --- the parts of the time


def of_lines(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    timed: Sequence[Mapping[str, Any]],
    killed: float,
    goodput: float,
) -> Measured:
    """Compute a swarm's figures from lines of its ledgers and of saving_node.py (`timed`).

    `before` and `after`: ledger lines before and after the kill, in order of time. Without a kill
    all are `after`. `killed`: Unix seconds of the kill.
    """
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
    """Return the sum, over saves, of the slowest stage's seconds. A step that was made twice counts
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

"""Ports of a node in virtual time: its compute thread and its disk."""

from __future__ import annotations

import errno
import hashlib
import heapq
import itertools
import os
import random
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from planaria.node.machine.compute import kind_of
from planaria.node.machine.hang_watch import Hang, HangWatch
from planaria.node.ports import Priority
from planaria.node.report.line_file import LineFile
from planaria.node.state.saves import stages_by_age
from planaria.node.state.stage_state import Age, SaveError, StageState, StateId
from simulation.fingerprints import chain_of
from simulation.world import Process

T = TypeVar("T")

KEPT_SAVES = 3


class Compute:
    """The compute thread: does one work at a time, the most urgent first, in a random time. It may
    hang, or be slow."""

    def __init__(self, process: Process, pace: float, patience: float) -> None:
        self.process = process
        self.stopped = False
        self.watch = HangWatch(first=patience)
        self.computed = 0
        self.slowness = 1.0
        """Factor by which works take longer."""
        self.hangs = False
        self._held: list[Callable[[], None]] = []  # works that hang
        self._pace = pace * process.world.random.uniform(0.5, 2.0)
        self._posted: list[tuple[Priority, int, Callable[[], Any], Callable[[Any], None]]] = []
        self._numbers = itertools.count()
        self._busy = False

    @property
    def now(self) -> float:
        return self.process.world.now

    @property
    def computing(self) -> bool:
        return self._busy or bool(self._posted)

    def find_hang(self) -> Hang | None:
        return self.watch.find_hang(self.now)

    def hang(self) -> None:
        """Makes it hang: from now on no work ends."""
        self.hangs = True

    def go_on(self) -> None:
        self.hangs = False
        held, self._held = self._held, []
        for work in held:
            work()

    def post(
        self, work: Callable[[], T], then: Callable[[T | Exception], None], priority: Priority
    ) -> None:
        heapq.heappush(self._posted, (priority, next(self._numbers), work, then))
        self._work()

    def _work(self) -> None:
        if self._busy or self.stopped or not self._posted:
            return
        self._busy = True
        priority, _, work, then = heapq.heappop(self._posted)
        chance = self.process.world.random
        control = priority is Priority.CONTROL
        longest = chance.choice([0.001, 0.001, 0.05]) if control else 0.02 * self._pace
        self.watch.began(kind_of(work), self.process.world.now)
        seconds = chance.uniform(0.1, 1.0) * longest * self.slowness
        self.process.after(seconds, self._end, partial(self._done, work, then))

    def _end(self, done: Callable[[], None]) -> None:
        if self.hangs:
            self._held.append(done)
        else:
            done()

    def _done(self, work: Callable[[], T], then: Callable[[T | Exception], None]) -> None:
        try:
            result: T | Exception = work()
        except Exception as error:  # noqa: BLE001 (`then` handles any error)
            result = error
        self.watch.ended(self.process.world.now)
        self.computed += 1
        self.process.after(0.0, self._tell, then, result)
        self._busy = False
        self._work()

    def _tell(self, then: Callable[[Any], None], result: object) -> None:
        if not self.stopped:
            then(result)


class Files:
    """Files, which outlive processes: saves on the disk of each host, and a checkpoint folder."""

    def __init__(self, save_every: int = 0, checkpoint_every: int = 0) -> None:
        """Steps between two saves, and between two checkpoints; 0: none are written."""
        self.save_every, self.checkpoint_every = save_every, checkpoint_every
        self.failing: dict[str, float] = {}  # host -> share of its writes that fails
        self.stalled: dict[str, float] = {}  # host -> until when its ledgers are not written
        self.chance: Callable[[float], bool] = bool
        self.noted: set[int] = set()  # steps that are in a ledger
        self._files: dict[tuple[str, str, int], dict[Age, StageState]] = defaultdict(dict)

    def check(self, host: str) -> None:
        """Raises OSError if the host's disk fails this time."""
        if host in self.failing and self.chance(self.failing[host]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, kind: str, owner: str, state: StageState) -> None:
        """Stores a state whole, as a rename does."""
        files = self._files[kind, owner, state.id.stage]
        files[state.id.age] = state
        if kind == "save":
            for age in sorted(files)[:-KEPT_SAVES]:
                del files[age]

    def of(self, kind: str, owner: str, stage: int) -> dict[Age, StageState]:
        return self._files.get((kind, owner, stage), {})

    def newest_common(self, stages: int) -> tuple[int, int] | None:
        """Lineage and step of the newest state of which every stage has a file, on any disk."""
        chains: dict[int, set[tuple[Age, bytes]]] = defaultdict(set)
        for (_, _, stage), files in self._files.items():
            chains[stage].update((age, chain_of(state)) for age, state in files.items())
        common = set.intersection(*(chains[stage] for stage in range(stages + 1)))
        return max(common)[0] if common else None

    def stages_of(self, owner: str) -> list[int]:
        """The stages that the host served when it saved last."""
        return stages_by_age(
            (max(files), stage)
            for (kind, host, stage), files in self._files.items()
            if (kind, host) == ("save", owner) and files
        )


def _digest_of(state: StageState) -> bytes:
    values = (tensor.numpy().tobytes() for tensor in state.tensors.values())
    return hashlib.blake2b(b"".join(values), digest_size=8).digest()


class LedgerDisks:
    """The functions of `os` that node/report/line_file.py uses. A ledger is named HOST-NODE-SEAT,
    and its lines are steps."""

    O_WRONLY = O_APPEND = O_CREAT = O_CLOEXEC = 0

    def __init__(self, files: Files) -> None:
        self._files = files
        self._names: list[str] = []  # by descriptor
        self._rest: dict[str, bytes] = defaultdict(bytes)  # by name: an incomplete line

    def open(self, path: Path, flags: int, mode: int) -> int:
        self._check(path.name)
        self._names.append(path.name)
        return len(self._names) - 1

    def write(self, descriptor: int, data: bytes) -> int:
        """Writes all of it, or half, as a disk that is full at times does."""
        name = self._names[descriptor]
        self._check(name)
        if self._fails(name) and self._files.chance(0.3):
            data = data[: len(data) // 2]
        *steps, self._rest[name] = (self._rest[name] + data).split(b"\n")
        self._files.noted.update(map(int, steps))
        return len(data)

    def close(self, descriptor: int) -> None:
        self._check(self._names[descriptor])

    def _fails(self, name: str) -> bool:
        return name.split("-")[0] in self._files.failing

    def _check(self, name: str) -> None:
        self._files.check(name.split("-")[0])


class VirtualLineFile(LineFile):
    """A line file that is written after a delay, as by a thread; a crash loses unwritten lines."""

    def __init__(self, path: Path, files: Files, process: Process) -> None:
        super().__init__(path, clock=lambda: process.world.now)
        self._files, self._process = files, process
        self._chance = random.Random(path.name)  # so that the seed's other draws stay the same

    def append(self, line: bytes) -> None:
        self.waiting.add(line, self._clock())
        self.waiting.trim()
        seconds = self._chance.choice([0.001, 0.001, 0.001, 0.3])
        self._process.after(seconds, self.flush)

    def flush(self) -> None:
        stalled = self._files.stalled.get(self._process.host, 0.0) - self._clock()
        if stalled > 0:
            self._process.after(stalled, self.flush)
        else:
            super().flush()


class VirtualDisk:
    """One folder for one stage. A write takes its time; a crash before its end leaves nothing."""

    critical_seconds = 0.0
    bytes_written = 0

    def __init__(
        self,
        files: Files,
        folder: tuple[str, str, int],
        process: Process,
        saved: Callable[[Age], None],
        failed: Callable[[str], None],
        check: Callable[[StageState], None],
    ) -> None:
        self._files, self._folder, self._process = files, folder, process
        self._saved, self._failed, self._check = saved, failed, check

    def listed(self, refused: Collection[Age] = ()) -> list[StateId]:
        files = self._files.of(*self._folder)
        saves = [files[age] for age in sorted(files, reverse=True) if age not in refused]
        return [replace(save.id, digest=_digest_of(save)) for save in saves]

    def damaged(self) -> set[Age]:
        return set()

    def remove(self, saves: Collection[Age]) -> None:
        for save in saves:
            self._files.of(*self._folder).pop(save, None)

    def write(self, state: StageState) -> None:
        self._check(state)
        copies = {name: tensor.clone() for name, tensor in state.tensors.items()}
        seconds = self._process.world.random.uniform(0.01, 0.5)
        self._process.after(seconds, self._written, replace(state, tensors=copies))

    def _written(self, state: StageState) -> None:
        kind, owner, _ = self._folder
        try:
            self._files.check(self._process.host)
        except OSError as error:
            self._failed(f"the {kind} of step {state.id.step} failed: {error.strerror}")
            return
        self._files.write(kind, owner, state)
        self._saved(state.id.age)

    def load(self, save: Age, then: Callable[[StageState | Exception], None]) -> None:
        state = self._files.of(*self._folder).get(save)
        result = SaveError(f"there is no save of {save}") if state is None else state
        self._process.after(self._process.world.random.uniform(0.01, 0.3), then, result)

    def finish(self, seconds: float) -> None:
        """Returns at once; writes in progress go on."""

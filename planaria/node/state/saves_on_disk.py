"""Saves while training goes on: a thread writes them, so that no disk stops the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Condition, Thread

from torch import Tensor

from planaria.node.machine.compute import waiting_for_disk
from planaria.node.machine.device import empty_pinned
from planaria.node.ports import OpenDisk
from planaria.node.report.line_file import STALLED
from planaria.node.state.save_file import Contents, invalid_number
from planaria.node.state.saves import Saves, file_name, remedy
from planaria.node.state.stage_state import Age, SaveError, StageState, StateId

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PendingSave:
    """A state that is to be saved, and not yet on disk."""

    state: StageState
    buffers: dict[str, Tensor]  # of its tensors, by name
    since: float  # seconds, of `time.perf_counter`


class SavesOnDisk:
    """The port `Disk`: writes a stage's saves for training, which no error or delay of the disk may
    stop, and reads them.

    `write` belongs to the compute thread, right after a commit was applied. It copies the state to
    host memory, in one of `in_flight` reused buffers (fresh memory costs many times the copy), and
    a thread writes it. When no buffer is free, the state replaces the newest one whose write has
    not begun; the replaced state is left out, or this one if there is none. `write` skips a state
    given before: the end of a run is reported more than once.

    `on_loop` is the loop's `call_soon_threadsafe`; `saved(save)` and `failed(sentence)` are called
    there. A save that is left out has failed if the disk has held the oldest one up for STALLED
    seconds.
    """

    def __init__(
        self,
        saves: Saves,
        in_flight: int,
        on_loop: Callable[..., object],
        saved: Callable[[Age], None],
        failed: Callable[[str], None],
    ) -> None:
        self.critical_seconds = 0.0  # of the compute thread, spent in `write`
        self.bytes_written = 0
        self.left_out = 0
        self._saves, self._on_loop = saves, on_loop
        self._on_error, self._on_saved = partial(on_loop, failed), partial(on_loop, saved)
        self._changed = Condition()  # guards the rest; not held while the disk is used
        self._free: list[dict[str, Tensor]] = [{} for _ in range(in_flight)]  # buffers
        self._waiting: list[PendingSave] = []  # for the disk, the oldest first
        self._writing: PendingSave | None = None  # the first of those, once its write has begun
        self._missed: list[PendingSave] = []  # the last state given, if it was left out
        self._newest: StageState | None = None  # on disk or waiting; without its tensors
        self._closed = False
        # A daemon: a hung disk must not keep the process from exiting.
        Thread(target=self._write_all, name="saves", daemon=True).start()

    def write(self, state: StageState) -> None:
        started = time.perf_counter()
        if wrong := invalid_number(state):  # else older saves would make room for one that is none
            action = self._action(state.id.age)
            raise ValueError(f"{action}: {wrong} is not a finite number of at least 0")
        with self._changed:
            error = self._take(state, started)
        if error:
            self._on_error(error)
        self.critical_seconds += time.perf_counter() - started

    def finish(self, seconds: float) -> None:
        """Waits, blocking, for states on their way to the disk. Those not on disk in time have
        failed, and so has the last one if it was left out. A later `write` is an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting, seconds)
            missing = [*self._waiting, *self._missed]
        for pending in missing:
            seconds_since = time.perf_counter() - pending.since
            self._on_error(
                f"{self._action(pending.state.id.age)} failed: not on disk after "
                f"{seconds_since:.1f} s"
            )

    def _take(self, state: StageState, now: float) -> str:
        """Copy a state to be saved for the writing thread. Returns an error to report; "": none."""
        key, error = replace(state, tensors={}), ""
        if self._newest == key:
            return ""
        if self._closed:
            return f"{self._action(key.id.age)} failed: the writer is closed"
        if not self._free:
            replaced = self._waiting.pop() if self._waiting[-1] is not self._writing else None
            if replaced is None:
                self._missed = [PendingSave(key, {}, now)]
                return self._leave_out(key, now)
            self._free.append(replaced.buffers)
            error = self._leave_out(replaced.state, now)
        buffers = self._free.pop()
        for name, tensor in state.tensors.items():
            if name not in buffers or buffers[name].shape != tensor.shape:
                buffers[name] = empty_pinned(tensor)
            buffers[name].copy_(tensor.detach())
        copies = {name: buffers[name] for name in state.tensors}
        self._waiting.append(PendingSave(replace(state, tensors=copies), buffers, now))
        self._newest, self._missed = key, []
        self._changed.notify_all()
        return error

    def _leave_out(self, state: StageState, now: float) -> str:
        """Count a save that is left out. Returns an error to report; "": the disk is in time."""
        self.left_out += 1
        oldest = self._waiting[0]
        seconds = now - oldest.since
        if seconds < STALLED:
            return ""
        return (
            f"{self._action(state.id.age)} is left out ({self.left_out} so far): the disk has not "
            f"written the save of step {oldest.state.id.step} for {seconds:.1f} s; check it, or "
            "save less often"
        )

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                pending = self._writing = self._waiting[0]
            written = self._write(pending.state)
            with self._changed:
                self._waiting.remove(pending)
                self._free.append(pending.buffers)
                self._writing = None
                if not written and self._newest == replace(pending.state, tensors={}):
                    self._newest = None
                self._changed.notify_all()

    def _write(self, state: StageState) -> bool:
        """Write a save to disk, in the writing thread. False: it failed."""
        try:
            self._saves.write(state)
        except OSError as error:
            self._on_error(
                f"{self._action(state.id.age)} failed: {error.strerror}; {remedy(error)}. Earlier "
                "saves stay, and the next one is tried"
            )
            return False
        self.bytes_written += state.bytes
        self._on_saved(state.id.age)
        return True

    def _action(self, save: Age) -> str:
        return f"saving step {save.step} of stage {self._saves.stage} in {self._saves.folder}"

    # --- reading

    def listed(self, refused: Collection[Age] = ()) -> list[StateId]:
        try:
            saves = self._saves.listed()
        except OSError as error:
            log.error("can't list the saves in %s: %s", self._saves.folder, error.strerror)
            return []
        ids = []
        for save in saves:
            try:
                if save not in refused:
                    ids.append(self._saves.id_of(save))
            except SaveError as error:  # damaged since, or replaced by a newer one
                log.warning("a save is not offered: %s", error)
        return ids

    def damaged(self) -> set[Age]:
        with waiting_for_disk():
            return self._saves.damaged()

    def remove(self, saves: Collection[Age]) -> None:
        for save in saves:
            with suppress(OSError):
                (self._saves.folder / file_name(save)).unlink()

    def load(self, save: Age, then: Callable[[StageState | Exception], None]) -> None:
        def read() -> None:
            try:
                result: StageState | Exception = self._saves.load(save)
            except Exception as error:  # noqa: BLE001 (any error goes to the caller)
                result = error
            self._on_loop(then, result)

        # A daemon: a hung disk must not keep the process from exiting.
        Thread(target=read, name="load", daemon=True).start()


def saves_on_disk(
    run: str,
    stage: int,
    in_flight: int,
    on_loop: Callable[..., object],
    contents: Contents,
    milestones: int = 0,
) -> OpenDisk:
    """Opens folders for the saves of a stage; arguments as for Saves and SavesOnDisk."""

    def open_disk(
        folder: Path,
        keep: int,
        saved: Callable[[Age], None],
        failed: Callable[[str], None],
    ) -> SavesOnDisk:
        saves = Saves(folder, run, stage, keep, contents, milestones)
        return SavesOnDisk(saves, in_flight, on_loop, saved, failed)

    return open_disk

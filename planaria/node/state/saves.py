"""A node's saves of its stage: files that exist whole or not at all.

A folder holds `stage-K/step-00000040-0.safetensors` (committed step, lineage) and `latest`, the
name of the newest, for people and scripts: nothing here trusts it. A file is written under a
temporary name, flushed, renamed, and the folder flushed (ECRL, section 4.3). So a file with a
save's name was complete when it got it. Checksums detect later damage.

Several processes may share a folder, also replicas of one stage. They write the same states under
the same names, so the last rename replaces a file by an equal one.

The format is safetensors: any reader finds a stage's weights by the names and in the shapes of
Hugging Face, and the moments as `first_moment.NAME` and `second_moment.NAME`. The metadata says
what they are, and of which model. It is written and read here, since a node needs what the library
doesn't give: flushing before the rename, an errno for a full disk, temporary files distinguishable
from a live writer's, and safe reading. Reading must not hold the interpreter for seconds (as the
library's `pread` does) nor crash on a bad sector (as a mapped file does).
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import math
import os
import re
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from secrets import token_hex
from threading import Condition, Thread
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_digest, xxh3_64_hexdigest

from planaria.bootstrap.files import flush
from planaria.node.machine.compute import waiting_for_disk
from planaria.node.machine.device import empty_pinned
from planaria.node.model.config import to_config
from planaria.node.model.shape import ModelConfig, trained_shapes
from planaria.node.ports import OpenDisk
from planaria.node.report.line_file import STALLED
from planaria.node.state.stage_state import Age, SaveError, StageState, StateId, is_milestone
from planaria.node.wire import stage_pb2 as pb
from planaria.recovery.decide import RECENT

log = logging.getLogger(__name__)

FORMAT: Final = "planaria-save-1"
LATEST: Final = "latest"
CHUNK: Final = 16 << 20  # bytes read at a time
METADATA: Final = "__metadata__"  # no tensor's name
HEADER_LIMIT: Final = 64 << 20  # bytes
VALUE: Final = torch.float32.itemsize  # bytes

_NAME: Final = re.compile(r"step-(\d{8,19})-(\d{1,9})\.safetensors", re.ASCII)
_REMEDIES: Final = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or raise the quota",
    errno.EACCES: "let this user write there",
    errno.EPERM: "let this user write there",
    errno.EROFS: "mount it writable",
}

_NO_SENSE: Final = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    DecodeError,
)
"""Exceptions from reading a header in another format."""

Fields: TypeAlias = dict[str, str]
Bytes: TypeAlias = NDArray[np.uint8]
Listed: TypeAlias = tuple[str, int, str]
"""A tensor in a header: name, number of values, checksum of the values."""


class Pieces(NamedTuple):
    """A tensor made piece by piece, each time that it is read."""

    length: int
    pieces: Callable[[], Iterable[Bytes]]  # float32, in order


class Contents(NamedTuple):
    """Description of a stage's flat tensors, for other readers."""

    parameters: Mapping[str, Sequence[int]]  # shapes by name, in order
    config: Mapping[str, Any]  # of the whole model

    @classmethod
    def of(cls, config: ModelConfig, stage: int) -> Contents:
        shapes = {name: list(shape) for name, shape in trained_shapes(config, stage).items()}
        cut = {"stages": config.stages, "sizes": config.cut}
        return cls(shapes, {**cut, **to_config(config, "float32", None)})

    @property
    def values(self) -> int:
        return sum(map(math.prod, self.parameters.values()))


class Saves:
    """The saves of one stage in `folder`; the newest `keep` are kept, and those of every
    `milestones`-th step (0: none).

    Opening makes the folder and removes leftovers of dead writers. Raises SaveError when it can't
    be used, or holds saves of another run, which is a mistake. All state is the folder's, so any
    thread may use it, even while another one writes.

    Stages save the same steps, but not at the same time. While no write fails and no save is left
    out, a `keep` of 2, and 1 more for each write that may be in flight, leaves a step that all of
    them have.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        stage: int,
        keep: int,
        contents: Contents,
        milestones: int = 0,
    ) -> None:
        """`contents`: name and shape of each parameter in the files."""
        if keep < 1:
            raise ValueError(f"{keep} saves to keep; at least 1")
        self.folder = folder / f"stage-{stage}"
        self.run, self.stage, self.keep, self.contents = run, stage, keep, contents
        self._milestones = milestones
        try:
            _make_folder(self.folder)
            _remove_leftovers(self.folder)
            saves = self.listed()
        except OSError as error:
            raise SaveError(
                f"can't use {self.folder} for saves: {error.strerror}; "
                f"{_remedy(error)}, or name another folder"
            ) from error
        for save in saves:
            saved_run = self._run_of(save)
            if saved_run not in (None, run):
                raise SaveError(
                    f"{self._path(save)} is of the run {saved_run}, not of {run}: name another "
                    "folder for saves, or move those away; `planaria regroup` converts them for "
                    "another run file"
                )

    def listed(self) -> list[Age]:
        """The saves in the folder, newest first, unread. Raises OSError."""
        with os.scandir(self.folder) as entries:
            ages = [_parse_file_name(entry.name) for entry in entries if entry.is_file()]
        return sorted((save for save in ages if save is not None), reverse=True)

    def sound(self) -> list[Age]:
        """The saves that `load` accepts, newest first; the log names the others. Reads all of them,
        at most a chunk in memory. Raises OSError when the folder can't be read."""
        sound = []
        for save in self.listed():
            try:
                self._read(save, keep_tensors=False)
            except SaveError as error:
                log.warning("refused a save: %s", error)
            else:
                sound.append(save)
        return sound

    def id_of(self, save: Age) -> StateId:
        """The id of a saved state, from the header alone. Raises SaveError."""
        with _open_save(self._path(save)) as (_, fields):
            state_id = _state_in(fields).id
            return replace(state_id, stage=self.stage, lineage=save.lineage, step=save.step)

    def load(self, save: Age) -> StageState:
        """Reads a save. Raises SaveError if it is missing, unreadable, damaged, or of another run
        or stage. Tensors' names and sizes are as saved; the caller checks whether they fit."""
        return self._read(save, keep_tensors=True)

    def check(self, state: StageState) -> None:
        """Checks a state to be saved. Raises ValueError for one of another stage, for tensors that
        aren't flat, contiguous float32, negative numbers, and an omega that isn't finite."""
        if state.id.stage != self.stage:
            raise ValueError(
                f"stage {state.id.stage} is not saved in {self.folder}, which is for stage "
                f"{self.stage}"
            )
        file = file_name(state.id.age)
        if wrong := _invalid_number(state):
            raise ValueError(f"{file}: {wrong} is not a finite number of at least 0")
        for name, tensor in state.tensors.items():
            if name == METADATA:
                raise ValueError(f"{file}: no tensor can be named {name}")
            if tensor.dtype != torch.float32 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError(
                    f"{file}: {name} is {tensor.dtype} {tuple(tensor.shape)}; only flat, "
                    "contiguous torch.float32 is saved"
                )

    def write(self, state: StageState) -> None:
        """Write the state to disk before returning; older saves stay until then. Raises OSError,
        and ValueError as `check` does."""
        self.check(state)
        tensors = {name: _bytes(t.detach().cpu()) for name, t in state.tensors.items()}
        self.write_pieces(
            state,
            {n: Pieces(len(v) // VALUE, partial(iter, [v])) for n, v in tensors.items()},
        )

    def write_pieces(self, state: StageState, tensors: Mapping[str, Pieces]) -> None:
        """As `write`, for a state with these tensors; each is made twice."""
        self.check(state)
        for name, (length, _) in tensors.items():
            if length != self.contents.values:
                raise ValueError(
                    f"{file_name(state.id.age)}: {name} has {length} values, and the parameters of "
                    f"stage {self.stage} {self.contents.values}"
                )
        listed = [(name, values.length, _digest(values)) for name, values in tensors.items()]
        header = _encode_header(_header_fields(self.run, state, listed, self.contents))
        contents = chain.from_iterable(values.pieces() for values in tensors.values())
        self._put(file_name(state.id.age), chain([header], contents))
        try:
            # The newest of all: a replica may have been faster.
            self._put(LATEST, [_as_bytes(file_name(self.listed()[0]).encode() + b"\n")])
        finally:
            self._prune()

    def _path(self, save: Age) -> Path:
        return self.folder / file_name(save)

    def _put(self, name: str, parts: Iterable[Bytes]) -> None:
        """Write a file whole or not at all, for other processes and after a power cut."""
        temporary = self.folder / f".{name}.{token_hex(8)}.tmp"
        try:
            with temporary.open("xb", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # marks a live writer
                if not os.fstat(file.fileno()).st_nlink:
                    # A process that has just opened the folder took it for a dead writer's.
                    self._put(name, parts)
                    return
                for part in parts:
                    while part.size:
                        part = part[file.write(part.data) :]
                os.fsync(file.fileno())
                temporary.replace(self.folder / name)
        finally:
            temporary.unlink(missing_ok=True)  # exists only after an error
        flush(self.folder)

    def _prune(self) -> None:
        keeping: list[Age] = []
        for save in self.listed():
            # Saves of an abandoned lineage don't count. Otherwise the one that the run went back to
            # would go first, while other stages may have no newer one yet. (One from between two
            # regular saves can't be recognised, and takes a place until it is the oldest.)
            goes_on = not keeping or save.step < keeping[-1].step
            milestone = is_milestone(save.step, self._milestones)
            if goes_on and (len(keeping) < self.keep or milestone):
                keeping.append(save)
            elif self._run_of(save) in (None, self.run):
                self._path(save).unlink(missing_ok=True)  # a replica may have been faster

    def _run_of(self, save: Age) -> str | None:
        """The run in a save's header; None: it can't be read."""
        try:
            with _open_save(self._path(save)) as (_, fields):
                return fields["run"]
        except SaveError:
            return None  # `load` says why

    def _read(self, save: Age, keep_tensors: bool) -> StageState:
        """Read a save, without its tensors if not `keep_tensors`. Raises SaveError."""
        path = self._path(save)
        with _open_save(path) as (file, fields):
            state, run = _state_in(fields), fields["run"]
            saved = state.id
            if (run, saved.stage, saved.age) != (self.run, self.stage, save):
                raise SaveError(
                    f"{path} has step {saved.step}, lineage {saved.lineage} of stage "
                    f"{saved.stage} of the run {run}; its name says step {save.step}, lineage "
                    f"{save.lineage} of stage {self.stage} of {self.run}: remove it"
                )
            return replace(state, tensors=dict(_read_tensors(path, file, fields, keep_tensors)))


@dataclass(frozen=True)
class SaveFile:
    """A save in any place, by its header; its tensors stay on disk."""

    path: Path
    run: str
    state: StageState  # without its tensors
    tensors: Mapping[str, int]  # number of values by name, in the file's order
    begin: int  # offset of the first one in the file
    stages: int  # body stages of the model; 0: not known
    sizes: tuple[int, ...]  # layers of each; (): equal

    @classmethod
    def open(cls, path: Path) -> SaveFile:
        """Reads a save's header. Raises SaveError if it or the length is wrong."""
        with _open_save(path) as (file, fields):
            sizes = {name: values for name, values, _ in _tensors_in(fields)}
            return cls(
                path,
                fields["run"],
                _state_in(fields),
                sizes,
                file.tell(),
                *_stages_in(fields),
            )

    def check(self) -> None:
        """Reads the whole save for its checksums, at most a chunk in memory. Raises SaveError."""
        with _open_save(self.path) as (file, fields):
            for _ in _read_tensors(self.path, file, fields, keep=False):
                raise AssertionError

    def values(self, tensor: str, first: int, count: int) -> Iterator[Bytes]:
        """`count` values of the tensor, from the `first` one on, in chunks. Raises SaveError,
        OSError."""
        before = takewhile(lambda item: item[0] != tensor, self.tensors.items())
        offset = self.begin + VALUE * (first + sum(values for _, values in before))
        with self.path.open("rb", buffering=0) as file:
            file.seek(offset)
            for done in range(0, VALUE * count, CHUNK):
                chunk = np.empty(min(CHUNK, VALUE * count - done), np.uint8)
                _fill(self.path, file, chunk)
                yield chunk

    def copy(self, to: Saves) -> None:
        """Copy the save to another folder. Raises SaveError, OSError."""
        tensors = {
            n: Pieces(size, partial(self.values, n, 0, size)) for n, size in self.tensors.items()
        }
        to.write_pieces(self.state, tensors)


def find_saves(*folders: Path) -> list[SaveFile]:
    """Saves of any stage and run in nodes' save folders, or in parents of those; the log names
    unusable ones."""
    saves = []
    for folder in folders:
        for path in sorted({*folder.glob("stage-*/step-*"), *folder.glob("*/stage-*/step-*")}):
            if _parse_file_name(path.name) is None:
                continue
            try:
                save = SaveFile.open(path)
            except SaveError as error:
                log.warning("refused a save: %s", error)
                continue
            state_id = save.state.id
            if (f"stage-{state_id.stage}", file_name(state_id.age)) == (
                path.parent.name,
                path.name,
            ):
                saves.append(save)
            else:
                contents = f"{file_name(state_id.age)} of stage {state_id.stage}"
                log.warning("refused a save: %s contains %s", path, contents)
    return saves


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

    Raises ValueError when `saves` keeps too few for stages to share a step (see `Saves`).
    """

    def __init__(
        self,
        saves: Saves,
        in_flight: int,
        on_loop: Callable[..., object],
        saved: Callable[[Age], None],
        failed: Callable[[str], None],
    ) -> None:
        if in_flight < 1:
            raise ValueError(f"{in_flight} writes in flight; at least 1")
        if saves.keep < 2 + in_flight:
            raise ValueError(
                f"{saves.keep} saves are kept, but {2 + in_flight} are needed ({in_flight} in "
                "flight) for the stages to have one of the same step"
            )
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
        self._saves.check(state)
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
                f"{self._action(state.id.age)} failed: {error.strerror}; {_remedy(error)}. Earlier "
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
            return set(self._saves.listed()) - set(self._saves.sound())

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


# The file: the header's length, 8 bytes; the header, JSON; the tensors, concatenated. The fields
# of this format are in the header's "__metadata__", text by name.


def _header_fields(
    run: str, state: StageState, tensors: Sequence[Listed], contents: Contents
) -> Fields:
    for_others = {**contents._asdict(), "commit": state.id.made}
    return {
        "format": FORMAT,
        "run": run,
        **{field: repr(value) for field, value in _numbers(state).items()},
        **({"relearning": repr(state.relearning)} if state.relearning else {}),
        "last": b64encode(state.last.SerializeToString()).decode(),
        "tensors": json.dumps(tensors),
        **{name: json.dumps(value) for name, value in for_others.items()},
    }


def _digest(values: Pieces) -> str:
    digest = xxh3_64()
    for piece in values.pieces():
        digest.update(piece.data)
    return digest.hexdigest()


def _numbers(state: StageState) -> dict[str, int | float]:
    """A state's numbers in the header of its save, in order."""
    return {
        "stage": state.id.stage,
        "step": state.id.step,
        "lineage": state.id.lineage,
        "omega": state.omega,
        "boosted_at": state.boosted_at,
        "optimizer_step": state.optimizer_step,
    }


def _invalid_number(state: StageState) -> str:
    """The first invalid number of a state, as text; "": none."""
    wrong = (f"{f} {v}" for f, v in _numbers(state).items() if not (math.isfinite(v) and v >= 0))
    return next(wrong, "")


def _state_in(fields: Fields) -> StageState:
    """A save's state without its tensors."""
    last = pb.Commit.FromString(b64decode(fields["last"]))
    stage, lineage, step = (int(fields[name]) for name in ("stage", "lineage", "step"))
    return StageState(
        id=StateId.after(last, stage, lineage, step, xxh3_64_digest(fields["tensors"].encode())),
        tensors={},
        omega=float(fields["omega"]),
        boosted_at=int(fields["boosted_at"]),
        last=last,
        optimizer_step=int(fields["optimizer_step"]),
        relearning=int(fields.get("relearning", 0)),
    )


def _stages_in(fields: Fields) -> tuple[int, tuple[int, ...]]:
    try:
        config = json.loads(fields["config"])
        return int(config["stages"]), tuple(map(int, config.get("sizes", ())))
    except _NO_SENSE:
        return 0, ()


def _tensors_in(fields: Fields) -> list[Listed]:
    """The tensors in a save's header. Raises one of `_NO_SENSE`."""
    listed: list[Listed] = json.loads(fields["tensors"])
    for name, values, checksum in listed:
        if not (isinstance(name, str) and isinstance(checksum, str)):
            raise ValueError(f"a tensor is named {name!r}, with the checksum {checksum!r}")
        if type(values) is not int or values < 0:
            raise ValueError(f"{name} has {values!r} values")
    return listed


def _encode_header(fields: Fields) -> Bytes:
    header: dict[str, object] = {METADATA: {**fields, "xxh3": _checksum(fields)}}
    offset = 0
    for name, shape in _parameter_entries(fields):
        end = offset + VALUE * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return _as_bytes(len(text).to_bytes(8, "little") + text)


def _parameter_entries(fields: Fields) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of the tensors for other readers, in order."""
    parameters = json.loads(fields["parameters"])
    for tensor, _, _ in _tensors_in(fields):
        for name, shape in parameters.items():
            yield (name if tensor == "weights" else f"{tensor}.{name}"), shape


def _checksum(fields: Fields) -> str:
    return xxh3_64_hexdigest(json.dumps(fields).encode())


@contextmanager
def _open_save(path: Path) -> Iterator[tuple[io.FileIO, Fields]]:
    """A save, open at its tensors, and its header. Raises SaveError."""
    try:
        with path.open("rb", buffering=0) as file:
            yield file, _read_header(path, file)
    except OSError as error:
        raise SaveError(f"{path} can't be read: {error.strerror}") from error


def _read_header(path: Path, file: io.FileIO) -> Fields:
    """Read and check the header, and the file's size. Raises SaveError, OSError."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if 8 + length > size or length > HEADER_LIMIT:
        raise SaveError(f"{path} is damaged: it has {size} bytes, and its header needs {length}")
    text = np.empty(length, np.uint8)
    _fill(path, file, text)
    try:
        fields: Fields = json.loads(text.tobytes())[METADATA]
        checksum = fields.pop("xxh3")
    except _NO_SENSE as error:
        raise SaveError(f"{path} is damaged, or not a save: its header can't be read") from error
    if checksum != _checksum(fields):
        raise SaveError(f"{path} is damaged: its header's checksum is not {checksum}")
    if fields.get("format") != FORMAT:
        raise SaveError(
            f"{path} has the format {fields.get('format')}, and this version reads {FORMAT}: use "
            "the version that wrote it, or move it away"
        )
    try:
        whole = np.array_equal(_encode_header(fields)[8:], text)
        if wrong := _invalid_number(_state_in(fields)):
            raise ValueError(wrong)
        expected = 8 + length + VALUE * sum(values for _, values, _ in _tensors_in(fields))
    except _NO_SENSE as error:
        raise SaveError(f"{path} is damaged: its header has invalid values ({error!r})") from error
    if not whole or not isinstance(fields.get("run"), str):
        raise SaveError(f"{path} is damaged: its header contradicts itself")
    if size != expected:
        raise SaveError(f"{path} is damaged: it has {size} bytes instead of {expected}")
    return fields


def _read_tensors(
    path: Path, file: io.FileIO, fields: Fields, keep: bool
) -> Iterator[tuple[str, Tensor]]:
    """A save's tensors, with checked checksums; none if not `keep`. Raises SaveError, OSError."""
    scratch = np.empty(CHUNK, np.uint8)
    for name, values, checksum in _tensors_in(fields):
        size = VALUE * values
        tensor = torch.empty(values if keep else 0)
        digest = xxh3_64()
        for offset in range(0, size, CHUNK):
            chunk = _bytes(tensor)[offset : offset + CHUNK] if keep else scratch[: size - offset]
            _fill(path, file, chunk)
            digest.update(chunk.data)
        if digest.hexdigest() != checksum:
            raise SaveError(
                f"{path} is damaged: the checksum of {name} is {digest.hexdigest()}, not {checksum}"
            )
        if keep:
            yield name, tensor


def _fill(path: Path, file: io.FileIO, chunk: Bytes) -> None:
    while chunk.size:
        read = file.readinto(chunk.data)
        if not read:
            raise SaveError(f"{path} is damaged: it ends {chunk.size} bytes too early")
        chunk = chunk[read:]


def _bytes(tensor: Tensor) -> Bytes:
    """The tensor's bytes, as a view."""
    view: Bytes = tensor.numpy().view(np.uint8)
    return view


def _as_bytes(text: bytes) -> Bytes:
    return np.frombuffer(text, np.uint8)


# The folder


def saved_stages(folder: Path) -> list[int]:
    """The stages saved last in a node's folder, the newest first. Raises OSError."""
    return stages_by_age(_saved_stages(folder))


def stages_by_age(saves: Iterable[tuple[Age, int]]) -> list[int]:
    """The stages of saves, the newest first, without those that lack `RECENT` steps."""
    newest: dict[int, Age] = {}
    for save, stage in sorted(saves, reverse=True):
        newest.setdefault(stage, save)
    last = max((save.step for save in newest.values()), default=0)
    return [stage for stage, save in newest.items() if last - save.step <= RECENT]


def saved_run(folder: Path) -> str:
    """The run of the newest readable save in a node's folder; empty: there is none. Raises
    OSError."""
    for save, stage in sorted(_saved_stages(folder), reverse=True):
        with (
            suppress(SaveError),
            _open_save(folder / f"stage-{stage}" / file_name(save)) as (_, fields),
        ):
            return str(fields["run"])
    return ""


def _saved_stages(folder: Path) -> list[tuple[Age, int]]:
    return [
        (save, int(path.name.removeprefix("stage-")))
        for path in folder.glob("stage-*")
        if path.name.removeprefix("stage-").isdecimal()
        for entry in os.scandir(path)
        if (save := _parse_file_name(entry.name)) is not None
    ]


def file_name(save: Age) -> str:
    """The file name of a save."""
    return f"step-{save.step:08d}-{save.lineage}.safetensors"


def _parse_file_name(name: str) -> Age | None:
    """The save with this file name; None: it is no save's name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    save = Age(step=int(match[1]), lineage=int(match[2]))
    return save if file_name(save) == name else None  # no leading zeros: a save has one name


def _make_folder(folder: Path) -> None:
    """Make the folder and its parents, durable against a power cut."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        flush(folder.parent)


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary files without a lock: their writers are dead."""
    for path in folder.glob(".*.tmp"):
        try:
            with path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        except (FileNotFoundError, BlockingIOError):
            continue  # renamed or removed meanwhile, or its writer lives
        log.info("removed the incomplete file %s", path)


def _remedy(error: OSError) -> str:
    return _REMEDIES.get(error.errno or 0, "check the disk")

"""A node's saves of its stage: files that exist whole or not at all.

A folder holds `stage-K/step-00000040-0.safetensors` (committed step, lineage) and `latest`, the
name of the newest, for people and scripts: nothing here trusts it. A file is written under a
temporary name, flushed, renamed, and the folder flushed (ECRL, section 4.3). So a file with a
save's name was complete when it got it. Checksums detect later damage.

Several processes may share a folder, also replicas of one stage. They write the same states under
the same names, so the last rename replaces a file by an equal one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from secrets import token_hex
from typing import Final

from planaria.bootstrap.files import flush
from planaria.node.state.save_file import (
    VALUE,
    Bytes,
    Contents,
    Pieces,
    SaveFile,
    as_bytes,
    bytes_of,
    digest_of,
    encode_header,
    header_fields,
    open_save,
    read_tensors,
    state_in,
)
from planaria.node.state.stage_state import Age, SaveError, StageState, StateId, is_milestone
from planaria.recovery.decide import RECENT

log = logging.getLogger(__name__)
LATEST: Final = "latest"
_NAME: Final = re.compile(r"step-(\d{8,19})-(\d{1,9})\.safetensors", re.ASCII)
_REMEDIES: Final = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or raise the quota",
    errno.EACCES: "let this user write there",
    errno.EPERM: "let this user write there",
    errno.EROFS: "mount it writable",
}


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
                f"{remedy(error)}, or name another folder"
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

    def damaged(self) -> set[Age]:
        """The saves that `load` refuses; the log names them. Reads the newest until `keep` are
        sound, at most a chunk in memory: milestones may be many times as much. Raises OSError when
        the folder can't be read."""
        damaged, sound = set(), 0
        for save in self.listed():
            if sound == self.keep:
                break
            try:
                self._read(save, keep_tensors=False)
                sound += 1
            except SaveError as error:
                log.warning("refused a save: %s", error)
                damaged.add(save)
        return damaged

    def id_of(self, save: Age) -> StateId:
        """The id of a saved state, from the header alone, which is read once. Raises SaveError."""
        path = self._path(save)
        try:
            file = path.stat()
        except OSError as error:
            raise SaveError(f"{path} can't be read: {error.strerror}") from error
        state_id = _id_in(path, file.st_ino, file.st_mtime_ns)
        return replace(state_id, stage=self.stage, lineage=save.lineage, step=save.step)

    def load(self, save: Age) -> StageState:
        """Reads a save. Raises SaveError if it is missing, unreadable, damaged, or of another run
        or stage. Tensors' names and sizes are as saved; the caller checks whether they fit."""
        return self._read(save, keep_tensors=True)

    def write(self, state: StageState) -> None:
        """Write the state of this stage to disk before returning; older saves stay until then.
        Raises OSError."""
        tensors = {name: bytes_of(t.detach().cpu()) for name, t in state.tensors.items()}
        self.write_pieces(
            state,
            {n: Pieces(len(v) // VALUE, partial(iter, [v])) for n, v in tensors.items()},
        )

    def write_pieces(self, state: StageState, tensors: Mapping[str, Pieces]) -> None:
        """As `write`, for a state with these tensors; each is made twice."""
        listed = [(name, values.length, digest_of(values)) for name, values in tensors.items()]
        header = encode_header(header_fields(self.run, state, listed, self.contents))
        contents = chain.from_iterable(values.pieces() for values in tensors.values())
        self._put(file_name(state.id.age), chain([header], contents))
        try:
            # The newest of all: a replica may have been faster.
            self._put(LATEST, [as_bytes(file_name(self.listed()[0]).encode() + b"\n")])
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
            return SaveFile.open(self._path(save)).run
        except SaveError:
            return None  # `load` says why

    def _read(self, save: Age, keep_tensors: bool) -> StageState:
        """Read a save, without its tensors if not `keep_tensors`. Raises SaveError."""
        path = self._path(save)
        with open_save(path) as (file, fields):
            state, run = state_in(fields), fields["run"]
            saved = state.id
            if (run, saved.stage, saved.age) != (self.run, self.stage, save):
                raise SaveError(
                    f"{path} has step {saved.step}, lineage {saved.lineage} of stage "
                    f"{saved.stage} of the run {run}; its name says step {save.step}, lineage "
                    f"{save.lineage} of stage {self.stage} of {self.run}: remove it"
                )
            return replace(state, tensors=dict(read_tensors(path, file, fields, keep_tensors)))


@lru_cache(maxsize=1 << 12)
def _id_in(path: Path, inode: int, changed: int) -> StateId:
    """The id in a save's header. `inode`, `changed`: of the file, which may be replaced. Raises
    SaveError."""
    with open_save(path) as (_, fields):
        return state_in(fields).id


def _refuse(path: Path, why: str) -> None:
    log.warning("refused a save: %s", why)


def find_saves(*folders: Path, refuse: Callable[[Path, str], None] = _refuse) -> list[SaveFile]:
    """Saves of any stage and run in nodes' save folders, or in parents of those. `refuse` gets
    unusable ones, and why; the log names them."""
    saves = []
    for folder in folders:
        for path in sorted({*folder.glob("stage-*/step-*"), *folder.glob("*/stage-*/step-*")}):
            if _parse_file_name(path.name) is None:
                continue
            try:
                save = SaveFile.open(path)
            except SaveError as error:
                refuse(path, str(error))
                continue
            state_id = save.state.id
            if (f"stage-{state_id.stage}", file_name(state_id.age)) == (
                path.parent.name,
                path.name,
            ):
                saves.append(save)
            else:
                contents = f"{file_name(state_id.age)} of stage {state_id.stage}"
                refuse(path, f"{path} contains {contents}")
    return saves


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
        with suppress(SaveError):
            return SaveFile.open(folder / f"stage-{stage}" / file_name(save)).run
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


def remedy(error: OSError) -> str:
    return _REMEDIES.get(error.errno or 0, "check the disk")

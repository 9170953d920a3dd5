"""`planaria up --resume`: puts saves where the nodes that continue the run look for them.

Nodes have their own folders, and may return in other places or numbers. With other stages, no node
has what its stage needs. All saves under the save folder count, from any node.

A run that continues in another number of stages, or goes back, is another run to registry and
nodes. Its state is written beside the earlier run's, under its own name. Only its run file, put in
place last, makes it the folder's run.

Reading saves loads torch, which takes seconds: only here, not when a run begins.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from planaria.bootstrap.admission import key_beside
from planaria.bootstrap.errors import UserError
from planaria.bootstrap.files import replace_file
from planaria.bootstrap.journal import Journal
from planaria.bootstrap.registry_pb2 import View
from planaria.node.data.mixture import index_of
from planaria.node.launch.errors import SwarmError
from planaria.node.launch.resolve import resolve, run_id
from planaria.node.launch.settings import STAGES, changed_run, check_identity, differences
from planaria.node.local.loss_schedule import stage_of
from planaria.node.model.learning_rate import warmup_of
from planaria.node.run_file import RunFile, dumps, flatten, override

if TYPE_CHECKING:
    from planaria.node.state.save_file import SaveFile
    from planaria.node.state.saves import Saves

RUN_FILE, JOURNAL = "run.toml", "registry.journal"
SETTINGS: Final = "steps", "recovery", "saves", "swarm", "wire", "trust", "notify"
"""What may change, but the section [training] and model.stages."""
FOLDERS: Final = "model.from", "data.path", "data.corpora"
"""Keys whose folders may lie elsewhere; the content is compared."""
ALL: Final = 10**6
"""Number of saves to keep, so that none is removed."""


class KeptRun(NamedTuple):
    """A stopped run of `planaria up`, and its folders."""

    run: RunFile  # resolved
    out: Path
    save_dir: Path | None

    @property
    def id(self) -> str:
        return run_id(self.run)

    @property
    def journal(self) -> Path:
        return self._own_path(self.out / "logs", f"{self.id}.journal", JOURNAL)

    def open_journal(self) -> Journal:
        """Open the registry's journal. Raises AdmissionError, JournalError."""
        return Journal(self.journal, self.id, key_beside(self.journal))

    @property
    def saves(self) -> Path | None:
        """The folder of the nodes' folders with saves."""
        return None if self.save_dir is None else self._own_path(self.save_dir, self.id, "")

    @property
    def checkpoints(self) -> Path | None:
        """The run file's checkpoint folder; if it was moved, that in the run's folder."""
        if not self.run.policy.checkpoints:
            return None
        named = Path(self.run.recovery.checkpoint.dir)
        return named if named.parent.exists() else self.out / named.name

    def find(self) -> list[SaveFile]:
        """All saves of the stopped run. Raises SwarmError."""
        from planaria.node.state.saves import find_saves

        folders = [folder for folder in (self.saves, self.checkpoints) if folder is not None]
        any_stage = any(any((*f.glob("stage-*"), *f.glob("*/stage-*"))) for f in folders)
        if not any_stage and self._has_trained():
            where = " and ".join(map(str, folders))
            raise SwarmError(
                f"there are no saves under {where}, but the run has trained: mount the disk, or "
                "move the saves back. Without them, start a new run in another folder"
            )
        saves = find_saves(*folders)
        own = [save for save in saves if save.run == self.id]
        if saves and not own:
            raise SwarmError(
                f"{saves[0].path} belongs to the run {saves[0].run}, and {self.out / RUN_FILE} to "
                f"{self.id}: restore the run file of the saves, and change numbers of stages and "
                "replicas only by --stages and --replicas"
            )
        is_undone = self.run.is_undone
        return [s for s in own if not is_undone(s.state.id.step, s.state.id.made.view)]

    def find_at(self, step: int) -> list[SaveFile]:
        """All stages' saves of a step, of the run as it is or as it was. Raises SwarmError."""
        from planaria.node.state.regrouped_saves import model_as_saved, whole_steps
        from planaria.node.state.saves import find_saves

        places = [*filter(None, (self.save_dir, self.checkpoints)), *self.out.glob("checkpoints*")]
        places += [] if self.save_dir is None else filter(Path.is_dir, self.save_dir.glob("*"))
        by_run: defaultdict[str, dict[Path, SaveFile]] = defaultdict(dict)
        for save in find_saves(*places):
            by_run[save.run][save.path] = save
        newest = {run: max(path.stat().st_mtime for path in saves) for run, saves in by_run.items()}
        steps = set[int]()
        for run in sorted(by_run, key=lambda run: (run == self.id, newest[run]), reverse=True):
            saves = [*by_run[run].values()]
            steps |= (whole := {*whole_steps(saves, model_as_saved(saves, self.run.config).stages)})
            if step in whole:
                return [save for save in saves if save.state.id.step == step]
        listed = ", ".join(map(str, sorted(steps))) or f"none under {places[0]}"
        raise SwarmError(f"not each stage has saved step {step}; steps that each has: {listed}")

    def _has_trained(self) -> bool:
        """Whether a ledger of the run has a step, below its header."""
        ledgers = (self.out / "logs").glob("ledger-*.jsonl")
        return any(len(path.read_bytes().splitlines()) > 1 for path in ledgers)

    @staticmethod
    def _own_path(folder: Path, name: str, of_the_first: str) -> Path:
        """Path under the run's own name, if it continues another run in the same folder."""
        own = folder / name
        return own if own.exists() else folder / of_the_first


def with_settings_of(file: RunFile, run: RunFile) -> RunFile:
    """A resolved run with another run file's settings. Raises RunFileError where that file names
    another model or other data, CorpusError."""
    given = flatten(file.model_dump(mode="json", exclude_unset=True))
    own = flatten(run.model_dump())
    free = [STAGES, *(key for key in FOLDERS if own.get(key) is not None)]
    check_identity({key: (own.get(key), value) for key, value in given.items()}, free)
    data = file.data.folders
    if "data" in file.model_fields_set and all(path.exists() for path in data):
        check_identity({"data.content": (run.data.content, index_of(file.data).content)})
    changes: dict[str, Any] = {name: getattr(file, name) for name in SETTINGS}
    changes["training"] = file.training.model_copy(
        update={
            "lora": run.training.lora,
            "optimizer": run.training.optimizer,
            "lr": file.training.lr or run.config.learning_rate,
            "warmup": warmup_of(file),
        }
    )
    stages = file.model.stages or run.model.stages
    changes["model"] = run.model.model_copy(update={"stages": stages})
    return run.model_copy(update=changes)


def continued_run(kept: KeptRun, wanted: RunFile, goes_back: bool = False) -> RunFile:
    """The resolved run to resume with the settings of `wanted`, which is its run file with other
    values. Raises RunFileError where the model or the data would be others, CorpusError."""
    rows = differences(kept.run, wanted)
    check_identity(rows, [STAGES])
    if not _needs_rewriting(kept.run, wanted, goes_back):
        return resolve(wanted) if rows else kept.run
    if STAGES in rows:  # the digests are of other stages
        model = wanted.model.model_copy(update={"content": None})
        wanted = wanted.model_copy(update={"model": model})
    shared = wanted.recovery.checkpoint.dir
    if wanted.policy.checkpoints:  # nodes of the run as it was ignore those files
        shared = shared or str((kept.out / "checkpoints").absolute())
        shared = re.sub(r"(-change\d+)?$", f"-change{len(kept.run.changes) + 1}", shared, count=1)
    return resolve(override(wanted, recovery__checkpoint__dir=shared))


def _needs_rewriting(run: RunFile, wanted: RunFile, goes_back: bool) -> bool:
    """Whether a resumed run's saves have to be written anew."""
    return goes_back or run.model.stages != wanted.model.stages


def place_saves(kept: KeptRun, slots: Sequence[str]) -> list[str]:
    """Copy each stage's save to a folder of the processes in `slots`, STAGE.REPLICA, unless one has
    it. Returns the copies, in sentences. Raises SwarmError."""
    from planaria.node.state.regrouped_saves import choose_saves

    all_saves = kept.find()
    if not all_saves:
        return ["the run has no saves: it starts from the beginning"]
    copies = []
    with resume_errors(), kept.open_journal():  # exclusive use
        _, chosen = choose_saves(all_saves, kept.run.config.stages)
        for stage, saves in sorted(chosen.items()):
            homes = _save_dirs(kept, kept.saves, stage, slots)
            if all(save.path.parent.parent not in homes for save in saves):
                saves[0].copy(_open_saves(kept, homes[0], stage))
                copies.append(f"{saves[0].path} is copied to {homes[0]}")
    return copies


def replace_run(
    before: KeptRun, kept: KeptRun, slots: Sequence[str], at: int | None = None
) -> KeptRun:
    """Make `kept`, with the step from which it holds, the folder's run. Its state is what `before`
    has saved: the newest, or that of step `at`. Saves are written anew, for another run, if the
    number of stages changes or the run goes back. On an error, the folder is still that of
    `before`. Raises SwarmError, RunFileError."""
    from planaria.node.state.regrouped_saves import choose_saves, model_as_saved, rewrite_saves

    anew = _needs_rewriting(before.run, kept.run, at is not None)
    saves = before.find() if at is None else before.find_at(at)
    if anew and not saves:
        raise SwarmError(
            f"there is no save of the run under {before.checkpoints or before.saves}: without one, "
            "continue without changes, or start a new run"
        )
    with resume_errors(), before.open_journal() as journal:
        chosen = (
            choose_saves(saves, model_as_saved(saves, kept.run.config).stages) if saves else None
        )
        step = chosen[0].step if chosen else 0
        if kept.run.steps < step:
            raise SwarmError(
                f"steps = {kept.run.steps}: the run is at step {step} already; choose more"
            )
        kept = kept._replace(run=changed_run(before.run, kept.run, step, anew))
        if anew and chosen:
            folder = None if kept.save_dir is None else kept.save_dir / kept.id
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)

            def open_folder(stage: int) -> Saves:
                return _open_saves(kept, _save_dirs(kept, folder, stage, slots)[0], stage)

            rewrite_saves(chosen, kept.run.config, open_folder, before.run.training.betas)
            own = kept.out / "logs" / f"{kept.id}.journal"
            with Journal(own, kept.id, key_beside(own)) as views:
                reason = f"the run {before.id} continues with other settings"
                views.go_on_from(journal.view or View(), reason)
        replace_file(kept.out / RUN_FILE, dumps(kept.run).encode())
    return kept


def _open_saves(kept: KeptRun, folder: Path, stage: int) -> Saves:
    from planaria.node.state.save_file import Contents
    from planaria.node.state.saves import Saves

    return Saves(folder, kept.id, stage, ALL, Contents.of(kept.run.config, stage))


def _save_dirs(kept: KeptRun, folder: Path | None, stage: int, slots: Sequence[str]) -> list[Path]:
    """Folders where a stage's nodes in these slots look for saves. `folder`: parent of theirs."""
    shared = [] if kept.checkpoints is None else [kept.checkpoints]
    own = [slot for slot in slots if stage_of(slot) == stage]
    return shared + ([] if folder is None else [folder / slot for slot in own])


@contextmanager
def resume_errors() -> Iterator[None]:
    """Turn errors of files into SwarmError, with what to do."""
    try:
        yield
    except UserError as error:
        raise SwarmError(f"the run can't be resumed: {error}") from error
    except OSError as error:
        raise SwarmError(
            f"the run can't be resumed: {error.filename}: {error.strerror}; free space, or let "
            "this user write there"
        ) from error

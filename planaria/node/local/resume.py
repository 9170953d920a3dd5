"""`planaria up --resume`: puts saves where the nodes that continue the run look for them.

Nodes have their own folders, and may return in other places or numbers. With other stages, no node
has what its stage needs. All saves under the save folder count, from any node.

A run that continues with other numbers has another run file, so registry and nodes take it for
another run. Its state is written beside the earlier run's, under its own name. Only its run file,
put in place last, makes it the folder's run.

Reading saves loads torch, which takes seconds: only here, not when a run begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from planaria.bootstrap.admission import key_beside
from planaria.bootstrap.errors import UserError
from planaria.bootstrap.files import replace_file
from planaria.bootstrap.journal import Journal
from planaria.bootstrap.registry_pb2 import View
from planaria.node.launch.resolve import resolve, run_id
from planaria.node.local.losses import stage_of
from planaria.node.model.shape import divisors
from planaria.node.run_file import RunFile, dumps, override
from planaria.recovery.decide import Resume

if TYPE_CHECKING:
    from planaria.node.state.saves import SaveFile, Saves

RUN_FILE, JOURNAL = "run.toml", "registry.journal"
ALL: Final = 10**6
"""Number of saves to keep, so that none is removed."""


class SwarmError(UserError):
    """Error of a swarm; the message says why it can't start or continue, and what to do."""


class KeptRun(NamedTuple):
    """A run of `planaria up`, and its folders."""

    run: RunFile  # resolved
    out: Path
    save_dir: Path | None

    @property
    def id(self) -> str:
        return run_id(self.run)

    @property
    def journal(self) -> Path:
        return self._own(self.out / "logs", f"{self.id}.journal", JOURNAL)

    def open_journal(self) -> Journal:
        """Open the journal. Raises AdmissionError, JournalError."""
        return Journal(self.journal, self.id, key_beside(self.journal))

    @property
    def saves(self) -> Path | None:
        """The folder of the nodes' folders."""
        return None if self.save_dir is None else self._own(self.save_dir, self.id, "")

    @property
    def checkpoints(self) -> Path | None:
        """The folder that the run file names; if its parent is gone, that in the run's folder,
        which was moved."""
        if not self.run.policy.checkpoints:
            return None
        named = Path(self.run.recovery.checkpoint.dir)
        return named if named.parent.exists() else self.out / named.name

    def find(self) -> list[SaveFile]:
        """All saves of the run. Raises SwarmError."""
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
        return own

    def _has_trained(self) -> bool:
        """Whether a ledger has a step, below its header."""
        ledgers = (self.out / "logs").glob("ledger-*.jsonl")
        return any(len(path.read_bytes().splitlines()) > 1 for path in ledgers)

    @staticmethod
    def _own(folder: Path, name: str, of_the_first: str) -> Path:
        """Path under the run's own name, if it continues another run in the same folder."""
        own = folder / name
        return own if own.exists() else folder / of_the_first


def changed(run: RunFile, stages: int | None, replicas: int | None) -> RunFile:
    """The resolved run with other numbers of stages and replicas, and the same model. Raises
    SwarmError, RunFileError, CorpusError."""
    config = run.config
    stages = None if stages == config.stages else stages
    if stages is not None and (stages < 1 or config.layers % stages):
        choices = map(str, divisors(config.layers))
        raise SwarmError(
            f"--stages {stages}: the model has {config.layers} layers, and each stage has the same "
            f"number of them: choose {', '.join(choices)}"
        )
    changed_run = override(
        run,
        model__stages=stages,
        model__layers=None if stages is None else config.layers,
        swarm__replicas=replicas,
    )
    if changed_run == run:
        return run
    shared = run.recovery.checkpoint.dir
    if shared:  # nodes of another run ignore those files
        numbers = f"-{changed_run.config.stages}x{changed_run.swarm.replicas}"
        shared = re.sub(r"(-\d+x\d+)?$", numbers, shared, count=1)
    return resolve(override(changed_run, recovery__checkpoint__dir=shared))


def put_in_place(kept: KeptRun, slots: Sequence[str]) -> list[str]:
    """Copy each stage's save to a folder of the processes in `slots`, STAGE.REPLICA, unless one has
    it. Returns the copies, in sentences. Raises SwarmError."""
    from planaria.node.state.regroup import choose

    all_saves = kept.find()
    if not all_saves:
        return ["the run has no saves: it starts from the beginning"]
    copies = []
    with resuming(), kept.open_journal():  # exclusive use
        _, chosen = choose(all_saves, kept.run.config.stages)
        for stage, saves in sorted(chosen.items()):
            homes = _homes(kept, kept.saves, stage, slots)
            if all(save.path.parent.parent not in homes for save in saves):
                saves[0].copy(_open(kept, homes[0], stage))
                copies.append(f"{saves[0].path} is copied to {homes[0]}")
    return copies


def take_over(before: KeptRun, kept: KeptRun, slots: Sequence[str]) -> Resume:
    """Make `kept` the folder's run, with the state that `before` has saved. Returns that state. On
    SwarmError, the folder is still that of `before`."""
    from planaria.node.state.regroup import regroup

    saves = before.find()
    if not saves:
        raise SwarmError(
            f"there is no save of the run under {before.checkpoints or before.saves}: without one, "
            "continue with the same --stages and --replicas"
        )
    with resuming(), before.open_journal() as journal:
        folder = None if kept.save_dir is None else kept.save_dir / kept.id
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

        def open_folder(stage: int) -> Saves:
            return _open(kept, _homes(kept, folder, stage, slots)[0], stage)

        state = regroup(saves, kept.run.config, open_folder, kept.run.training.betas)
        own = kept.out / "logs" / f"{kept.id}.journal"
        with Journal(own, kept.id, key_beside(own)) as views:
            reason = f"the run {before.id} continues with other numbers of stages or replicas"
            views.go_on_from(journal.view or View(), reason)
        replace_file(kept.out / RUN_FILE, dumps(kept.run).encode())
    return state


def _open(kept: KeptRun, folder: Path, stage: int) -> Saves:
    from planaria.node.state.saves import Contents, Saves

    return Saves(folder, kept.id, stage, ALL, Contents.of(kept.run.config, stage))


def _homes(kept: KeptRun, folder: Path | None, stage: int, slots: Sequence[str]) -> list[Path]:
    """Folders where the stage's nodes in these slots look for files. `folder`: parent of theirs."""
    shared = [] if kept.checkpoints is None else [kept.checkpoints]
    own = [slot for slot in slots if stage_of(slot) == stage]
    return shared + ([] if folder is None else [folder / slot for slot in own])


@contextmanager
def resuming() -> Iterator[None]:
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

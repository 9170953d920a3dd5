"""A run of `planaria up` before its processes start: run file, folders, devices, options. It is
new, or read again, copied and continued."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from planaria.bootstrap.files import replace_file
from planaria.bootstrap.journal import read_view
from planaria.bootstrap.registry_pb2 import View
from planaria.node.data.mixture import find_by_content, index_of
from planaria.node.data.progress import Track
from planaria.node.data.tokenizer import TOKENIZER
from planaria.node.hugging_face.begin_from_model import with_model
from planaria.node.launch.errors import SwarmError
from planaria.node.launch.resolve import resolve, text_to_prepare
from planaria.node.launch.settings import describe_change, with_changes
from planaria.node.local.options import SwarmOptions
from planaria.node.local.resume import RUN_FILE, KeptRun, place_saves, replace_run, resume_errors
from planaria.node.machine.processes import Work, run_planaria
from planaria.node.report.ledger import MERGED
from planaria.node.run_file import (
    PRIVATE,
    RunFile,
    RunFileError,
    dumps,
    load,
    override,
)

PLAN, ADDRESS = "up.json", "registry.address"


class ProcessHome(NamedTuple):
    """The network of a swarm's process, if it has its own."""

    host: str  # address in that network
    namespace: Path  # the network, as in /proc/PID/ns/net


class SwarmPlan(NamedTuple):
    """A run of `planaria up`: its run file, folders, devices and options."""

    run: RunFile  # resolved
    out: Path
    save_dir: Path | None  # for nodes' saves
    device: str
    homes: Mapping[str, ProcessHome] = {}  # slot -> home, of all; `up` must reach them
    work: Work = run_planaria  # main of its processes
    options: SwarmOptions = SwarmOptions(http="none")
    data: Sequence[str] = ()  # where the run's data is; none: where the run file says
    at: int | None = None  # step from which it is resumed; None: the newest

    @property
    def kept(self) -> KeptRun:
        return KeptRun(self.run, self.out, self.save_dir)


def plan_run(
    run: RunFile,
    out: Path | None,
    save_dir: Path | None,
    device: str,
    say: Callable[[str], object],
    track: Track,
) -> SwarmPlan:
    """Resolve a new run's file. Prepare the shipped prose for a run that names no data, and the
    model of a run that it begins from. Raises SwarmError, RunFileError, ExportError,
    CorpusError."""
    from planaria.node.local.from_run import begin_from_run  # which reads that run's plan

    run = begin_from_run(run, say, track)
    if run.model.origin is not None and not run.model.content:
        say(f"reading {run.model.origin}, from which the run begins")
    text, path = text_to_prepare(run), Path(run.data.path)
    if text is not None:
        from planaria.node.data.prepare import prepare
        from planaria.node.data.recipe import Recipe

        run = with_model(run)
        tokenizer = Path(run.model.origin) / TOKENIZER if run.model.origin else None
        say(f"there is no prepared data at {path}; preparing the prose in {text}")
        prepare(Recipe([str(text)], tokenizer), path, track=track)
    folder = out or Path("out") / f"{run.name}-{datetime.now():%Y%m%d-%H%M%S}"
    if run.policy.checkpoints and not run.recovery.checkpoint.dir:
        shared = str((folder / "checkpoints").absolute())
        run = override(run, recovery__checkpoint__dir=shared)
    run = resolve(run)
    index_of(run.data)  # stage 0's nodes need the data on this machine
    return SwarmPlan(run, folder, save_dir or folder / "saves", device)


def create_folder(plan: SwarmPlan) -> None:
    """Create a run's folder. Raises SwarmError when it, or the one for saves, is in use."""
    out, save_dir = plan.out, plan.save_dir
    depths = "*/stage-*/step-*", "*/*/stage-*/step-*"
    if save_dir is not None and any(any(save_dir.glob(depth)) for depth in depths):
        raise SwarmError(
            f"{save_dir} already holds saves of a run: continue it with --resume {save_dir}, "
            "or choose another --save-dir"
        )
    for name in ("summary.json", MERGED, "logs"):
        if (out / name).exists():
            raise SwarmError(
                f"{out} already holds a run ({name}): continue it with --resume {out}, choose "
                "another folder with --out, or remove this one"
            )
    try:
        (out / "logs").mkdir(parents=True)
    except OSError as error:
        raise SwarmError(f"can't create the folder {out}: {error.strerror}") from error


def write_plan(plan: SwarmPlan) -> None:
    """Write what `--resume` needs to the run's folder and beside the saves. Raises SwarmError."""
    for folder in filter(None, [plan.out, plan.save_dir]):
        saves = None if plan.save_dir is None else os.path.relpath(plan.save_dir, folder)
        fields = {"out": os.path.relpath(plan.out, folder), "save_dir": saves}
        fields["device"] = plan.device
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if folder == plan.out:
                (folder / RUN_FILE).write_text(dumps(plan.run), encoding="utf-8")
            (folder / PLAN).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise SwarmError(f"can't write in {folder}: {error.strerror}") from error


def read_plan(folder: Path, data: Sequence[str] = ()) -> SwarmPlan:
    """The plan of the run that wrote `folder`, or whose saves are in it; the folder may have been
    moved. `data`: where the run's data is, if elsewhere. Raises SwarmError."""
    try:
        fields = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        out, device = Path(os.path.normpath(folder / fields["out"])), str(fields["device"])
        saves = fields["save_dir"] and Path(os.path.normpath(folder / fields["save_dir"]))
        run = load(out / RUN_FILE)
        if run.training.optimizer is None:  # of a version that had no other
            run = override(run, training__optimizer="adamw")
    except RunFileError as error:
        raise SwarmError(
            f"the run in {folder} can't be used: {error}\nA run continues only with the run file "
            "that it began with"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SwarmError(
            f"there is no run in {folder}: {PLAN}, or the run file that it names, can't be "
            f"read ({error}). Name the folder that `planaria up` wrote (--out), or its --save-dir"
        ) from error
    plan = SwarmPlan(run, out, saves, device, data=data)
    if (journal := plan.kept.journal).exists():  # the run's operator may have changed it
        plan = plan._replace(run=with_changes(run, read_view(journal).changes))
    if saves is None and not run.recovery.checkpoint.dir:
        raise SwarmError(
            f"the run in {folder} has no saves: it was started without a folder for them, and its "
            "policy writes no checkpoints; start a new run"
        )
    return plan


def resume_from(
    plan: SwarmPlan, before: SwarmPlan, slots: Sequence[str]
) -> tuple[SwarmPlan, list[str]]:
    """Put saves of `before` where the resumed processes in `slots` look for them. Returns the plan,
    with the step from which changed settings hold, and messages. Raises SwarmError."""
    missing = [name for name in plan.run.data.names if not Path(name).exists()]
    if missing and not plan.data:
        plan = plan._replace(data=find_by_content(plan.run.data))
    if missing and not plan.data:
        raise SwarmError(
            f"the run's prepared data is not in {missing[0]}: name the folder that has it, with "
            "the same content, by --data DIR"
        )
    sentences: list[str] = []
    if plan.out != before.out:
        before = copy_run(before, plan.out)
        plan = plan._replace(save_dir=before.save_dir)
        sentences.append(f"the run is copied to {plan.out}, and goes on there")
    if plan.run.notify != before.run.notify:  # which is no change of the run
        before = before._replace(run=before.run.model_copy(update={PRIVATE: plan.run.notify}))
        with resume_errors():
            replace_file(plan.out / RUN_FILE, dumps(before.run).encode())
    if plan.run != before.run or plan.at is not None:
        plan = plan._replace(run=replace_run(before.kept, plan.kept, slots, plan.at).run)
        sentences += describe_change(before.run, plan.run)
    if plan.kept.id == before.kept.id:
        sentences += place_saves(plan.kept, slots)
    else:
        sentences.append(f"the saves as they were stay in {before.kept.saves or 'their folder'}")
    empty_journal(plan)
    return plan, sentences


def copy_run(plan: SwarmPlan, out: Path) -> SwarmPlan:
    """Copy a run and its saves to `out`. Returns the copy's plan. Raises SwarmError."""
    if plan.run.policy.checkpoints:
        raise SwarmError(
            f"--out {out}: the run file names {plan.kept.checkpoints} for checkpoints, so the copy "
            "would write there, too; resume the run without --out"
        )
    folders, save_dir = {plan.out: out}, plan.save_dir
    if save_dir is not None:
        place = Path(os.path.relpath(save_dir, plan.out))
        if ".." in place.parts:
            place = Path("saves")
            folders[save_dir] = out / place
        save_dir = out / place
    inside = any(out.resolve().is_relative_to(folder.resolve()) for folder in folders)
    if inside or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise SwarmError(
            f"--out {out} can't have a copy of the run: name a new or empty folder, outside of "
            f"{' and '.join(map(str, folders))}"
        )
    with resume_errors(), plan.kept.open_journal():  # exclusive use
        try:
            for folder, to in folders.items():
                shutil.copytree(folder, to, dirs_exist_ok=True)
        except shutil.Error as error:
            _, path, why = error.args[0][0]
            raise SwarmError(f"can't copy the run to {path}: {why}; remove {out}") from error
        plan = plan._replace(out=out, save_dir=save_dir)
        write_plan(plan)
    return plan


def empty_journal(plan: SwarmPlan) -> None:
    """Remove all members from a stopped run's journal. Raises SwarmError."""
    with resume_errors(), plan.kept.open_journal() as journal:
        journal.go_on_from(journal.view or View(), "the run is resumed")
        (plan.out / ADDRESS).unlink(missing_ok=True)

"""`model.from = "DIR"` or `"DIR@STEP"`, where DIR is the folder of another run: a new run begins
from what that one has saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from planaria.node.data.progress import Track
from planaria.node.launch.errors import SwarmError
from planaria.node.local.plan import PLAN, read_plan
from planaria.node.run_file import RunFile, override


def begin_from_run(run: RunFile, say: Callable[[str], object], track: Track) -> RunFile:
    """The run file, with a model's folder in place of another run's, where it names one: the model
    is exported beside that run's results, once. Raises SwarmError, ExportError, CorpusError."""
    origin = run.model.origin or ""
    folder, _, step = (origin, "", "") if _is_run(origin) else origin.rpartition("@")
    if not _is_run(folder):
        return run
    if step and not (step.isascii() and step.isdigit()):
        raise SwarmError(f"model.from = {run.model.origin}: write {folder}@800 for step 800")
    return override(run, model__from=str(_export_once(Path(folder), step, say, track)))


def _is_run(folder: str) -> bool:
    return folder != "" and (Path(folder) / PLAN).is_file()


def _export_once(folder: Path, step: str, say: Callable[[str], object], track: Track) -> Path:
    from planaria.node.hugging_face.from_saves import export_saves
    from planaria.node.hugging_face.options import ExportOptions
    from planaria.node.state.regrouped_saves import model_as_saved, whole_steps

    before = read_plan(folder)
    saves = before.kept.find_at(int(step)) if step else before.kept.find()
    steps = whole_steps(saves, model_as_saved(saves, before.run.config).stages) if saves else []
    if not steps:
        raise SwarmError(f"model.from = {folder}: that run has no step that each stage has saved")
    newest = [save for save in saves if save.state.id.step == steps[-1]]
    view = max(save.state.id.made.view for save in newest)  # a run that goes back has a step twice
    out = before.out / f"model-{steps[-1]}-{view}"
    if not out.exists():
        lora = before.run.training.lora is not None
        export_saves(before.run, newest, {}, ExportOptions(out=out, merged=lora), track)
        say(f"{out} has the model of step {steps[-1]} of {before.kept.id}, to begin from")
    return out

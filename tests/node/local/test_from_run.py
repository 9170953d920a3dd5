"""Tests of new runs that begin from another run's saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planaria.node.data.progress import untracked
from planaria.node.launch.errors import SwarmError
from planaria.node.local.from_run import begin_from_run
from planaria.node.local.plan import SwarmPlan, write_plan
from planaria.node.local.resume import KeptRun
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.run_file import RunFile, override
from tests.node.local.test_resume import begun, save
from tests.node.state.small_saves import state


def saved(tmp_path: Path) -> KeptRun:
    """Make a run with saves of steps 4 and 8 at all stages, and of step 12 at some."""
    kept = begun(tmp_path)
    for stage in range(3):
        save(kept, f"{stage}.0", stage, 4, 8, *([12] if stage else []))
    write_plan(SwarmPlan(kept.run, kept.out, kept.save_dir, "cpu"))
    return kept


@pytest.mark.parametrize(("at", "step"), [("", 8), ("@4", 4)])
def test_its_model_is_exported_once_the_newest_or_that_of_a_step(
    tmp_path: Path, at: str, step: int
) -> None:
    kept, news = saved(tmp_path), list[str]()
    folder = kept.out / f"model-{step}-2"  # its commit was in view 2
    new = override(RunFile(), model__from=f"{kept.out}{at}")
    begins = begin_from_run(new, news.append, untracked)
    assert begins == override(new, model__from=str(folder))
    assert news == [f"{folder} has the model of step {step} of {kept.id}, to begin from"]
    embedding = torch.from_numpy(Checkpoint.open(folder).read("model.embed_tokens.weight"))
    flat = state(kept.run.config, 0, step).tensors["weights"]
    assert torch.equal(embedding.flatten(), flat[: embedding.numel()])
    assert begin_from_run(new, news.append, untracked) == begins
    assert len(news) == 1


def test_a_step_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    out = saved(tmp_path).out
    with pytest.raises(SwarmError, match=r"not each stage has saved step 12; .*: 4, 8$"):
        begin_from_run(override(RunFile(), model__from=f"{out}@12"), print, untracked)
    with pytest.raises(SwarmError, match=f"write {out}@800 for step 800"):
        begin_from_run(override(RunFile(), model__from=f"{out}@last"), print, untracked)


@pytest.mark.parametrize("at", ["", "@8"])
def test_a_folders_name_may_have_the_mark_of_a_step(tmp_path: Path, at: str) -> None:
    out = saved(tmp_path / "me@home").out
    begins = begin_from_run(override(RunFile(), model__from=f"{out}{at}"), print, untracked)
    assert begins.model.origin == str(out / "model-8-2")


def test_other_folders_and_names_stay(tmp_path: Path) -> None:
    for name in (None, str(tmp_path), "Qwen/Qwen3-0.6B@main"):
        run = override(RunFile(), model__from=name)
        assert begin_from_run(run, print, untracked) is run

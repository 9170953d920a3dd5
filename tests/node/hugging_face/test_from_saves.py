"""Tests of a model's weights from saves, whose number of stages may not be the run file's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planaria.node.hugging_face.export import ExportError
from planaria.node.hugging_face.from_saves import saved_model
from planaria.node.model.layout import model_weights
from planaria.node.model.shape import ModelConfig
from planaria.node.run_file import ModelSection, RunFile
from planaria.node.state.saves import find_saves
from planaria.node.state.stage_state import SaveError
from tests.node.state.small_saves import model, saved, state

pytestmark = pytest.mark.usefixtures("unflushed")


def shape_in(stages: int) -> ModelConfig:
    return model(4, stages, dim=8, hidden=8)


def run_of(stages: int) -> RunFile:
    """Return a run file with so many stages; saves may have another number."""
    shape = shape_in(stages)
    names = ("vocabulary", "dim", "heads", "kv_heads", "context", "hidden", "layers", "stages")
    return RunFile(model=ModelSection(**{name: getattr(shape, name) for name in names}))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_weights_are_found_in_whatever_stages_the_saves_are_of(tmp_path: Path, stages: int) -> None:
    had = shape_in(2)
    model = saved_model(run_of(stages), saved(tmp_path, had))
    assert (model.step, model.doubt) == (8, "")
    assert model.config.stages == 2
    for weight in model_weights(model.config):
        wanted = state(had, weight.stage).tensors["weights"]
        read = model.read(weight.stage, weight.first, weight.size)
        torch.testing.assert_close(read, wanted[weight.first :][: weight.size], rtol=0, atol=0)


def test_saves_of_several_runs_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "a", shape_in(2), run="a")
    saved(tmp_path / "b", shape_in(2), steps=(16,), run="b")
    with pytest.raises(SaveError, match=r"several runs .*: name folders of one"):
        saved_model(run_of(2), find_saves(tmp_path / "a", tmp_path / "b"))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    saves = saved(tmp_path, shape_in(2))
    with pytest.raises(ExportError, match="no save of stage 1, "):
        saved_model(run_of(2), [save for save in saves if save.state.id.stage != 1])
    with pytest.raises(SaveError, match="there is no save: name folders"):
        saved_model(run_of(2), [])


def test_what_is_not_of_one_step_says_so(tmp_path: Path) -> None:
    first, second, _ = saved(tmp_path / "first", shape_in(2))
    later = [s for s in saved(tmp_path / "later", shape_in(2), (16,)) if s.state.id.stage == 2]
    model = saved_model(run_of(2), [first, second, *later])
    assert model.step == 16
    assert "there is no step that every stage has" in model.doubt

"""The command `planaria saves`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from planaria.node.cli import app
from planaria.node.state.save_file import SaveFile
from planaria.node.state.saves import find_saves
from tests.node.state.small_saves import model, opened, saved, state

MODEL = model(4, 2)


def pruned(folder: Path, keep: int) -> Result:
    return CliRunner().invoke(app, ["saves", str(folder), "--prune", str(keep)])


def steps(folder: Path, run: str, stage: int) -> list[int]:
    def is_its(save: SaveFile) -> bool:
        return (save.run, save.state.id.stage) == (run, stage)

    return sorted(save.state.id.step for save in find_saves(folder) if is_its(save))


def test_the_newest_whole_steps_of_each_run_stay_and_what_is_newer(tmp_path: Path) -> None:
    """A step that lacks a stage doesn't count. Saves of a replica are removed, too."""
    saves = tmp_path / "saves"
    saved(saves, MODEL, (4, 8, 12, 16, 20))
    for save in find_saves(saves):
        if (save.state.id.stage, save.state.id.step) in ((1, 12), (2, 20)):
            save.path.unlink()
    replica = opened(saves / "1.1", "old", MODEL, 1)
    replica.write(state(MODEL, 1, 4))
    saved(saves / "new", MODEL, (2,), run="new")
    size = sum(
        save.path.stat().st_size for save in find_saves(saves) if save.state.id.step in (4, 12)
    )
    result = pruned(tmp_path, 2)
    assert result.exit_code == 0, result.output
    assert f"old: 6 saves of step 4, 12 are removed, {size / 1e6:,.1f} MB" in result.output
    assert "new: 0 saves are removed, 0.0 MB" in result.output
    assert [steps(saves, "old", stage) for stage in range(3)] == [[8, 16, 20], [8, 16, 20], [8, 16]]
    assert steps(saves / "new", "new", 1) == [2]
    assert pruned(tmp_path, 1).exit_code == 0
    assert [steps(saves, "old", stage) for stage in range(3)] == [[16, 20], [16, 20], [16]]


@pytest.mark.parametrize("kept", ["0.0", "1.0"])
def test_without_a_whole_step_nothing_is_removed(tmp_path: Path, kept: str) -> None:
    """The folder of one node has no whole step, even if the node serves stage 0."""
    saved(tmp_path, MODEL, (4, 8, 12))
    result = pruned(tmp_path / kept, 1)
    assert result.exit_code == 1
    assert "old has no step that each stage has saved" in " ".join(result.output.split())
    assert steps(tmp_path, "old", int(kept[0])) == [4, 8, 12]


def test_a_save_that_is_cut_off_is_damaged_and_said_once(tmp_path: Path) -> None:
    saved(tmp_path / "saves", MODEL, (4, 8))
    save = find_saves(tmp_path / "saves")[0]
    with save.path.open("r+b") as file:
        file.truncate(save.path.stat().st_size - 8)
    result = CliRunner().invoke(app, ["saves", str(tmp_path), "--verify"])
    assert result.exit_code == 1, result.output
    assert result.stderr.count("is damaged") == 1
    assert re.search(r"old +│ +4 │ lacks 0 +│", result.stdout)


def test_a_run_that_goes_on_may_remove_what_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "saves", MODEL, (4, 8))
    read = SaveFile.check

    def read_while_others_go(save: SaveFile) -> None:
        if save.state.id.step == 4 and save.state.id.stage == 0:
            for gone in (tmp_path / "saves").glob("*/stage-[02]/step-00000004*"):
                gone.unlink()
        read(save)

    monkeypatch.setattr(SaveFile, "check", read_while_others_go)
    result = CliRunner().invoke(app, ["saves", str(tmp_path), "--verify"])
    assert result.exit_code == 0, result.output
    assert not result.stderr
    assert re.search(r"old +│ +8 │ all +│", result.stdout)

"""Saves regrouped for stages with other layers, in real files of small tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from planaria.bootstrap.registry_pb2 import Description
from planaria.node.cli import app
from planaria.node.commands import saves as commands
from planaria.node.model.modules import build_stage
from planaria.node.model.shape import BETAS, ModelConfig
from planaria.node.run_file import RunFile, dumps, override
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.state import save_file
from planaria.node.state.regrouped_saves import (
    SaveError,
    choose_saves,
    layer_ranges,
    model_as_saved,
    moment_scale,
    rewrite_saves,
    saves_of_one_run,
)
from planaria.node.state.save_file import SaveFile
from planaria.node.state.saves import file_name, find_saves
from planaria.node.state.stage_state import TENSORS, Age, StageState
from tests.node.state.small_saves import model, opened, saved, state

CPU = torch.device("cpu")
CUTS = [(1,), (2,), (1, 1), (4,), (1, 3), (3, 1), (1, 2, 1), (2, 2), (1, 1, 1, 1), (6,)]
CUTS += [(2, 2, 2), (3, 3), (3, 2, 1), (1, 4, 1), (2, 1, 1, 2), (1, 1, 1, 1, 1, 1)]


def cut(*sizes: int) -> ModelConfig:
    return model(sum(sizes), len(sizes), sizes=sizes)


def any_cut(data: st.DataObject, layers: int) -> ModelConfig:
    return cut(*data.draw(st.sampled_from([sizes for sizes in CUTS if sum(sizes) == layers])))


def regroup(saves: Sequence[SaveFile], config: ModelConfig, folder: Path, run: str = "new") -> None:
    chosen = choose_saves(saves, model_as_saved(saves, config).stages)
    rewrite_saves(chosen, config, partial(opened, folder, run, config), BETAS)


def regrouped(
    saves: Sequence[SaveFile], config: ModelConfig, folder: Path, run: str = "new"
) -> list[StageState]:
    regroup(saves, config, folder, run)
    own = [opened(folder, run, config, stage) for stage in range(config.stages + 1)]
    return [saves.load(saves.listed()[0]) for saves in own]


pytestmark = pytest.mark.usefixtures("unflushed")


# Which layers go where


@given(st.sampled_from(CUTS), st.data())
def test_each_layer_is_in_one_stage_in_order(sizes: tuple[int, ...], data: st.DataObject) -> None:
    before, after = cut(*sizes), any_cut(data, sum(sizes))
    layers = [
        before.layers_of(piece.stage)[piece.first + layer]
        for stage in range(1, after.stages + 1)
        for piece in layer_ranges(stage, before, after)
        for layer in range(piece.layers)
    ]
    assert layers == list(range(before.layers))
    for stage in range(1, after.stages + 1):
        assert [piece.of for piece in layer_ranges(stage, before, after)] == [
            before.cut[piece.stage - 1] for piece in layer_ranges(stage, before, after)
        ]
    assert layer_ranges(0, before, after) == [(0, 0, 1, 1)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.sampled_from(CUTS), st.data())
def test_there_and_back_is_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], data: st.DataObject
) -> None:
    monkeypatch.setattr(save_file, "CHUNK", 64)  # so that a layer has several chunks
    folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    old, new = cut(*sizes), any_cut(data, sum(sizes))
    moved = regrouped(saved(folder / "old", old), new, folder / "new")
    back = regrouped(find_saves(folder / "new"), old, folder / "again", "third")
    assert sum(save.omega for save in moved) == pytest.approx(sum(save.omega for save in back))
    for stage, again in enumerate(back):
        was = state(old, stage)
        assert again.tensors.keys() == was.tensors.keys()
        assert all(torch.equal(again.tensors[name], was.tensors[name]) for name in was.tensors)
        assert (again.id.step, again.id.made) == (8, was.id.made)
        assert again.id.lineage == was.id.lineage + 2
        assert (again.optimizer_step, again.boosted_at) == (8, 0)


def test_a_model_computes_the_same_in_other_stages(tmp_path: Path) -> None:
    old, new = model(6, 2), cut(1, 3, 2)
    modules = [build_stage(old, stage, seed=5) for stage in range(3)]
    for stage, built in enumerate(modules):
        tensors = dict(StageOptimizer(built, CPU).state())
        save = state(old, stage, tensors=tensors, optimizer_step=0)
        opened(tmp_path / "old", "old", old, stage).write(save)
    moved = regrouped(find_saves(tmp_path / "old"), new, tmp_path / "new")
    built = [build_stage(new, stage, seed=0) for stage in range(4)]
    for stage, save in enumerate(moved):
        StageOptimizer(built[stage], CPU).load(save.tensors.items(), save.optimizer_step)
    tokens = torch.arange(8).view(2, 4)

    def logits(stages: Sequence[Any]) -> torch.Tensor:
        x = stages[0].embed(tokens)
        for stage in stages[1:]:
            x = stage(x)
        computed: torch.Tensor = stages[0].logits(x)
        return computed

    assert torch.equal(logits(built), logits(modules))


# What is known of a stage, and not of its layers


def test_what_a_stage_knows_of_itself_goes_with_its_layers(tmp_path: Path) -> None:
    old, new = model(4, 2), model(4, 1)
    first, second = state(old, 1, omega=2.0), state(old, 2, omega=5.0, boosted_at=7)
    second.last.lr_scale[2] = 1.1
    first.last.signature = second.last.signature = b"of three stages"
    for save in (state(old, 0), first, second):
        opened(tmp_path / "old", "old", old, save.id.stage).write(save)
    _, moved = regrouped(find_saves(tmp_path / "old"), new, tmp_path / "new")
    assert (moved.omega, moved.boosted_at, moved.id.stage) == (7.0, 7, 1)
    assert list(moved.last.lr_scale) == [1.1]  # one value is that of all stages
    assert list(moved.last.clip_scale) == [1.0]
    assert not moved.last.signature
    halves = regrouped(find_saves(tmp_path / "new"), model(4, 4), tmp_path / "four", "third")
    assert [save.omega for save in halves[1:]] == [7.0 / 4] * 4


def test_adams_counts_that_differ_become_the_least_and_averages_stay(tmp_path: Path) -> None:
    """Updates divide moments by their bias corrections. These quotients stay."""
    old, new = model(2, 2), model(2, 1)
    young = state(old, 2, optimizer_step=3)
    for save in (state(old, 0), state(old, 1, optimizer_step=8), young):
        opened(tmp_path / "old", "old", old, save.id.stage).write(save)
    _, moved = regrouped(find_saves(tmp_path / "old"), new, tmp_path / "new")
    assert moved.optimizer_step == 3
    moment = moved.tensors["first_moment"] / (1 - BETAS[0] ** 3)
    both = (
        state(old, 1).tensors["first_moment"] / (1 - BETAS[0] ** 8),
        young.tensors["first_moment"],
    )
    half = len(moment) // 2
    torch.testing.assert_close(moment[:half], both[0])
    assert torch.equal(moved.tensors["first_moment"][half:], both[1])
    assert torch.equal(moved.tensors["weights"][:half], state(old, 1).tensors["weights"])


def test_muons_momentum_stays_whatever_the_counts(tmp_path: Path) -> None:
    old, new = model(2, 2, muon=True), model(2, 1, muon=True)
    for save in (state(old, 0), state(old, 1, optimizer_step=8), state(old, 2, optimizer_step=1)):
        opened(tmp_path / "old", "old", old, save.id.stage).write(save)
    _, moved = regrouped(find_saves(tmp_path / "old"), new, tmp_path / "new")
    both = torch.cat([state(old, stage).tensors["first_moment"] for stage in (1, 2)])
    assert torch.equal(moved.tensors["first_moment"], both)


@pytest.mark.parametrize("changes", [{}, {"model__from": "base", "training__lora": {"rank": 2}}])
def test_the_command_regroups_what_the_run_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    figures = {"vocabulary": 11, "dim": 8, "heads": 2, "layers": 2, "stages": 2, "hidden": 8}
    run = override(RunFile(), **{f"model__{k}": v for k, v in figures.items()}, **changes)
    old, new = run.config, override(run, model__stages=1)
    saved(tmp_path / "old", old)

    async def describe() -> Description:
        return Description(run="new", run_file=dumps(new))

    registry = SimpleNamespace(describe=describe)
    ask = lambda join, credentials, question: asyncio.run(question(registry))  # noqa: E731
    monkeypatch.setattr(commands, "ask_registry", ask)
    words = ["regroup", str(tmp_path / "old"), "--join", "127.0.0.1:1"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    moved = opened(tmp_path / "new", "new", new.config, 1).load(Age(2, 8))
    for name in TENSORS[: new.config.tensors_in(1)]:
        both = torch.cat([state(old, stage).tensors[name] for stage in (1, 2)])
        assert torch.equal(moved.tensors[name], both), name


def test_with_a_stage_that_has_no_moments_adam_begins_afresh(tmp_path: Path) -> None:
    old, new = model(2, 2), model(2, 1)
    bare = state(old, 2)
    weights = {"weights": bare.tensors["weights"]}
    for save in (state(old, 0), state(old, 1), replace(bare, tensors=weights, optimizer_step=0)):
        opened(tmp_path / "old", "old", old, save.id.stage).write(save)
    _, moved = regrouped(find_saves(tmp_path / "old"), new, tmp_path / "new")
    assert list(moved.tensors) == ["weights"]
    assert moved.optimizer_step == 0
    assert moment_scale(BETAS[0], 0, 0) == 1.0
    assert moment_scale(BETAS[0], 5, 0) == 0.0


def test_moments_stay_where_the_new_run_has_the_same_optimizer_or_muon(tmp_path: Path) -> None:
    """Muon's momentum is Adam's first moment."""
    adam, muon = model(2, 2), model(2, 1, muon=True)
    ends, body = regrouped(saved(tmp_path / "old", adam), muon, tmp_path / "new")
    assert list(ends.tensors) == ["weights", "first_moment", "second_moment"]
    assert list(body.tensors) == ["weights", "first_moment"]
    again = regrouped(
        find_saves(tmp_path / "new"), replace(muon, stages=2), tmp_path / "third", "3"
    )
    for stage, moved in enumerate(again):
        wanted = state(adam, stage).tensors
        assert all(torch.equal(values, wanted[name]) for name, values in moved.tensors.items())
    _, back = regrouped(find_saves(tmp_path / "new"), model(2, 1), tmp_path / "back", "4")
    assert (list(back.tensors), back.optimizer_step) == (["weights"], 0)


# Which saves


def test_the_newest_step_that_all_have_is_taken_wherever_it_lies(tmp_path: Path) -> None:
    config = model(2, 2)
    saved(tmp_path, config, (4, 8))
    opened(tmp_path / "2.0", "old", config, 2).write(state(config, 2, 12))
    (tmp_path / "1.0").rename(tmp_path / "who-has-gone")
    choice, chosen = choose_saves(find_saves(tmp_path), 2)
    assert (choice.step, choice.exact) == (8, True)
    assert [save.state.id.step for of in chosen.values() for save in of] == [8, 8, 8]
    assert chosen[1][0].path.is_relative_to(tmp_path / "who-has-gone")


@pytest.mark.parametrize("offset", [0, 40, -1])  # length, header, tensors
def test_a_damaged_save_is_named_and_the_step_before_is_taken(
    tmp_path: Path, offset: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = model(2, 2)
    saved(tmp_path, config, (4, 8))
    path = tmp_path / "1.0" / "stage-1" / "step-00000008-1.safetensors"
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    choice, _ = choose_saves(find_saves(tmp_path), 2)
    assert (choice.step, choice.exact) == (4, True)
    assert str(path) in caplog.text
    path.write_bytes(bytes(content[:-9]))  # half-written
    assert choose_saves(find_saves(tmp_path), 2)[0].step == 4


def test_the_same_save_at_another_node_serves_for_a_damaged_one(tmp_path: Path) -> None:
    config = model(2, 1)
    saved(tmp_path, config)
    opened(tmp_path / "1.1", "old", config, 1).write(state(config, 1))
    path = tmp_path / "1.0" / "stage-1" / "step-00000008-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    choice, chosen = choose_saves(find_saves(tmp_path), 1)
    assert (choice.step, choice.exact) == (8, True)
    assert chosen[1][0].path.is_relative_to(tmp_path / "1.1")


def test_files_that_are_not_what_their_place_says_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = model(2, 1)
    saved(tmp_path, config)
    path = tmp_path / "1.0" / "stage-1" / "step-00000008-1.safetensors"
    path.rename(path.with_name("step-00000012-1.safetensors"))
    (path.parent / "step-00000016-1.safetensors.part").write_bytes(b"?")
    assert [save.state.id.stage for save in find_saves(tmp_path)] == [0]
    assert file_name(state(config, 1).id.age) in caplog.text


# What is refused


def test_stages_without_a_common_step_are_named(tmp_path: Path) -> None:
    old, new = model(4, 2), model(4, 4)
    saves = saved(tmp_path / "old", old, (4, 8))
    some = [s for s in saves if s.state.id.stage != 1]
    with pytest.raises(SaveError, match=r"nothing of stage 1\. .* go on with 2 stages"):
        regroup(some, new, tmp_path / "new")
    apart = [s for s in saves if (s.state.id.stage == 1) == (s.state.id.step == 4)]
    with pytest.raises(SaveError, match="stage 0 from step 8, stage 1 from step 4"):
        regroup(apart, new, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_mix_of_steps_goes_on_in_the_same_stages(tmp_path: Path) -> None:
    config = model(2, 2)
    saves = saved(tmp_path / "old", config, (4, 8))
    mixed = [s for s in saves if s.state.id.stage == 0 or s.state.id.step == 4 * s.state.id.stage]
    mixed = [s for s in mixed if s.state.id.stage]
    regroup(mixed, config, tmp_path / "new")
    moved = find_saves(tmp_path / "new")
    assert [(s.state.id.stage, s.state.id.step) for s in moved] == [(1, 4), (2, 8)]


@pytest.mark.parametrize(
    ("new", "says"),
    [
        (
            model(4, 2, dim=8),
            "stage-0/.* is of another model: it has 92 weights instead of the 184",
        ),
        (model(4, 2, vocabulary=12), "stage-0/.* is of another model"),
        (model(4, 2, hidden=7), "stage-1/.* is of another model: .* for each layer"),
        (model(3, 3), "stages with 2 layers, and the model has 3"),
    ],
)
def test_saves_of_another_model_are_refused(tmp_path: Path, new: ModelConfig, says: str) -> None:
    saves = saved(tmp_path, model(4, 2))
    with pytest.raises(SaveError, match=says):
        model_as_saved(saves, new)


def test_older_saves_say_less_of_their_stages(tmp_path: Path) -> None:
    """Older saves lack sizes of stages, and some their number. All had equally many layers."""
    saves = saved(tmp_path, cut(2, 2))
    for stages in (2, 0):
        old = [replace(save, stages=stages, sizes=()) for save in saves]
        assert model_as_saved(old, cut(1, 3)).cut == (2, 2)
    assert model_as_saved(saved(tmp_path / "other", cut(1, 3), run="other"), cut(4)).cut == (1, 3)


def test_saves_of_several_runs_are_refused(tmp_path: Path) -> None:
    config = model(2, 2)
    saved(tmp_path / "a", config, run="a")
    saved(tmp_path / "b", config, run="b")
    both = find_saves(tmp_path / "a", tmp_path / "b")
    with pytest.raises(SaveError, match=r"several runs \(a in .*/a/0.0/stage-0, b in "):
        saves_of_one_run(both, excluded="c")
    assert {save.run for save in saves_of_one_run(both, excluded="b")} == {"a"}
    with pytest.raises(SaveError, match="no save of a run other than b: name folders"):
        saves_of_one_run(find_saves(tmp_path / "b"), excluded="b")


def test_nodes_of_the_old_division_are_refused_what_is_of_the_new(tmp_path: Path) -> None:
    """Nodes of the new run are refused saves of the old one, too."""
    saved(tmp_path / "old", model(4, 2))
    regrouped(find_saves(tmp_path / "old"), model(4, 4), tmp_path / "new")
    for folder, run in ((tmp_path / "old" / "1.0", "new"), (tmp_path / "new", "old")):
        with pytest.raises(SaveError, match="planaria regroup"):
            opened(folder, run, model(4, 2), 1)

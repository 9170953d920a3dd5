"""Where a run's saves are found, and what becomes of them when it goes on in other numbers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from planaria.bootstrap.admission import key_beside
from planaria.bootstrap.journal import Journal
from planaria.bootstrap.registry_pb2 import View
from planaria.bootstrap.views import sign
from planaria.node.launch.resolve import resolve
from planaria.node.local import resume as module
from planaria.node.local.losses import places
from planaria.node.local.resume import (
    JOURNAL,
    RUN_FILE,
    KeptRun,
    SwarmError,
    changed,
    put_in_place,
    take_over,
)
from planaria.node.run_file import RunFile, RunFileError, dumps, load, loads, override
from planaria.node.state.saves import find_saves
from planaria.node.state.stage_state import Age
from tests.node.state.small_saves import opened, state

RUN = resolve(
    loads("""
data.path = "on another machine"
[model]
dim = 8
heads = 2
hidden = 8
layers = 4
stages = 2
vocabulary = 9
context = 4
""")
)


@pytest.fixture(autouse=True)
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def begun(tmp_path: Path, run: RunFile = RUN) -> KeptRun:
    """A run with its folder, that has seen 7 views."""
    kept = KeptRun(run, tmp_path / "out", tmp_path / "saves")
    (kept.out / "logs").mkdir(parents=True)
    (kept.out / RUN_FILE).write_text(dumps(run))
    path = kept.out / "logs" / JOURNAL
    key, view = key_beside(path), View(run=kept.id, number=7, committed=9)
    sign(view, key, View())
    with Journal(path, kept.id, key) as journal:
        journal.append(view)
    assert kept.save_dir is not None
    kept.save_dir.mkdir()
    return kept


def save(kept: KeptRun, slot: str, stage: int, *steps: int) -> None:
    assert kept.save_dir is not None
    saves = opened(kept.save_dir / slot, kept.id, kept.run.model.config, stage)
    for step in steps:
        saves.write(state(kept.run.model.config, stage, step))


def at(kept: KeptRun, slot: str, stage: int) -> list[Age]:
    assert kept.saves is not None
    return opened(kept.saves / slot, kept.id, kept.run.model.config, stage).sound()


def slots_of(kept: KeptRun) -> list[str]:
    return places(kept.run.model.config.stages, kept.run.swarm.replicas)


# In the same numbers


def test_what_nodes_have_had_that_are_no_more_is_found(tmp_path: Path) -> None:
    """One had a second seat; one was in a place that nobody takes now."""
    kept = begun(tmp_path)
    save(kept, "0.0", 0, 4, 8)
    save(kept, "1.0", 1, 4)
    save(kept, "1.3", 1, 4, 8)
    save(kept, "0.0", 2, 4, 8)
    copies = put_in_place(kept, slots_of(kept))
    assert [at(kept, f"{stage}.0", stage) for stage in (0, 1, 2)] == [
        [Age(1, 8), Age(1, 4)],
        [Age(1, 8), Age(1, 4)],
        [Age(1, 8)],
    ]
    assert [sentence.split(" is copied to ")[1] for sentence in copies] == [
        str(tmp_path / "saves" / "1.0"),
        str(tmp_path / "saves" / "2.0"),
    ]
    assert put_in_place(kept, slots_of(kept)) == []


def test_what_is_put_in_a_folder_takes_nothing_away(tmp_path: Path) -> None:
    """Another stage has nothing as new as what is there."""
    kept = begun(tmp_path)
    save(kept, "0.0", 0, 4)
    save(kept, "1.0", 1, 12, 16, 20, 24, 28)
    save(kept, "1.9", 1, 4)
    save(kept, "2.0", 2, 4)
    assert len(put_in_place(kept, slots_of(kept))) == 1
    assert Age(1, 4) in at(kept, "1.0", 1)
    assert len(at(kept, "1.0", 1)) == 6


def test_a_shared_folder_is_everybodys(tmp_path: Path) -> None:
    shared = {"policy": "checkpoint", "checkpoint": {"dir": str(tmp_path / "shared")}}
    kept = begun(tmp_path, override(RUN, recovery=shared))._replace(save_dir=None)
    for stage in range(3):
        config = RUN.model.config
        opened(tmp_path / "shared", kept.id, config, stage).write(state(config, stage))
    assert put_in_place(kept, slots_of(kept)) == []


def test_before_anything_was_saved_it_begins_anew_and_says_so(tmp_path: Path) -> None:
    kept = begun(tmp_path)
    save(kept, "0.0", 0)
    (message,) = put_in_place(kept, slots_of(kept))
    assert "starts from the beginning" in message


def test_a_folder_for_saves_that_has_gone_is_missed(tmp_path: Path) -> None:
    """Else a run would begin anew because a disk wasn't mounted."""
    kept = begun(tmp_path)
    ledger = tmp_path / "out/logs/ledger-node-0.0-12ab34-0.jsonl"
    ledger.parent.mkdir(parents=True, exist_ok=True)
    ledger.write_text('{"ledger": 1}\n')
    assert kept.find() == []
    ledger.write_text('{"ledger": 1}\n{"step": 1}\n')
    with pytest.raises(SwarmError, match=r"no saves under .*/saves, .* mount the disk"):
        put_in_place(kept, slots_of(kept))


def test_a_run_file_that_was_changed_by_hand_is_told(tmp_path: Path) -> None:
    kept = begun(tmp_path)
    save(kept, "0.0", 0, 4)
    other = kept._replace(run=override(RUN, model__stages=4))
    with pytest.raises(SwarmError, match=f"to the run {kept.id}, .* restore .* --stages"):
        put_in_place(other, slots_of(other))


# In other numbers


def test_the_model_stays_whatever_the_number_of_stages() -> None:
    preset = override(RUN, model__layers=None)
    preset = loads(dumps(preset).replace("layers = 4\n", ""))
    assert preset.model.config.layers == 4  # as the preset has it
    new = changed(preset, stages=1, replicas=3)
    assert new.model.config == replace(preset.model.config, stages=1)
    assert new.swarm.replicas == 3
    assert changed(preset, stages=2, replicas=1) == preset == changed(preset, None, None)


@pytest.mark.parametrize("stages", [0, 3, 8])
def test_layers_that_do_not_divide_are_refused(stages: int) -> None:
    says = rf"--stages {stages}: the model has 4 layers, .* choose 1, 2, 4$"
    with pytest.raises(SwarmError, match=says):
        changed(RUN, stages, None)


def test_a_policy_that_needs_more_stages_is_refused() -> None:
    run = override(RUN, model__stages=4, recovery__policy="checkfree+")
    with pytest.raises(RunFileError, match=r"needs 4 of them, and model.stages = 2"):
        changed(run, 2, None)


@pytest.mark.parametrize(("stages", "replicas"), [(4, 1), (1, 2), (None, 2)])
def test_a_run_goes_on_in_other_numbers(tmp_path: Path, stages: int | None, replicas: int) -> None:
    kept = begun(tmp_path)
    for stage in range(3):
        save(kept, f"{stage}.0", stage, 4, 8)
    new = kept._replace(run=changed(RUN, stages, replicas))
    assert take_over(kept, new, slots_of(new)).step == 8
    assert load(new.out / RUN_FILE) == new.run
    for stage in range((stages or 2) + 1):
        assert at(new, f"{stage}.0", stage) == [Age(2, 8)]
    with new.open_journal() as journal:
        assert journal.view is not None
        assert (journal.view.number, journal.view.committed) == (8, 9)
        assert not journal.view.members
    assert put_in_place(new, slots_of(new)) == []


def test_there_and_back_the_newest_counts(tmp_path: Path) -> None:
    """What the first division had saved is still there, and of no use."""
    first = begun(tmp_path)
    for stage in range(3):
        save(first, f"{stage}.0", stage, 4, 8)
    save(first, "1.0", 1, 12)
    four = first._replace(run=changed(RUN, 4, None))
    take_over(first, four, slots_of(four))
    for _ in range(2):
        again = four._replace(run=changed(four.run, 2, None))
        take_over(four, again, slots_of(again))
        take_over(again, four, slots_of(four))
    assert again.id == first.id
    assert again.saves != first.save_dir
    assert [at(four, f"{stage}.0", stage) for stage in range(5)] == [[Age(6, 8)]] * 5
    with four.open_journal() as journal:
        assert journal.view is not None
        assert journal.view.number == 7 + 5


@pytest.mark.parametrize(
    "when", ["planaria.node.state.regroup.regroup", f"{module.__name__}.replace_file"]
)
def test_what_is_cut_short_leaves_the_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    kept = begun(tmp_path)
    for stage in range(3):
        save(kept, f"{stage}.0", stage, 8)
    new = kept._replace(run=changed(RUN, 4, 2))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    with monkeypatch.context() as patch:
        patch.setattr(when, full)
        with pytest.raises(SwarmError, match="somewhere: No space left on device; free space"):
            take_over(kept, new, slots_of(new))
    assert load(kept.out / RUN_FILE) == kept.run
    assert put_in_place(kept, slots_of(kept)) == []
    assert at(kept, "1.0", 1) == [Age(1, 8)]
    assert take_over(kept, new, slots_of(new)).step == 8


def test_a_stage_without_a_save_is_named(tmp_path: Path) -> None:
    kept = begun(tmp_path)
    for stage in (0, 2):
        save(kept, f"{stage}.0", stage, 8)
    new = kept._replace(run=changed(RUN, 4, None))
    with pytest.raises(SwarmError, match=r"can't be resumed: .* nothing of stage 1"):
        take_over(kept, new, slots_of(new))
    with pytest.raises(SwarmError, match=r"there is no save of the run under .*/saves"):
        bare = begun(tmp_path / "bare")
        save(bare, "0.0", 0)
        take_over(bare, bare._replace(run=new.run), slots_of(new))


def test_a_run_that_still_trains_is_left_alone(tmp_path: Path) -> None:
    kept = begun(tmp_path)
    save(kept, "0.0", 0, 8)
    new = kept._replace(run=changed(RUN, 4, None))
    running = kept.open_journal()
    with pytest.raises(SwarmError, match="in use by another registry"):
        take_over(kept, new, slots_of(new))
    running.close()


def test_checkpoints_go_to_a_folder_of_their_own(tmp_path: Path) -> None:
    shared = {"policy": "checkpoint", "checkpoint": {"dir": str(tmp_path / "shared")}}
    kept = begun(tmp_path, override(RUN, recovery=shared))
    for stage in range(3):
        config = RUN.model.config
        opened(tmp_path / "shared", kept.id, config, stage).write(state(config, stage))
    new = kept._replace(run=changed(kept.run, 4, None))
    take_over(kept, new, slots_of(new))
    assert new.checkpoints == tmp_path / "shared-4x1"
    assert len(find_saves(new.checkpoints)) == 5
    assert changed(new.run, 2, 3).recovery.checkpoint.dir == str(tmp_path / "shared-2x3")
    assert new.saves != kept.saves  # nodes with --save-dir begin there

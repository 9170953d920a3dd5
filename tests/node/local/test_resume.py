"""Tests of where a run's saves are found, and of runs resumed with other numbers of nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planaria.bootstrap.admission import key_beside
from planaria.bootstrap.journal import Journal
from planaria.bootstrap.registry_pb2 import View
from planaria.bootstrap.views import sign
from planaria.node.data.batches import Batch, Batches
from planaria.node.data.corpus import read_index
from planaria.node.hugging_face.begin_from_model import stage_digests
from planaria.node.launch.errors import SwarmError
from planaria.node.launch.resolve import resolve
from planaria.node.launch.settings import changed_run, describe_change, differences
from planaria.node.local import resume as module
from planaria.node.local.loss_schedule import places
from planaria.node.local.plan import SwarmPlan, copy_run, read_plan, resume_from, write_plan
from planaria.node.local.resume import (
    JOURNAL,
    RUN_FILE,
    KeptRun,
    continued_run,
    place_saves,
    replace_run,
    with_settings_of,
)
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.run_file import (
    ChangeSection,
    RunFile,
    RunFileError,
    dumps,
    from_fields,
    load,
    loads,
    override,
)
from planaria.node.state.saves import find_saves
from planaria.node.state.stage_state import Age
from tests.node.hugging_face.test_folders import exported
from tests.node.stage.shapes import GROUPED
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


pytestmark = pytest.mark.usefixtures("unflushed")


def begun(tmp_path: Path, *saved: int, run: RunFile = RUN) -> KeptRun:
    """Return a run with a folder, a journal with view 7, and saves of these steps at each stage."""
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
    for stage in range(run.config.stages + 1) if saved else ():
        save(kept, f"{stage}.0", stage, *saved)
    return kept


def save(kept: KeptRun, slot: str, stage: int, *steps: int) -> None:
    assert kept.save_dir is not None
    saves = opened(kept.save_dir / slot, kept.id, kept.run.model.config, stage)
    for step in steps:
        saves.write(state(kept.run.model.config, stage, step))


def at(kept: KeptRun, slot: str, stage: int) -> list[Age]:
    assert kept.saves is not None
    saves = opened(kept.saves / slot, kept.id, kept.run.model.config, stage)
    assert not saves.damaged()
    return saves.listed()


def slots_of(kept: KeptRun) -> list[str]:
    return places(kept.run.model.config.stages, kept.run.swarm.replicas)


def taken_over(kept: KeptRun, new: KeptRun, **how: int) -> KeptRun:
    return replace_run(kept, new, slots_of(new), **how)


# With the same numbers of nodes


def test_what_nodes_have_had_that_are_no_more_is_found(tmp_path: Path) -> None:
    """One node had a second seat, and one had a slot that no node has now."""
    kept = begun(tmp_path)
    save(kept, "0.0", 0, 4, 8)
    save(kept, "1.0", 1, 4)
    save(kept, "1.3", 1, 4, 8)
    save(kept, "0.0", 2, 4, 8)
    copies = place_saves(kept, slots_of(kept))
    assert [at(kept, f"{stage}.0", stage) for stage in (0, 1, 2)] == [
        [Age(1, 8), Age(1, 4)],
        [Age(1, 8), Age(1, 4)],
        [Age(1, 8)],
    ]
    assert [sentence.split(" is copied to ")[1] for sentence in copies] == [
        str(tmp_path / "saves" / "1.0"),
        str(tmp_path / "saves" / "2.0"),
    ]
    assert place_saves(kept, slots_of(kept)) == []


def test_what_is_put_in_a_folder_takes_nothing_away(tmp_path: Path) -> None:
    """The copied save is older than all others in the folder, none of which is removed."""
    kept = begun(tmp_path)
    save(kept, "0.0", 0, 4)
    save(kept, "1.0", 1, 12, 16, 20, 24, 28)
    save(kept, "1.9", 1, 4)
    save(kept, "2.0", 2, 4)
    assert len(place_saves(kept, slots_of(kept))) == 1
    assert Age(1, 4) in at(kept, "1.0", 1)
    assert len(at(kept, "1.0", 1)) == 6


def shared_at(tmp_path: Path) -> dict[str, Any]:
    return {"policy": "checkpoint", "checkpoint": {"dir": str(tmp_path / "shared")}}


def with_checkpoints(tmp_path: Path) -> KeptRun:
    """Return a run with a checkpoint of each stage in a shared folder."""
    kept = begun(tmp_path, run=override(RUN, recovery=shared_at(tmp_path)))
    for stage in range(3):
        config = RUN.model.config
        opened(tmp_path / "shared", kept.id, config, stage).write(state(config, stage))
    return kept


def test_a_shared_folder_is_everybodys(tmp_path: Path) -> None:
    kept = with_checkpoints(tmp_path)._replace(save_dir=None)
    assert place_saves(kept, slots_of(kept)) == []


def test_before_anything_was_saved_it_begins_anew_and_says_so(tmp_path: Path) -> None:
    kept = begun(tmp_path)
    save(kept, "0.0", 0)
    (message,) = place_saves(kept, slots_of(kept))
    assert "starts from the beginning" in message


def test_a_folder_for_saves_that_has_gone_is_missed(tmp_path: Path) -> None:
    """Otherwise a run would begin anew because a disk isn't mounted."""
    kept = begun(tmp_path)
    ledger = tmp_path / "out/logs/ledger-node-0.0-12ab34-0.jsonl"
    ledger.parent.mkdir(parents=True, exist_ok=True)
    ledger.write_text('{"ledger": 1}\n')
    assert kept.find() == []
    ledger.write_text('{"ledger": 1}\n{"step": 1}\n')
    with pytest.raises(SwarmError, match=r"no saves under .*/saves, .* mount the disk"):
        place_saves(kept, slots_of(kept))


def test_a_run_file_that_was_changed_by_hand_is_told(tmp_path: Path) -> None:
    kept = begun(tmp_path)
    save(kept, "0.0", 0, 4)
    other = kept._replace(run=override(RUN, model__stages=4))
    with pytest.raises(SwarmError, match=f"to the run {kept.id}, .* restore .* --stages"):
        place_saves(other, slots_of(other))


# With other settings


def differently(kept: KeptRun, **changes: Any) -> KeptRun:
    return kept._replace(run=continued_run(kept, override(kept.run, **changes)))


def test_without_another_value_it_is_the_same_run(tmp_path: Path) -> None:
    kept = begun(tmp_path)
    assert differently(kept, model__stages=2, swarm__replicas=1) == kept == differently(kept)
    assert with_settings_of(kept.run, kept.run) == kept.run


def test_the_model_stays_whatever_the_number_of_stages(tmp_path: Path) -> None:
    new = differently(begun(tmp_path), model__stages=1, swarm__replicas=3).run
    assert new.model.config == replace(RUN.model.config, stages=1)
    assert new.swarm.replicas == 3


@pytest.mark.parametrize("key", ["seed", "name", "model__dim", "model__context", "data__content"])
def test_what_makes_weights_and_data_stays(tmp_path: Path, key: str) -> None:
    value: object = {"name": "other", "data__content": "c0ffee"}.get(key, 16)
    dotted = key.replace("__", ".")
    with pytest.raises(RunFileError, match=rf"^{dotted} = {value}, .* model.from$"):
        differently(begun(tmp_path), **{key: value})


def test_adapters_are_not_changed(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"^training.lora.alpha = 8.0, and the run has none: "):
        differently(begun(tmp_path), training__lora={"alpha": 8})


def test_a_run_file_gives_its_settings_and_no_other_model(tmp_path: Path) -> None:
    file = loads("steps = 70\n[training]\nbatch = 32\n[swarm]\nreplicas = 2")
    kept = begun(tmp_path)
    new = with_settings_of(file, kept.run)
    assert differences(kept.run, new) == {
        "steps": (100, 70),
        "swarm.replicas": (1, 2),
        "training.batch": (16, 32),
        "training.warmup": (10, 7),
    }
    assert with_settings_of(loads("[model]\nstages = 4\ndim = 8"), kept.run).model.stages == 4
    for text in ("seed = 1", "[model]\ndim = 16", '[model]\npreset = "small"'):
        with pytest.raises(RunFileError, match="would be others"):
            with_settings_of(loads(text), kept.run)


def test_a_run_file_that_names_other_data_is_refused(tmp_path: Path, data: Path) -> None:
    run = begun(tmp_path, run=resolve(override(RUN, data__content="c0ffee"))).run
    with pytest.raises(RunFileError, match=r"^data.content = .* and the run has c0ffee"):
        with_settings_of(override(RunFile(), data__path=str(data)), run)


def test_a_policy_that_needs_more_stages_is_refused(tmp_path: Path) -> None:
    kept = begun(tmp_path, run=override(RUN, model__stages=4, recovery__policy="checkfree+"))
    with pytest.raises(RunFileError, match=r"needs 4 of them, and model.stages = 2"):
        differently(kept, model__stages=2)


@pytest.mark.parametrize(("stages", "replicas"), [(4, 1), (1, 2), ([1, 3], 1), ([1, 1, 2], 2)])
def test_a_run_goes_on_in_other_numbers(
    tmp_path: Path, stages: int | list[int], replicas: int
) -> None:
    kept = begun(tmp_path, 4, 8)
    new = differently(kept, model__stages=stages, swarm__replicas=replicas)
    new = taken_over(kept, new)
    was = ["model.stages=2", *(["swarm.replicas=1"] if replicas == 2 else [])]
    assert new.run.changes == (ChangeSection(step=8, was=was, anew=True),)
    assert new.id != kept.id
    assert load(new.out / RUN_FILE) == new.run
    for stage in range(new.run.config.stages + 1):
        assert at(new, f"{stage}.0", stage) == [Age(2, 8)]
    with new.open_journal() as journal:
        assert journal.view is not None
        assert (journal.view.number, journal.view.committed) == (8, 9)
        assert not journal.view.members
    assert place_saves(new, slots_of(new)) == []


@pytest.mark.parametrize("stages", [2, [1, 2, 3]])
def test_the_checkpoints_digests_are_those_of_the_new_stages(
    tmp_path: Path, stages: int | list[int]
) -> None:
    exported(tmp_path / "model", GROUPED)
    model = {"from": str(tmp_path / "model"), "stages": 3, "context": 24}
    run = resolve(from_fields({"model": model, "data": {"path": "elsewhere"}}))
    kept = begun(tmp_path, 8, run=run)
    new = differently(kept, model__stages=stages)
    new = taken_over(kept, new)
    digests = stage_digests(Checkpoint.open(tmp_path / "model"), new.run.config)
    assert new.run.model.content == new.run.original.model.content == digests
    assert len(digests) == new.run.config.stages + 1
    assert new.run.changes[0].was == ("model.stages=3",)


def test_with_other_settings_it_is_the_same_run_and_has_its_saves(tmp_path: Path) -> None:
    kept = begun(tmp_path, 8)
    for values in ({"steps": 200, "swarm__replicas": 2}, {"training__lr": 0.25}, {"steps": 100}):
        new = differently(kept, **values)
        before, kept = kept, taken_over(kept, new)
        assert (kept.id, kept.journal, kept.saves) == (before.id, before.journal, before.saves)
        assert load(kept.out / RUN_FILE) == kept.run
    assert [change.step for change in kept.run.changes] == [8, 8, 8]
    assert kept.run.changes[0].was == ("steps=100", "swarm.replicas=1")
    assert kept.run.original == RUN
    assert [at(kept, f"{stage}.0", stage) for stage in range(3)] == [[Age(1, 8)]] * 3


def test_any_setting_goes_through_the_list_of_changes_unchanged(tmp_path: Path) -> None:
    texts = ("", "two\nlines", 'a "quote" = # and\\n')
    other = {"prompts": texts, "betas": (0.5, 0.25), "schedule": "wsd", "rewarm": 7, "lr": 1e-7}
    new = differently(begun(tmp_path), training=RUN.training.model_dump() | other).run
    assert loads(dumps(changed_run(RUN, new, 3))).original == RUN
    assert loads(dumps(changed_run(new, RUN, 3))).original == new


def test_another_batch_goes_on_where_the_data_was(tmp_path: Path) -> None:
    kept = begun(tmp_path, 8)
    new = differently(kept, training__batch=24, training__microbatch=3)
    kept, new = new, taken_over(kept, new)
    assert new.run.batches == Batches(24, 3, (Batch(8, 16, 2),))
    sentences = describe_change(RUN, new.run)
    assert sentences == [
        "from step 9 on:",
        "  training.batch = 24 (was 16)",
        "  training.microbatch = 3 (was 2)",
    ]


def test_another_rate_is_said(tmp_path: Path) -> None:
    run = override(RUN, training__lr=1e-3, steps=100, training__schedule="constant")
    new = changed_run(run, override(run, training__lr=2e-3), 50)
    rate = "the learning rate at step 51 goes from 0.001 to "
    assert describe_change(run, new)[1:] == [
        "  training.lr = 0.002 (was 0.001)",
        f"{rate}0.002; training.rewarm=50 makes that 50 steps long",
    ]
    assert describe_change(run, override(new, training__rewarm=10))[-1] == f"{rate}0.0002"
    back = changed_run(new, override(new, training__lr=1e-3), 50)
    assert describe_change(new, back)[-1].endswith("from 0.002 to 0.001")


def test_it_goes_back_to_what_was_saved_under_whatever_settings(tmp_path: Path) -> None:
    first = begun(tmp_path, 4, 8, 12)
    save(first, "1.0", 1, 16)
    wanted = differently(first, training__batch=24)
    new = taken_over(first, wanted)
    with pytest.raises(SwarmError, match=r"not each stage has saved step 16; .* 4, 8, 12$"):
        new.find_at(16)
    for step in (8, 12):
        again = new._replace(run=continued_run(new, new.run, goes_back=True))
        again = taken_over(new, again, at=step)
        assert again.run.changed_at == step
        assert again.run.batches.at_step(step).samples == 16
        assert again.run.batches.at_step(13).samples == 24
        assert again.id != new.id
        assert at(again, "1.0", 1) == [Age(2, step)]


def test_it_goes_back_to_nothing_where_the_save_folder_is_missing(tmp_path: Path) -> None:
    kept = begun(tmp_path)
    with pytest.raises(SwarmError, match=rf"step 8; .* none under {tmp_path / 'saves'}$"):
        kept.find_at(8)


@pytest.mark.parametrize("place", ["out/saves", "elsewhere"])
def test_a_copy_goes_on_and_the_run_stays_as_it_was(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Data is found where the environment says, and other settings of [notify] are no change."""
    run = override(RUN, data__content=read_index(data).content)
    kept = begun(tmp_path, run=run)._replace(save_dir=tmp_path / place)
    for stage in range(3):
        save(kept, f"{stage}.0", stage, 4, 8)
    write_plan(SwarmPlan(run, kept.out, kept.save_dir, "cpu"))
    with kept.open_journal():
        pass  # makes the file of its lock
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    new = tmp_path / "new"
    plan = read_plan(kept.out)
    wanted = override(run, notify__command="cat")
    monkeypatch.setenv("PLANARIA_DATA", str(data))
    plan, messages = resume_from(plan._replace(out=new, run=wanted), plan, slots_of(kept))
    assert messages == [f"the run is copied to {new}, and goes on there"]
    assert {path: path.read_bytes() for path in before} == before
    assert plan.data == [str(data)]
    copy = read_plan(new)
    assert (copy.run, copy.out, copy.save_dir) == (wanted, new, new / "saves")
    assert copy.kept.id == kept.id and at(copy.kept, "1.0", 1) == [Age(1, 8), Age(1, 4)]
    assert copy.kept.journal.is_relative_to(new)
    saves = [path for path in new.rglob("step-*") if path.is_file()]
    assert len(saves) == 6 and {path.stat().st_nlink for path in saves} == {1}


def test_a_copy_that_would_not_be_one_is_refused(tmp_path: Path) -> None:
    kept = begun(tmp_path)
    plan = SwarmPlan(kept.run, kept.out, kept.save_dir, "cpu")
    (tmp_path / "file").touch()
    for out in (kept.out / "logs/new", kept.save_dir, tmp_path / "file", tmp_path):
        with pytest.raises(SwarmError, match=r"can't have a copy of the run: name a new or empty"):
            copy_run(plan, out)
    with kept.open_journal(), pytest.raises(SwarmError, match="in use by another registry"):
        copy_run(plan, tmp_path / "new")
    plan = plan._replace(run=override(RUN, recovery=shared_at(tmp_path)))
    with pytest.raises(SwarmError, match=r"shared for checkpoints, so the copy would write there"):
        copy_run(plan, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_fewer_steps_than_there_were_are_refused(tmp_path: Path) -> None:
    kept = begun(tmp_path, 8)
    new = differently(kept, steps=7)
    with pytest.raises(SwarmError, match=r"steps = 7: the run is at step 8 already"):
        taken_over(kept, new)
    assert load(kept.out / RUN_FILE) == kept.run


def test_there_and_back_the_newest_counts(tmp_path: Path) -> None:
    """The saves of the first division are still there, but aren't used."""
    first = kept = begun(tmp_path, 4, 8)
    save(first, "1.0", 1, 12)
    for stages in (4, 2, 4, 2, 4):
        new = differently(kept, model__stages=stages)
        kept = taken_over(kept, new)
    assert kept.saves != first.save_dir
    assert [at(kept, f"{stage}.0", stage) for stage in range(5)] == [[Age(6, 8)]] * 5
    with kept.open_journal() as journal:
        assert journal.view is not None
        assert journal.view.number == 7 + 5


@pytest.mark.parametrize(
    "when", ["planaria.node.state.regrouped_saves.rewrite_saves", f"{module.__name__}.replace_file"]
)
def test_what_is_cut_short_leaves_the_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    kept = begun(tmp_path, 8)
    new = differently(kept, model__stages=4, swarm__replicas=2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    with monkeypatch.context() as patch:
        patch.setattr(when, full)
        with pytest.raises(SwarmError, match="somewhere: No space left on device; free space"):
            taken_over(kept, new)
    assert load(kept.out / RUN_FILE) == kept.run
    assert place_saves(kept, slots_of(kept)) == []
    assert at(kept, "1.0", 1) == [Age(1, 8)]
    assert taken_over(kept, new).run.changed_at == 8


def test_a_stage_without_a_save_is_named(tmp_path: Path) -> None:
    kept = begun(tmp_path)
    for stage in (0, 2):
        save(kept, f"{stage}.0", stage, 8)
    new = differently(kept, model__stages=4)
    with pytest.raises(SwarmError, match=r"can't be resumed: .* nothing of stage 1"):
        taken_over(kept, new)
    with pytest.raises(SwarmError, match=r"there is no save of the run under .*/saves"):
        bare = begun(tmp_path / "bare")
        save(bare, "0.0", 0)
        replace_run(bare, bare._replace(run=new.run), slots_of(new))


def test_a_run_that_still_trains_is_left_alone(tmp_path: Path) -> None:
    kept = begun(tmp_path)
    save(kept, "0.0", 0, 8)
    new = differently(kept, model__stages=4)
    running = kept.open_journal()
    with pytest.raises(SwarmError, match="in use by another registry"):
        taken_over(kept, new)
    running.close()


def test_checkpoints_go_to_a_folder_of_their_own(tmp_path: Path) -> None:
    kept = with_checkpoints(tmp_path)
    new = differently(kept, model__stages=4)
    new = taken_over(kept, new)
    assert new.checkpoints == tmp_path / "shared-change1"
    assert len(find_saves(new.checkpoints)) == 5
    again = differently(new, model__stages=2)
    assert again.checkpoints == tmp_path / "shared-change2"
    assert new.saves != kept.saves  # for nodes with --save-dir

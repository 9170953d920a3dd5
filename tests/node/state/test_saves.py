"""Saves of stages on disk. As a script, this file forks writers and kills them (see `main`)."""

import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from planaria.bootstrap.files import flush
from planaria.node.model.modules import build_stage
from planaria.node.model.shape import model_config
from planaria.node.run_file import ModelSection
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.state import save_file, saves_on_disk
from planaria.node.state import saves as saves_of_a_stage
from planaria.node.state.save_file import Contents
from planaria.node.state.saves import Saves, file_name, find_saves, saved_run
from planaria.node.state.saves_on_disk import SavesOnDisk
from planaria.node.state.stage_state import Age, SaveError, StageState, StateId
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import stage_pb2 as pb
from tests.node.state.small_saves import flat

RUN = "demo-1f"
STAGE = 3
NAMES = ("weights", "first_moment", "second_moment")


def state(
    step: int, lineage: int = 0, values: int = 5, stage: int = STAGE, **changed: Any
) -> StageState:
    generator = torch.Generator().manual_seed(100 * lineage + step)
    last = pb.Commit(
        step=step, ballot=pb.Ballot(view=3, attempt=step), loss=4.25, clip_scale=[1.0, 0.5]
    )
    given = StageState(
        id=StateId.after(last, stage, lineage, step),
        omega=step / 3,
        boosted_at=2,
        optimizer_step=step // 2,
        last=last,
        tensors={name: torch.randn(values, generator=generator) for name in NAMES},
    )
    return replace(given, **changed)


def opened(
    folder: Path, keep: int = 4, run: str = RUN, stage: int = STAGE, values: int = 5
) -> Saves:
    return Saves(folder, run, stage, keep, flat(values))


def same(state: StageState, other: StageState) -> bool:
    return (
        replace(state, tensors={}) == replace(other, tensors={})
        and list(state.tensors) == list(other.tensors)
        and all(map(torch.equal, state.tensors.values(), other.tensors.values()))
    )


def written(folder: Path, *states: StageState, keep: int = 4) -> Saves:
    saves = opened(folder, keep, values=max(len(state.tensors["weights"]) for state in states))
    for each in states:
        saves.write(each)
    return saves


def sound(saves: Saves) -> list[Age]:
    damaged = saves.damaged()
    return [save for save in saves.listed() if save not in damaged]


def temporaries(saves: Saves) -> list[Path]:
    return list(saves.folder.glob(".*"))


# What is written comes back


def test_a_save_comes_back_as_it_was_though_it_is_written_twice(tmp_path: Path) -> None:
    given = state(40, lineage=2)
    saves = written(tmp_path, given, given)
    assert saves.listed() == sound(saves) == [Age(lineage=2, step=40)]
    assert same(saves.load(Age(2, 40)), given)
    latest, save = sorted(saves.folder.iterdir())
    assert (latest.name, save.name) == ("latest", "step-00000040-2.safetensors")
    assert latest.read_text() == "step-00000040-2.safetensors\n"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_any_reader_finds_parameters_as_hugging_face_has_them(tmp_path: Path, family: Any) -> None:
    section = ModelSection(
        dim=8, heads=2, hidden=8, layers=4, stages=2, family=family, tied=family != "llama"
    )
    config = model_config(section, vocabulary=9)
    modules = {stage: build_stage(config, stage, seed=1) for stage in range(3)}
    tensors: dict[str, torch.Tensor] = {}
    for stage, built in modules.items():
        optimizer = StageOptimizer(built, torch.device("cpu"))
        optimizer.first_moment.normal_()
        given = state(4, stage=stage, tensors=dict(optimizer.state()))
        saves = Saves(tmp_path, RUN, stage, 4, Contents.of(config, stage))
        saves.write(given)
        assert same(saves.load(given.id.age), given)
        path = saves.folder / file_name(given.id.age)
        read = load_file(path)
        weights = {name: read[name] for name in Contents.of(config, stage).parameters}
        assert len(read) == 3 * len(weights)
        moments = [read[f"first_moment.{name}"].flatten() for name in weights]
        assert torch.equal(torch.cat(moments), optimizer.first_moment)
        tensors |= weights
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        assert json.loads(metadata["config"])["num_hidden_layers"] == 4
        assert (metadata["run"], metadata["stage"], metadata["step"]) == (RUN, str(stage), "4")
    parameters = [parameter for built in modules.values() for parameter in built.parameters()]
    assert all(map(torch.equal, tensors.values(), parameters))
    assert len(tensors) == len(parameters)


def test_the_format_stays(tmp_path: Path) -> None:
    header = (
        rb'{"__metadata__": {"format": "planaria-save-1", "run": "demo-1f", "stage": "3", '
        rb'"step": "40", "lineage": "2", "omega": "13.5", "boosted_at": "2", '
        rb'"optimizer_step": "20", "last": "CCgSBAgDEAgxAAAAAAAAEUA=", '
        rb'"tensors": "[[\"weights\", 2, \"28a0ba9c345d3723\"], '
        rb'[\"first_moment\", 2, \"38ceab2f710ec8b6\"]]", '
        rb'"parameters": "{\"norm.weight\": [1], \"head\": [1, 1]}", '
        rb'"config": "{\"stages\": 4}", "commit": "[3, 8]", "xxh3": "3cc387d796707fc1"}, '
        rb'"norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
        rb'"head": {"dtype": "F32", "shape": [1, 1], "data_offsets": [4, 8]}, '
        rb'"first_moment.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}, '
        rb'"first_moment.head": {"dtype": "F32", "shape": [1, 1], "data_offsets": [12, 16]}}'
    )
    header += b" " * (-len(header) % 8)
    values = b"\x00\x00\x80?\x00\x00\x00\xc0\x00\x00\x00?\x00\x00\x80>"
    last = pb.Commit(step=40, ballot=pb.Ballot(view=3, attempt=8), loss=4.25)
    tensors = {
        "weights": torch.tensor([1.0, -2.0]),
        "first_moment": torch.tensor([0.5, 0.25]),
    }
    given = StageState(StateId(STAGE, 2, 40, Ballot(3, 8)), tensors, 13.5, 2, last, 20)
    contents = Contents({"norm.weight": [1], "head": [1, 1]}, {"stages": 4})
    saves = Saves(tmp_path, RUN, STAGE, 4, contents)
    saves.write(given)
    path = saves.folder / "step-00000040-2.safetensors"
    assert path.read_bytes() == len(header).to_bytes(8, "little") + header + values
    assert same(opened(tmp_path).load(Age(2, 40)), given)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    run=st.text(max_size=20),
    omega=st.floats(min_value=0, allow_infinity=False, allow_nan=False),
    step=st.integers(0, 2**63 - 1),  # a name has room for it
    size=st.integers(0, 40),
    names=st.lists(st.text(max_size=10), max_size=4, unique=True),
)
def test_whatever_is_saved_comes_back_and_is_safetensors(
    tmp_path: Path,
    unflushed: None,
    run: str,
    omega: float,
    step: int,
    size: int,
    names: list[str],
) -> None:
    tensors = {name: torch.rand(size) for name in names}
    given = state(step, omega=omega, optimizer_step=step, tensors=tensors)
    folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    saves = opened(folder, run=run, values=size)
    saves.write(given)
    assert same(saves.load(Age(0, step)), given)
    read = load_file(saves.folder / file_name(given.id.age))
    assert len(read) == len(tensors)
    assert all(torch.equal(read[f"{name}.flat"], values) for name, values in tensors.items())


# Names, order, pruning


def test_the_newest_comes_first_and_foreign_names_are_left_alone(tmp_path: Path) -> None:
    saves = written(tmp_path, state(8), state(10), state(12, lineage=1))
    foreign = [
        "step-8-0.safetensors",
        "step-000000008-0.safetensors",
        "step-00000008-00.safetensors",
        "step-00000008-0.safetensors.bak",
        "step-٠٠٠٠٠٠٠٨-0.safetensors",
        "model.safetensors",
        "step-00000099-0.safetensors",
    ]
    for name in foreign[:-1]:
        (saves.folder / name).write_bytes(b"?")
    (saves.folder / foreign[-1]).mkdir()
    assert saves.listed() == [Age(1, 12), Age(0, 10), Age(0, 8)]
    saves.write(state(16, lineage=1))
    assert all((saves.folder / name).exists() for name in foreign)


def test_milestones_stay_unless_the_run_went_back_over_them(tmp_path: Path) -> None:
    saves = Saves(tmp_path, RUN, STAGE, 2, flat(5), milestones=8)
    for step in range(4, 36, 4):
        saves.write(state(step))
    assert [save.step for save in saves.listed()] == [32, 28, 24, 16, 8]
    saves.write(state(20, lineage=1))  # the run went back to 16
    assert saves.listed() == [Age(1, 20), Age(0, 16), Age(0, 8)]


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4))
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_newest_of_what_led_to_the_present_state_are_kept(
    tmp_path: Path, unflushed: None, moves: list[int], keep: int
) -> None:
    """Each move goes back by so many saves (0: by none), then trains four steps and saves."""
    saves = opened(tmp_path / f"{len(list(tmp_path.iterdir()))}", keep)
    kept: list[Age] = []  # newest first
    lineage = step = 0
    for back in moves:
        if 0 < back < len(kept):
            kept = kept[back:]
            lineage, step = lineage + 1, kept[0].step
        step += 4
        saves.write(state(step, lineage))
        kept = [Age(lineage, step), *kept][:keep]
        assert saves.listed() == kept


# Damage is found, named, and the save before is used


def check_refused(saves: Saves, save: Age, problem: str = "step-") -> None:
    with pytest.raises(SaveError, match=problem) as caught:
        saves.load(save)
    assert file_name(save) in str(caught.value)


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    good, bad = state(4), state(8)
    saves = Saves(tmp_path, RUN, STAGE, 4, Contents({"a": [2], "b.c": [1, 3]}, {"layers": 2}))
    saves.write(good)
    saves.write(bad)
    path = saves.folder / file_name(bad.id.age)
    whole = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for offset, byte in enumerate(whole):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), offset)
                check_refused(saves, bad.id.age)
            os.pwrite(file.fileno(), bytes([byte]), offset)
    assert same(saves.load(bad.id.age), bad)


@pytest.mark.parametrize("number", ["inf", "nan", "-1.0"])
def test_a_save_with_a_number_that_cannot_be_is_refused(tmp_path: Path, number: str) -> None:
    saves = written(tmp_path, state(4))
    (path,) = (file.path for file in find_saves(tmp_path))
    length = int.from_bytes(path.read_bytes()[:8], "little")
    fields = save_file._read_header(path, path.open("rb", buffering=0)) | {"omega": number}
    path.write_bytes(bytes(save_file.encode_header(fields)) + path.read_bytes()[8 + length :])
    check_refused(saves, Age(0, 4), f"its header has invalid values .*omega {number}")


@pytest.mark.parametrize("offset", [0, 12, -1])  # length, header, tensors
def test_a_damaged_save_is_named_and_the_one_before_is_used(
    tmp_path: Path, offset: int, caplog: pytest.LogCaptureFixture
) -> None:
    saves = written(tmp_path, state(4), state(8))
    path = saves.folder / "step-00000008-0.safetensors"
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    saves = opened(tmp_path)
    assert saves.listed() == [Age(0, 8), Age(0, 4)]
    assert sound(saves) == [Age(0, 4)]
    assert [(record.levelname, str(path) in record.message) for record in caplog.records] == [
        ("WARNING", True)
    ]


def test_no_more_is_read_for_damage_than_is_kept_besides_milestones(tmp_path: Path) -> None:
    saves = Saves(tmp_path, RUN, STAGE, 2, flat(5), milestones=4)
    for step in range(4, 24, 4):
        saves.write(state(step))
    for step in (8, 20):
        path = saves.folder / file_name(Age(0, step))
        *content, last = path.read_bytes()
        path.write_bytes(bytes([*content, last ^ 1]))
    assert saves.damaged() == {Age(0, 20)}
    check_refused(saves, Age(0, 8))


def test_a_header_is_read_once_until_the_file_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = written(tmp_path, state(4), state(8))
    ids = [saves.id_of(save) for save in saves.listed()]
    again = state(8, last=pb.Commit(step=8, ballot=pb.Ballot(view=4, attempt=1)))
    saves.write(again)
    opened_paths = []

    def open_save(path: Path) -> Any:
        opened_paths.append(path.name)
        return save_file.open_save(path)

    monkeypatch.setattr(saves_of_a_stage, "open_save", open_save)
    assert [saves.id_of(save).made for save in saves.listed()] == [Ballot(4, 1), ids[1].made]
    assert opened_paths == [file_name(Age(0, 8))]


def test_any_other_length_is_found(tmp_path: Path) -> None:
    saves = written(tmp_path, state(4))
    path = saves.folder / "step-00000004-0.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        check_refused(saves, Age(0, 4), "damaged")
    path.write_bytes(whole + b"\0")
    check_refused(saves, Age(0, 4), f"{len(whole) + 1} bytes instead of {len(whole)}")


def test_a_file_that_ends_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = written(tmp_path, state(4))
    path = saves.folder / "step-00000004-0.safetensors"
    original = save_file._read_header

    def read_and_cut(*arguments: Any) -> Any:
        fields = original(*arguments)
        os.truncate(path, path.stat().st_size - 7)
        return fields

    monkeypatch.setattr(save_file, "_read_header", read_and_cut)
    check_refused(saves, Age(0, 4), "ends 7 bytes too early")


def test_a_save_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    check_refused(opened(tmp_path), Age(0, 4), "No such file")


@pytest.mark.parametrize(
    ("elsewhere", "problem"),
    [
        ({"run": "other"}, "of the run other"),
        ({"stage": 4}, "of stage 4"),
        ({"step": 12}, "has step 12"),
        ({"lineage": 1}, "lineage 1"),
    ],
)
def test_a_save_in_the_wrong_place_is_refused(
    tmp_path: Path, elsewhere: dict[str, Any], problem: str
) -> None:
    saves = written(tmp_path / "here", state(4))
    run = elsewhere.pop("run", RUN)
    other = replace(state(8), id=replace(state(8).id, **elsewhere))
    misplaced = opened(tmp_path / "there", run=run, stage=other.id.stage)
    misplaced.write(other)
    (misplaced.folder / file_name(other.id.age)).rename(
        saves.folder / "step-00000008-0.safetensors"
    )
    assert sound(saves) == [Age(0, 4)]
    check_refused(saves, Age(0, 8), problem)


def test_a_folder_of_another_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    written(tmp_path, state(4))
    with pytest.raises(SaveError, match=r"of the run demo-1f, not of other: name another folder"):
        opened(tmp_path, run="other")
    assert sound(opened(tmp_path)) == [Age(0, 4)]


def test_a_folder_is_of_the_run_of_its_newest_save_that_can_be_read(tmp_path: Path) -> None:
    assert saved_run(tmp_path) == ""
    saves = written(tmp_path, state(4), state(8))
    assert saved_run(tmp_path) == RUN
    (saves.folder / file_name(Age(0, 8))).write_bytes(b"damaged")
    assert saved_run(tmp_path) == RUN
    (saves.folder / file_name(Age(0, 4))).unlink()
    assert saved_run(tmp_path) == ""


def test_saves_of_a_run_that_came_later_are_not_pruned(tmp_path: Path) -> None:
    mine, other = opened(tmp_path, keep=1), opened(tmp_path, keep=1, run="other")
    other.write(state(4))
    mine.write(state(8))
    assert other.listed() == [Age(0, 8), Age(0, 4)]


@pytest.mark.parametrize("content", [None, "step-00000099-0.safetensors\n", "\0\xff"])
def test_the_pointer_is_not_trusted(tmp_path: Path, content: str | None) -> None:
    saves = written(tmp_path, state(4), state(8))
    pointer = saves.folder / "latest"
    pointer.unlink()
    if content is not None:
        pointer.write_text(content)
    assert sound(opened(tmp_path)) == [Age(0, 8), Age(0, 4)]


def test_the_pointer_stays_at_the_newest(tmp_path: Path) -> None:
    fast, slow = opened(tmp_path), opened(tmp_path)
    fast.write(state(8))
    slow.write(state(4))
    assert (fast.folder / "latest").read_text() == "step-00000008-0.safetensors\n"


# Errors of the disk


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let writes beyond `size` bytes of any file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_power_cut_finds_each_thing_flushed_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "stage-3"
    done: list[str] = []
    fsync, rename = os.fsync, Path.replace

    def record_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        done.append(f"flush {path.name.rsplit('.', 2)[0] if path.suffix == '.tmp' else path.name}")

    def record_rename(path: Path, target: Path) -> Path:
        done.append(f"rename {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_rename)
    written(folder.parent, state(4))
    name = "step-00000004-0.safetensors"
    assert done == [
        f"flush {tmp_path.name}",  # the parent of the new folder
        "flush new",
        *(f"flush .{name}", f"rename {name}", "flush stage-3"),
        *("flush .latest", "rename latest", "flush stage-3"),
    ]


@pytest.mark.parametrize("operation", ["os.fsync", "fcntl.flock", "pathlib.Path.replace"])
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = written(tmp_path, state(4), state(8), keep=2)

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        patch.setattr(operation, fail)
        saves.write(state(12))
    assert sound(saves) == [Age(0, 8), Age(0, 4)]
    assert not temporaries(saves)
    saves.write(state(16))
    assert sound(saves) == [Age(0, 16), Age(0, 8)]


class Reports:
    def __init__(self) -> None:
        self.errors: list[str] = []
        self.saved: list[Age] = []

    def writer(self, saves: Saves, in_flight: int = 2) -> SavesOnDisk:
        return SavesOnDisk(
            saves,
            in_flight,
            on_loop=lambda call, argument: call(argument),
            saved=self.saved.append,
            failed=self.errors.append,
        )


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"omega": float("nan")}, "omega nan"),
        ({"omega": -1.0}, "omega -1"),
        ({"boosted_at": -1}, "boosted_at -1"),
    ],
)
def test_a_state_that_no_save_can_have_is_not_saved(
    tmp_path: Path, changed: dict[str, Any], complaint: str
) -> None:
    """Older saves would make room for one that can't be read."""
    saves = opened(tmp_path)
    with pytest.raises(ValueError, match=complaint):
        Reports().writer(saves).write(state(4, **changed))
    assert saves.listed() == []


def test_an_error_of_the_disk_is_reported_and_the_next_save_tried(tmp_path: Path) -> None:
    saves, reports = opened(tmp_path), Reports()
    for limit, step in ((1 << 20, 4), (500, 8), (1 << 20, 12)):
        writer = reports.writer(saves)
        with file_size_limit(limit):
            writer.write(state(step))
            writer.finish(60)
    assert reports.saved == [Age(0, 4), Age(0, 12)]
    assert sound(saves) == [Age(0, 12), Age(0, 4)]
    assert reports.errors == [
        f"saving step 8 of stage 3 in {saves.folder} failed: File too large; check the disk. "
        "Earlier saves stay, and the next one is tried"
    ]
    assert not temporaries(saves)


def test_a_folder_that_can_t_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SaveError, match=r"can't use .*/file/stage-3 for saves: .*name another"):
        opened(tmp_path / "file")


# The writer


def test_what_is_saved_is_the_state_at_that_moment(tmp_path: Path) -> None:
    saves, reports = opened(tmp_path, keep=9), Reports()
    writer = reports.writer(saves)
    given = [state(step) for step in (4, 8, 12, 16)]
    training = {name: torch.empty(5) for name in NAMES}
    for each in given:
        for name, values in training.items():
            values.copy_(each.tensors[name])
        writer.write(replace(each, tensors=training))
        for values in training.values():
            values.fill_(float("nan"))
        with writer._changed:
            assert writer._changed.wait_for(lambda: not writer._waiting, 60)
    writer.finish(60)
    assert all(same(saves.load(each.id.age), each) for each in given)
    assert reports.saved == [each.id.age for each in given]
    assert reports.errors == []
    assert writer.bytes_written == 4 * 3 * 5 * 4
    assert writer.critical_seconds > 0


class GatedSaves(Saves):
    """Saves that are written only once `gate` is set."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gate, self.begun = threading.Event(), threading.Event()

    def write(self, state: StageState) -> None:
        self.begun.set()
        assert self.gate.wait(60)
        super().write(state)


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[GatedSaves]:
    saves = GatedSaves(tmp_path, RUN, STAGE, 9, flat(5))
    yield saves
    saves.gate.set()


def test_training_never_waits_for_a_disk_and_what_it_leaves_out_is_counted(
    gated: GatedSaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(saves_on_disk, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    reports = Reports()
    writer = reports.writer(gated)
    for step, seconds in ((4, 0.0), (8, 1.0), (12, 1.0), (16, 1.0), (20, 2.5)):
        now[0] += seconds
        writer.write(state(step))
        assert gated.begun.wait(60)  # the write of step 4
    assert writer.left_out == 3
    assert reports.errors == [
        f"saving step {step} of stage 3 in {gated.folder} is left out ({count} so far): the disk "
        f"has not written the save of step 4 for {seconds} s; check it, or save less often"
        for step, count, seconds in ((12, 2, 3.0), (16, 3, 5.5))
    ]
    gated.gate.set()
    writer.finish(60)
    assert sound(gated) == [Age(0, 20), Age(0, 4)]  # the newest is not left out


def test_closing_names_a_last_step_that_was_left_out(gated: GatedSaves) -> None:
    reports = Reports()
    writer = reports.writer(gated, in_flight=1)
    writer.write(state(4))
    assert gated.begun.wait(60)
    writer.write(state(8))
    assert reports.errors == []
    writer.finish(0.0)
    assert ["step 4" in reports.errors[0], "step 8" in reports.errors[1]] == [True, True]


def test_a_state_that_is_saved_or_being_saved_is_not_written_again(gated: GatedSaves) -> None:
    reports = Reports()
    writer = reports.writer(gated, in_flight=1)
    for _ in range(3):
        writer.write(state(4))
    gated.gate.set()
    writer.finish(60)
    writer.write(state(4))
    assert reports.saved == [Age(0, 4)]
    assert reports.errors == []


def test_a_full_disk_is_reported_and_the_state_saved_again(tmp_path: Path) -> None:
    class FullOnce(Saves):
        tried = False

        def write(self, state: StageState) -> None:
            if not self.tried:
                self.tried = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().write(state)

    reports, saves = Reports(), FullOnce(tmp_path, RUN, STAGE, 9, flat(5))
    writer = reports.writer(saves, in_flight=1)
    writer.write(state(4))
    with writer._changed:
        assert writer._changed.wait_for(lambda: not writer._waiting, 60)
    writer.write(state(4))
    writer.finish(60)
    assert reports.saved == [Age(0, 4)]
    assert reports.errors == [
        f"saving step 4 of stage 3 in {saves.folder} failed: No space left on device; "
        "free space there. Earlier saves stay, and the next one is tried"
    ]


def test_what_waits_for_another_write_when_the_writer_is_closed_is_written_too(
    gated: GatedSaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Reports().writer(gated)
    writer.write(state(4))
    writer.write(state(8))
    wait_for = writer._changed.wait_for

    def opening(*arguments: Any) -> bool:
        gated.gate.set()
        return wait_for(*arguments)

    monkeypatch.setattr(writer._changed, "wait_for", opening)
    writer.finish(60)
    assert sound(gated) == [Age(0, 8), Age(0, 4)]


def test_closing_names_what_was_not_written_and_how_long_it_had(
    gated: GatedSaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(saves_on_disk, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    reports = Reports()
    writer = reports.writer(gated)
    writer.write(state(4))
    now[0] = 110.0
    writer.write(state(8))
    now[0] = 123.0
    writer.finish(0.0)
    where = f"of stage 3 in {gated.folder} failed: not on disk after"
    assert reports.errors == [f"saving step 4 {where} 23.0 s", f"saving step 8 {where} 13.0 s"]
    writer.write(state(12))
    assert "step 12" in reports.errors[-1]
    assert "closed" in reports.errors[-1]


# Processes that share a folder, and die


def test_what_a_dead_writer_left_is_removed_and_a_live_one_s_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = opened(tmp_path)
    left = saves.folder / ".step-00000004-0.safetensors.0123456789abcdef.tmp"
    left.write_bytes(b"half")
    original, seen = os.fsync, []

    def fsync(descriptor: int) -> None:
        here = threading.current_thread() is threading.main_thread()  # not an older test's writer
        if here and not seen:
            opened(tmp_path)  # as another process would
            seen.extend(temporaries(saves))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    saves.write(state(8))
    assert len(seen) == 1
    assert left not in seen
    assert sound(saves) == [Age(0, 8)]


def test_killed_writers_lose_no_save_and_replicas_that_share_a_folder_do_no_harm(
    tmp_path: Path,
) -> None:
    """Writers are killed at any line, and at any byte. All are forks of a process that has no other
    threads."""
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    at_lines, at_bytes, whole = json.loads(ended.stdout)
    assert at_lines > 30
    assert at_bytes > 20
    assert whole == 4
    saves = opened(tmp_path / "shared", keep=3)
    assert sound(saves) == [Age(0, 30), Age(0, 29), Age(0, 28)]
    assert all(same(saves.load(save), state(save.step)) for save in saves.listed())


def test_a_file_that_is_taken_for_a_dead_writers_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process opens the folder after a temporary file is made and before it is locked."""
    lock, taken = fcntl.flock, []

    def late(file: Any, how: int) -> None:
        if not taken:
            taken.append(file.name)
            Path(file.name).unlink()
        lock(file, how)

    saves = opened(tmp_path)
    monkeypatch.setattr(fcntl, "flock", late)
    saves.write(state(1))
    assert taken
    assert sound(saves) == [Age(0, 1)]
    assert not temporaries(saves)


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a child process, and return its id, which `os.waitpid` needs."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def killed(work: Callable[[], None]) -> bool:
    """Return whether a signal ended `work` in a child process. Raises if it failed otherwise."""
    _, status = os.waitpid(forked(work), 0)
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


def kill_at_line(number: int) -> None:
    """Kill this process before the `number`th line that it runs in code that writes to disk."""
    left = number
    functions = (Saves.write, Saves._put, Saves._prune, flush)
    disk = {function.__code__ for function in functions}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code not in disk:
            return None
        left -= event == "line"
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def kill_at_byte(size: int) -> None:
    """Kill this process when a file would grow beyond `size`."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def kill_writers(folder: Path, kill: Callable[[int], None], points: range) -> int:
    """Kill a writer at each of `points` until one survives. Returns how many were killed."""
    for died, point in enumerate(points):
        old, new = state(10 * point), state(10 * point + 4)
        written(folder, old, keep=2)

        def write(new: StageState = new, point: int = point) -> None:
            saves = opened(folder, keep=2)
            kill(point)
            saves.write(new)

        if not killed(write):
            assert sound(opened(folder, keep=2)) == [new.id.age, old.id.age]
            return died
        saves = opened(folder, keep=2)
        assert not temporaries(saves)
        whole = sound(saves)
        assert whole == saves.listed()
        assert old.id.age in whole[:2]  # nothing that was saved is lost
        assert all(same(saves.load(save), state(save.step)) for save in whole)
    raise AssertionError(f"every writer was killed, up to {points[-1]}")


def main(folder: Path) -> None:
    at_lines = kill_writers(folder / "lines", kill_at_line, range(1, 1000))
    at_bytes = kill_writers(folder / "bytes", kill_at_byte, range(0, 5000, 30))

    def write() -> None:
        written(folder / "shared", *(state(step) for step in range(1, 31)), keep=3)

    children = [forked(write) for _ in range(4)]
    whole = sum(os.waitpid(child, 0)[1] == 0 for child in children)
    print(json.dumps([at_lines, at_bytes, whole]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Tests of saving_node.py, which changes how the product's writer saves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from planaria.node.state.save_file import Contents
from planaria.node.state.saves import Saves
from planaria.node.state.saves_on_disk import SavesOnDisk
from planaria.node.state.stage_state import Age, StageState, StateId
from planaria.node.wire import stage_pb2 as pb
from planaria_lab.saves import saving_node
from planaria_lab.saves.saving_node import arm


def state(step: int) -> StageState:
    last = pb.Commit(step=step, ballot=pb.Ballot(view=1, attempt=step))
    return StageState(
        id=StateId.after(last, 1, 0, step),
        omega=1.0,
        boosted_at=0,
        optimizer_step=step,
        last=last,
        tensors={"weights": torch.full((500,), float(step))},
    )


@contextmanager
def writer(folder: Path, in_flight: int) -> Iterator[SavesOnDisk]:
    failed: list[str] = []
    saves = Saves(folder, "run", 1, 2 + in_flight, Contents({"flat": [500]}, {}))
    opened = SavesOnDisk(saves, in_flight, lambda call, of: call(of), lambda _: None, failed.append)
    try:
        yield opened
    finally:
        opened.finish(30.0)
        assert failed == []


def timings(folder: Path) -> list[dict[str, float]]:
    (file,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_blocking_save_is_on_disk_before_training_goes_on(tmp_path, monkeypatch):
    arm(tmp_path, True, 0.0, monkeypatch.setattr)
    with writer(tmp_path / "saves", 1) as opened:
        for step in (2, 4):
            opened.write(state(step))
            assert Age(0, step) in opened._saves.listed()
    write, critical = timings(tmp_path)[:2]
    assert (write["step"], critical["step"]) == (2, 2)
    assert critical["critical"] >= critical["waited"] >= write["write"] > 0


def test_an_overlapped_save_does_not_wait(tmp_path, monkeypatch):
    """The first save is still being written when the second is handed over."""
    going_on, write = Event(), Saves.write

    def at_write(saves: Saves, of: StageState) -> None:
        assert going_on.wait(60)
        write(saves, of)

    monkeypatch.setattr(Saves, "write", at_write)
    arm(tmp_path, False, 0.0, monkeypatch.setattr)
    with writer(tmp_path / "saves", 2) as opened:
        opened.write(state(1))
        opened.write(state(2))
        assert opened._saves.listed() == []
        going_on.set()
    lines = timings(tmp_path)
    assert [line["step"] for line in lines if "critical" in line] == [1, 2]
    assert [line["step"] for line in lines if "write" in line] == [1, 2]


def test_slow_storage_takes_the_time_that_its_rate_says(tmp_path, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(
        saving_node, "time", SimpleNamespace(sleep=slept.append, perf_counter=lambda: 0.0)
    )
    arm(tmp_path, True, 0.001, monkeypatch.setattr)  # 1,000 bytes per second
    with writer(tmp_path / "saves", 1) as opened:
        opened.write(state(7))
        (path,) = (tmp_path / "saves").glob("*/step-*")
        latest = path.with_name("latest")
        size = path.stat().st_size + latest.stat().st_size
    assert sum(slept) == pytest.approx(size / 1000)

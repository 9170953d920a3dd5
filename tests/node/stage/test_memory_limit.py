"""Limits on the microbatches that a stage keeps, which follow from its device's memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.node.machine.device import available_memory
from planaria.node.stage import memory_limit as module
from planaria.node.stage.memory_limit import SMALL, DeviceRoom
from planaria.node.transaction.attempt import NoRoomError

CPU = torch.device("cpu")


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> DeviceRoom:
    monkeypatch.setattr(module, "available_memory", lambda: math.inf)
    return DeviceRoom(CPU)


def runs_out(room: DeviceRoom, kept: int, waits: bool) -> NoRoomError:
    with pytest.raises(NoRoomError) as failure, room.guarding(kept, waits):
        torch.empty(1 << 48)  # more than there are addresses
    return failure.value


def goes_well(room: DeviceRoom, *kept: int) -> None:
    for count in kept:
        room.check(count, SMALL)
        with room.guarding(count, waits=True):
            pass


def test_a_pass_that_may_be_made_later_waits_and_no_more_are_begun(room: DeviceRoom) -> None:
    goes_well(room, 0, 1, 2)
    lacking = runs_out(room, kept=3, waits=True)
    assert lacking.waits
    assert room.most == 3
    goes_well(room, 2)
    with pytest.raises(NoRoomError, match="room for only 3 microbatches at a time") as failure:
        room.check(3, 0)
    assert failure.value.waits


def test_after_a_pass_that_cannot_wait_the_next_attempt_keeps_half_as_many(
    room: DeviceRoom,
) -> None:
    goes_well(room, *range(5))
    for most in (2, 1):
        lacking = runs_out(room, kept=5, waits=False)
        assert not (lacking.waits or lacking.ends)
        assert room.most == most
    lacking = runs_out(room, kept=1, waits=False)
    assert lacking.ends
    assert "set training.microbatch lower" in str(lacking).lower()


def test_alone_there_is_nothing_to_wait_for(room: DeviceRoom) -> None:
    """The seat keeps no microbatch, but others of the node may have taken the memory."""
    goes_well(room, 0, 1, 2, 3)
    lacking = runs_out(room, kept=0, waits=True)
    assert not (lacking.waits or lacking.ends)
    assert room.most == 2
    assert runs_out(DeviceRoom(CPU), kept=0, waits=True).ends, "it was the first one of all"


def test_a_gpu_says_it_by_an_error_of_its_own_and_other_errors_are_others(room: DeviceRoom) -> None:
    with (
        pytest.raises(NoRoomError, match="Tried to allocate"),
        room.guarding(2, waits=True),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")
    with pytest.raises(RuntimeError, match="shapes"), room.guarding(2, waits=True):
        raise RuntimeError("shapes don't match")


def test_a_machine_is_asked_before_its_memory_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit stays as it was, since others may use the memory for a while only."""
    available: Any = 2.5 * SMALL
    monkeypatch.setattr(module, "available_memory", lambda: available)
    room = DeviceRoom(CPU)
    room.check(1, 2 * SMALL)
    room.check(0, 3 * SMALL)
    with pytest.raises(NoRoomError, match=r"takes 50,331,648 bytes, and ") as failure:
        room.check(1, 3 * SMALL)
    assert failure.value.waits
    assert room.most == math.inf
    available = 0.0
    room.check(1, SMALL - 1)


def test_what_a_machine_has_left_is_what_its_kernel_and_its_container_say(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == math.inf
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable:     500 kB\n")
    assert available_memory(tmp_path) == 500 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) == 500 * 1024
    (group / "memory.max").write_text("300000\n")
    (group / "memory.current").write_text("250000\n")
    (group / "memory.stat").write_text("anon 100\ninactive_file 50000\n")
    assert available_memory(tmp_path) == 100_000
    assert available_memory() > 0

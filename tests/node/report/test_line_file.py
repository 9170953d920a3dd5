"""Files of lines on a disk that is full, fails or stalls."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.report import line_file
from planaria.node.report.event_log import EventLog
from planaria.node.report.events import Committed
from planaria.node.report.line_file import STALLED, BackgroundLineFile, LineFile, WaitingLines


class Disk:
    """Stand-in for `os.write` on a disk with room for so many more bytes."""

    def __init__(self, room: int) -> None:
        self.room, self.write = room, os.write

    def __call__(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.write(file, data[: self.room])
        self.room -= written
        return written


def line(number: int) -> bytes:
    return b"line %d\n" % number


def test_lines_are_with_the_operating_system_at_once(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lines"
    file = LineFile(path)
    file.append(line(1))
    assert path.read_bytes() == line(1)
    file.close()
    again = LineFile(path)
    again.append(line(2))
    assert path.read_bytes() == line(1) + line(2)
    again.close()


def test_a_device_that_is_full(caplog: pytest.LogCaptureFixture) -> None:
    file = LineFile(Path("/dev/full"))
    file.append(line(1))
    file.append(line(2))
    assert file.trouble == "can't write /dev/full: No space left on device"
    assert file.report() == file.trouble + "; 2 lines wait in memory"
    file.close()
    assert "2 lines wait in memory, and are lost" in caplog.text


@pytest.mark.parametrize("room", [0, 1, 7, 8, 10, 16, 40])
def test_what_has_waited_is_written_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    path = tmp_path / "lines"
    disk = Disk(room)
    monkeypatch.setattr(line_file.os, "write", disk)
    file = LineFile(path)
    for number in range(6):
        file.append(line(number))
    assert file.trouble
    disk.room = 1000
    file.flush()
    assert not file.trouble
    assert path.read_bytes() == b"".join(map(line, range(6)))


def test_of_too_many_the_oldest_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    disk = Disk(3)
    monkeypatch.setattr(line_file.os, "write", disk)
    file = LineFile(path, most=4 * len(line(0)))
    for number in range(10):
        file.append(line(number))
    assert "4 lines wait in memory, 6 older ones are lost" in file.report()
    disk.room = 1000
    file.append(b"last\n")
    assert path.read_bytes() == b"line 0\nline 7\nline 8\nline 9\nlast\n", "the first one was begun"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=30))
def test_whatever_is_written_is_whole_lines_in_order_and_the_rest_is_counted(
    steps: list[tuple[int, int]],
) -> None:
    """However the disk fills and empties, waiting lines stay within the memory allowed."""
    written = bytearray()
    disk = Disk(0)

    def write(file: int, data: bytes) -> int:
        if not disk.room:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        taken = data[: disk.room]
        disk.room -= len(taken)
        written.extend(taken)
        return len(taken)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_file.os, "write", write)
        file = LineFile(Path(os.devnull), most=60)
        for number, (room, size) in enumerate(steps):
            disk.room = room
            file.append(b"%d %s\n" % (number, b"x" * size))
            assert file.waiting.bytes <= 60 + 2 * 25, "but for what is begun, and the newest"
        disk.room = 10_000
        file.flush()
    lines = [b"%d %s\n" % (number, b"x" * size) for number, (_, size) in enumerate(steps)]
    on_disk = bytes(written).splitlines(keepends=True)
    assert on_disk == [each for each in lines if each in on_disk]
    assert len(on_disk) + file.waiting.dropped == len(lines)


def test_an_event_log_that_can_not_be_written_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "events-n.jsonl").mkdir()
    events = EventLog(tmp_path, "n")
    events.write(Committed(step=1, loss=2.0))
    assert events.file is not None
    assert str(tmp_path / "events-n.jsonl") in events.file.trouble
    events.close()


# --- in the background


class StalledDisk:
    """Stand-in for `os.write` on a disk that takes nothing until it is released."""

    def __init__(self) -> None:
        self.asked, self.released, self.write = threading.Event(), threading.Event(), os.write

    def __call__(self, file: int, data: bytes) -> int:
        self.asked.set()
        self.released.wait()
        return self.write(file, data)


def test_who_appends_does_not_wait_for_a_disk_that_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, clock = StalledDisk(), SimpleNamespace(now=100.0)
    monkeypatch.setattr(line_file.os, "write", disk)
    path = tmp_path / "folder" / "lines"
    file = BackgroundLineFile(path, clock=lambda: clock.now)
    assert (file.writing, file.trouble) == (False, "")
    file.append(line(1))
    disk.asked.wait()
    file.append(line(2))
    assert (file.writing, file.trouble) == (True, "")
    clock.now += STALLED
    assert not file.writing
    assert file.trouble == f"can't write {path}: its disk has accepted nothing for 3 s"
    assert file.report() == file.trouble + "; 2 lines wait in memory"
    disk.released.set()
    file.close()
    assert (file.writing, file.trouble) == (False, "")
    assert path.read_bytes() == line(1) + line(2), "nothing is lost at a clean end"


def test_what_a_disk_does_not_take_at_the_end_is_lost_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = StalledDisk()
    monkeypatch.setattr(line_file.os, "write", disk)
    monkeypatch.setattr(line_file, "LAST_WRITES", 0.0)
    file = BackgroundLineFile(tmp_path / "lines")
    file.append(line(1))
    file.close()
    assert "1 lines wait in memory, and are lost" in caplog.text
    disk.released.set()


def test_lines_that_a_full_disk_refuses_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, refused = Disk(10), threading.Event()

    def write(file: int, data: bytes) -> int:
        try:
            return disk(file, data)
        except OSError:
            refused.set()
            raise

    monkeypatch.setattr(line_file.os, "write", write)
    file = BackgroundLineFile(tmp_path / "lines")
    for number in range(4):
        file.append(line(number))
    refused.wait()
    disk.room = 1000
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"".join(map(line, range(4)))


Moves = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 20)),
        st.tuples(st.just("take"), st.none()),
        st.tuples(st.just("wrote"), st.integers(0, 60)),
        st.tuples(st.just("refused"), st.none()),
    ),
    max_size=60,
)


@given(Moves)
def test_what_is_added_while_a_disk_writes_changes_nothing_of_what_it_writes(
    moves: list[tuple[str, int | None]],
) -> None:
    """In the end, whole lines are written in order, and all others are counted."""
    waiting, written, piece = WaitingLines(most=60), bytearray(), b""
    lines: list[bytes] = []
    for move, size in moves:
        if move == "add":
            lines.append(b"%d %s\n" % (len(lines), b"x" * (size or 0)))
            waiting.add(lines[-1], 0.0)
            waiting.trim()
            assert waiting.bytes <= 60 + len(piece) + 2 * 25
        elif move == "take" and not piece:
            piece = waiting.take()
        elif piece and move == "wrote":
            taken = piece[:size]
            waiting.wrote(len(taken))
            written, piece = written + taken, b""
        elif piece and move == "refused":
            waiting.refused()
            piece = b""
    if piece:
        waiting.refused()
    while piece := waiting.take():
        waiting.wrote(len(piece))
        written += piece
    assert waiting.bytes == len(waiting) == 0
    on_disk = bytes(written).splitlines(keepends=True)
    assert on_disk == [each for each in lines if each in on_disk]
    assert len(on_disk) + waiting.dropped == len(lines)
    assert not lines or on_disk[0] == lines[0], "the first one says what file it is"

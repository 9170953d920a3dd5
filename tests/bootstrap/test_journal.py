"""The journal: what a registry finds after it was killed at any moment."""

from pathlib import Path

import pytest

from planaria.bootstrap import journal as module
from planaria.bootstrap.journal import Journal, JournalError
from planaria.bootstrap.registry_pb2 import Member, View


def view(number: int) -> View:
    return View(run="r", number=number, members=[Member(node="a", joined=1, address="h:1")])


def write(path: Path, *numbers: int) -> None:
    with Journal(path, "r", "toml") as journal:
        for number in numbers:
            journal.append(view(number))


def read(path: Path) -> View | None:
    with Journal(path, "r", "toml") as journal:
        return journal.view


def test_newest_view_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "journal"
    assert read(path) is None
    write(path, 1, 2, 3)
    assert read(path) == view(3)


def test_opening_compacts(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, *range(1, 100))
    grown = path.stat().st_size
    read(path)
    assert path.stat().st_size < grown / 10
    write(path, 100)
    assert read(path) == view(100)


def test_it_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPACT_ABOVE", 1000)
    path = tmp_path / "journal"
    write(path, *range(1, 500))
    assert path.stat().st_size < 2000
    assert read(path) == view(499)


def test_cut_off_anywhere_the_last_whole_view_is_left(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, 1)
    one = path.stat().st_size
    write(path, 2)
    content = path.read_bytes()
    for size in range(one, len(content)):
        path.write_bytes(content[:size])
        assert read(path) == view(1)


def test_garbled_tail_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, 1, 2)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\xff")
    assert read(path) == view(1)


def test_damage_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, 1, 2, 3)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(JournalError, match="damaged"):
        read(path)


def test_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, 1)
    with pytest.raises(JournalError, match="run = 'r', not 'other'"):
        Journal(path, "other", "toml")
    with pytest.raises(JournalError, match=r"another run \(run_file = "):
        Journal(path, "r", "other toml")
    assert read(path) == view(1), "and left alone"


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("do not lose me, I am not a journal at all")
    with pytest.raises(JournalError, match="damaged"):
        Journal(path, "r", "toml")
    assert path.read_text().startswith("do not lose me")


def test_one_registry_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with (
        Journal(path, "r", "toml"),
        pytest.raises(JournalError, match="in use by another registry"),
    ):
        Journal(path, "r", "toml")
    assert read(path) is None


def test_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="can't use the journal"):
        Journal(tmp_path / "file" / "journal", "r", "toml")
    journal = Journal(tmp_path / "journal", "r", "toml")
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.append(view(1))

"""Tests of the journal: what a registry finds after it was killed at any moment."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from planaria.bootstrap.identity import Identity
from planaria.bootstrap.journal import Journal, JournalError, read_view
from planaria.bootstrap.registry_pb2 import DIVERGENCE, Member, Quarantined, View
from planaria.bootstrap.views import hash_of, sign
from tests.bootstrap.conftest import KEY, full_disk, identity


def view(number: int) -> View:
    made = unsigned(number)
    sign(made, KEY, View())
    return made


def unsigned(number: int) -> View:
    return View(run="r", number=number, members=[Member(node="a", joined=1, address="h:1")])


def write(path: Path, *numbers: int) -> None:
    with Journal(path, "r", KEY) as journal:
        for number in numbers:
            journal.append(view(number))


def read(path: Path) -> View | None:
    with Journal(path, "r", KEY) as journal:
        return journal.view


def test_newest_view_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "journal"
    assert read(path) is None
    write(path, 1, 2, 3)
    assert read(path) == view(3)
    write(path, 4)
    assert read(path) == read_view(path) == view(4)


def test_what_a_crash_left_beside_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, 1)
    path.with_name(f"journal.{os.getpid()}.new").write_bytes(b"cut sho")
    write(path, 2)
    assert read(path) == view(2)
    assert {file.name for file in tmp_path.iterdir()} == {"journal", "journal.lock"}


@pytest.mark.parametrize("opens", [read, read_view])
def test_any_damage_is_refused_and_the_file_is_left_alone(
    tmp_path: Path, opens: Callable[[Path], object]
) -> None:
    path = tmp_path / "journal"
    write(path, 1)
    content = path.read_bytes()
    flipped = [bytearray(content) for _ in content]
    for at, file in enumerate(flipped):
        file[at] ^= 1 << at % 8
    for file in (*flipped, *(content[:size] for size in range(len(content))), content + b"\0"):
        path.write_bytes(file)
        with pytest.raises(JournalError, match=r"(damaged|no journal).*, or move it away: the reg"):
            opens(path)
        assert path.read_bytes() == file


@pytest.mark.parametrize("forger", [None, identity("somebody")])
def test_a_view_that_the_run_s_key_has_not_signed_is_refused_and_left_there(
    tmp_path: Path, forger: Identity | None
) -> None:
    path = tmp_path / "journal"
    write(path, 1, 2)
    forged = unsigned(3)
    if forger is not None:
        sign(forged, forger, view(2))
    with Journal(path, "r", KEY) as journal:
        journal.append(forged)
    content = path.read_bytes()
    with pytest.raises(JournalError, match=f"view 3 in the journal {path} is not signed by the"):
        read(path)
    assert path.read_bytes() == content


def test_a_journal_whose_key_is_lost_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "journal", 1)
    with pytest.raises(JournalError, match=r"has another key than before.*--authority DIR"):
        Journal(tmp_path / "journal", "r", Identity.generate())


def test_another_run_or_another_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, 1)
    with pytest.raises(JournalError, match="run = 'r', not 'other'"):
        Journal(path, "other", KEY)
    assert read(path) == view(1), "and left alone"
    path.write_text("do not lose me, I am not a journal at all")
    with pytest.raises(
        JournalError, match=r"journal is no journal .*beginning with b'do not lose "
    ):
        Journal(path, "r", KEY)
    assert path.read_text().startswith("do not lose me")


def test_one_registry_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with (
        Journal(path, "r", KEY),
        pytest.raises(JournalError, match="in use by another registry"),
    ):
        Journal(path, "r", KEY)
    assert read(path) is None


def test_once_the_disk_is_full_the_newest_view_is_written_when_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    with Journal(path, "r", KEY) as journal:
        journal.append(view(1))
        with monkeypatch.context() as disk:
            disk.setattr(os, "fsync", full_disk)
            for number in (2, 3):
                with pytest.raises(JournalError, match=f"view {number} .*No space left on device"):
                    journal.append(view(number))
        assert read_view(path) == view(1)
        for number in (4, 5):
            journal.append(view(number))
            assert read_view(path) == view(number)
    assert read(path) == view(5)


def test_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="can't use the journal"):
        Journal(tmp_path / "file" / "journal", "r", KEY)
    journal = Journal(tmp_path / "journal", "r", KEY)
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.append(view(1))


def test_views_go_on_counting_where_another_run_has_ended(tmp_path: Path) -> None:
    quarantined = Quarantined(instance="i", node="bad", cause=DIVERGENCE, times=1, seconds=9)
    last = view(40)
    last.quarantined.append(quarantined)
    with Journal(tmp_path / "new", "s", KEY) as journal:
        journal.go_on_from(last, "it goes on")
        first = journal.view
        assert first is not None
        assert (first.run, first.number, first.reason) == ("s", 41, "it goes on")
        assert first.before == hash_of(last)
        assert list(first.quarantined) == [quarantined], "who was evicted for cause stays so"
        assert not first.members
        journal.go_on_from(view(7), "again")
        assert journal.view is not None
        assert (journal.view.number, journal.view.reason) == (42, "again")
        assert journal.view.before == hash_of(first)
    with Journal(tmp_path / "new", "s", KEY) as journal:
        assert journal.view is not None
        assert journal.view.number == 42


def test_a_view_to_go_on_from_wants_a_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"can't read the journal .*none: No such file"):
        read_view(tmp_path / "none")
    (tmp_path / "other").write_bytes(b"something else")
    with pytest.raises(JournalError, match="no journal that this planaria reads"):
        read_view(tmp_path / "other")

"""The journal: what a registry finds after it was killed at any moment."""

import errno
import json
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from planaria.bootstrap import journal as module
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.journal import VIEWS_UNREAD, Journal, JournalError, read_view
from planaria.bootstrap.registry_pb2 import DIVERGENCE, Member, Quarantined, View
from planaria.bootstrap.views import hash_of, sign
from tests.bootstrap.conftest import KEY, identity


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


def damaged(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.damaged-*"))


def three_views(path: Path) -> tuple[bytes, list[int]]:
    """A journal that opened with view 1 and got 2 and 3; and where it can be cut unnoticed: behind
    what was written at once, and behind each view that was appended."""
    write(path, 1)
    cuts = []
    with Journal(path, "r", KEY) as journal:
        cuts.append(path.stat().st_size)
        for number in (2, 3):
            journal.append(view(number))
            cuts.append(path.stat().st_size)
    return path.read_bytes(), cuts


def test_cut_off_anywhere_it_is_torn_or_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content, cuts = three_views(tmp_path / "journal")
    header = cuts[0] - len(module._record(1, view(1).SerializeToString()))
    for size in range(len(content)):
        caplog.clear()
        path = tmp_path / str(size) / "journal"
        path.parent.mkdir()
        path.write_bytes(content[:size])
        found = read(path)
        told = caplog.text
        if size < cuts[0]:  # what is written in one piece is there in one piece, or else
            assert found is None
            assert [file.read_bytes() for file in damaged(path)] == [content[:size]]
            assert f"damaged at byte {header if size >= header else 0} of {size}" in told
        elif size in cuts:
            assert found == view(1 + cuts.index(size))
            assert not told
        else:
            end = max(cut for cut in cuts if cut < size)
            assert found == view(1 + cuts.index(end))
            assert f"{size - end} bytes of an incomplete record, left by a crash" in told
            assert not damaged(path)


def test_zeros_behind_are_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal"
    content, _ = three_views(path)
    for zeros in (1, 23, 24, 25, 512, 4096):
        caplog.clear()
        path.write_bytes(content + bytes(zeros))
        assert read(path) == view(3)
        assert f"{zeros} bytes of an incomplete record, left by a crash" in caplog.text
    assert not damaged(path)


def test_any_flipped_bit_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal"
    content, cuts = three_views(path)
    for at in range(len(content)):
        caplog.clear()
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        found = read(path)
        assert found == view(2 if at >= cuts[1] else 3), "the newest that is whole"
        (kept,) = damaged(path)
        assert kept.read_bytes() == flipped
        assert f"view {found.number} could be read" in caplog.text
        kept.unlink()
        assert read(path) == found, "a new file has it"
        assert not damaged(path)


@pytest.mark.parametrize("alien", [b"\0" * 30, b"x", b"\0" * 30 + b"x", bytes(range(256))])
def test_what_no_crash_leaves_behind_is_damage(tmp_path: Path, alien: bytes) -> None:
    path = tmp_path / "journal"
    content, cuts = three_views(path)
    path.write_bytes(content[: cuts[1]] + alien + content[cuts[1] :])
    with Journal(path, "r", KEY) as journal:
        assert journal.view == view(3)
        assert f"damaged at byte {cuts[1]} of {len(content) + len(alien)}" in journal.damage
        assert str(path) + ".damaged-1" in journal.damage
        assert "learns newer views from its nodes" in journal.damage


def test_a_missing_record_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    content, cuts = three_views(path)
    path.write_bytes(content[: cuts[0]] + content[cuts[1] :])
    with Journal(path, "r", KEY) as journal:
        assert journal.view == view(3)
        assert f"damaged at byte {cuts[0]}" in journal.damage


def test_each_damaged_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for number in (1, 2, 3):
        content, _ = three_views(path)
        path.write_bytes(content + b"%d" % number)
        assert read(path) == view(3)
        assert len(damaged(path)) == number
    assert [file.read_bytes()[-1:] for file in damaged(path)] == [b"1", b"2", b"3"]


def test_a_journal_of_zeros_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(bytes(4096))
    assert read(path) is None
    assert len(damaged(path)) == 1


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


def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(module._record(0, json.dumps({"format": 2, "run": "r"}).encode()))
    for opens in (read, read_view):
        with pytest.raises(JournalError, match=r"has format 2, .* reads format 1; use"):
            opens(path)
    assert not damaged(path)


def test_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, 1)
    with pytest.raises(JournalError, match="run = 'r', not 'other'"):
        Journal(path, "other", KEY)
    assert read(path) == view(1), "and left alone"


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("do not lose me, I am not a journal at all")
    with pytest.raises(
        JournalError, match=r"notes.txt is no journal .*beginning with b'do not lose "
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

    def full(file: BinaryIO) -> None:
        file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Journal(path, "r", KEY) as journal:
        journal.append(view(1))
        with monkeypatch.context() as disk:
            disk.setattr(module, "_flush", full)
            for number in (2, 3):
                with pytest.raises(JournalError, match=f"view {number} .*No space left on device"):
                    journal.append(view(number))
        journal.append(view(4))
        journal.append(view(5))
    assert read(path) == view(5)
    assert not damaged(path)


def test_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="can't use the journal"):
        Journal(tmp_path / "file" / "journal", "r", KEY)
    journal = Journal(tmp_path / "journal", "r", KEY)
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.append(view(1))


def test_views_go_on_counting_where_another_run_has_ended(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write(old, 1, 2, 40)
    last, damage = read_view(old)
    assert (last, damage) == (view(40), "")
    with Journal(new, "s", KEY) as journal:
        journal.go_on_from(last, damage, "it goes on")
        first = journal.view
        assert first is not None
        assert (first.run, first.number, first.reason) == ("s", 41, "it goes on")
        assert first.before == hash_of(last)
        journal.go_on_from(view(7), "a bit is wrong", "again")
        assert journal.view is not None
        assert (journal.view.number, journal.view.reason) == (41 + VIEWS_UNREAD, "again")
        assert journal.view.before == hash_of(first)
    with Journal(new, "s", KEY) as journal:
        assert journal.view is not None
        assert journal.view.number == 41 + VIEWS_UNREAD


def test_who_was_evicted_for_cause_stays_so_where_a_run_goes_on_in_other_numbers(
    tmp_path: Path,
) -> None:
    told = Quarantined(instance="i", node="bad", cause=DIVERGENCE, times=1, seconds=9)
    last = View(run="r", number=4, members=[Member(node="a", joined=1)], quarantined=[told])
    with Journal(tmp_path / "new", "s", KEY) as journal:
        journal.go_on_from(last, "", "it goes on")
        assert journal.view is not None
        assert (list(journal.view.quarantined), list(journal.view.members)) == ([told], [])


def test_a_view_to_go_on_from_wants_a_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"can't read the journal .*none: No such file"):
        read_view(tmp_path / "none")
    (tmp_path / "other").write_bytes(b"something else")
    with pytest.raises(JournalError, match="no journal of a registry"):
        read_view(tmp_path / "other")

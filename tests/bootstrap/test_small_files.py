"""Tests that a file named by a user as a small one is read in bounded time and memory."""

import os
from pathlib import Path

import pytest

from planaria.bootstrap.files import read_small
from planaria.bootstrap.invites import InviteError
from planaria.node.launch.enrolled import text_or_file
from planaria.node.run_file import RunFileError, load


@pytest.fixture(params=["pipe", "device"])
def endless(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "device":
        return Path("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_what_may_never_end_is_refused(endless: Path) -> None:
    with pytest.raises(RunFileError, match=r"can't read the run file .*: it is no regular file"):
        load(endless)
    with pytest.raises(InviteError, match=r"can't be read: .*it is no regular file"):
        text_or_file(f"@{endless}")


def test_a_file_has_a_largest_size(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_small(file, 5) == b"12345"
    with pytest.raises(OSError, match=r"it has more than 4 bytes"):
        read_small(file, 4)

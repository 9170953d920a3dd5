"""The file of those that alone may join."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.bootstrap.invites import AllowedError, read_allowed

ONE, OTHER = "0123456789abcdef" * 2, "f" * 32


def test_instances_one_a_line_with_notes_for_people(tmp_path: Path) -> None:
    file = tmp_path / "allowed"
    file.write_text(f"# of the lab\n\n{ONE}\n  {OTHER}  # the one below the desk\n")
    assert read_allowed(file) == {ONE, OTHER}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{ONE}\nbox-7f3a1c\n", "line 2 of .* has 'box-7f3a1c', which is no instance"),
        (ONE.upper(), "line 1 .* lower-case"),
        ("# nobody yet\n", "names no instance"),
        (None, "can't read"),
    ],
)
def test_what_is_no_such_file_is_said(text: str | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "allowed"
    if text is not None:
        file.write_text(text)
    with pytest.raises(AllowedError, match=says):
        read_allowed(file)

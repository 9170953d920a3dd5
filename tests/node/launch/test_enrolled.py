"""Tests of --join with invites, and of a node whose enrolment nobody answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from planaria.bootstrap.enrolment_client import EnrolmentUnreachable
from planaria.bootstrap.enrolment_pb2 import Invitation
from planaria.bootstrap.invites import InviteError
from planaria.node.commands.machines import exit_status_by_error
from planaria.node.launch.enrolled import check_role, enrolment_folder, invitation_of
from planaria.node.launch.supervisor import TRY_AGAIN


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "can't be read"),
        (" \n", "is empty"),
        ("planaria1.xyz", "incomplete"),
        (
            "planaria node --join @node.invite",
            "has no invite, which begins with planaria1., and no HOST:PORT",
        ),
    ],
)
def test_a_file_without_an_invite_is_named(tmp_path: Path, content: str | None, why: str) -> None:
    file = tmp_path / "invite"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InviteError, match=why):
        invitation_of(f"@{file}")


def test_a_file_that_is_named_without_the_at_sign(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert invitation_of("invite") is None
    (tmp_path / "invite").write_text("planaria1.xyz")
    with pytest.raises(InviteError, match="this is a file; --join @invite reads"):
        invitation_of("invite")
    assert invitation_of("localhost:7400") is None


def test_who_has_no_home_keeps_no_certificate_and_is_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert enrolment_folder(Invitation(role="reader")) is None
    assert "set HOME or XDG_STATE_HOME" in caplog.text
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert enrolment_folder(Invitation(role="reader")).parts[:3] == ("/", "state", "planaria")


def test_an_invite_for_another_role_is_not_used_up() -> None:
    check_role(Invitation(role="operator"), "operator")
    with pytest.raises(InviteError, match="is for the role reader, and this needs operator"):
        check_role(Invitation(role="reader"), "operator")


def test_a_node_that_nobody_enrols_says_so_in_a_sentence_and_tries_again(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(typer.Exit) as end, exit_status_by_error():
        raise EnrolmentUnreachable("no registry at registry:7399 accepts invites")
    assert end.value.exit_code == TRY_AGAIN
    assert "no registry at registry:7399 accepts invites" in capsys.readouterr().err
    assert not caplog.records

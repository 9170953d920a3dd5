"""Tests of secrets on command lines, which others on the machine see in lists of processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from planaria.bootstrap.authority import Authority, to_der
from planaria.bootstrap.enrolment_pb2 import Invitation
from planaria.bootstrap.invites import MARK, encode
from planaria.node.launch.options import parse_token
from planaria.node.launch.secret_words import INVITE, secret_warnings, without_secrets

DEADLINE = 120.0  # seconds
TOKEN = "the-token-of-this-run"


def test_what_may_be_secret_goes_from_the_command_line_into_the_environment() -> None:
    words = ["node", "--join", "planaria1.x", "--stage", "1", "--token=y", "--insecure"]
    secrets = {"PLANARIA_JOIN": "planaria1.x", "PLANARIA_TOKEN": "y"}
    assert without_secrets(words) == (["node", "--stage", "1", "--insecure"], secrets)
    assert without_secrets(["status", "--watch"]) == (["status", "--watch"], {})
    assert without_secrets(["node", "--join"]) == (["node"], {"PLANARIA_JOIN": ""})


def test_who_types_a_secret_is_told_how_nobody_sees_it() -> None:
    assert INVITE == MARK
    invite, token = secret_warnings(["node", "--join=planaria1.x", "--token", "y"])
    assert "--join @FILE, or set PLANARIA_JOIN" in invite and "planaria1.x" not in invite
    assert "--token @FILE, or set PLANARIA_TOKEN" in token
    for hidden in ("--join @f --token @g", "--join 127.0.0.1:1", "--token=", ""):
        assert secret_warnings(hidden.split()) == []


def test_a_token_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s e-cret\n")
    assert parse_token(f"@{file}") == "s e-cret"
    assert parse_token("as it is") == "as it is"
    file.write_text("\n")
    for path, why in (
        (file, "the file is empty; it should have the token"),
        (tmp_path, "be read"),
    ):
        with pytest.raises(typer.BadParameter, match=f"--token @{path}: .*{why}"):
            parse_token(f"@{path}")


def test_no_process_that_a_supervisor_starts_has_a_secret_on_its_command_line(
    tmp_path: Path,
) -> None:
    """The registry accepts connections and never answers, so that the nodes keep trying."""
    with socket.create_server(("127.0.0.1", 0)) as registry:
        at = f"127.0.0.1:{registry.getsockname()[1]}"
        secret, authority = os.urandom(20), to_der(Authority.make(time.time()).certificate)
        fields = {"run": "run", "role": "node", "registries": [at], "enrolments": [at]}
        invite = encode(Invitation(**fields, secret=secret, authority=authority))
        words = ["--join", invite, f"--token={TOKEN}", "--device", "cpu,cuda:7", "--out"]
        with (tmp_path / "log").open("wb") as log:
            supervisor = subprocess.Popen(
                [sys.executable, "-m", "planaria", "node", *words, str(tmp_path)], stderr=log
            )
        try:
            seen = both_nodes(supervisor.pid)
        finally:
            supervisor.send_signal(signal.SIGTERM)
            supervisor.wait(DEADLINE)
    for shown, environment in seen:
        assert "--device" in shown and "planaria" in shown
        assert invite not in shown and TOKEN not in shown
        assert f"PLANARIA_JOIN={invite}" in environment
        assert f"PLANARIA_TOKEN={TOKEN}" in environment
    text = (tmp_path / "log").read_text()
    assert text.count("--join @FILE") == text.count("--token @FILE") == 1
    assert invite not in text and TOKEN not in text


def both_nodes(supervisor: int) -> list[tuple[list[str], list[str]]]:
    """Wait for both nodes, and return the words of each. Between fork and exec a child shows its
    parent's words, and then none."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children")
    until = time.monotonic() + DEADLINE
    while True:
        processes = [told_by(int(pid)) for pid in children.read_text().split()]
        nodes = [words for words in processes if words[0].count("--device") == 2]  # its own is last
        if len(nodes) == 2:
            return nodes
        assert time.monotonic() < until, "no nodes were started"
        time.sleep(0.01)


def told_by(pid: int) -> tuple[list[str], list[str]]:
    """Return the words of a process's command line and environment; none once it has ended."""
    try:
        files = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    except (FileNotFoundError, ProcessLookupError):
        return [], []  # it has ended, and another one replaces it
    words, environment = (file.decode().split("\0") for file in files)
    return words, environment

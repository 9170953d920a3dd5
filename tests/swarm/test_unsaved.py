"""Tests of a run whose last step can't be saved: its nodes stay, and ending unsaved is an error."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planaria.node.cli import app
from tests.swarm.small import small


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    """A folder for saves where saving stage 1 fails: a folder has the name of one of its files."""
    (tmp_path / "saves/1.0/stage-1/latest").mkdir(parents=True)
    return tmp_path / "saves"


def test_a_model_that_is_lost_is_an_error(up, saves: Path) -> None:
    status, output = up(small(), "--save-dir", str(saves), "--hold", "0").finish()
    assert (status, "stage 1 was neither saved nor exported" in output) == (1, True)


@pytest.mark.parametrize(("way", "status"), [("export", 0), ("save", 0), ("interrupt", 130)])
def test_nodes_are_kept_until_the_model_is_safe_or_given_up(
    up, saves: Path, tmp_path: Path, way: str, status: int
) -> None:
    swarm = up(small(), "--save-dir", str(saves))
    swarm.wait_until("its start", swarm.output.exists)
    warning = "the last step of stage 1 is in memory only"
    swarm.wait_until("the end of the run", lambda: warning in swarm.output.read_text())
    if way == "export":
        (join,) = re.findall(r"planaria export --join (\S+) --out DIR", swarm.output.read_text())
        done = CliRunner().invoke(app, ["export", "--join", join, "--out", str(tmp_path / "model")])
        assert done.exit_code == 0, done.output
    elif way == "save":
        (saves / "1.0/stage-1/latest").rmdir()
    else:
        swarm.process.send_signal(signal.SIGINT)
    ended, output = swarm.finish()
    assert (ended, "stage 1 was not saved" in output) == (status, status != 0), output

"""Tests of Ctrl-C before a run has begun: no traceback, and the folder can be used again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from planaria import __main__ as command
from planaria.node.run_file import dumps
from tests.swarm.small import small


def test_while_the_command_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "planaria.node.cli", SimpleNamespace(main=interrupted))
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 130


def test_while_the_swarm_is_started(up, data: Path, tmp_path: Path) -> None:
    """All processes of the terminal get the signal, also the one that forks the others."""
    run, out = tmp_path / "run.toml", tmp_path / "out"
    run.write_text(dumps(small(data__path=str(data))))
    words = [sys.executable, "-m", "planaria", "up", str(run), "--out", str(out)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as started:
        assert started.stdout is not None
        assert any("starting; logs are in" in line for line in iter(started.stdout.readline, ""))
        os.killpg(started.pid, signal.SIGINT)
        output = started.stdout.read().splitlines()
    assert started.returncode == 130 and not any("Traceback" in line for line in output), output
    assert "ended by SIGINT at step 0; planaria up --resume" in output[-1]
    assert not (out / "logs").exists()  # it marks a folder as taken
    again = up(out)
    assert again.finish()[0] == 0, again.output.read_text()

"""Tests of planaria's Python interface; tests/swarm/test_from_python.py runs a swarm with it."""

from __future__ import annotations

import builtins
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import planaria
from planaria.node.launch.errors import SwarmError
from planaria.node.local.from_python import print_output
from planaria.node.local.results import Ending, wrap_up
from planaria.node.run_file import RunFileError, loads

ENDS_WHEN_TOLD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saving", file=sys.stderr)))
print("training", file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_a_run_file_is_read_with_changes(tmp_path):
    (tmp_path / "run.toml").write_text("steps = 9\n[model]\npreset = 'mini'\n")
    run = planaria.load(tmp_path / "run.toml", model__stages=2)
    assert (run.steps, run.model.preset, run.model.stages) == (9, "mini", 2)
    assert planaria.load() == loads("")
    with pytest.raises(planaria.RunFileError, match="did you mean steps"):
        planaria.load(step=4)


def test_the_package_says_what_it_has():
    with pytest.raises(AttributeError, match=r"planaria has no 'down'; it has .*load, up"):
        planaria.down  # noqa: B018
    assert (planaria.SwarmError, planaria.RunFileError) == (SwarmError, RunFileError)


def test_what_the_command_refuses_is_an_exception_with_its_sentence(data, tmp_path):
    run = planaria.load(data__path=str(data))
    with pytest.raises(SwarmError, match="--kill 9@1: there is no stage 9, choose 0 to 4"):
        planaria.up(run, kill=["9@1"], out=tmp_path / "out")


def test_an_interrupt_ends_the_swarm_which_is_heard_to_its_end(monkeypatch):
    heard = []

    def interrupted(text: str, **_: object) -> None:
        heard.append(text)
        if text == "training\n":
            raise KeyboardInterrupt

    with subprocess.Popen(
        [sys.executable, "-c", ENDS_WHEN_TOLD], stderr=subprocess.PIPE
    ) as between:
        assert between.stderr is not None
        monkeypatch.setattr(builtins, "print", interrupted)
        assert print_output(between, between.stderr)
        monkeypatch.undo()
    assert heard == ["training\n", "saving\n"]
    assert between.returncode == 0


def test_a_notebook_shows_a_result_and_takes_nothing_for_markup(tmp_path: Path):
    folder = tmp_path / "<b>"
    (folder / "logs").mkdir(parents=True)
    with pytest.raises(planaria.SwarmError, match="no run has ended in"):
        planaria.Result(folder)
    wrap_up(loads("steps = 3"), folder, Console(file=io.StringIO()), Ending(1, "enough"))
    result = planaria.Result(str(folder))
    assert (result.losses, result.validation, result.recoveries) == ([], None, [])
    assert result.summary["stopped"] == "enough"
    assert repr(result).startswith("0 steps, 0 tokens")
    shown = result._repr_html_()
    assert "&lt;b&gt; has" in shown
    assert re.findall(r"<(\w+)", shown) == [*["p"] * (len(repr(result).splitlines())), "img"]

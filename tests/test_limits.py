"""No test goes on for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
HANGING = """
import threading

def wait():
    threading.Event().wait()

def test_that_hangs():
    threading.Thread(target=wait, name="another thread", daemon=True).start()
    wait()
"""


def test_every_test_has_a_limit(pytestconfig: pytest.Config) -> None:
    assert float(pytestconfig.getini("timeout")) > 0


def test_a_test_that_hangs_fails_and_shows_where_each_thread_is(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    options = ["-c", str(PROJECT), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "-o", "timeout=0.5", str(tmp_path)]
    tested = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert tested.returncode == pytest.ExitCode.TESTS_FAILED
    of_the_test, of_the_other = tested.stdout.split("Stack of another thread")
    assert "test_hanging.py:9: " in of_the_test
    assert "line 5, in wait" in of_the_other

"""Signals end the processes that tests start."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name
)
def test_a_child_ends_by(number: signal.Signals) -> None:
    forever = "import signal; print('up', flush=True); signal.pause()"
    with subprocess.Popen(
        [sys.executable, "-c", forever], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(number)
        try:
            assert child.wait(60) == -number
        finally:
            child.kill()


@pytest.mark.parametrize("number", ["INT", "HUP"])
def test_the_tests_may_be_started_with_a_signal_ignored(number: str) -> None:
    """A shell script ignores SIGINT for its background processes, and nohup ignores SIGHUP."""
    test = f"{__file__}::{test_a_child_ends_by.__name__}[SIG{number}]"
    pytest_command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
    ignoring = ["sh", "-c", f'trap "" {number}; exec "$@"', "sh", *pytest_command]
    tested = subprocess.run(ignoring, cwd=ROOT, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout

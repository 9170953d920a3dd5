"""Stages on a device that is neither CPU nor CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = "import os, pytest, sys; status = pytest.main(); sys.stdout.flush(); os._exit(status)"
"""Without an end of the interpreter: torch has threads for the device, which don't outlive it."""


@pytest.mark.parametrize("lacks", ["", "float64", "rounding"])
def test_all_computes_on_a_device_of_any_kind(lacks: str) -> None:
    tests = str(Path(__file__).with_name("on_other_device.py"))
    command = [sys.executable, "-c", RUN, tests, "-p", "no:cacheprovider", "-p", "no:xdist"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**own, "LACKS": lacks}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

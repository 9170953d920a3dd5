"""Stages on a device that is neither CPU nor CUDA, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUN = "import os, pytest, sys; status = pytest.main(); sys.stdout.flush(); os._exit(status)"
"""Program that runs the tests and skips the interpreter's end, which torch's device threads don't
survive."""
HERE = torch.cuda.is_available()
CUDA = pytest.mark.cuda, pytest.mark.skipif(not HERE, reason="torch sees no GPU by CUDA")


def run_on(device: str, lacks: str, tests: Path, shared: Path, which: str = "") -> None:
    """Run a file of tests, or `which` of them, in a process that has this device. To the fixture
    `shared` it is one more worker of this test run."""
    command = [sys.executable, "-c", RUN, str(tests), "-p", "no:cacheprovider", "-p", "no:xdist"]
    own_folder = shared / f"{tests.parent.name}-{device}-{lacks}"
    command += ["-k", which, "--basetemp", str(own_folder)]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**own, "DEVICE": device, "LACKS": lacks, "PYTEST_XDIST_WORKER": own_folder.name}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("device", "lacks", "which"),
    [
        ("other", "", "same_updates or described"),
        ("other", "rounding", "same_updates or described"),
        ("other", "float64", ""),
        pytest.param("cuda:0", "", "", marks=CUDA),
    ],
)
def test_all_computes_on_a_device_of_any_kind(
    device: str, lacks: str, which: str, shared: Path
) -> None:
    """A device that lacks nothing, or rounds in its own way, differs only in where updates are
    made: only these are tested there."""
    run_on(device, lacks, Path(__file__).with_name("on_other_device.py"), shared, which)

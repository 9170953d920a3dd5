"""What a script prints in a process of its own, with kernels of another processor."""

from __future__ import annotations

import os
import subprocess
import sys


def printed(script: str, **environment: str) -> list[str]:
    """The words of the script's output."""
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.split()

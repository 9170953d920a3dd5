"""Scripts in processes of their own, which can use the kernels of another processor."""

from __future__ import annotations

import os
import subprocess
import sys


def printed(script: str, **environment: str) -> list[str]:
    """Runs a script with these variables; returns the words of its output."""
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.split()

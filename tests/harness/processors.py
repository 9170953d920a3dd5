"""What a script prints, here or in a process that uses the kernels of another processor."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO


def printed(script: str, **environment: str) -> list[str]:
    """Runs a script, in a process with these variables if any are given; returns the words of its
    output."""
    if not environment:
        with redirect_stdout(StringIO()) as here:
            exec(script, {})
        return here.getvalue().split()
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.split()

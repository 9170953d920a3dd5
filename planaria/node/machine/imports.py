"""Module search path of child Python processes: without the current folder, which may be a
downloaded one with a `json.py` in it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def leave_out_current_folder() -> None:
    """Keep Python processes started from now on, by any library, from importing from the current
    folder, unless planaria itself is in it."""
    if not _planaria_is_here():
        os.environ["PYTHONSAFEPATH"] = "1"


def python_command(module: str) -> list[str]:
    """Command line of another Python that calls `main` of that module. It has the path of this one,
    but for the current folder, which notebooks and scripts may have in their path."""
    path = sys.path
    if not _planaria_is_here():
        path = [entry for entry in path if Path(entry).resolve() != Path.cwd()]
    code = f"import sys; sys.path[:] = {path!r}; from {module} import main; main()"
    return [sys.executable, "-c", code]


def _planaria_is_here() -> bool:
    return Path(__file__).parents[3].samefile(".")

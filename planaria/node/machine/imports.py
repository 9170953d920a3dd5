"""Where the Python processes that planaria starts look for modules: not in the current folder,
which may be a downloaded one with a `json.py` in it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def leave_out_current_folder() -> None:
    """Python processes that are started from here on, by whatever library, don't import from the
    current folder, unless planaria itself is there."""
    if not _planaria_is_here():
        os.environ["PYTHONSAFEPATH"] = "1"


def calling(module: str) -> list[str]:
    """The command line of another Python that calls `main` of that module, and finds whatever this
    one finds, but for the current folder, which notebooks and scripts may have in their path."""
    path = sys.path
    if not _planaria_is_here():
        path = [entry for entry in path if Path(entry).resolve() != Path.cwd()]
    code = f"import sys; sys.path[:] = {path!r}; from {module} import main; main()"
    return [sys.executable, "-c", code]


def _planaria_is_here() -> bool:
    return Path(__file__).parents[3].samefile(".")

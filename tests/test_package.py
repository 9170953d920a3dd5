"""One import package, and no module under two names."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("bootstrap", "lab", "node", "recovery")

IMPORT_ALL = f"""
import importlib, pkgutil, sys

FOLDERS = {FOLDERS!r}
sys.modules.update(dict.fromkeys(FOLDERS))  # whoever imports one of them by that name fails
import planaria

found = [module.name for module in pkgutil.walk_packages(planaria.__path__, "planaria.")]
for name in found:
    if name not in ("planaria.__main__", "planaria.node.local.fork_server"):
        importlib.import_module(name)
twice = [name for name in sys.modules if name.partition(".")[0] in FOLDERS and "." in name]
assert not twice, twice
print(len(found))
"""


def python(code: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_all_modules_are_loaded_as_planaria_and_under_no_other_name(tmp_path):
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert int(python(IMPORT_ALL, tmp_path)) == len(files) + 1  # __main__.py


def test_the_folders_of_the_repository_are_the_packages():
    for folder in FOLDERS:
        link = ROOT / "planaria" / folder
        assert link.is_symlink(), f"{link} is a copy: git's core.symlinks is off"
        assert link.resolve() == ROOT / folder

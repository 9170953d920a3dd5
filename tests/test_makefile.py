"""What `make` prints if Python is too old."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OLD = f"""#!{sys.executable}
import sys
sys.version_info = (3, 10, 12, "final", 0)
assert sys.argv.pop(1) == "-c", "only to be asked what it is, not to be used"
exec(sys.argv.pop(1))
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
@pytest.mark.parametrize("program", ["python3", ".venv/bin/python"])
def test_an_old_python_is_named_at_once_and_nothing_is_installed_with_it(
    program: str, tmp_path: Path
) -> None:
    """The Python that `make` would use, and that of an existing .venv."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / program
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(OLD)
    python.chmod(0o755)
    if program != "python3":
        (tmp_path / ".venv/bin/pip").touch()
    alone = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    make = ["make", f"PYTHON={tmp_path / 'python3'}", "demo"]
    refused = subprocess.run(
        make, cwd=tmp_path, env=alone, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert f"{program} is Python 3.10.12, and planaria needs 3.11 or newer" in refused.stderr
    assert "make PYTHON=python3.12 demo" in refused.stderr
    assert refused.stdout == ""

"""Tests that no command runs files of the current folder that are named like modules."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from planaria.node.run_file import dumps
from tests.conftest import CONVERSATIONS
from tests.swarm.small import small

ROOT = Path(__file__).parents[2]
PLANARIA = [sys.executable, "-m", "planaria"]
TEMPLATE = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
NOTEBOOK = """
import json, socket, sys
import planaria
sys.path.insert(0, "")
planaria.up(planaria.load("run.toml"), out="out")
"""
"""A notebook's kernel has its own modules loaded, and the current folder in its path."""


@pytest.fixture
def folder(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the test, with modules that write a file when they are loaded."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in ("json", "socket", "jinja2"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'w')")
    run = small(steps=1, data__path=str(data))
    (folder / "run.toml").write_text(dumps(run))
    (folder / "template.jinja").write_text(TEMPLATE)
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


def prepare(data: Path) -> list[list[str]]:
    words = f"--tokenizer {data}/tokenizer.json --chat-template template.jinja --validation 0.3"
    prepare = [*PLANARIA, "data", "prepare", str(CONVERSATIONS), "--out", "new", "--jobs", "2"]
    return [[*prepare, *words.split()]]


def up(data: Path) -> list[list[str]]:
    return [
        [*PLANARIA, "up", "run.toml", "--out", "out"],
        [*PLANARIA, "export", "out", "--out", "model"],
        [*PLANARIA, "generate", "model", "It was", "--tokens", "1"],
    ]


def from_python(data: Path) -> list[list[str]]:
    return [[sys.executable, str(Path.cwd().parent / "notebook.py")]]


@pytest.mark.parametrize("commands", [prepare, up, from_python])
def test_modules_in_the_current_folder_are_not_run(commands, folder: Path, data: Path) -> None:
    for command in commands(data):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in folder.parent.iterdir()) == ["downloaded", "notebook.py"]


def test_nor_does_a_node_that_another_process_watches(folder: Path) -> None:
    words = "bootstrap --run run.toml --listen 127.0.0.1:0 --address-file address"
    registry = subprocess.Popen([*PLANARIA, *words.split()])
    try:
        while not Path("address").exists():
            assert registry.poll() is None
            time.sleep(0.05)
        join = Path("address").read_text().strip()
        node = [*PLANARIA, "node", "--join", join, "--stage", "0", "--data", "missing"]
        done = subprocess.run(node, capture_output=True, text=True, timeout=600, check=False)
    finally:
        registry.kill()
        registry.wait()
    assert (done.returncode, "missing" in done.stderr) == (1, True), done.stderr
    assert sorted(path.name for path in folder.parent.iterdir()) == ["downloaded", "notebook.py"]

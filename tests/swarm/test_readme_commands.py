"""README's commands run in order, in an almost empty folder. Blocks marked `sh` and `python` are
run; a block marked `toml` is written to the file that its first line names."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE = 600.0  # seconds; reached only by a hang
FENCE = re.compile(r"^```(sh|python|toml)\n(.*?)^```", re.M | re.S)


@pytest.fixture
def newcomer(tmp_path: Path) -> Path:
    """The folder of a new user, with some texts."""
    texts = tmp_path / "my-texts"
    texts.mkdir()
    shutil.copy(ROOT / "corpus/austen/persuasion.txt", texts)
    return tmp_path


def output_of(kind: str, text: str, folder: Path) -> str:
    """Run or write a block, and return its output; it must succeed."""
    if kind == "toml":
        (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
        return ""
    mine = {name: value for name, value in os.environ.items() if "PLANARIA" not in name}
    bin_folder = str(Path(sys.executable).parent)
    command = [sys.executable, "-c"] if kind == "python" else ["bash", "-euo", "pipefail", "-c"]
    done = subprocess.run(
        [*command, text],
        cwd=folder,
        env=mine | {"PATH": f"{bin_folder}:{mine['PATH']}", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}"
    return done.stdout


def test_what_readme_says_works(newcomer: Path) -> None:
    blocks = FENCE.findall((ROOT / "README.md").read_text("utf-8"))
    outputs = {text: output_of(kind, text, newcomer) for kind, text in blocks}
    trained, home, loaded, tuned = (
        next(outputs[text] for text in outputs if sign in text)
        for sign in ("planaria up", "planaria export", "from_pretrained", "--merged")
    )
    assert "stage 2 rebuilt by snapshot at step 49" in trained
    assert "0 duplicates, 0 missing, 0 extra" in trained
    assert "my-model has the model of step 100" in home
    (loss,) = re.findall(r"([\d.]+) nats a token", home)
    assert float(loss) < math.log(2048) - 0.5
    assert "\nIt was" in loaded
    assert "stage 2 rebuilt by snapshot at step 9" in tuned
    assert "my-tuned-model has the model of step 20" in tuned

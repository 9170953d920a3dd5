"""A machine that lacks what some tests need still passes, and .ci/debian says what it skips."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

DEBIAN = Path(__file__).parent.parent / ".ci/debian"
BROWSER = ("Chromium", "chromium google-chrome", "the page's pictures are")
PACKAGES = ("chromium", "fonts-liberation")
SCRIPT = '#!{bash}\necho "$*" >> {log}\n{then}\n'


def installing(tmp_path: Path, **programs: str) -> tuple[str, str]:
    """Runs .ci/debian with these programs only; returns its output, and how it called them."""
    bash, log = shutil.which("bash"), tmp_path / "log"
    log.touch()
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("env", "timeout"):
        (folder / name).symlink_to(str(shutil.which(name)))
    for name, then in programs.items():
        (folder / name.replace("_", "-")).write_text(SCRIPT.format(bash=bash, log=log, then=then))
        (folder / name.replace("_", "-")).chmod(0o755)
    ended = subprocess.run(
        [str(bash), DEBIAN, *BROWSER, *PACKAGES],
        env=os.environ | {"PATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr == ""
    return ended.stdout, log.read_text()


@pytest.mark.parametrize(
    ("programs", "reason"),
    [
        ({}, "no apt-get to install it"),
        ({"apt_get": "", "id": "echo 1000"}, "only root installs it"),
        ({"apt_get": "", "id": "echo 1000", "sudo": "exit 1"}, "only root installs it"),
        ({"apt_get": "exit 100", "id": "echo 0"}, "apt-get update failed"),
        ({"apt_get": "[[ $* != *only* ]]", "id": "echo 0"}, "could not fetch it within 240 s"),
    ],
)
def test_it_says_why_there_is_no_browser(
    programs: dict[str, str], reason: str, tmp_path: Path
) -> None:
    printed, _ = installing(tmp_path, **programs)
    assert printed.startswith("the page's pictures are skipped: ") and reason in printed


@pytest.mark.parametrize("program", ["chromium", "google_chrome"])
def test_a_browser_that_is_there_is_enough(program: str, tmp_path: Path) -> None:
    assert installing(tmp_path, **{program: "", "apt_get": ""}) == ("", "")


def test_debians_is_installed_else(tmp_path: Path) -> None:
    printed, calls = installing(tmp_path, apt_get="", id="echo 0")
    assert printed == ""
    assert calls.splitlines()[-1].endswith(
        " --yes --no-install-recommends chromium fonts-liberation"
    )

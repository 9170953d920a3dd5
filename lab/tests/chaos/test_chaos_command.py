"""The run that `planaria lab chaos` trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.node.launch import resolve
from planaria_lab.chaos.command import _small_run
from planaria_lab.chaos.schedule import Shape


def test_what_it_prepares_is_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prose, here = tmp_path / "prose", tmp_path / "here"
    prose.mkdir()
    here.mkdir()
    for number in range(60):
        (prose / f"{number}.txt").write_text(f"It was dark and stormy night {number}.\n" * 30)
    monkeypatch.setattr(resolve, "SHIPPED", prose)
    monkeypatch.chdir(here)
    run = _small_run(None, Shape(2, 1), Path("out"))
    assert run.data.path == str(here / "out" / "data" / "prose")
    assert [path.name for path in here.iterdir()] == ["out"]
    assert _small_run(None, Shape(2, 1), Path("out")) == run

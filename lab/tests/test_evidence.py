"""Tests that claims of pages have rows, and that rows name their origin."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from planaria_lab.evidence import complaints
from planaria_lab.origin import lacking, origin

TOP = Path(__file__).parents[2]
STUDY = Path("lab/results/swapped-order")


def test_each_claim_of_the_pages_has_rows_that_are_paired() -> None:
    assert [*complaints(TOP)] == []


def test_a_row_of_today_says_where_it_comes_from() -> None:
    assert not lacking(origin())
    assert lacking({**origin(), "commit": ""}) == ["commit"]


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A repository with one study."""
    shutil.copytree(TOP / STUDY, tmp_path / STUDY, ignore=shutil.ignore_patterns("*.md", "*.png"))
    shutil.copy(TOP / STUDY / "table.md", tmp_path / STUDY)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.md").write_text("[0.1](../lab/results/swapped-order/table.md)")
    return tmp_path


def change(top: Path, **fields: object) -> None:
    """Change fields of the last row of the study."""
    path = top / STUDY / "runs.jsonl"
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps({**json.loads(last), **fields})]) + "\n")


def test_a_study_without_runs_claims_nothing(top: Path) -> None:
    (top / STUDY / "runs.jsonl").unlink()
    (top / STUDY / "table.md").unlink()
    (top / "docs/page.md").unlink()
    assert [*complaints(top)] == []


def test_what_is_missing_is_named(top: Path) -> None:
    assert [*complaints(top)] == []
    (top / "README.md").write_text("[0.2](lab/results/gone/) `python -m planaria_lab.bench.gone`")
    folder, bench = complaints(top)
    assert "links to" in folder and "gone, which has no rows" in folder
    assert "names the measurement gone" in bench


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"torch": ""}, ["line 21 lacks torch", "1 rows of", "isn't what its rows make"]),
        ({"machine": "abacus, 2 cores"}, ["1 rows of", "isn't what its rows make"]),
        ({"seed": 9}, ["isn't what its rows make"]),
        ({"commit": "other"}, []),
    ],
)
def test_a_row_that_supports_nothing_is_named(
    top: Path, fields: dict[str, object], words: list[str]
) -> None:
    change(top, **fields)
    lines = [*complaints(top)]
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True)), lines

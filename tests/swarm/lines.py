"""What a swarm under way writes, read as it comes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from planaria.node.report.event_log import LineReader


class Lines:
    """The JSON lines in a folder's files, in the order in which they were seen; each is read once,
    however often one looks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tails: dict[Path, LineReader] = {}
        self._seen: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)

    def of(self, pattern: str) -> list[dict[str, Any]]:
        """Whole lines of the files that match."""
        for path in sorted(self.folder.glob(pattern)):
            self._seen[pattern] += self._tails.setdefault(path, LineReader(path)).lines()
        return self._seen[pattern]

    def events(self, kind: str, pattern: str = "events-*.jsonl") -> list[dict[str, Any]]:
        return [event for event in self.of(pattern) if event["kind"] == kind]

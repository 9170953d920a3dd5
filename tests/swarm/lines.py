"""A reader of the lines that a running swarm writes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from planaria.node.report.event_log import LineReader


class Lines:
    """The JSON lines in a folder's files, in the order in which they were seen. Each line is read
    only once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tails: dict[Path, LineReader] = {}
        self._seen: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)

    def of(self, pattern: str) -> list[dict[str, Any]]:
        """Return the whole lines of files that match the pattern."""
        for path in sorted(self.folder.glob(pattern)):
            self._seen[pattern] += self._tails.setdefault(path, LineReader(path)).lines()
        return self._seen[pattern]

    def events(self, kind: str, pattern: str = "events-*.jsonl") -> list[dict[str, Any]]:
        return [event for event in self.of(pattern) if event["kind"] == kind]

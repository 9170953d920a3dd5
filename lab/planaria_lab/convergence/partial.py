"""Files of unfinished runs, from which another process can continue them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from planaria_lab.convergence.study import StudyError
from planaria_lab.convergence.training import STATE_CLASSES, TrainingSwarm
from planaria_lab.origin import origin

EVERY = 300.0
"""Seconds between two writes of the file."""


@dataclass
class Progress:
    """The progress of a run, beside the state of its swarm."""

    curve: list[tuple[int, int, float]] = field(default_factory=list)
    rebuilds: list[dict[str, Any]] = field(default_factory=list)
    iteration: int = 0
    seconds: float = 0.0


class PartialRun:
    """The file of an unfinished run. The swarm's lessons and `progress.rebuilds` share their lines,
    also after loading, so that relearning in the background continues to count."""

    def __init__(self, path: Path, every: float = EVERY) -> None:
        self._path, self._every = path, every
        self._last = 0.0  # time of `load`, or of the last write
        self._commit = origin()["commit"]  # other code may continue a run differently

    def load(self, swarm: TrainingSwarm) -> Progress | None:
        """Load the run into `swarm` and return its progress; None, and no change, without a file.
        Raises StudyError for a file of another run, format or commit."""
        self._last = time.monotonic()  # by the clock of the machine that runs it
        if not self._path.exists():
            return None
        try:
            with torch.serialization.safe_globals([Progress, *STATE_CLASSES]):
                saved = torch.load(self._path, map_location="cpu", weights_only=True)
            began_at, progress = saved["commit"], saved["progress"]
            if began_at == self._commit:
                swarm.put(saved["swarm"])
        except (UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
            raise StudyError(
                f"{self._path} is no run that can continue here ({type(error).__name__}): delete it"
            ) from error
        if began_at != self._commit:
            raise StudyError(
                f"{self._path} was begun at commit {began_at}, and this is {self._commit}: go on "
                "with that commit, or delete the file"
            )
        assert isinstance(progress, Progress)
        return progress

    def keep(self, swarm: TrainingSwarm, progress: Progress) -> None:
        """Write the file, atomically, if the last write was long enough ago."""
        if time.monotonic() - self._last < self._every:
            return
        scratch = self._path.with_suffix(".new")
        saved = {"commit": self._commit, "swarm": swarm.state(), "progress": progress}
        torch.save(saved, scratch)
        scratch.replace(self._path)
        self._last = time.monotonic()

"""A run that is under way, in a file, so that it goes on where it was when its process ends."""

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
"""Seconds."""


@dataclass
class Progress:
    """The progress of a run, beside the state of its swarm."""

    curve: list[tuple[int, int, float]] = field(default_factory=list)
    rebuilds: list[dict[str, Any]] = field(default_factory=list)
    iteration: int = 0
    seconds: float = 0.0


class PartialRun:
    """The file of a run. What `progress` holds of the swarm is the same object there and here, also
    after loading: what is learned in the background goes on being counted."""

    def __init__(self, path: Path, every: float = EVERY) -> None:
        self._path, self._every = path, every
        self._last = 0.0  # time of `load`, or since when it is kept
        self._commit = origin()["commit"]  # other code may go on otherwise than it had begun

    def load(self, swarm: TrainingSwarm) -> Progress | None:
        """None where there is none; `swarm` is then as it was. Raises StudyError."""
        self._last = time.monotonic()  # of the machine where it runs
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
                f"{self._path} is no run that goes on from here ({type(error).__name__}): delete it"
            ) from error
        if began_at != self._commit:
            raise StudyError(
                f"{self._path} was begun at commit {began_at}, and this is {self._commit}: go on "
                "with that one, or delete the file"
            )
        assert isinstance(progress, Progress)
        return progress

    def keep(self, swarm: TrainingSwarm, progress: Progress) -> None:
        """Now and then, whole or not at all."""
        if time.monotonic() - self._last < self._every:
            return
        scratch = self._path.with_suffix(".new")
        saved = {"commit": self._commit, "swarm": swarm.state(), "progress": progress}
        torch.save(saved, scratch)
        scratch.replace(self._path)
        self._last = time.monotonic()

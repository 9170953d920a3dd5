"""Phases of a driver, and its state when it waits for no member."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class DriverPhase(enum.Enum):
    INACTIVE = "not the driver"
    GATHERING = "gathering"
    SYNCING = "syncing"
    RUNNING = "running"
    REDUCING = "reducing"
    WAITING = "waiting"
    PAUSING = "pausing"
    HALTED = "halted"


@dataclass(frozen=True)
class Resting:
    """The driver asks nothing of any member."""

    phase: DriverPhase
    why: str = ""

    def explain(self) -> str:
        return self.why or self.phase.value

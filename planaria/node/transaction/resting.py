"""What a driver is at, and when it asks nothing of any member."""

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
    """Nothing is asked of any member."""

    phase: DriverPhase
    why: str = ""

    def explain(self) -> str:
        return self.why or self.phase.value

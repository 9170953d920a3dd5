"""Wall time of a node by use."""

from __future__ import annotations

PARTS = ("compute", "average", "rebuild", "send", "idle")


class WallClock:
    """A node's wall time in seconds, by part: in all, from the first sample to the last."""

    def __init__(self, now: float) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last = now
        self._busy = 0.0

    def sample(self, now: float, busy_seconds: float, otherwise: str) -> None:
        """Add a sample. `busy_seconds`: compute thread's total; `otherwise`: part of the rest."""
        passed, self._last = now - self._last, now
        computed = min(passed, max(0.0, busy_seconds - self._busy))
        self._busy += computed
        self.seconds["compute"] += computed
        self.seconds[otherwise] += passed - computed

    def report(self) -> dict[str, float]:
        return {**self.seconds, "total": sum(self.seconds.values())}

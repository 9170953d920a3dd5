"""Which node drives: for whom the run's first driver waits, and who is the next one."""

from __future__ import annotations

from planaria.bootstrap.accusations import Accusations
from planaria.bootstrap.member_table import Members
from planaria.bootstrap.registry_pb2 import View


class Driving:
    """Decides which node drives, and when the run's first driver is named."""

    def __init__(self, members: Members, accusations: Accusations) -> None:
        self._members, self._accusations, self._rules = members, accusations, members.rules
        self.started = False  # whether any driver has been named
        self.joined_at = 0.0  # time of the latest join
        self.heir = ""  # the next driver, by an accusation
        self._covered: float | None = None  # time since which each stage has a member

    def restore(self, view: View, now: float) -> None:
        # A started run lacks a driver only while stage 0 is vacant.
        led = bool(view.driver) or (view.committed > 0 and not self._members.count(0))
        self.started = self.started or (led and len(self._members) > 0)
        self.joined_at, self._covered = now, None
        self.note_covered(now)

    def note_covered(self, now: float) -> None:
        """Notes since when each stage has had a member."""
        if self._members.vacant():
            self._covered = None
        elif self._covered is None:
            self._covered = now

    def paused(self, seconds: float) -> None:
        """Extends the wait for nodes by a pause of the registry."""
        self.joined_at += seconds
        if self._covered is not None:
            self._covered += seconds

    def has_begun(self, now: float) -> bool:
        """Whether the run has begun, or no further nodes are awaited for it."""
        return self.started or now > self.joined_at + self._rules.start_grace

    def is_due(self, now: float) -> bool:
        """Whether the wait for the first driver is over."""
        return not self.started and self._is_over(now)

    def _is_over(self, now: float) -> bool:
        return self._covered is not None and now >= self._covered + self._rules.start_grace

    def name(self, now: float) -> tuple[str, str]:
        """The driver, empty: none; and the nodes that the run's first driver waits for, as text."""
        awaited = "" if self.started else self._awaited(now)
        driver = "" if awaited else self._next()
        self.started = self.started or bool(driver)
        return driver, awaited

    def _next(self) -> str:
        """The next driver: an heir, else the present driver, else the oldest staying stage-0 member
        that has lost the drive least often. Empty: none."""
        heir, self.heir = self.heir, ""
        ends = {node.name: node for node in self._members.at(0)}
        for name in (heir, self._members.driver):
            if name in ends:
                return name
        lost = self._accusations.lost_alone
        return min(ends, key=lambda name: (ends[name].leaving, lost(name)), default="")

    def _awaited(self, now: float) -> str:
        """The nodes that the run's first driver waits for, as text; empty: none."""
        if self._is_over(now):
            return ""
        wanted = self._rules.replicas
        counts = map(self._members.count, range(self._rules.stages + 1))
        needed = [
            f"{wanted - count} more node{'s' if wanted - count > 1 else ''} "
            f"at stage {stage} ({count} of {wanted})"
            for stage, count in enumerate(counts)
            if count < wanted
        ]
        return f"waiting for {', '.join(needed)}" if needed else ""

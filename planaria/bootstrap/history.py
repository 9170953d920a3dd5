"""The registry's memory of what has happened, for people and for former members."""

from __future__ import annotations

from collections import deque

from planaria.bootstrap.accusations import WHY_LENGTH
from planaria.bootstrap.escaping import readable
from planaria.bootstrap.registry_pb2 import Description, Eviction, Member, Rebuild

DECISIONS_KEPT = 200
DECISION_LENGTH = 4000  # characters of a decision, or of a view's reason
EVICTED_KEPT = 10_000
EVICTIONS_LISTED = 20
REBUILDS_LISTED = 100


class ViewHistory:
    def __init__(self) -> None:
        self.decisions: deque[str] = deque(maxlen=DECISIONS_KEPT)  # newest last
        self.decided = 0  # decisions ever taken
        self.former: dict[str, str] = {}  # former members -> reason; the oldest are dropped
        self._evictions: deque[tuple[float, Eviction]] = deque(maxlen=EVICTIONS_LISTED)
        self._rebuilds: dict[tuple[int, int, str], Rebuild] = {}  # by step, stage, method

    def note(self, decision: str) -> None:
        self.decisions.append(decision[:DECISION_LENGTH])
        self.decided += 1

    def gone(self, name: str, reason: str) -> None:
        self.former[name] = reason[:WHY_LENGTH]
        while len(self.former) > EVICTED_KEPT:
            del self.former[next(iter(self.former))]

    def evicted(self, member: Member, reason: str, now: float) -> None:
        self._evictions.append((now, Eviction(member=member, reason=reason[:DECISION_LENGTH])))

    def rebuilt(self, rebuild: Rebuild) -> None:
        """Stores a rebuild, since the driver that reported it may leave."""
        method = rebuild.method[:WHY_LENGTH]
        copy = self._rebuilds[rebuild.step, rebuild.stage, method] = Rebuild()
        copy.CopyFrom(rebuild)
        copy.method = method
        while len(self._rebuilds) > REBUILDS_LISTED:
            del self._rebuilds[next(iter(self._rebuilds))]

    def why_gone(self, name: str) -> str:
        """Why a node is no member any longer."""
        return self.former.get(name, "not a member of the current view")

    def describe(self, description: Description, now: float) -> None:
        """Adds the latest decisions, evictions and rebuilds to a registry's description."""
        description.decisions.extend(self.decisions)
        for when, eviction in self._evictions:
            description.evictions.add(
                member=eviction.member, reason=eviction.reason, seconds=now - when
            )
        for _, rebuild in sorted(self._rebuilds.items()):
            description.rebuilds.append(rebuild)
            description.rebuilds[-1].method = readable(rebuild.method)

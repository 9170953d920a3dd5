"""The links that a node needs and lacks, of which it complains to the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from planaria.bootstrap.cuts import MOST_COMPLAINTS
from planaria.bootstrap.registry_pb2 import Complaint

PATIENCE: Final = 1.0
"""Seconds that a link takes to come up, mostly: of one that is new nobody complains at once."""


class MissingLinks:
    """Which of them are missing for how long. Without a clock: `now` in seconds of any one."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._told: dict[str, bool] = {}  # whether another member carries for the two

    def look(self, needed: Iterable[str], carrier: Callable[[str], str | None], now: float) -> bool:
        """`needed`: the members to which a link has to be up; `carrier`: who carries one, empty
        where it is direct, None where there is none. Returns whether `complaints` are others than
        before."""
        self._since = {p: self._since.get(p, now) for p in needed if carrier(p) != ""}
        before, ripe = self._told, [p for p, at in self._since.items() if now - at >= PATIENCE]
        self._told = {peer: bool(carrier(peer)) for peer in ripe}
        return self._told != before

    def complaints(self) -> list[Complaint]:
        """For a report: those that stand, those that have stood for longest first; more than
        MOST_COMPLAINTS say no more."""
        longest = sorted(self._told, key=lambda peer: self._since[peer])[:MOST_COMPLAINTS]
        return [Complaint(peer=peer, relayed=self._told[peer]) for peer in longest]

    @property
    def unlisted(self) -> int:
        """How many more stand."""
        return max(0, len(self._told) - MOST_COMPLAINTS)

"""The links that a node needs and lacks, for its complaints to the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from planaria.bootstrap.registry_pb2 import Complaint
from planaria.bootstrap.unreachable_pairs import MOST_COMPLAINTS

PATIENCE: Final = 1.0
"""Seconds that a link mostly takes to come up; a node complains only about older ones."""


class MissingLinks:
    """How long each link that a node needs has been missing. `now` in seconds of any one clock."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._reported: dict[str, bool] = {}  # whether a relay carries the link

    def look(self, needed: Iterable[str], carrier: Callable[[str], str | None], now: float) -> bool:
        """Look which links are missing. `needed`: the members that need a link. `carrier` gives a
        link's relay: "" for a direct link, None if it is down. Returns whether `complaints` have
        changed."""
        self._since = {p: self._since.get(p, now) for p in needed if carrier(p) != ""}
        before, ripe = self._reported, [p for p, at in self._since.items() if now - at >= PATIENCE]
        self._reported = {peer: bool(carrier(peer)) for peer in ripe}
        return self._reported != before

    def complaints(self) -> list[Complaint]:
        """The missing links as complaints to the registry, the oldest first; at most
        MOST_COMPLAINTS, since more add nothing."""
        longest = sorted(self._reported, key=lambda peer: self._since[peer])[:MOST_COMPLAINTS]
        return [Complaint(peer=peer, relayed=self._reported[peer]) for peer in longest]

    @property
    def unlisted(self) -> int:
        """Number of further complaints, beyond MOST_COMPLAINTS."""
        return max(0, len(self._reported) - MOST_COMPLAINTS)

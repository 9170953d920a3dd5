"""Items for members to which no link is up yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from planaria.node.ports import Net
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.budget import Budget
from planaria.node.wire.frame_format import Frame

PATIENCE: Final = 3.0
"""Seconds that an item waits for a link to come up."""


class _Waiting(NamedTuple):
    since: float
    item: pb.Message | Frame
    size: int


class NodeOutbox:
    """Sends over links, and demands those that aren't up. Items for a peer keep their order.

    `undelivered` gets each item for which no link came up in time, and the reason.
    """

    def __init__(
        self, net: Net, undelivered: Callable[[str, pb.Message | Frame, str], None], limit: int
    ) -> None:
        """`limit`: bytes for a peer that may wait."""
        self._net, self._undelivered = net, undelivered
        self._waiting: dict[str, list[_Waiting]] = {}
        self._budget = Budget(limit)

    def send(self, peer: str, item: pb.Message | Frame, member: bool, now: float) -> bool:
        """Send a peer an item, now or once a link is up. False: none is up, and it can't wait: the
        peer is no `member`, or too much waits for it already."""
        if peer not in self._waiting and self._net.send(peer, item):
            return True
        size = item.size if isinstance(item, Frame) else item.ByteSize()
        if not member or self._budget.spend(peer, size):
            return False
        self._waiting.setdefault(peer, []).append(_Waiting(now, item, size))
        self._net.demand(peer)
        return True

    def linked(self, peer: str) -> None:
        """Send what waits for `peer`: a link to it is up."""
        for _, item, size in self._waiting.pop(peer, []):
            self._budget.free(peer, size)
            self._net.send(peer, item)

    def tick(self, now: float) -> None:
        for peer, waiting in list(self._waiting.items()):
            if self._net.linked(peer):
                self.linked(peer)
                continue
            late = [letter for letter in waiting if now - letter.since > PATIENCE]
            del waiting[: len(late)]
            if not waiting:
                del self._waiting[peer]
            for _, item, size in late:
                self._budget.free(peer, size)
                self._undelivered(peer, item, f"no link to {peer} came up in {PATIENCE:.0f} s")

"""The driver's audits: each is an exchange that collects answers until a deadline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from planaria.node.averaging.audit import AuditResult, examine
from planaria.node.averaging.coding import Coding
from planaria.node.averaging.evidence import Signing
from planaria.node.transaction.effects import NEVER, Audit, Ballot
from planaria.node.wire.exchange import Exchanges, Inboxes, Lost
from planaria.node.wire.frames import Frame, buffers_of

MOST_ANSWERED: Final = 16 << 20
"""Maximum bytes of an answer: each block is at most twice 65,536 float32, and signed digests."""


class Auditor:
    """Collects the answers to audits, one audit at a time."""

    def __init__(
        self,
        exchanges: Exchanges,
        coding: Coding,
        size: int,
        signing: Callable[[], Signing],
        patience: float,
    ) -> None:
        """`size`: values of the gradient of a body stage. `signing`: by the newest view.
        `patience`: seconds to wait for all answers."""
        self._exchanges, self._coding, self._size = exchanges, coding, size
        self._signing, self._patience = signing, patience
        self._inboxes: Inboxes[Ballot, Frame] = Inboxes(exchanges, NEVER, 0, MOST_ANSWERED)

    async def run(self, audit: Audit) -> AuditResult:
        """Waits for the answers of all replicas, and examines those that have come. Who has lost
        its link owes none."""
        awaited = {node for replicas in audit.stages.values() for node in replicas}
        answers: dict[str, bytes] = {}
        signing = self._signing()
        until = self._exchanges.now + self._patience
        with self._inboxes.open(audit.ballot) as inbox:
            while awaited:
                try:
                    peer, item = await inbox.take(until)
                except TimeoutError:
                    break
                if peer in awaited and not isinstance(item, Lost):
                    answers[peer] = b"".join(buffers_of(item.payload))
                awaited.discard(peer)
        coding = self._coding.at(audit.step)
        return await self._exchanges.compute(
            partial(examine, audit, answers, awaited, coding, self._size, signing)
        )

    def on_frame(self, peer: str, frame: Frame) -> None:
        """Handles a frame of kind "audit". It has no effect unless its audit is under way."""
        self._inboxes.put(Ballot(*frame.ballot), peer, frame, frame.size)

    def on_peer_lost(self, peer: str, reason: str) -> None:
        """The link to `peer` is lost: its answer is no longer awaited."""
        self._inboxes.lost(peer, reason)

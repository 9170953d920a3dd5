"""The exchanges by which a node's reductions are carried out, and audited."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Final

from planaria.node.averaging.coding import Coding, ReductionRound, has_error_feedback
from planaria.node.averaging.error_feedback import ErrorFeedback
from planaria.node.averaging.evidence import Evidence, Signing, is_audited
from planaria.node.averaging.examination import AuditResult, examine_answers
from planaria.node.averaging.reduction import OutgoingFrames, Reduction
from planaria.node.transaction.effects import AuditSum, Ballot
from planaria.node.wire.exchange import ComplaintError, Exchanges, Hearing, Lost, PeerLostError
from planaria.node.wire.frame_format import Frame, buffers_of

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

EARLY_LIMIT: Final = 2 << 30  # bytes kept of one peer that is ahead of this node
MOST_ANSWERED: Final = 16 << 20
"""Maximum bytes of an audit's answer: each block is at most twice 65,536 float32, and signed
digests."""
LATER: Final = 2.0
"""Extra seconds before an accusation, for each hop behind a row's contributions: nodes nearer to
the cause then report first."""


class Averaging(Hearing):
    """One node's side of the reductions, one at a time.

    `send` queues a frame for a peer and returns False without a route. After a cancellation, touch
    the gradient only in the compute thread, behind the reduction's last work there.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        send: Callable[[str, Frame], bool],
        coding: Coding,
        limit: int = EARLY_LIMIT,
        signing: Callable[[], Signing] | None = None,
    ) -> None:
        """`limit`: bytes of one peer that wait, before a reduction and in it. `signing`: by the
        newest view; given if the stage is audited."""
        super().__init__(exchanges, limit, limit)
        self._signing = signing
        self._evidence: Evidence | None = None  # of the last reduction
        self._send = send
        self._coding = coding
        self.feedback = ErrorFeedback()

    async def reduce(
        self, round: ReductionRound, gradient: Tensor, ids: Collection[int], patience: float
    ) -> None:
        """Replace `gradient` (float32 [n]) by its sum over the replicas, in place.

        `ids`: microbatches in this node's gradient. `patience`: seconds to wait for the next frame
        after `hurry`; until then others may still compute.

        Takes about twice the gradient's memory, half of it for frames to be sent, and twice more
        for error feedback, if any. What audits may ask for stays until the commit: all that was
        sent, and this node's own part in float32.

        Raises ComplaintError, and PeerLostError when the gradients can still be summed without the
        accused. After failure or cancellation the gradient's contents are void.
        """
        coding, ballot = self._coding.at(round.step), round.ballot
        feedback = self.feedback if has_error_feedback(coding.codec) else None
        self._evidence = None
        if self._signing is not None and is_audited(coding.codec, len(round.replicas)):
            self._evidence = Evidence(round, gradient.numel(), coding, self._signing())
        reduction = Reduction(round, gradient, ids, coding, feedback, self._evidence)
        try:
            with self._inboxes.open(ballot) as inbox:
                await self._compute(reduction.start)
                for number in range(reduction.pieces):
                    await self._compute(partial(reduction.contribute, number))
                while awaited := reduction.awaited():
                    phase, nodes, hops = awaited
                    seconds = patience + LATER * hops
                    try:
                        peer, item = await inbox.take(patience=seconds)
                    except TimeoutError:
                        whose = ", ".join(nodes)
                        raise ComplaintError(
                            f"waited {seconds:g} s in vain for the {phase} of {whose}", nodes
                        ) from None
                    await self._absorb(reduction, peer, item)
        finally:
            self.forget(Ballot(ballot.view, ballot.attempt + 1))

    def take_evidence(self, ballot: Ballot) -> Evidence | None:
        """The evidence of that ballot's sum, if it is kept. It is kept no longer."""
        evidence, self._evidence = self._evidence, None
        return evidence if evidence is not None and evidence.ballot == ballot else None

    async def _absorb(self, reduction: Reduction, peer: str, item: Frame | Lost) -> None:
        if isinstance(item, Lost):
            if reduction.needs(peer):
                why = f"lost {peer} before its sums were here: {item.reason}"
                raise PeerLostError(why, [peer], item.cause)
        elif peer in reduction.nodes:
            await self._compute(partial(reduction.absorb, peer, item))
        else:
            log.warning("dropped a gradient from %s, no replica of this stage", peer)

    async def _compute(self, work: Callable[[], OutgoingFrames]) -> None:
        for peer, frame in await self._exchanges.compute(work):
            if not self._send(peer, frame):
                raise PeerLostError(f"there is no link to {peer}", [peer])


class Auditor(Hearing):
    """Collects the answers to the driver's audits, one audit at a time, until a deadline."""

    def __init__(
        self,
        exchanges: Exchanges,
        coding: Coding,
        size_of: Callable[[int], int],
        signing: Callable[[], Signing],
        patience: float,
    ) -> None:
        """`size_of`: values of a stage's gradient. `signing`: by the newest view.
        `patience`: seconds to wait for all answers."""
        super().__init__(exchanges, 0, MOST_ANSWERED)
        self._coding, self._size_of = coding, size_of
        self._signing, self._patience = signing, patience

    async def run(self, audit: AuditSum) -> AuditResult:
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
            partial(examine_answers, audit, answers, awaited, coding, self._size_of, signing)
        )

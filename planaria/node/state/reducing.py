"""Sums the gradient of an attempt over the replicas of a seat's stage, and lets the member vote."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

from planaria.bootstrap.registry_pb2 import DIVERGENCE, SILENT
from planaria.node.averaging.averaging import Auditor, Averaging
from planaria.node.averaging.coding import Coding, ReductionRound
from planaria.node.averaging.evidence import Signing
from planaria.node.model.shape import trained_shapes
from planaria.node.transaction.effects import NEVER, AuditSum, Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.commit_chain import hash_of
from planaria.node.wire.exchange import ComplaintError, Exchange, Outcome, PeerLostError

if TYPE_CHECKING:
    from planaria.node.agent import Agent
    from planaria.node.transaction.attempt import Attempt

NOTING: Final = 0.02
"""Seconds between two checks whether the ledger is written."""


class Reducing:
    """The reduction of a seat's newest attempt, from its beginning to the vote."""

    def __init__(self, seat: Agent) -> None:
        self._seat = seat
        self.ballot = NEVER
        self._exchange: Exchange[None] | None = None
        self._all_home: Outcome[None] = Outcome(seat.exchanges)

    @property
    def runs(self) -> bool:
        return self._exchange is not None and not self._exchange.done

    def start(self, ballot: Ballot, attempt: Attempt) -> None:
        self._all_home = Outcome(self._seat.exchanges)
        self.ballot = ballot
        self._exchange = self._seat.exchanges.start(self._reduce(ballot, attempt))

    def hurry(self, ballot: Ballot) -> None:
        """All microbatches are home: from now on, sums and twins wait for frames in vain for so
        long."""
        self._seat.averaging.hurry(ballot)
        if self._seat.holdings.twin is not None:
            self._seat.holdings.twin.hurry(ballot)
        self._all_home.fulfil(None)

    def forget(self, before: Ballot) -> None:
        """Cancels the sums of attempts older than `before`."""
        if self._exchange is not None and self.ballot < before:
            self._exchange.cancel()
        self._seat.averaging.forget(before)

    async def _reduce(self, ballot: Ballot, attempt: Attempt) -> None:
        seat = self._seat
        try:
            norm = await self._sum(ballot, attempt)
        except ComplaintError as error:
            if isinstance(error, PeerLostError) or error.cause not in (SILENT, DIVERGENCE):
                for node in error.accused:
                    seat.cut_off(ballot, node, str(error), error.cause)
            else:
                seat.attempt_failed(ballot, str(error), error.accused, error.cause)
            return
        await self._wait_for_ledger()
        seconds = seat.workplace.seconds_per_microbatch
        relearned, relearning = await seat.gaps.offer(self._all_home)
        digest = await seat.exchanges.compute(seat.arithmetic.digest)
        ready = pb.Ready(
            squared_norm=norm,
            finite=math.isfinite(norm),
            seconds_per_microbatch=seconds,
            digest=digest,
            relearned=relearned,
            relearning=relearning,
        )
        seat.carry_out(seat.member.reduced(ballot, ready))
        seat.exchanges.start(seat.feed.feed(ballot, attempt.begin))

    async def audit(self, audit: AuditSum) -> None:
        result = await self._seat.auditor.run(audit)
        self._seat.carry_out(self._seat.driver.audit_over(result))

    async def _wait_for_ledger(self) -> None:
        """Waits until the previous step is in this member's ledger, or can't be written. Votes come
        after that, so each step is in a ledger, whichever nodes are lost when."""
        while self._seat.record.recording() == pb.LEDGER_WRITING:
            await self._seat.exchanges.sleep(NOTING)

    async def _sum(self, ballot: Ballot, attempt: Attempt) -> float:
        """Sums the stage's gradient over its replicas, and the twin's. Returns the squared norm of
        the former. Raises ComplaintError."""
        seat, begin = self._seat, attempt.begin
        progress, gradient = seat.run.swarm.progress, seat.arithmetic.gradient
        replicas = sorted(place.node for place in begin.members if place.stage == seat.stage)
        await attempt.complete(seat.exchanges)
        reduction = ReductionRound(
            seat.node,
            ballot,
            replicas,
            window=begin.untold + len(begin.plan),
            step=begin.step,
            non_finite=begin.non_finite,
            last=hash_of(seat.member.last),
        )
        await seat.averaging.reduce(reduction, gradient, attempt.applied, progress)
        norm = await seat.exchanges.compute(seat.arithmetic.reduced)
        if seat.holdings.twin is not None:
            await seat.holdings.twin.exchange(ballot, begin.members, gradient, norm, progress)
        return norm

    async def answer_audit(self, commit: pb.Commit) -> None:
        """Answers the audit that the commit asks for, beside the next step."""
        seat = self._seat
        evidence = seat.averaging.take_evidence(Ballot.of(commit.ballot))
        if evidence is not None and commit.audited:
            frame = await seat.exchanges.compute(partial(evidence.answer, commit.audited))
            seat.send(seat.member.decider, frame)


def make_averaging(seat: Agent, slack: int) -> tuple[Averaging, Auditor]:
    """What averages a seat's gradient, and what audits that. `slack`: bytes of frames' heads."""
    some = 2 * seat.arithmetic.gradient.nbytes + slack  # of two attempts, for one node
    shapes = trained_shapes(seat.config, seat.stage).values()
    coding = Coding.of_run(seat.tensors, seat.run.wire, shapes)

    def signing() -> Signing:
        return Signing(seat.ports.identity, seat.member.view)

    audited = signing if seat.stage > 0 and seat.run.trust.gradients != "off" else None
    progress = seat.run.swarm.progress
    return (
        Averaging(seat.exchanges, seat.send, coding, some, audited),
        Auditor(seat.exchanges, coding, seat.config.trained_in, signing, progress),
    )

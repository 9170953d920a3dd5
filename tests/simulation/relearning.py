"""A joiner that relearns what was guessed: what it asks of the neighbours, and of other joiners."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.wire import stage_pb2 as pb

if TYPE_CHECKING:
    from simulation.shell import Node

BODIES = frozenset(["boundary_request", "boundary_manifest", "relearn"])
PATIENCE = 2.0
"""Seconds that the neighbours' boundary tensors are waited for: without them it stays a guess."""


class Relearning:
    """One joiner's part, between the weights' arrival and their being fit to train."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.ballot = NEVER
        self.asked: set[str] = set()
        self.others: set[str] = set()  # joiners of the same block
        self.heard: dict[str, tuple[Ballot, int]] = {}  # of other joiners: passes done
        self.round = 0

    def start(
        self, ballot: Ballot, sync: pb.Sync, done: Callable[[], None], fail: Callable[[str], None]
    ) -> bool:
        """False: the state is wanted no longer. Else `done` is called, or `fail`, or `stop` was."""
        member = self.node.member
        assert member is not None
        if not member.voided(ballot):
            return False
        self.ballot, self.done, self.fail = ballot, done, fail
        self.round, self.passes = 0, self.node.world.random.randint(1, 6)
        self.others = {place.node for place in sync.lost} - {self.node.name}
        self.asked = {place.node for place in sync.neighbours}
        request = pb.BoundaryRequest(transfer=ballot.attempt, step=sync.step)
        request.lost.extend(place.stage for place in sync.lost)
        for peer in sorted(self.asked):
            if not self.node.send(peer, pb.Message(boundary_request=request)):
                self.asked.discard(peer)
        self.node.process.after(PATIENCE, self._learn, ballot)
        self._go_on()
        return True

    def stop(self) -> None:
        self.ballot = NEVER

    def _learn(self, ballot: Ballot) -> None:
        if ballot == self.ballot and self.asked:
            self.asked = set()
            self._go_on()

    def _go_on(self) -> None:
        if self.ballot == NEVER or self.asked or self.node.over:
            return
        here = self.ballot, self.round
        behind = [peer for peer in self.others if self.heard.get(peer, (NEVER, 0)) < here]
        if self.round and behind:
            return
        if self.round >= self.passes:
            for peer in sorted(self.others):  # who is behind goes on alone
                self._tell(peer, over=True)
            self.ballot = NEVER
            self.done()
            return
        ballot = self.ballot
        self.round += 1
        self.node.compute.run(lambda: None, lambda _: self._passed(ballot), seconds=0.2)

    def _passed(self, ballot: Ballot) -> None:
        if ballot == self.ballot and not self.node.over:
            for peer in sorted(self.others):
                self._tell(peer)
            self._go_on()

    def _tell(self, peer: str, over: bool = False) -> None:
        work = pb.Relearn.KEEP if over else pb.Relearn.TRAIN
        relearn = pb.Relearn(round=self.round, work=work)
        self.node.send(peer, pb.Message(ballot=self.ballot.message(), relearn=relearn))

    def on_message(self, peer: str, message: pb.Message) -> None:
        match message.WhichOneof("body"):
            case "boundary_request":
                request = message.boundary_request
                manifest = pb.BoundaryManifest(transfer=request.transfer, step=request.step)
                self.node.send(peer, pb.Message(boundary_manifest=manifest))
            case "boundary_manifest" if message.boundary_manifest.transfer == self.ballot.attempt:
                self.asked.discard(peer)
                self._go_on()
            case "relearn":
                over = message.relearn.work == pb.Relearn.KEEP
                rounds = 1_000 if over else message.relearn.round
                heard = Ballot.of(message.ballot), rounds
                self.heard[peer] = max(heard, self.heard.get(peer, (NEVER, 0)))
                self._go_on()

    def on_peer_lost(self, peer: str) -> None:
        if self.ballot == NEVER:
            return
        if peer in self.others:
            self.stop()
            self.fail(f"lost {peer}, which relearns with this node")
        elif peer in self.asked:
            self.asked.discard(peer)
            self._go_on()

"""Takeover: a stage's last node is lost in the middle of a step, and another takes its seat.

With redundant computation the nodes of the stage before hold a twin: the state with which the step
began. So the attempt isn't given up. It waits until the new seat has that state, and goes on by a
plan that gives it the lost node's microbatches. The neighbours send again what they sent to the
lost node. Only the lost stage's visits are computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from planaria.node.driver.query_answers import Standing
from planaria.node.driver.rebuilds import order_event
from planaria.node.report.events import RebuildOrdered, SeatTaken
from planaria.node.transaction.routing import stages_in
from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.seat_names import node_of
from planaria.recovery.facts import Rebuild, Source

VACANT = 3.0
"""Seconds that an attempt waits for the view in which another node has the seat."""
ASK_AGAIN = 0.25
"""Seconds before a silent seat is queried again: its node may not know of the seat yet."""


@dataclass
class Takeover:
    """The takeover of a lost node's seat, for which an attempt waits."""

    lost: str
    stage: int
    since: float
    why: str
    seat: str = ""  # receives the stage's state; empty: the seat is vacant
    asked: float = 0.0
    ordered: bool = False  # whether the `Sync` to the seat was sent

    def __str__(self) -> str:
        successor = self.seat or f"a successor of {self.lost} at stage {self.stage}"
        return f"{successor}, for {self.why}"

    def may_ask(self, now: float) -> bool:
        return bool(self.seat) and not self.ordered and now - self.asked >= ASK_AGAIN

    def overdue(self, now: float) -> str:
        """Why an attempt gives up its takeover; empty: it waits, as for a seat that is taken."""
        if self.seat or now - self.since < VACANT:
            return ""
        return f"no node has taken the seat of {self.lost} in {VACANT:g} s: {self.why}"

    def order(self, step: int, holders: list[str], at: Standing) -> tuple[RebuildOrdered, pb.Sync]:
        """The event and the `Sync` by which the seat gets its state from one of these holders."""
        near = beside(self.seat, holders)  # no link is between them; others, if that is lost
        holders = near + [node for node in holders if node not in near]
        reason = (
            f"{self.seat} takes the seat of {self.lost} at stage {self.stage} in step {step}: its "
            "twin at the stage before takes over"
        )
        sources = [Source(node, self.stage, at.committed, at.lineage) for node in holders]
        decision = Rebuild(self.stage, "redundant", tuple(sources), exact=True, reason=reason)
        self.ordered = True
        sync = at.sync("redundant", reason, sources, last=at.last)
        return order_event(self.seat, decision), sync

    def taken(self, step: int, moved: int, now: float) -> SeatTaken:
        """The event that the seat has taken over; `moved`: the microbatches that it gets."""
        return SeatTaken(
            step=step,
            stage=self.stage,
            lost=self.lost,
            by=self.seat,
            microbatches=moved,
            seconds=now - self.since,
            reason=self.why,
        )

    def choose(
        self, view: Mapping[str, int], known: Collection[str], holders: Collection[str]
    ) -> None:
        """Takes a new seat of the view at this stage, if possible on a node with a twin. `known`:
        members that aren't new."""
        new = [node for node, stage in view.items() if stage == self.stage and node not in known]
        self.seat = min(new, key=lambda seat: (not beside(seat, holders), seat), default="")


def beside(seat: str, others: Collection[str]) -> list[str]:
    """The seats among `others` that are on the same node as `seat`."""
    return [other for other in others if node_of(other) == node_of(seat)]


def twin_holders(begin: pb.Begin, stage: int, lost: Collection[str]) -> list[str]:
    """Members of the attempt that have a twin of the stage, without the lost ones."""
    return [p.node for p in begin.members if p.stage == stage - 1 and p.node not in lost]


def to_be_taken_over(begin: pb.Begin, lost: Collection[str], rules: TransactionRules) -> str | None:
    """The one lost node that leaves its stage without any, if its twin is left and the attempt can
    go on without the others; otherwise None."""
    if not (rules.policy.twins and rules.masking) or begin.kind != pb.Begin.TRAIN:
        return None
    stages = stages_in(begin)
    left = {stage for node, stage in stages.items() if node not in lost}
    last = [node for node in lost if node in stages and stages[node] not in left]
    if len(last) != 1 or not stages.keys() >= set(lost):
        return None
    (node,) = last
    return node if stages[node] > 0 and twin_holders(begin, stages[node], lost) else None

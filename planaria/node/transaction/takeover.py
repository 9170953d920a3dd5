"""The last node of a stage is lost in the middle of a step, and another one takes its seat.

With redundant computation the nodes of the stage before hold a twin: the very state that the step
began with. So the attempt isn't given up; it waits for whoever gets the seat to have that state,
and goes on by a plan in which the new seat has the lost one's microbatches. What its neighbours had
sent to the lost one they send again, and only the lost stage's visits are computed once more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.naming import node_of

VACANT = 3.0
"""Seconds that an attempt waits for the view in which somebody else has the seat."""
ASK_AGAIN = 0.25
"""Seconds before a seat that hasn't answered is asked again: its node may not know of it yet."""


@dataclass
class Takeover:
    """What the attempt waits for."""

    lost: str
    stage: int
    since: float
    why: str
    seat: str = ""  # who gets the stage's state; empty: nobody has the seat yet
    asked: float = 0.0
    ordered: bool = False  # it was told where that state is

    def __str__(self) -> str:
        what = self.seat or f"somebody who takes the seat of {self.lost} at stage {self.stage}"
        return f"{what}, for {self.why}"

    def may_ask(self, now: float) -> bool:
        return bool(self.seat) and not self.ordered and now - self.asked >= ASK_AGAIN

    def overdue(self, now: float) -> str:
        """Why it is waited for no longer; empty: it is. Who has the seat has longer: its state is
        on the way."""
        if self.seat or now - self.since < VACANT:
            return ""
        return f"nobody has taken the seat of {self.lost} in {VACANT:g} s: {self.why}"

    def choose(
        self, view: Mapping[str, int], known: Collection[str], holders: Collection[str]
    ) -> str:
        """Of the view's new seats at this stage, one whose node has a twin itself, if there is such
        a one; empty: there is no new seat. `known`: members that aren't new."""
        new = [node for node, stage in view.items() if stage == self.stage and node not in known]
        return min(new, key=lambda seat: (not beside(seat, holders), seat), default="")


def beside(seat: str, others: Collection[str]) -> list[str]:
    """Those of the others that are seats of the same node."""
    return [other for other in others if node_of(other) == node_of(seat)]


def holders(begin: pb.Begin, stage: int, lost: Collection[str]) -> list[str]:
    """Who takes part in the attempt and has a twin of the stage, but for those that are lost."""
    return [p.node for p in begin.members if p.stage == stage - 1 and p.node not in lost]


def to_be_taken_over(begin: pb.Begin, lost: Collection[str], rules: TransactionRules) -> str | None:
    """The one of these lost nodes that leaves its stage without any, if there is exactly one, and
    its twin is left; the others of them can be done without. None: there isn't."""
    if rules.policy != "redundant" or rules.masking == "abort" or begin.kind != pb.Begin.TRAIN:
        return None
    stages = {place.node: place.stage for place in begin.members}
    left = {stage for node, stage in stages.items() if node not in lost}
    last = [node for node in lost if node in stages and stages[node] not in left]
    if len(last) != 1 or not stages.keys() >= set(lost):
        return None
    (node,) = last
    return node if stages[node] > 0 and holders(begin, stages[node], lost) else None

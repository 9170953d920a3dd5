"""Background relearning: how many updates enter with which commit.

A relearning stage has one node, which alone knows its weights (state/background_relearning.py).
Relearning ends once another node is to have them.
"""

from __future__ import annotations

from dataclasses import dataclass

from planaria.node.wire import stage_pb2 as pb


@dataclass
class RelearningProgress:
    """How far a stage's background relearning is: counts of its updates and steps."""

    updates: int  # updates of the whole relearning
    entered: int  # updates that are in the weights
    each_step: int  # to be made in a step; 0: as many as possible
    within: int  # steps after which it is over
    made: int = 0  # on the copy
    offered: bool = False  # whether the made updates may enter; no more are added
    steps: int = 0  # committed since it began

    @property
    def left(self) -> int:
        return self.updates - self.entered if self.steps < self.within else 0

    @property
    def left_then(self) -> int:
        """Relearning updates left once the current step is committed, with all that were made."""
        return self.left - self.made if self.steps + 1 < self.within else 0

    @property
    def gone(self) -> float:
        """The share of the relearning's steps that are over."""
        return self.steps / self.within

    @property
    def most(self) -> int:
        """Most relearning updates in this step."""
        return min(self.left, self.each_step) if self.each_step else self.left

    @property
    def may_update(self) -> bool:
        return not self.offered and self.made < self.most

    @property
    def is_due(self) -> bool:
        """Whether the stage still has to make updates in this step."""
        return self.each_step > 0 and self.may_update

    def offer(self) -> int:
        self.offered = True
        return self.made

    def goes_on(self) -> None:
        """Goes on with updates of the copy: those offered won't be committed in this attempt."""
        self.offered = False

    def commit(self, fixed: int) -> None:
        """Counts a committed step: `fixed` updates enter, and the others are made again."""
        self.entered += fixed
        self.steps += 1
        self.made, self.offered = 0, False


def other_holder(begin: pb.Begin, node: str, stage: int) -> str:
    """A node other than this one that has, or is to have, the stage's weights; empty: none."""
    nodes = [place.node for place in begin.members if place.stage == stage]
    nodes += [joiner.node for joiner in begin.joining if joiner.stage == stage]
    return next((other for other in nodes if other != node), "")

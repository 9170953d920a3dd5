"""Background relearning: how many updates enter with which commit.

A relearning stage has one node, which alone knows its weights (state/background_relearning.py).
Relearning ends once another node is to have them.
"""

from __future__ import annotations

from dataclasses import dataclass

from planaria.node.wire import stage_pb2 as pb


@dataclass
class RelearningProgress:
    """Counts of a stage's relearning updates."""

    updates: int  # updates of the whole relearning
    entered: int  # in the weights
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
        """Updates left once the current step is committed, with all that were made."""
        return self.left - self.made if self.steps + 1 < self.within else 0

    @property
    def gone(self) -> float:
        """The share of its steps that are over."""
        return self.steps / self.within

    @property
    def most(self) -> int:
        """Maximum updates of this step."""
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
        """The offer won't be committed: the copy is still of the current weights."""
        self.offered = False

    def commit(self, fixed: int) -> None:
        """`fixed` updates enter; the others are made again."""
        self.entered += fixed
        self.steps += 1
        self.made, self.offered = 0, False


def company(begin: pb.Begin, node: str, stage: int) -> str:
    """Another node that has, or is to have, the stage's weights; empty: none."""
    nodes = [place.node for place in begin.members if place.stage == stage]
    nodes += [joiner.node for joiner in begin.joining if joiner.stage == stage]
    return next((other for other in nodes if other != node), "")

"""How many updates of a lesson enter with which commit (state/background_relearning.py makes them).

A stage that relearns while it trains has one node, which alone knows the weights that come of it.
Once anybody else is to have them, the lesson is over.
"""

from __future__ import annotations

from dataclasses import dataclass

from planaria.node.wire import stage_pb2 as pb


@dataclass
class RelearningProgress:
    """How many updates of a lesson are where."""

    updates: int  # of the whole lesson
    entered: int  # are in the weights
    each_step: int  # are to be made in a step; 0: as many as can be
    within: int  # steps; then it is over
    made: int = 0  # on the copy
    offered: bool = False  # which may enter, with nothing more
    steps: int = 0  # have been committed since it began

    @property
    def left(self) -> int:
        return self.updates - self.entered if self.steps < self.within else 0

    @property
    def left_then(self) -> int:
        """Once the step under way is committed, with all that was made."""
        return self.left - self.made if self.steps + 1 < self.within else 0

    @property
    def gone(self) -> float:
        """The share of its steps."""
        return self.steps / self.within

    @property
    def most(self) -> int:
        """That this step may have."""
        return min(self.left, self.each_step) if self.each_step else self.left

    @property
    def may_update(self) -> bool:
        return not self.offered and self.made < self.most

    @property
    def is_due(self) -> bool:
        """Whether the stage can't be ready yet."""
        return self.each_step > 0 and self.may_update

    def offer(self) -> int:
        self.offered = True
        return self.made

    def goes_on(self) -> None:
        """What was offered won't be committed: the weights are still those that the copy is of."""
        self.offered = False

    def commit(self, fixed: int) -> None:
        """So many enter; what was made beyond that is made again."""
        self.entered += fixed
        self.steps += 1
        self.made, self.offered = 0, False


def company(begin: pb.Begin, node: str, stage: int) -> str:
    """Who else has, or is to have, the stage's weights; empty: nobody."""
    there = [place.node for place in begin.members if place.stage == stage]
    there += [joiner.node for joiner in begin.joining if joiner.stage == stage]
    return next((other for other in there if other != node), "")


def entering(commit: pb.Commit, stage: int) -> int:
    """Updates of the stage's lesson that enter with the commit."""
    return commit.relearned[stage] if stage < len(commit.relearned) else 0

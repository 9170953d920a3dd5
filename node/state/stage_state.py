"""Which state of a stage something is; without torch, for those that decide and never compute."""

from __future__ import annotations

from dataclasses import dataclass

from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.wire import stage_pb2 as pb


@dataclass(frozen=True)
class StateId:
    """The state of `stage` after `step`, in a run that had gone back to files `lineage` times.

    `made`: the ballot of the commit that made the step. A commit that only those knew who are gone
    never happened, and its step is made again: of the same number, but another. NEVER if there was
    none: these are the initial weights, or a state of older commits that counts as of this step
    since the run was resumed with it.
    """

    stage: int
    lineage: int
    step: int
    made: Ballot

    @classmethod
    def after(cls, last: pb.Commit, stage: int, lineage: int, step: int) -> StateId:
        """Of a state that counts as of `step`; `last` is the newest commit in it."""
        made = Ballot.of(last.ballot) if last.step == step else NEVER
        return cls(stage, lineage, step, made)

    def holding(self, kind: str) -> pb.Holding:
        """What a node says of a state that it keeps; `kind` as in recovery/decide.py."""
        made = None if self.made == NEVER else self.made.message()
        return pb.Holding(
            kind=kind, stage=self.stage, step=self.step, lineage=self.lineage, made=made
        )

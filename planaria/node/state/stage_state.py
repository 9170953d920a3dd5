"""A stage's state and its identity; without torch, for code that decides and never computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from planaria.bootstrap.errors import UserError
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.wire import stage_pb2 as pb

if TYPE_CHECKING:
    from torch import Tensor


TENSORS: Final = "weights", "first_moment", "second_moment"
"""Names of a stage's flat tensors, in their order. Muon has no second moment."""


class SaveError(UserError):
    """A save that can't be used; the message names it and what is wrong with it."""


class Age(NamedTuple):
    """Order of a stage's states; a run that goes back to its files counts steps anew."""

    lineage: int  # how often it had gone back when the state was made
    step: int


@dataclass(frozen=True)
class StateId:
    """The state of `stage` after `step`, in a run that had gone back to files `lineage` times.

    `made`: the ballot of the commit that made the step. A commit known only to lost nodes never
    happened; its step is made again, with the same number and another ballot. NEVER without such a
    commit: initial weights, or a state of older commits that counts as of this step since the run
    was resumed with it. `digest`: of the values in a file, since a stage may be guessed twice after
    one commit; empty: not known.
    """

    stage: int
    lineage: int
    step: int
    made: Ballot
    digest: bytes = field(default=b"", compare=False)

    @classmethod
    def after(
        cls, last: pb.Commit, stage: int, lineage: int, step: int, digest: bytes = b""
    ) -> StateId:
        """The id of a state that counts as of `step`; `last` is the newest commit in it."""
        made = Ballot.of(last.ballot) if last.step == step else NEVER
        return cls(stage, lineage, step, made, digest)

    @property
    def age(self) -> Age:
        return Age(self.lineage, self.step)

    def holding(self, kind: str) -> pb.Holding:
        """The id as a holding to report; `kind` as in recovery/facts.py."""
        made = None if self.made == NEVER else self.made.message()
        return pb.Holding(
            kind=kind,
            stage=self.stage,
            step=self.step,
            lineage=self.lineage,
            made=made,
            digest=self.digest,
        )


@dataclass(frozen=True)
class StageState:
    """All that a stage has learned, and what its next steps depend on.

    `tensors`: flat, float32 [n], contiguous, on any device, by name and in the order of their
    bytes: the weights, and the optimizer's moments where they are known.
    They may be the stage's own training tensors, which the next commit changes.
    """

    id: StateId
    tensors: Mapping[str, Tensor]
    omega: float  # squared norm of the last committed gradient
    boosted_at: int  # step after which the stage was rebuilt inexactly; 0: never
    last: pb.Commit  # the newest commit in it
    optimizer_step: int
    digest: bytes = b""  # of weights and moments; empty: not taken
    read: Callable[[int, int], Tensor] | None = field(default=None, compare=False)
    """Returns values [start, stop) of weights that aren't in memory; `tensors` has their number.
    Call it in the compute thread. Raises ValueError that says why they can't be read."""

    @property
    def bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def is_milestone(step: int, every: int) -> bool:
    """Whether a save of this step is kept for ever; `every`: steps between such saves, 0: none."""
    return every > 0 and step % every == 0

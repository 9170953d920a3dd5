"""Error feedback: what a replica has not sent of its gradients (Seide et al., Interspeech 2014).

A lossy codec leaves something out at each step. The next step adds it to what is sent, so nothing
is lost, only late. For parts that others own, it comes from this replica's contributions; for its
own part, from the sums. It is one row as long as the gradient, whichever node owns which part. So
the number of replicas may change, and each replica's error feedback stays valid.

It changes only when a step is committed. An attempt that is given up, or repeated by another plan,
leaves nothing here. It is no part of the stage's state: a node that copies the state begins with
none, and that of a lost replica is lost. A node alone at its stage sends nothing and drops its
error feedback: hundreds of steps may be in it, too many for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.node.transaction.effects import NEVER, Ballot

if TYPE_CHECKING:
    from torch import Tensor


class ErrorFeedback:
    """The error feedback of one replica. All of it belongs to the compute thread."""

    def __init__(self) -> None:
        self.row: Tensor | None = None
        """float32 [n], as of the last commit; None: there is none."""
        self._coming: tuple[Ballot, Tensor | None] = NEVER, None
        self._spare: Tensor | None = None

    def begin(self, ballot: Ballot, gradient: Tensor) -> Tensor:
        """A row like the gradient, to be filled with what becomes the error feedback once `ballot`
        is committed."""
        coming = self._spare if self._spare is not None else gradient.new_empty(gradient.shape)
        self._spare = coming
        self._coming = ballot, coming
        return coming

    def begin_alone(self, ballot: Ballot) -> None:
        """Begins a reduction without other replicas, which drops the row when it is committed."""
        self._coming = ballot, None

    def commit(self, ballot: Ballot) -> None:
        """The sum of that ballot is applied: what it left out is the error feedback from now on."""
        begun, coming = self._coming
        if begun == ballot != NEVER:
            self._spare = self.row if coming is not None else None
            self.row = coming
        self._coming = NEVER, None

    def drop(self) -> None:
        """Drops the row: the stage's state has changed, and these gradients were of the old one."""
        self.row, self._spare = None, None
        self._coming = NEVER, None

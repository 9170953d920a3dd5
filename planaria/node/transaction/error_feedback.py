"""What a replica has not sent of its gradients: error feedback (Seide et al., Interspeech 2014).

A lossy codec leaves something out at each step. It is added to what is sent in the next one, so
nothing is lost for good, only late. At the parts that others own it is of this replica's
contributions, at its own part it is of the sums: one row as long as the gradient, whoever owns
what. So the replicas may become more or fewer, and what each holds back is still what it owes.

It changes when a step is committed, and only then: of an attempt that is given up, or done again
by another plan, nothing remains here. It is no part of the stage's state: who gets that anew
begins with nothing, and what a lost replica held back is lost. Who is alone at its stage sends
nothing, and drops what it held back: hundreds of steps may be in it, too many for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.node.transaction.effects import NEVER, Ballot

if TYPE_CHECKING:
    from torch import Tensor


class ErrorFeedback:
    """All of it belongs to the compute thread."""

    def __init__(self) -> None:
        self.row: Tensor | None = None
        """float32 [n], as of the last commit; None: nothing is held back."""
        self._coming: tuple[Ballot, Tensor | None] = NEVER, None
        self._spare: Tensor | None = None

    def begin(self, ballot: Ballot, gradient: Tensor) -> Tensor:
        """A row like the gradient, to be filled with what is held back once `ballot` is
        committed."""
        coming = self._spare if self._spare is not None else gradient.new_empty(gradient.shape)
        self._spare = coming
        self._coming = ballot, coming
        return coming

    def begin_alone(self, ballot: Ballot) -> None:
        """There is nobody to send anything to in this reduction."""
        self._coming = ballot, None

    def commit(self, ballot: Ballot) -> None:
        """The sum of that ballot is applied."""
        begun, coming = self._coming
        if begun == ballot != NEVER:
            self._spare = self.row if coming is not None else None
            self.row = coming
        self._coming = NEVER, None

    def drop(self) -> None:
        """The stage's state isn't what these gradients were of."""
        self.row, self._spare = None, None
        self._coming = NEVER, None

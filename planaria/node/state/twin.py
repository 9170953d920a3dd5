"""The twin of the next stage: redundant computation, after Bamboo (Thorpe et al., NSDI 2023).

A node of stage s also holds stage s + 1 (stage L holds stage 0), bit-identical. For this, the
replicas of s + 1 send their reduced gradient to the nodes of s *before* either of them answers
Ready. So both have the same gradient when a commit comes, and both apply it, whichever dies next.

When the last node of s + 1 dies within a step, another node takes its seat with this state, and the
step goes on (node/driver/takeover.py). Bamboo's node also computes the forward passes of the
held stage, so that only backward passes are left. Here the new node computes both: the inner
activations of a stage over a window often take more memory than the stage itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from reprlib import repr as _repr
from typing import TYPE_CHECKING, Final

from planaria.bootstrap.registry_pb2 import NUMBERS, Cause
from planaria.node.ports import Tensors
from planaria.node.state.stage_state import StageState, StateId
from planaria.node.transaction.commits import of_stage
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import (
    OPEN_LIMIT,
    ComplaintError,
    ExchangeInbox,
    Exchanges,
    Hearing,
    Lost,
    PeerLostError,
)
from planaria.node.wire.frame_format import Form, Frame, WireError, check_forms

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.node.stage.optimizer import StageOptimizer

log = logging.getLogger(__name__)

PIECE: Final = 1 << 20  # values of the gradient per frame: 4 MiB


def next_stage(stage: int, stages: int) -> int:
    """The stage whose twin a node of `stage` holds, with body stages 1..`stages`."""
    return (stage + 1) % (stages + 1)


def senders_by_holder(stage: int, stages: int, members: Sequence[pb.Place]) -> dict[str, str]:
    """Map from each holder of a twin of `stage` to the replica that sends it the gradient.

    Replica j of R, in the order of the ids, serves the holders k with k mod R = j.
    """
    replicas = sorted(place.node for place in members if place.stage == stage)
    holders = sorted(place.node for place in members if next_stage(place.stage, stages) == stage)
    return {holder: replicas[k % len(replicas)] for k, holder in enumerate(holders)}


class Twin(Hearing):
    """The next stage, held by a node beside its own.

    Takes the memory of the stage's weights, gradient and moments, and that of a gradient once more
    while one is transferred. `apply` and `load` run in the compute thread, all else on the event
    loop.
    """

    def __init__(
        self,
        node: str,
        stage: int,
        stages: int,
        optimizer: StageOptimizer,
        exchanges: Exchanges,
        send: Callable[[str, Frame], bool],
        tensors: Tensors,
    ) -> None:
        """`stage` is the node's own; `optimizer` is the next stage's at step 0, made from the seed
        and so exact. `send` queues a frame for a peer; False: there is no link to it.
        """
        two_gradients = 2 * optimizer.gradient.nbytes
        super().__init__(exchanges, two_gradients, two_gradients + OPEN_LIMIT)
        self.stage = next_stage(stage, stages)
        self.optimizer = optimizer
        self._node, self._own_stage, self._stages = node, stage, stages
        self._tensors, self._send = tensors, send
        # Stale: not of the node's committed step.
        initial = StateId(self.stage, lineage=0, step=0, made=NEVER)
        state = dict(optimizer.state())
        self.state = StageState(initial, state, 0.0, 0, pb.Commit(), 0)
        self._reduced = (NEVER, 0.0)  # ballot of the optimizer's gradient; its squared norm
        # Costs
        self.bytes_sent = 0  # of this node's gradient, to the holders of its stage's twin
        self._exchange_seconds = 0.0

    @property
    def memory_bytes(self) -> int:
        """Bytes of the twin's weights, gradient and moments."""
        state = self.optimizer.state()
        return sum(tensor.nbytes for _, tensor in state) + self.optimizer.gradient.nbytes

    @property
    def critical_seconds(self) -> float:
        """Seconds that Ready and the next step have waited for the twin."""
        return self._exchange_seconds + self.optimizer.seconds

    # --- training

    async def exchange(
        self,
        ballot: Ballot,
        members: Sequence[pb.Place],
        gradient: Tensor,
        squared_norm: float,
        patience: float,
    ) -> None:
        """Send this stage's reduced `gradient` to the holders of its twin, and receive that of the
        next stage. Only then may the node answer Ready.

        `squared_norm` is the gradient's; `patience`: seconds to wait for each frame, once `hurry`
        was called. Raises ComplaintError, and PeerLostError when a holder can't be reached.
        """
        started = self._exchanges.now
        server = senders_by_holder(self.stage, self._stages, members)[self._node]
        gathering = _GradientAssembly(self.stage, server, self.optimizer.gradient, self._tensors)
        try:
            with self._inboxes.open(ballot) as inbox:
                await self._serve(ballot, members, gradient, squared_norm)
                await self._gather(inbox, gathering, patience)
                self._reduced = ballot, gathering.squared_norm
        finally:
            self.forget(Ballot(ballot.view, ballot.attempt + 1))
            self._exchange_seconds += self._exchanges.now - started

    async def _serve(
        self,
        ballot: Ballot,
        members: Sequence[pb.Place],
        gradient: Tensor,
        squared_norm: float,
    ) -> None:
        plan = senders_by_holder(self._own_stage, self._stages, members)
        holders = [holder for holder, server in plan.items() if server == self._node]
        if not holders:
            return
        for number, part in enumerate(_pieces(gradient.detach())):
            fields = {"squared_norm": squared_norm, "piece": number}
            frame = await self._exchanges.compute(partial(self._frame, ballot, fields, part))
            for holder in holders:
                if not self._send(holder, frame):
                    raise PeerLostError(
                        f"there is no link to {holder}, which holds a twin", [holder]
                    )
                self.bytes_sent += frame.size

    def _frame(self, ballot: Ballot, fields: dict[str, float], part: Tensor) -> Frame:
        # A copy: queued data must not change with the gradient.
        return Frame("twin", ballot, fields, *self._tensors.encode([part.clone()], "none"))

    async def _gather(
        self, inbox: ExchangeInbox[Frame], gathering: _GradientAssembly, patience: float
    ) -> None:
        while gathering.missing:
            try:
                peer, frame = await inbox.take(patience=patience)
            except TimeoutError:
                raise gathering.did_not_come(patience) from None
            if isinstance(frame, Lost):
                continue  # lost frames are sent again
            if peer != gathering.server:
                dropped = f"a gradient for the twin of stage {self.stage} from {peer}"
                log.warning("dropped %s: only %s sends it", dropped, gathering.server)
                continue
            await self._exchanges.compute(partial(gathering.absorb, frame))

    def apply(self, commit: pb.Commit, lr: float) -> None:
        """Apply the commit as the next stage does; a stale twin stays as it is.

        `lr` is the step's, before the stage's scale.
        """
        if commit.step != self.state.id.step + 1:
            return
        ballot, squared_norm = self._reduced
        assert ballot == Ballot.of(commit.ballot), f"{commit.step} without the gradient of {ballot}"
        omega = self.state.omega
        if not commit.skipped:
            # What is applied is finite: only a faulty replica gives another norm for it.
            omega = squared_norm if math.isfinite(squared_norm) else omega
            scale = of_stage(commit.lr_scale, self.stage)
            self.optimizer.step(lr * scale, of_stage(commit.clip_scale, self.stage))
        self.state = replace(
            self.state,
            id=StateId.after(commit, self.stage, self.state.id.lineage, commit.step),
            omega=omega,
            last=commit,
            optimizer_step=self.optimizer.steps,
            digest=self.optimizer.digest(),
        )

    # --- the state

    def load(self, state: StageState) -> None:
        """Make a state served by a replica of the next stage the twin's.

        Raises ValueError when it isn't a state of that stage; nothing changes then.
        """
        self.optimizer.load(state.tensors.items(), state.optimizer_step)
        self.state = replace(state, tensors=self.state.tensors, digest=b"")


class _GradientAssembly:
    """Assembles the next stage's reduced gradient in the twin's optimizer."""

    def __init__(self, stage: int, server: str, gradient: Tensor, tensors: Tensors) -> None:
        self.stage, self.server, self.tensors = stage, server, tensors
        self.parts = _pieces(gradient)
        self.missing = set(range(len(self.parts)))
        self.squared_norm = 0.0

    def did_not_come(self, seconds: float) -> ComplaintError:
        return ComplaintError(
            f"{len(self.missing)} of {len(self.parts)} pieces of stage {self.stage}'s gradient for "
            f"its twin did not arrive from {self.server} within {seconds:g} s",
            [self.server],
        )

    def absorb(self, frame: Frame) -> None:
        """Copy a frame's piece to its place, in the compute thread. Raises ComplaintError for an
        invalid one."""
        piece, squared_norm = frame.fields.get("piece"), frame.fields.get("squared_norm")
        if type(piece) is not int or not 0 <= piece < len(self.parts):
            raise self._complaint(f"piece {_repr(piece)} of {len(self.parts)}", NUMBERS)
        if type(squared_norm) is not float or squared_norm < 0:
            raise self._complaint(f"{_repr(squared_norm)} as a squared norm", NUMBERS)
        part = self.parts[piece]
        try:
            check_forms(frame.descriptors, [Form("float32", tuple(part.shape))])
            (values,) = self.tensors.decode(frame.descriptors, frame.payload, part.device)
        except WireError as error:
            raise self._complaint(f"an invalid frame: {error}", error.cause) from error
        part.copy_(values)  # a repeated piece is harmless: a broken link sends again
        self.squared_norm = squared_norm
        self.missing.discard(piece)

    def _complaint(self, problem: str, cause: Cause) -> ComplaintError:
        reason = f"{self.server} sent {problem}, in a gradient for the twin of stage {self.stage}"
        return ComplaintError(reason, [self.server], cause)


def _pieces(gradient: Tensor) -> list[Tensor]:
    """Views of the pieces in which a gradient is sent to a twin."""
    return [gradient[first : first + PIECE] for first in range(0, gradient.numel(), PIECE)]

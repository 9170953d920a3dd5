"""Tensors for joiners that follow: states of past steps, and reduced gradients.

A source keeps a copy of the state that a joiner must fetch, made before the next commit changes its
own. A joiner's feeder sends it the exact reduced gradient of each attempt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from planaria.node.ports import Tensors
from planaria.node.state.stage_state import StageState
from planaria.node.transaction.effects import Ballot
from planaria.node.transaction.following import feeders
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Form, Frame, WireError, check_forms

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.node.agent import Agent

BACKLOG: Final = 4 << 30
"""Bytes of gradients that may wait at the joiner to be applied."""
UNSENT: Final = 128 << 20
"""Bytes of gradients that may wait at the feeder for one joiner."""
FEWEST: Final = 4
"""Number of gradients that may wait, however large they are."""


class StatePins:
    """Copies of this stage's past states, by step, for nodes that still fetch them."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._states: dict[int, StageState] = {}

    def get(self, step: int) -> StageState | None:
        return self._states.get(step)

    def keep(self, steps: Collection[int], state: StageState) -> Callable[[], None]:
        """Pin `state`, which is about to change, if its step is in `steps`, and forget pins of
        other steps. The returned function copies the state to the CPU. Run it in the compute
        thread, before the change and before anything of the pin is sent."""
        self.forget_others(steps)
        if state.id.step not in steps:
            return lambda: None
        copies = {name: self._tensors.empty(t.numel()) for name, t in state.tensors.items()}
        self._states[state.id.step] = replace(state, tensors=copies)

        def copy() -> None:
            for name, tensor in state.tensors.items():
                copies[name].copy_(tensor.detach())

        return copy

    def forget_others(self, steps: Collection[int]) -> None:
        """Forget the pinned states of all steps but these."""
        self._states = {step: pin for step, pin in self._states.items() if step in steps}


def gradient_frame(ballot: Ballot, gradient: Tensor, tensors: Tensors) -> Frame:
    """An exact copy of the reduced gradient, as a frame for a joiner. Compute thread."""
    copy = tensors.empty(gradient.numel())
    copy.copy_(gradient.detach())
    return Frame("follow", ballot, {}, *tensors.encode([copy], "none"))


def missed_gradient_frame(ballot: Ballot) -> Frame:
    """The frame sent instead of a gradient when too many wait."""
    return Frame("follow", ballot, {}, [], b"")


class ReducedGradients:
    """Reduced gradients at the joiner, by ballot, until they are applied.

    `like` is the stage's own gradient, float32 [n].
    """

    def __init__(self, like: Tensor, tensors: Tensors) -> None:
        self._like, self._tensors = like, tensors
        self._waiting: dict[Ballot, Tensor] = {}
        self._parsing = 0  # bytes

    @contextmanager
    def parsing(self, frame: Frame) -> Iterator[bool]:
        """Reserve memory for a gradient's frame while it is parsed. False: too many wait
        already."""
        size = self._like.nbytes
        waiting = len(self._waiting) * size + self._parsing
        fits = waiting + frame.size <= max(BACKLOG, FEWEST * size)
        self._parsing += frame.size * fits
        try:
            yield fits
        finally:
            self._parsing -= frame.size * fits

    def parse(self, frame: Frame) -> Tensor:
        """The reduced gradient of a frame, float32 [n] on the CPU. Raises WireError."""
        check_forms(frame.descriptors, [Form("float32", tuple(self._like.shape))])
        (gradient,) = self._tensors.decode(frame.descriptors, frame.payload)
        return gradient

    def put(self, ballot: Ballot, gradient: Tensor) -> None:
        """Adds a gradient whose frame has just been parsed, in the memory reserved for it."""
        self._waiting[ballot] = gradient

    def get(self, ballot: Ballot) -> Tensor:
        return self._waiting[ballot]

    def forget(self, through: Ballot) -> None:
        """Forget the reduced gradients of that ballot, and of older ones."""
        self._waiting = {b: g for b, g in self._waiting.items() if b > through}


class GradientFeed:
    """A seat's part in the joins of its stage: it feeds joiners, or is a joiner that is fed."""

    def __init__(self, seat: Agent) -> None:
        self._seat = seat
        self.gradients = ReducedGradients(seat.arithmetic.gradient, seat.tensors)

    async def feed(self, ballot: Ballot, begin: pb.Begin) -> None:
        """Sends the reduced gradient to the joiners that this node feeds."""
        seat = self._seat
        joiners = [joiner for joiner, by in feeders(begin).items() if by == seat.node]
        if not joiners:
            return
        gradient = seat.arithmetic.gradient
        frame = await seat.exchanges.compute(
            partial(gradient_frame, ballot, gradient, seat.tensors)
        )
        for joiner in joiners:
            unsent = seat.net.unacknowledged_by(joiner) + frame.size
            fits = unsent <= max(UNSENT, FEWEST * gradient.nbytes)
            seat.send(joiner, frame if fits else missed_gradient_frame(ballot))

    def on_frame(self, peer: str, frame: Frame) -> None:
        self._seat.exchanges.start(self._take(peer, frame))

    async def _take(self, peer: str, frame: Frame) -> None:
        """Takes a reduced gradient from a replica of this node's stage."""
        seat, member, ballot = self._seat, self._seat.member, Ballot(*frame.ballot)
        if member.following is None or seat.peers.get(peer) != seat.stage:
            return
        with self.gradients.parsing(frame) as fits:
            if not (fits and frame.descriptors):  # too many wait, here or to be sent
                seat.carry_out(member.gradient_missed(ballot))
                return
            try:
                gradient = await seat.exchanges.compute(partial(self.gradients.parse, frame))
            except WireError as error:
                reason = f"{peer} sent an invalid gradient for a joiner: {error}"
                seat.carry_out(member.gradient_refused(reason, peer, error.cause))
                return
        self.gradients.put(ballot, gradient)
        seat.carry_out(member.gradient_came(ballot, peer))

    async def adopt(self, ballot: Ballot) -> None:
        """Adopts a replica's reduced gradient as this node's own."""
        seat = self._seat
        adopt = partial(seat.arithmetic.replace_gradient, self.gradients.get(ballot))
        norm = await seat.exchanges.compute(adopt)
        digest = await seat.exchanges.compute(seat.arithmetic.digest)
        ready = pb.Ready(squared_norm=norm, finite=math.isfinite(norm), digest=digest)
        seat.carry_out(seat.member.reduced(ballot, ready))

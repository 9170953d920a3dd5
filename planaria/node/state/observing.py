"""What a seat does for observers: it pins weights for an export and computes with their tensors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from planaria.node.ports import Priority
from planaria.node.state.transfer import WEIGHTS, shorten
from planaria.node.state.weight_pins import WeightPins
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Descriptor, Frame, WireError

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.node.agent import Agent

AT_A_TIME: Final = 4
"""Maximum observers whose tensors wait to be computed with."""


class ObserverService:
    """Serves the observers of one seat. Its methods are called on the event loop's thread."""

    def __init__(self, seat: Agent) -> None:
        self._seat = seat
        self.pins = WeightPins(seat.tensors)
        self.computing_for: set[str] = set()

    def pin(self, peer: str, message: pb.Message) -> None:
        """Pins, or keeps pinned, the weights of a step that an observer exports."""
        seat, now, request = self._seat, self._seat.exchanges.now, message.pin_request
        state, member = seat.own_state(), seat.member
        answer = pb.Pinned(transfer=request.transfer, step=request.step, lineage=member.lineage)
        if state is None or member.hang:
            answer.error = member.hang or f"the state of stage {seat.stage} has not arrived yet"
        else:
            answer.committed = state.id.step
            if 0 < state.id.step <= request.step:
                answer.error = self.pins.want(peer, request.step, now)
            else:
                self.pins.renew(peer, request.step, now)
            is_pinned = request.step > 0 and self.pins.get(request.step, state) is not None
            answer.kept = is_pinned and not answer.error
            if request.exported and request.step == state.id.step:
                seat.own_saves.exported(state.id.age)
        seat.send(peer, pb.Message(pinned=answer))

    def compute(self, peer: str, frame: Frame) -> None:
        """Computes the stage with an observer's tensor, and sends the result to the observer."""
        if peer not in self.computing_for and len(self.computing_for) < AT_A_TIME:
            self._seat.exchanges.start(self._compute(peer, frame))

    async def _compute(self, peer: str, frame: Frame) -> None:
        """Text generation goes between two microbatches; requests about one step, which may be
        long, go behind all of training."""
        seat = self._seat
        self.computing_for.add(peer)
        fields: dict[str, object] = {"transfer": frame.fields.get("transfer")}
        descriptors: list[Descriptor] = []
        payload: tuple[memoryview, ...] = ()
        try:
            if "file" in frame.fields:
                part = partial(self._part_of_file, frame)
                descriptors, payload = await seat.exchanges.compute(part, Priority.FORWARD)
            else:
                descriptors, payload = await self._result(frame, fields)
        except (WireError, ValueError) as error:
            fields["error"] = shorten(str(error))
        self.computing_for.remove(peer)
        seat.send(peer, Frame("state", frame.ballot, fields, descriptors, payload))

    async def _result(
        self, frame: Frame, fields: dict[str, object]
    ) -> tuple[list[Descriptor], tuple[memoryview, ...]]:
        """Computes the stage's result for an observer's frame. Raises WireError, ValueError."""
        seat, step = self._seat, frame.fields.get("step") or 0
        while True:
            state = own = seat.own_state()
            if step and isinstance(step, int):
                state = self.pins.get(step, own)
            if state is None:
                subject = f"step {step}" if step else "the state"
                raise ValueError(f"{subject} of stage {seat.stage} isn't available, or not yet")
            weights = None if state is own else state.tensors[WEIGHTS]
            if step:
                fields["made"] = [*Ballot.of(state.last.ballot)]
            result = await seat.exchanges.compute(
                partial(self._forward, frame, weights),
                Priority.BACKGROUND if step else Priority.FORWARD,
            )
            now = seat.own_state()
            if not step or weights is not None or (now and own and now.id == own.id):
                return result  # else they may have changed before this was computed

    def _forward(
        self, frame: Frame, weights: Tensor | None
    ) -> tuple[list[Descriptor], tuple[memoryview, ...]]:
        """The stage's outputs for an observer's frame. Runs in the compute thread. Raises
        WireError, ValueError."""
        seat = self._seat
        inputs = seat.tensors.decode(frame.descriptors, frame.payload)
        outputs = seat.arithmetic.evaluate(inputs, frame.fields.get("head") is True, weights)
        return seat.tensors.encode([outputs], "none")

    def _part_of_file(self, frame: Frame) -> tuple[list[Descriptor], tuple[memoryview, ...]]:
        """Part of a tokenizer file; runs in the compute thread. Raises ValueError."""
        part = self._seat.arithmetic.tokenizer_part(frame.fields["file"], frame.fields.get("first"))
        return self._seat.tensors.encode([part], "none")

"""Serves states to other nodes: a seat's own, its holdings, and stages of the run's checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from planaria.node.state.feeding import StatePins
from planaria.node.state.stage_state import StageState
from planaria.node.state.transfer import WEIGHTS, StateServer
from planaria.node.state.weight_pins import PIN
from planaria.node.wire import stage_pb2 as pb
from planaria.recovery.facts import ORIGIN

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.node.agent import Agent

REQUESTED_AGAIN: Final = 30.0
"""Seconds within which a node that fetches a stage requests its next part."""


class StateService:
    """Serves the states of one seat. Of a stage of the checkpoint a few tensors are in memory,
    until no node has requested any for a while."""

    def __init__(self, seat: Agent) -> None:
        self._seat = seat
        self._pins = StatePins(seat.tensors)
        self._server = StateServer(
            seat.exchanges,
            seat.tensors,
            seat.send,
            self._find,
            lambda: bool(seat.member.hang),
        )
        self._checkpoint: dict[int, StageState] = {}
        self._requested = 0.0  # when a stage of it was last requested

    def on_message(self, peer: str, message: pb.Message) -> None:
        """Handles a StateRequest or a ShardRequest."""
        self._server.on_message(peer, message)

    def tick(self, now: float) -> None:
        if now - self._requested > REQUESTED_AGAIN:
            self._checkpoint.clear()

    def before_commit(self, fetched: Collection[int], state: StageState) -> Callable[[], None]:
        """Pins `state`, which a commit is about to change, if joiners fetch its step: `fetched`.
        Run the returned function in the compute thread before the change."""
        return self._pins.keep(fetched, state)

    def listed(self) -> list[pb.Holding]:
        """All holdings, as reported to the driver, and weights that came before their source was
        lost. The run's initial state is left out: it has other sources."""
        arrived = self._seat.states.weights(self._seat.stage)
        holdings = self._seat.holdings.listed()
        if arrived is not None and arrived.id.step > 0:
            holdings.append(arrived.id.holding(WEIGHTS))
        return holdings

    def _of_checkpoint(self, stage: int) -> StageState | None:
        """The stage's weights in the checkpoint, if they are here: any stage's with the folder, its
        own with adapters."""
        seat = self._seat
        adapters = seat.run.training.lora is not None
        own = adapters and stage == seat.stage and not seat.member.weightless
        if not (own or (seat.member.origin and stage <= seat.config.stages)):
            return None
        self._requested = seat.exchanges.now
        if stage not in self._checkpoint:
            state = seat.arithmetic.checkpoint_state(stage)
            read = state.read and partial(self._read, state.read)
            self._checkpoint[stage] = replace(state, read=read)
        return self._checkpoint[stage]

    def _read(self, read: Callable[[int, int], Tensor], start: int, stop: int) -> Tensor:
        """Read values of the checkpoint, in the compute thread. Once that fails, other nodes are to
        give it. Raises ValueError."""
        try:
            return read(start, stop)
        except ValueError:
            self._seat.member.origin = False
            raise

    def _find(self, kind: str, stage: int, step: int) -> StageState | None:
        """The state that another node requests; None: it isn't here."""
        seat, hangs = self._seat, bool(self._seat.member.hang)
        if kind == PIN:
            return seat.observers.pins.get(step, None if hangs else seat.own_state())
        if kind == ORIGIN:
            return self._of_checkpoint(stage)
        if kind:
            return None if hangs else seat.holdings.held_state(kind, stage)
        if hangs and not seat.is_readable():
            seat.leave_unread(seat.member.hang)
            return None
        return self._pins.get(step) or seat.own_state()

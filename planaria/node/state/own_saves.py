"""What is on disk of a seat's own state, when it is saved besides, and what fails."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from planaria.node.report.events import Saved, SaveFailed
from planaria.node.state.stage_state import Age
from planaria.node.wire.exchange import Outcome
from planaria.node.wire.seat_names import node_of
from planaria.recovery.facts import Kind

if TYPE_CHECKING:
    from planaria.node.agent import Agent

AGAIN: Final = 15.0
"""Seconds between two attempts to save the last step of a finished run."""


class OwnSaves:
    """What is on disk of one seat's state, and what fails to be."""

    def __init__(self, seat: Agent) -> None:
        self._seat = seat
        self._troubles: dict[Kind, str] = {}  # by what isn't written, why
        self._newest = Age(lineage=0, step=0)  # on disk, or exported
        self._tried = 0.0  # when a save of the last step was last begun
        self._steps: list[int] | None = None  # of saves on disk; None: to be listed

    @property
    def step(self) -> int:
        """The newest step that is on disk, or was exported."""
        lineage, step = self._newest
        return step if lineage == self._seat.member.lineage else 0

    @property
    def trouble(self) -> str:
        """Why saving fails; empty: it doesn't."""
        return "; ".join(self._troubles.values())

    @property
    def steps(self) -> list[int]:
        """Steps of the saves on disk, the newest first."""
        if self._steps is None:
            self._steps = self._seat.holdings.saved_steps()
        return self._steps

    @property
    def lacks_last(self) -> bool:
        """Whether the run is finished, and its last step is in memory only."""
        return self._seat.finished and self.step < self._seat.member.committed

    def tick(self, now: float) -> None:
        if self.lacks_last and now - self._tried > AGAIN:
            self.save_last()

    def save_last(self) -> None:
        self._tried = self._seat.exchanges.now
        self._seat.exchanges.start(self.save_now())

    async def save_now(self) -> None:
        """Saves the seat's state of the current step."""
        seat = self._seat
        await self._wait_for_update()
        state = seat.own_state()
        if state is not None and state.id.step > 0:
            save = partial(seat.holdings.save, state, first=False, always=True)
            await seat.exchanges.compute(save)

    async def _wait_for_update(self) -> None:
        """Waits until no update of the state is under way."""
        while self._seat.member.changing:
            await self._seat.exchanges.compute(lambda: None)  # behind the update

    async def deposit(self) -> str:
        """Ends the attempt, and leaves this last node's state of stage 0 with a body node; returns
        that node. Raises ComplaintError."""
        seat = self._seat
        heard: Outcome[None] = Outcome(seat.exchanges)
        seat.carry_out(seat.driver.rest("the last node of stage 0 leaves", seat.exchanges.now))
        seat.exchanges.call_soon(lambda: heard.fulfil(None))
        await heard  # a commit that it has just decided reaches this member before
        await self._wait_for_update()
        staying = {member.node for member in seat.driver.view.members if not member.leaving}
        stages = {node: seat.peers[node] for node in staying & seat.peers.keys()}
        linked = [n for n in sorted(stages) if stages[n] and node_of(n) != node_of(seat.node)]
        return await seat.holdings.deposit(filter(seat.net.linked, linked))

    def save_despite_hang(self) -> None:
        """Saves the state in place although the compute thread hangs and is abandoned. Runs in any
        thread, once nothing else runs here."""
        state = self._seat.own_state()
        if self._seat.is_readable() and state is not None and state.id.step > 0:
            self._seat.holdings.save(state, first=False, always=True)

    def saved(self, kind: Kind, save: Age) -> None:
        self._troubles.pop(kind, None)
        self._steps = None
        self._seat.record.tell(Saved(holding=kind, step=save.step))
        self.exported(save)

    def exported(self, state: Age) -> None:
        """Records that a state is on disk, or that an observer has exported it."""
        self._newest = max(self._newest, state)
        if self._seat.finished:
            self._seat.record.report_changed()

    def failed(self, kind: Kind, reason: str) -> None:
        if self._seat.finished:
            reason += ". The run is over: this one is tried again, or take it away by export"
        self._troubles[kind] = reason
        self._seat.record.tell(SaveFailed(holding=kind, reason=reason))
        self._seat.record.report_changed()

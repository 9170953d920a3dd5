"""Stages of the checkpoint that a run begins from, served to nodes that lack it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from planaria.node.state.stage_state import StageState
from planaria.node.wire.exchange import ComplaintError, Exchanges

log = logging.getLogger(__name__)

REQUESTED_AGAIN: Final = 30.0
"""Seconds within which a node that fetches a stage requests its next part."""


class CheckpointStages:
    """Reads a stage of the checkpoint when a node requests it. It stays in memory until the first
    commit, or until no node has requested one for a while."""

    def __init__(self, exchanges: Exchanges, read: Callable[[int], StageState]) -> None:
        """`read`: reads a stage, in the compute thread. Raises ComplaintError."""
        self._exchanges, self._read = exchanges, read
        self._stages: dict[int, StageState] = {}
        self._requested = 0.0  # when one was last requested

    def get(self, stage: int) -> StageState | None:
        self._requested = self._exchanges.now
        return self._stages.get(stage)

    async def load(self, stage: int) -> None:
        try:
            self._stages[stage] = await self._exchanges.compute(lambda: self._read(stage))
        except ComplaintError as error:
            log.warning("%s", error)

    def expire(self, now: float) -> None:
        if now - self._requested > REQUESTED_AGAIN:
            self.clear()

    def clear(self) -> None:
        self._stages.clear()

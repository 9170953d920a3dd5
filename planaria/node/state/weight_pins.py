"""Weight pins: weights of committed steps, kept for observers that export a model during training.

An export needs the same step of each stage, and no stage waits for it. An observer requests a step
in advance, and the stage keeps a copy when the commit after it comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from planaria.node.ports import Tensors
from planaria.node.state.feeding import StatePins
from planaria.node.state.stage_state import StageState
from planaria.node.state.transfer import WEIGHTS

log = logging.getLogger(__name__)

PIN: Final = "pin"
"""Stands for a kind of Holding in requests for pinned weights."""
LEASE: Final = 30.0
"""Seconds that a step stays pinned after its last request."""
MOST: Final = 2
"""Steps pinned here at a time: each takes a copy of the stage's weights."""


class _Wish(NamedTuple):
    step: int
    until: float


class WeightPins:
    """Weight pins of one stage, and the observers' requests for them. `now` is in seconds of any
    one clock."""

    def __init__(self, tensors: Tensors) -> None:
        self._wishes: dict[str, _Wish] = {}  # by observer: each has one
        self._pins = StatePins(tensors)

    def want(self, observer: str, step: int, now: float) -> str:
        """Replace an observer's request for a step's weights. Returns why that fails; "": the step
        will be kept."""
        self.expire(now)
        others = {wish.step for name, wish in self._wishes.items() if name != observer}
        if len(others | {step}) > MOST:
            return f"{MOST} steps are pinned for other observers: try again in {LEASE:.0f} s"
        self._wishes[observer] = _Wish(step, now + LEASE)
        return ""

    def renew(self, observer: str, step: int, now: float) -> None:
        """Extend the pin of a step that the observer still reads."""
        if self._pins.get(step) is not None:
            self.want(observer, step, now)

    def forget(self, observer: str) -> None:
        """Drop an observer's request for a step's weights."""
        self._wishes.pop(observer, None)

    def expire(self, now: float) -> None:
        """Forget requests that weren't renewed in time, and their pins."""
        self._wishes = {name: wish for name, wish in self._wishes.items() if now < wish.until}
        self._pins.forget_others(self._steps())

    def _steps(self) -> set[int]:
        """The steps whose weights observers request."""
        return {wish.step for wish in self._wishes.values()}

    def keep(self, state: StageState, next_step: int, now: float) -> Callable[[], None]:
        """Pin the weights of `state`, which is about to become that of `next_step`, if requested.
        The returned function copies them to the CPU: run it in the compute thread, before the
        change."""
        self.expire(now)
        step = state.id.step
        # A joiner that follows may have a state of an older step.
        if step + 1 == next_step:
            weights = replace(state, tensors={WEIGHTS: state.tensors[WEIGHTS]})
            try:
                return self._pins.keep(self._steps(), weights)
            except MemoryError as error:
                log.warning("step %d is not pinned for observers: %s", step, error)
        return lambda: None

    def get(self, step: int, own: StageState | None) -> StageState | None:
        """The state of that step, with reliable weights; `own`: the stage's."""
        if own is not None and own.id.step == step:
            return own
        return self._pins.get(step)

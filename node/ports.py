"""What an agent asks of the world.

The daemon has it over asyncio, gRPC and torch, the simulation in virtual time, on a virtual network
and with numbers for tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Priority(enum.IntEnum):
    """Backward before forward, so that 1F1B emerges; what everybody waits for before both, and what
    fills the bubbles behind them."""

    CONTROL = 0
    BACKWARD = 1
    FORWARD = 2
    BACKGROUND = 3


class Compute(Protocol):
    """One thread for the arithmetic: one work at a time, the most urgent first, those of equal
    priority in the order in which they were posted."""

    def post(
        self, work: Callable[[], T], then: Callable[[T | Exception], None], priority: Priority
    ) -> None:
        """`then` gets what the work returned or raised, on the event loop."""
        ...

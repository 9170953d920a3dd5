"""Measures the speed of a link, for `planaria probe`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

ECHOES: Final = 5
SMALLEST, LARGEST = 256 << 10, 64 << 20
"""Bytes of the first and of the largest transfer."""
LONG_ENOUGH: Final = 0.5
"""Seconds of sending that measure the rate; a shorter time may measure a buffer that takes all."""


class MeasuredLink(NamedTuple):
    rtt: float  # seconds
    rate: float  # bytes per second


async def measure(send: Callable[[int], Awaitable[None]], now: Callable[[], float]) -> MeasuredLink:
    """Measure a link beside its other traffic. `send` sends that many bytes, at least 1, and
    returns when they are acknowledged; `now` is a clock in seconds."""

    async def seconds(size: int) -> float:
        began = now()
        await send(size)
        return now() - began

    rtt = min([await seconds(1) for _ in range(ECHOES)])
    size = SMALLEST
    while (spent := await seconds(size) - rtt) < LONG_ENOUGH and size < LARGEST:
        size *= 2
    return MeasuredLink(rtt, size / max(spent, 1e-9))

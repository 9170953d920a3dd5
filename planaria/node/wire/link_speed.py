"""How fast a link is: what `planaria probe` has every node find out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

ECHOES: Final = 5
SMALLEST, LARGEST = 256 << 10, 64 << 20
"""Bytes sent at once, at first and at most."""
LONG_ENOUGH: Final = 0.5
"""Seconds of sending that say how fast it goes; less may be a buffer that takes all at once."""


class MeasuredLink(NamedTuple):
    rtt: float  # seconds
    rate: float  # bytes per second


async def measure(send: Callable[[int], Awaitable[None]], now: Callable[[], float]) -> MeasuredLink:
    """`send` sends so many bytes, at least 1, and returns when they are acknowledged; `now` is a
    clock in seconds. Beside other traffic it measures what that leaves."""

    async def seconds(size: int) -> float:
        began = now()
        await send(size)
        return now() - began

    rtt = min([await seconds(1) for _ in range(ECHOES)])
    size = SMALLEST
    while (spent := await seconds(size) - rtt) < LONG_ENOUGH and size < LARGEST:
        size *= 2
    return MeasuredLink(rtt, size / max(spent, 1e-9))

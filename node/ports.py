"""What an agent asks of the world.

The daemon has it over asyncio, gRPC and torch, the simulation in virtual time, on a virtual network
and with numbers for tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.node.wire.frames import Codec, Descriptor, Payload

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


class Tensors(Protocol):
    """Rows of numbers, and how they travel. All but `empty` runs in the compute thread."""

    def encode(
        self, tensors: Sequence[Tensor], codec: Codec
    ) -> tuple[list[Descriptor], tuple[memoryview, ...]]:
        """Descriptors and bytes, one of each for every tensor."""
        ...

    def decode(
        self, descriptors: Sequence[Any], payload: Payload, device: Any = "cpu"
    ) -> list[Tensor]:
        """Raises WireError for bytes that can't be these tensors."""
        ...

    def empty(self, values: int) -> Tensor:
        """float32 [values] on the CPU."""
        ...


class Optimizer(Protocol):
    """One stage's weights and what they learn by, flat. All of it belongs to the compute thread,
    but for the tensors' sizes. `seconds`: spent in `step`."""

    weights: Tensor
    gradient: Tensor
    steps: int
    seconds: float

    def zero_gradient(self) -> None: ...
    def squared_norm(self) -> float: ...
    def step(self, lr: float, clip_scale: float) -> None: ...
    def digest(self) -> bytes: ...
    def state(self, optimizer: bool) -> list[tuple[str, Tensor]]: ...
    def load(self, tensors: Iterable[tuple[str, Tensor]], steps: int) -> None:
        """Raises ValueError."""
        ...

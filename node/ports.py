"""What an agent asks of the world.

The daemon has it over asyncio, gRPC and torch, the simulation in virtual time, on a virtual network
and with numbers for tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.node.run_file import Writes
    from planaria.node.state.stage_state import Age, StageState, StateId
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


class Disk(Protocol):
    """A stage's saves in one folder: each is there whole or not at all, whatever dies when."""

    @property
    def critical_seconds(self) -> float:
        """What `write` has taken of the compute thread's time."""
        ...

    @property
    def bytes_written(self) -> int: ...

    def listed(self, refused: Collection[Age] = ()) -> list[StateId]:
        """What is there but for those, newest first. Of each only the beginning has been read."""
        ...

    def damaged(self) -> set[Age]:
        """Those that `load` would refuse. Reads them all, in the compute thread."""
        ...

    def write(self, state: StageState) -> None:
        """In the compute thread: the state as it is now. It may wait for the writes before.
        Whether it was saved is told to who has opened the disk. Raises ValueError for what is no
        state of the stage."""
        ...

    def load(self, save: Age, then: Callable[[StageState | Exception], None]) -> None:
        """`then` gets it, or SaveError if it can't be used, on the event loop."""
        ...

    def finish(self, seconds: float) -> None:
        """Waits, blocking, for the writes in flight. What is written after this is an error."""
        ...


class OpenDisk(Protocol):
    """Opens a folder for the saves of a stage, in the compute thread."""

    def __call__(
        self,
        folder: Path,
        mode: Writes,
        keep: int,
        saved: Callable[[Age], None],
        failed: Callable[[str], None],
    ) -> Disk:
        """The newest `keep` are kept. On the event loop `saved` gets what is on disk, `failed` a
        sentence on what isn't. Raises SaveError for a folder that can't be used."""
        ...

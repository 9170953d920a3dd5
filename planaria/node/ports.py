"""What an agent asks of the world.

The daemon has it over asyncio, gRPC and torch, the simulation in virtual time, on a virtual network
and with numbers for tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.bootstrap.identity import Identity
    from planaria.bootstrap.registry_pb2 import Cause, Proof
    from planaria.node.report.events import Event
    from planaria.node.state.boundary import Fetched
    from planaria.node.state.relearn import Lesson
    from planaria.node.state.stage_state import Age, StageState, StateId
    from planaria.node.transaction.attempt import StageWork
    from planaria.node.wire import stage_pb2 as pb
    from planaria.node.wire.exchange import Exchanges
    from planaria.node.wire.frames import Codec, Descriptor, Frame, Payload
    from planaria.node.wire.lowrank import Cut

T = TypeVar("T")


class Priority(enum.IntEnum):
    """Backward before forward, so that 1F1B emerges; what everybody waits for before both, and what
    fills the bubbles behind them."""

    CONTROL = 0
    BACKWARD = 1
    FORWARD = 2
    BACKGROUND = 3


class Net(Protocol):
    """The links of a node."""

    def send(self, peer: str, item: pb.Message | Frame) -> bool:
        """Queues it on the link to `peer`. False: none is up."""
        ...

    def demand(self, peer: str) -> None:
        """A link to `peer`, a member, is needed."""
        ...

    def linked(self, peer: str) -> bool:
        """Whether one is up."""
        ...

    def unacknowledged_by(self, peer: str) -> int:
        """Bytes of frames that were sent to `peer`, of which it hasn't said that they came."""
        ...


class Compute(Protocol):
    """One thread for the arithmetic: one work at a time, the most urgent first, those of equal
    priority in the order in which they were posted."""

    @property
    def now(self) -> float:
        """Seconds, by the clock of the events that an agent is told of."""
        ...

    @property
    def computed(self) -> int:
        """Works that are done."""
        ...

    @property
    def computing(self) -> bool:
        """Whether there is one to do, and it isn't a disk that is waited for."""
        ...

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

    def encode_low_rank(
        self, row: Tensor, cuts: Sequence[Cut], rank: int
    ) -> tuple[list[Descriptor], tuple[memoryview, ...]]:
        """A float32 row [n], its matrices by two factors each."""
        ...

    def decode_low_rank(
        self,
        descriptors: Sequence[Descriptor],
        payload: Payload,
        size: int,
        cuts: Sequence[Cut],
        rank: int,
        device: Any = "cpu",
    ) -> Tensor:
        """float32 [size], the same bits everywhere. Raises WireError."""
        ...

    def finite(self, tensor: Tensor) -> bool:
        """Whether all of it is, where it is."""
        ...

    def empty(self, values: int) -> Tensor:
        """float32 [values] on the CPU."""
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
        """Writes the state as it is now, in the compute thread. It may wait for the writes before.
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
        keep: int,
        saved: Callable[[Age], None],
        failed: Callable[[str], None],
    ) -> Disk:
        """The newest `keep` are kept. On the event loop `saved` gets what is on disk, `failed` a
        sentence on what isn't. Raises SaveError for a folder that can't be used."""
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


class Learned(NamedTuple):
    """What is to be known of a stage's weights once they have changed."""

    digest: bytes
    omega: float  # squared norm of the last committed gradient
    optimizer_step: int


class Arithmetic(Protocol):
    """The arithmetic of one stage. All of it belongs to the compute thread, but for the sizes of
    the tensors; while that thread hangs, others may read them."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The weights and moments themselves, as in `StageState`."""
        ...

    @property
    def gradient(self) -> Tensor:
        """The stage's own, float32 [n]."""
        ...

    @property
    def work(self) -> StageWork: ...

    def digest(self) -> bytes:
        """The digest of weights and moments."""
        ...

    def reduced(self) -> float:
        """The gradient is the sum over all replicas; its squared norm."""
        ...

    def adopt(self, gradient: Tensor) -> float:
        """Takes a sum that a replica has sent, and returns what `reduced` does."""
        ...

    def apply(self, commit: pb.Commit, lr: float, beside: Tensor | None = None) -> Learned:
        """The reduced gradient, with `lr` before the stage's scale, and then `beside`, float32 [n],
        which a lesson has changed meanwhile; the gradient is zero then."""
        ...

    @property
    def weightless(self) -> bool:
        """It was made without the weights that the run begins with, and needs some."""
        ...

    @property
    def origin(self) -> bool:
        """The checkpoint that the run begins from is here: `of_checkpoint` has any stage."""
        ...

    def initial(self, stage: int, lineage: int) -> StageState:
        """What that stage trains, as it was before the first step. Raises ComplaintError when it
        isn't here."""
        ...

    def of_checkpoint(self, stage: int) -> StageState:
        """The stage's weights in the checkpoint that the run begins from, and no more. Raises
        ComplaintError when they aren't here."""
        ...

    @property
    def lacking(self) -> int:
        """Values of the stage's weights that aren't trained and aren't here, so that what is
        trained is of no use yet; 0: all are here."""
        ...

    def take_in(self, weights: Tensor, giver: str) -> None:
        """These. Raises ComplaintError, which accuses `giver`, for others than the checkpoint
        has."""
        ...

    def put_in_place(self, sync: pb.Sync, states: Sequence[StageState]) -> Learned:
        """What `sync` makes of the states of its source stages, in their order. What guesses the
        weights starts Adam afresh, as published. Raises ComplaintError for weights that aren't
        those which the run begins with."""
        ...

    def lesson(self, fetched: Fetched, lost: Collection[int]) -> Lesson:
        """What this stage relearns by, from what is in place; `lost` relearn together."""
        ...

    def look(self, shown: Sequence[Tensor], head: bool, weights: Tensor | None = None) -> Tensor:
        """What the stage makes of it at the moment, or with `weights`, float32: of no more rows B
        than a microbatch has, a body stage of float32 [B, T, dim] the same; stage 0 of int64 tokens
        [B, T] float32 [B, T, dim] or, with `head`, of those the logits of what follows the last,
        [B, 1, vocabulary], or, of them and int64 targets [B, T], the sum of their losses in nats,
        [1]. Training doesn't notice. Raises ValueError."""
        ...

    def part_of(self, name: object, first: object) -> Tensor:
        """At stage 0, of a file that says how text becomes tokens: bytes from `first` on, uint8
        [n], as tokenizer.part_of has them. Raises ValueError."""
        ...

    def boundary_tensor(self, frame: Frame) -> Tensor:
        """bf16 on the CPU. Raises WireError when it is damaged, or not finite."""
        ...


class Record(Protocol):
    """Where a seat tells what happens."""

    def tell(self, event: Event) -> None:
        """A line of the event log."""
        ...

    def committed(self, commit: pb.Commit) -> None:
        """A line of the ledger, at stage 0."""
        ...

    def recording(self) -> pb.Recording:
        """Whether the ledger can be written. While lines are on their way to a disk that, as far as
        can be told, takes them, it is being written; after a few seconds the disk counts as one
        that doesn't."""
        ...

    def changed(self) -> None:
        """What the registry is to hear of this seat is something else now."""
        ...

    def halted(self, halt: pb.Halt) -> None:
        """The run is over, or can't go on; the weights are kept."""
        ...

    def suspect(self, node: str, why: str, cause: Cause, proof: Proof | None = None) -> None:
        """The registry is to ask this member whether it is alive or, for any cause but SILENT, to
        take it out. `why` is the evidence, a sentence for people; `proof` what the member has
        signed and can't have."""
        ...

    def replace(self, why: str) -> None:
        """The registry is to find an heir for this seat, if there is one, who copies its state."""
        ...

    def over(self, reason: str) -> None:
        """This node is a member no longer: it drops everything and joins again as a new one."""
        ...


@dataclass(frozen=True)
class Ports:
    """All the ports of an agent."""

    net: Net
    exchanges: Exchanges
    compute: Compute
    tensors: Tensors
    arithmetic: Arithmetic
    record: Record
    chance: Random
    """That nobody else can foresee."""
    identity: Identity
    """Of the node, which signs what it decides."""

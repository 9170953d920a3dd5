"""Ports: what an agent needs from its environment.

The daemon implements them with asyncio, gRPC and torch. The simulation does it in virtual time,
with a virtual network and numbers for tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.bootstrap.identity import Identity
    from planaria.bootstrap.registry_pb2 import Cause
    from planaria.node.report.events import Event
    from planaria.node.state.boundary import FetchedTensors
    from planaria.node.state.relearn import Lesson
    from planaria.node.state.stage_state import Age, StageState, StateId
    from planaria.node.transaction.attempt import StageWork
    from planaria.node.wire import stage_pb2 as pb
    from planaria.node.wire.exchange import Exchanges
    from planaria.node.wire.frame_format import Codec, Descriptor, Frame, Payload
    from planaria.node.wire.lowrank import SlicePart

T = TypeVar("T")


class Priority(enum.IntEnum):
    """Backward before forward, so that 1F1B emerges. CONTROL, which all nodes wait for, is before
    both; BACKGROUND fills the bubbles behind them."""

    CONTROL = 0
    BACKWARD = 1
    FORWARD = 2
    BACKGROUND = 3


class Net(Protocol):
    """The links of a node."""

    def send(self, peer: str, item: pb.Message | Frame) -> bool:
        """Queues an item on the link to `peer`. False: none is up."""

    def demand(self, peer: str) -> None:
        """Requests a link to `peer`, a member."""

    def linked(self, peer: str) -> bool:
        """Whether a link to `peer` is up."""

    def unacknowledged_by(self, peer: str) -> int:
        """Bytes of frames sent to `peer` that it hasn't acknowledged."""


class Compute(Protocol):
    """One thread for arithmetic: one work at a time, the most urgent first. Works of equal priority
    run in the order in which they were posted."""

    @property
    def now(self) -> float:
        """Seconds, by the clock of an agent's events."""

    @property
    def computed(self) -> int:
        """Number of finished works."""

    @property
    def computing(self) -> bool:
        """Whether there is work to do, and it isn't waiting for a disk."""

    def post(
        self, work: Callable[[], T], then: Callable[[T | Exception], None], priority: Priority
    ) -> None:
        """`then` gets the result or exception of the work, on the event loop."""


class Tensors(Protocol):
    """Operations on tensors: their wire form, and checks. All but `empty` runs in the compute
    thread."""

    def encode(
        self, tensors: Sequence[Tensor], codec: Codec
    ) -> tuple[list[Descriptor], tuple[memoryview, ...]]:
        """The wire form of tensors: a descriptor and a buffer for each."""

    def decode(
        self, descriptors: Sequence[Descriptor], payload: Payload, device: Any = "cpu"
    ) -> list[Tensor]:
        """The tensors of a frame's payload. Raises WireError for bytes that can't be these."""

    def encode_low_rank(
        self, row: Tensor, cuts: Sequence[SlicePart], rank: int
    ) -> tuple[list[Descriptor], tuple[memoryview, ...]]:
        """Encodes a float32 row [n], its matrices by two factors each."""

    def decode_low_rank(
        self,
        descriptors: Sequence[Descriptor],
        payload: Payload,
        size: int,
        cuts: Sequence[SlicePart],
        rank: int,
        device: Any = "cpu",
    ) -> Tensor:
        """The row float32 [size] of a low-rank payload, the same bits everywhere. Raises
        WireError."""

    def finite(self, tensor: Tensor) -> bool:
        """Whether all values are finite, computed on the tensor's device."""

    def empty(self, values: int) -> Tensor:
        """An uninitialized tensor, float32 [values] on the CPU."""


class Disk(Protocol):
    """A stage's saves in one folder: each is complete or absent, whatever fails when."""

    @property
    def critical_seconds(self) -> float:
        """Seconds that `write` has taken in the compute thread."""

    @property
    def bytes_written(self) -> int: ...

    def listed(self, refused: Collection[Age] = ()) -> list[StateId]:
        """The saves on disk without `refused`, newest first. Only the beginning of each has been
        read."""

    def damaged(self) -> set[Age]:
        """Damaged saves, which `load` would refuse, among the newest. Reads as many as the folder
        keeps besides milestones, in the compute thread."""

    def remove(self, saves: Collection[Age]) -> None:
        """Removes saves from the disk. What can't be removed stays."""

    def write(self, state: StageState) -> None:
        """Starts to write the current state, in the compute thread. Never waits for the disk. The
        callbacks given to `OpenDisk` get the outcome. Raises ValueError for a state with a number
        that no save can have."""

    def load(self, save: Age, then: Callable[[StageState | Exception], None]) -> None:
        """`then` gets the state, or SaveError for an unusable one, on the event loop."""

    def finish(self, seconds: float) -> None:
        """Waits, blocking, for the writes of saves in flight. A later `write` is an error."""


OpenDisk: TypeAlias = Callable[[Path, int, Callable[["Age"], None], Callable[[str], None]], Disk]
"""Opens a folder for the saves of a stage, in the compute thread, and keeps so many of the newest.
On the event loop, the third argument gets what is on disk, the last one a sentence on what isn't.
Raises SaveError for an unusable folder."""


class Learned(NamedTuple):
    """Facts about a stage's weights after a change."""

    digest: bytes
    omega: float  # squared norm of the last committed gradient
    optimizer_step: int


class Arithmetic(Protocol):
    """The arithmetic of one stage. All of it belongs to the compute thread, but for the sizes of
    the tensors. While that thread hangs, others may read them."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The weights and moments themselves, as in `StageState`."""

    @property
    def gradient(self) -> Tensor:
        """The stage's own gradient, float32 [n]."""

    @property
    def work(self) -> StageWork: ...

    def digest(self) -> bytes:
        """The digest of weights and moments."""

    def reduced(self) -> float:
        """Takes the gradient as the sum over all replicas; returns its squared norm."""

    def replace_gradient(self, gradient: Tensor) -> float:
        """Replaces the gradient by the sum that a replica has sent; returns its squared norm."""

    def apply(self, commit: pb.Commit, lr: float, beside: Tensor | None = None) -> Learned:
        """Applies the reduced gradient, with `lr` before the stage's scale. Then applies `beside`,
        float32 [n], the weights' change by relearning. Zeroes the gradient."""

    @property
    def weightless(self) -> bool:
        """Whether it was made without the run's initial weights, and needs some."""

    @property
    def origin(self) -> bool:
        """Whether the run's initial checkpoint is here: `checkpoint_state` then has any stage."""

    def initial_state(self, stage: int, lineage: int) -> StageState:
        """The state of that stage before the first step: what it trains. Raises ComplaintError
        when it isn't here."""

    def checkpoint_state(self, stage: int) -> StageState:
        """Only the stage's weights in the run's initial checkpoint, which must be here. They are
        read when they are needed."""

    @property
    def lacking(self) -> int:
        """Number of untrained values of the stage's weights that are missing, without which the
        trained ones are useless; 0: none."""

    def take_frozen_weights(self, weights: Tensor, giver: str) -> None:
        """Takes the stage's frozen weights, from a peer. Raises ComplaintError, which accuses
        `giver`, if they differ from the checkpoint's."""

    def put_in_place(self, sync: pb.Sync, states: Sequence[StageState]) -> Learned:
        """Makes the stage's state from those of the sync's source stages, in their order. Guessed
        weights start Adam afresh, as published. Raises ComplaintError for weights other than the
        run's initial ones."""

    def lesson(self, fetched: FetchedTensors, lost: Collection[int]) -> Lesson:
        """The relearning of this stage, from what is in place; `lost` stages relearn together."""

    def evaluate(
        self, shown: Sequence[Tensor], head: bool, weights: Tensor | None = None
    ) -> Tensor:
        """Computes the stage, with its current weights or with `weights`, float32, for at most the
        rows B of a microbatch. A body stage maps float32 [B, T, dim] to the same. Stage 0 maps
        int64 tokens [B, T] to float32 [B, T, dim]. With `head`, it maps those to logits of the
        token after the last, [B, 1, vocabulary], or, with int64 targets [B, T], to the sum of their
        losses in nats, [1]. Training is unaffected. Raises ValueError."""

    def tokenizer_part(self, name: object, first: object) -> Tensor:
        """Part of a tokenizer file, at stage 0: bytes from `first` on, uint8 [n], as
        tokenizer.part_of has them. Raises ValueError."""

    def boundary_tensor(self, frame: Frame) -> Tensor:
        """A frame's boundary tensor, bf16 on the CPU. Raises WireError for a damaged or non-finite
        one."""


class Record(Protocol):
    """The port through which a seat reports events."""

    def tell(self, event: Event) -> None:
        """Adds a line to the event log."""

    def committed(self, commit: pb.Commit) -> None:
        """Adds a line to the ledger, at stage 0."""

    def recording(self) -> pb.Recording:
        """Whether the ledger can be written. It is being written while lines are on their way to a
        disk that seems to take them. After a few seconds the disk counts as failing."""

    def report_changed(self) -> None:
        """Sends the node's report to the registry, since the seat's part has changed."""

    def halted(self, halt: pb.Halt) -> None:
        """Records that the run is over, or stopped; the weights are kept."""

    def suspect(self, node: str, why: str, cause: Cause) -> None:
        """Asks the registry to probe this member or, for any cause but SILENT, to remove it. `why`
        is the evidence, a sentence for people."""

    def request_heir(self, why: str) -> None:
        """Asks the registry for an heir of this seat, if possible, that copies its state."""

    def rejoin(self, reason: str) -> None:
        """Drops everything and joins again as a new node: this one is no longer a member."""


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
    """Randomness that no other node can predict."""
    identity: Identity
    """The node's identity, which signs its decisions."""

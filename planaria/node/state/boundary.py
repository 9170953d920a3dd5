"""Boundary tensors: what crossed from stage to stage in the last committed steps.

Sender and receiver both keep them, in host memory. So if a stage is lost, its neighbours have its
inputs and outputs. The node that rebuilds the stage fetches them to relearn. Several steps are
kept, since more tokens teach more than more passes over the same ones.

While a step runs, keeping only holds on to frames that exist anyway. Once it is committed, tensors
of more than two bytes a value are narrowed to bf16, when the compute thread is idle.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from planaria.bootstrap.registry_pb2 import NONFINITE, NUMBERS, SILENT, Cause
from planaria.node.ports import Priority, Tensors
from planaria.node.state.transfer import shorten
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import OPEN_LIMIT, ExchangeInbox, Exchanges, Inboxes, Lost
from planaria.node.wire.frame_format import (
    Descriptor,
    FiguresError,
    Form,
    Frame,
    Payload,
    WireError,
    check_forms,
)
from planaria.recovery.orders import runs

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

BATCH: Final = 16  # frames sent per request
LOST_LIMIT: Final = 4096  # stages that a request may name
PIECE: Final = 1 << 20  # bytes narrowed at a time

Side = Literal["sent", "received"]


# Keeping


class Crossing(NamedTuple):
    """A microbatch's hop from the visit before `position` to the one there."""

    microbatch: int
    position: int  # on its route
    side: Side  # of this node


class KeptTensor(NamedTuple):
    """A boundary tensor in memory, as it crossed, or narrowed to bf16."""

    stages: Sequence[int]  # of the route
    descriptors: list[Descriptor]
    payload: Payload

    @property
    def size(self) -> int:
        """Size of the kept tensor in bytes."""
        return sum(descriptor.size for descriptor in self.descriptors)

    @property
    def narrow(self) -> bool:
        return all(map(_is_narrow, self.descriptors))

    def narrowed(self, tensors: Tensors) -> KeptTensor:
        if self.narrow:
            return self
        wide = tensors.decode(self.descriptors, self.payload)
        return KeptTensor(self.stages, *tensors.encode(wide, "bf16"))


def _is_narrow(descriptor: Descriptor) -> bool:
    return descriptor.size <= 2 * descriptor.values


@dataclass
class _Step:
    """Tensors kept of one attempt at a step."""

    ballot: tuple[int, int]
    step: int
    kept: dict[Crossing, KeptTensor] = field(default_factory=dict)
    size: int = 0

    def add(self, crossing: Crossing, kept: KeptTensor) -> None:
        former = self.kept.get(crossing)
        self.kept[crossing] = kept
        self.size += kept.size - (former.size if former else 0)


class BoundaryKeeper:
    """Tensors sent and received here in the running attempt, and in the last committed steps.

    Those steps are consecutive and of one history: none that the run has gone back behind, none
    from before a gap. All methods belong to the event loop. A commit requires that the whole step
    has been computed, so nothing is added to a committed step.
    """

    def __init__(self, exchanges: Exchanges, tensors: Tensors, steps: int) -> None:
        """Keeps what crossed in at most `steps` committed steps."""
        self._exchanges, self._tensors = exchanges, tensors
        self._attempt = _Step(NEVER, 0)
        self._committed: deque[_Step] = deque(maxlen=steps)
        self._newest = (0, 0)  # lineage and number of the newest committed step
        self._narrowings = 0

    @property
    def memory_bytes(self) -> int:
        return self._attempt.size + sum(step.size for step in self._committed)

    def start(self, ballot: Ballot, step: int) -> None:
        """Start an attempt at training `step`, and drop what an older one has left."""
        self._attempt = _Step(ballot, step)

    def commit(self, step: int, lineage: int) -> None:
        """Make the attempt's tensors those of the last committed step; none, if it wasn't at
        `step`. `lineage`: how often the run has gone back to files."""
        attempt, self._attempt = self._attempt, _Step(NEVER, 0)
        self.set_state_step(step - 1, lineage)
        self._newest = lineage, step
        if attempt.step == step:
            self._committed.append(attempt)
        else:
            self._committed.clear()

    def set_state_step(self, step: int, lineage: int) -> None:
        """Set the step of this node's state; tensors that lead to another one are dropped."""
        if self._newest != (lineage, step):
            self._committed.clear()
            self._newest = lineage, step

    def drop(self) -> None:
        """Drop the boundary tensors of a failed attempt."""
        self._attempt = _Step(NEVER, 0)

    async def narrow(self) -> None:
        """Narrow kept tensors to bf16, after a commit and until the next one."""
        self._narrowings += 1
        narrowing = self._narrowings
        wide = [
            (step, crossing, kept)
            for step in reversed(self._committed)  # the oldest come last, and are taken first
            for crossing, kept in step.kept.items()
            if not kept.narrow
        ]
        while wide and narrowing == self._narrowings:
            piece: list[tuple[_Step, Crossing, KeptTensor]] = []
            while wide and sum(kept.size for _, _, kept in piece) < PIECE:
                piece.append(wide.pop())
            work = partial(self._narrowed, [kept for _, _, kept in piece])
            narrowed = await self._exchanges.compute(work, Priority.BACKGROUND)
            for (step, crossing, _), kept in zip(piece, narrowed, strict=True):
                step.add(crossing, kept)

    def _narrowed(self, kept: Sequence[KeptTensor]) -> list[KeptTensor]:
        return [tensor.narrowed(self._tensors) for tensor in kept]

    def keep(
        self, side: Side, frame: Frame, ballot: tuple[int, int], stages: Sequence[int]
    ) -> None:
        """Keep an activation's frame that is being sent, or was received and is valid. Its attempt
        began under `ballot`; its route has these stages. Frames of other attempts, and of
        evaluations, are not kept."""
        attempt = self._attempt
        if ballot != attempt.ballot:
            return
        fields = frame.fields
        crossing = Crossing(int(fields["microbatch"]), int(fields["position"]), side)
        attempt.add(crossing, KeptTensor(stages, frame.descriptors, frame.payload))

    def tensors_for(
        self, step: int, stage: int, lost: frozenset[int]
    ) -> list[tuple[BoundaryPair, str, KeptTensor]]:
        """Boundary tensors for a joiner of `stage`, of steps up to `step`, as (pair, side, tensor):
        newest step first, each in order. Raises ValueError that says why there are none."""
        _, newest = self._newest
        if newest != step:
            raise ValueError(
                f"boundary tensors of step {step} are requested, those of step {newest} are kept"
            )
        sides = []
        for committed in reversed(self._committed):
            for crossing, kept in sorted(committed.kept.items(), key=lambda item: item[0]):
                for run in runs([int(visited) for visited in kept.stages], lost):
                    pair = BoundaryPair(committed.step, crossing.microbatch, run.stages)
                    hop = crossing.position, crossing.side
                    if stage == run.stages[0] and hop == (run.start, "sent"):
                        sides.append((pair, "input", kept))
                    if stage == run.stages[-1] and hop == (run.end, "received"):
                        sides.append((pair, "output", kept))
        return sides


class BoundaryPair(NamedTuple):
    """Input and output of consecutive lost stages in a microbatch."""

    step: int
    microbatch: int
    stages: tuple[int, ...]  # in the order of the visits


# The neighbour's side


class BoundaryServer:
    """Sends joiners the boundary tensors kept here; each request says where to continue."""

    def __init__(
        self,
        keeper: BoundaryKeeper,
        tensors: Tensors,
        send: Callable[[str, pb.Message | Frame], bool],
    ) -> None:
        self._keeper, self._tensors, self._send = keeper, tensors, send

    def on_message(self, peer: str, message: pb.Message) -> None:
        """Handle a BoundaryRequest."""
        request = message.boundary_request
        manifest = pb.BoundaryManifest(transfer=request.transfer, step=request.step)
        ballot = message.ballot.view, message.ballot.attempt
        try:
            if request.stage not in request.lost or len(request.lost) > LOST_LIMIT:
                raise ValueError(
                    f"stage {request.stage} is not among the {len(request.lost)} lost stages "
                    f"(at most {LOST_LIMIT})"
                )
            sides = self._keeper.tensors_for(request.step, request.stage, frozenset(request.lost))
        except ValueError as error:
            manifest.error = str(error)
            sides = []
        for pair, side, kept in sides[request.offset : request.offset + BATCH]:
            fields = {
                "transfer": request.transfer,
                "step": pair.step,
                "microbatch": pair.microbatch,
                "stages": list(pair.stages),
                "side": side,
            }
            _, descriptors, payload = kept.narrowed(self._tensors)
            self._send(peer, Frame("boundary", ballot, fields, descriptors, payload))
        manifest.count = len(sides)
        self._send(peer, pb.Message(ballot=message.ballot, boundary_manifest=manifest))


# The joiner's side


@dataclass(frozen=True)
class WantedTensors:
    """A joiner's request for boundary tensors."""

    step: int  # the newest step
    steps: int  # number of steps, up to that one
    stage: int  # the joiner's
    lost: frozenset[int]
    microbatches: int  # in a window
    shape: tuple[int, int, int]  # of each tensor: samples, tokens, features
    beside: int = 0  # how many of these features, the last ones, are bytes


@dataclass
class FetchedTensors:
    """Boundary tensors that a joiner has fetched, of `shape`: bf16 on the CPU, and finite."""

    shape: tuple[int, int, int]
    inputs: dict[BoundaryPair, Tensor] = field(default_factory=dict)
    outputs: dict[BoundaryPair, Tensor] = field(default_factory=dict)
    bytes: int = 0
    complaints: list[str] = field(default_factory=list)  # what is missing, and why

    def complete_pairs(self) -> list[BoundaryPair]:
        """The fetched pairs with both sides, in order."""
        return sorted(self.inputs.keys() & self.outputs.keys())


_Answer: TypeAlias = pb.BoundaryManifest | Frame


class BoundaryClient:
    """Fetches boundary tensors, for one joiner or several at a time. `parse`, in the compute
    thread, makes the bf16 tensor of a frame, or raises WireError."""

    def __init__(
        self,
        exchanges: Exchanges,
        send: Callable[[str, pb.Message], bool],
        parse: Callable[[Frame], Tensor],
        accuse: Callable[[str, str, Cause], None],
        limit: int = OPEN_LIMIT,
    ) -> None:
        """`accuse` gets a node that sent invalid data, the reason and the cause; `limit`: bytes of
        one peer that may wait."""
        self.exchanges, self.send, self.parse = exchanges, send, parse
        self.accuse = accuse
        self._numbers = count(1)
        self._inboxes: Inboxes[int, _Answer] = Inboxes(exchanges, 0, open_limit=limit)

    async def fetch(
        self, ballot: Ballot, wanted: WantedTensors, neighbours: Sequence[str], deadline: float
    ) -> FetchedTensors:
        """Fetch what `neighbours` have of the wanted tensors within `deadline` seconds.

        A neighbour that has none, is lost or silent, or sends damaged data costs only its own
        tensors; the complaints name it. One that sends invalid data is accused, but not for a
        tensor that is not finite: that may be the model's, of a step committed as skipped. Raises
        nothing of its own.
        """
        number = next(self._numbers)
        with self._inboxes.open(number) as inbox:
            return await _BoundaryFetch(self, number, ballot, wanted).run(
                inbox, neighbours, deadline
            )

    def on_message(self, peer: str, message: pb.Message) -> None:
        """Handle a BoundaryManifest."""
        manifest = message.boundary_manifest
        self._inboxes.put(manifest.transfer, peer, manifest, manifest.ByteSize())

    def on_frame(self, peer: str, frame: Frame) -> None:
        """Handle a frame of kind "boundary"."""
        if type(number := frame.fields.get("transfer")) is int:
            self._inboxes.put(number, peer, frame, frame.size)

    def on_peer_lost(self, peer: str, reason: str) -> None:
        self._inboxes.lost(peer, reason)


@dataclass
class _NeighbourProgress:
    """What one neighbour was asked for, and has sent."""

    requested: int = 0  # frames requested so far
    received: int = 0
    count: int | None = None  # in all; None: no manifest yet


class _BoundaryFetch:
    def __init__(
        self, client: BoundaryClient, number: int, ballot: Ballot, wanted: WantedTensors
    ) -> None:
        self._client, self._number = client, number
        self._ballot, self._wanted = ballot, wanted
        self._waiting: dict[str, _NeighbourProgress] = {}  # neighbours that still owe frames
        self._accused: set[str] = set()
        self._fetched = FetchedTensors(wanted.shape)

    async def run(
        self, inbox: ExchangeInbox[_Answer], neighbours: Sequence[str], deadline: float
    ) -> FetchedTensors:
        until = self._client.exchanges.now + deadline
        self._waiting = {node: _NeighbourProgress() for node in neighbours}
        for node in neighbours:
            self._ask(node)
        try:
            while self._waiting:
                peer, answer = await inbox.take(until)
                if peer in self._waiting:
                    await self._take(peer, answer)
        except TimeoutError:
            for node in list(self._waiting):
                self._give_up(node, f"no answer in {deadline:g} s")
        return self._fetched

    def _ask(self, node: str) -> None:
        state, wanted = self._waiting[node], self._wanted
        request = pb.BoundaryRequest(
            transfer=self._number,
            step=wanted.step,
            lost=sorted(wanted.lost),
            stage=wanted.stage,
            offset=state.requested,
        )
        state.requested += BATCH
        message = pb.Message(ballot=self._ballot.message(), boundary_request=request)
        if not self._client.send(node, message):
            self._give_up(node, "there is no link to it")

    def _give_up(self, node: str, reason: str) -> None:
        state = self._waiting.pop(node)
        missing = (
            "any" if state.count is None else f"{state.count - state.received} of {state.count}"
        )
        self._complain(f"{node} did not send {missing} boundary tensors: {reason}")

    def _complain(self, complaint: str) -> None:
        log.warning("step %d, stage %d: %s", self._wanted.step, self._wanted.stage, complaint)
        self._fetched.complaints.append(complaint)

    def _accuse(self, node: str, reason: str, cause: Cause) -> None:
        """Accuse a node that sent invalid boundary tensors, at most once."""
        if node not in self._accused:
            self._accused.add(node)
            self._client.accuse(node, reason, cause)

    async def _take(self, peer: str, answer: _Answer | Lost) -> None:
        state = self._waiting[peer]
        match answer:
            case Lost(reason, cause):
                self._give_up(peer, f"lost: {reason}")
                if cause != SILENT:
                    self._accuse(peer, reason, cause)
                return
            case pb.BoundaryManifest():
                if answer.error:
                    self._give_up(peer, shorten(answer.error))
                    return
                state.count = answer.count
            case Frame():
                state.received += 1
                if state.received > state.requested:
                    excess = f"it sent {state.received}, more than requested"
                    self._give_up(peer, excess)
                    self._accuse(peer, f"boundary tensors from {peer}: {excess}", NUMBERS)
                    return
                await self._take_frame(peer, answer)
        if state.count is None:
            return
        if state.received >= state.count:
            del self._waiting[peer]
        elif state.received == state.requested:
            self._ask(peer)

    async def _take_frame(self, peer: str, frame: Frame) -> None:
        fetched = self._fetched
        try:
            pair, side = self._wanted_pair(frame)
            tensors = fetched.inputs if side == "input" else fetched.outputs
            if any(pair[:2] == other[:2] for other in tensors):
                name = f"microbatch {pair.microbatch} in step {pair.step}"
                self._complain(f"{peer} sent the {side} of {name} again")
                return
            tensor = await self._client.exchanges.compute(partial(self._client.parse, frame))
        except WireError as error:
            name = f"{peer} sent a bad boundary tensor: {shorten(str(error))}"
            self._complain(name)
            if error.cause != NONFINITE:
                self._accuse(peer, name, error.cause)
            return
        tensors[pair] = tensor
        fetched.bytes += frame.size

    def _wanted_pair(self, frame: Frame) -> tuple[BoundaryPair, str]:
        """The boundary pair, and its side, of a frame. Raises WireError for an unwanted one."""
        wanted = self._wanted
        match frame.fields:
            case {
                "step": int(step),
                "microbatch": int(microbatch),
                "stages": [*stages],
                "side": str(side),
            }:
                pair = BoundaryPair(step, microbatch, tuple(stages))
            case _:
                raise FiguresError(f"the fields {sorted(frame.fields)} don't describe a pair")
        if not wanted.step - wanted.steps < step <= wanted.step:
            raise FiguresError(f"step {step} is not among the {wanted.steps} up to {wanted.step}")
        if not 0 <= microbatch < wanted.microbatches:
            raise FiguresError(f"microbatch {microbatch} is not among {wanted.microbatches}")
        index = {"input": 0, "output": -1}.get(side)
        if index is None or not stages or not all(type(stage) is int for stage in stages):
            raise FiguresError(f"{side!r} is not a side of stages {stages[:9]}")
        repeated = len(set(stages)) < len(stages)
        if repeated or not wanted.lost.issuperset(stages) or stages[index] != wanted.stage:
            raise FiguresError(f"the {side} of stages {stages[:9]} was not requested")
        _check_wanted_form(frame.descriptors, wanted)
        return pair, side


def _check_wanted_form(descriptors: Sequence[Descriptor], wanted: WantedTensors) -> None:
    """Checks that a frame's boundary tensors have the wanted form. Raises WireError."""
    if not descriptors or not _is_narrow(first := descriptors[0]):
        raise WireError("it is not one tensor of at most two bytes a value")
    samples, tokens, features = wanted.shape
    expected = [first.form._replace(shape=(samples, tokens, features - wanted.beside))]
    if wanted.beside:
        expected.append(Form("uint8", (samples, tokens, wanted.beside)))
    check_forms(descriptors, expected)

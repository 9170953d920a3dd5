"""Transfers a stage's state from peers: of one step, in shards, checksummed, from many sources.

The state is a few flat float32 tensors; their bytes, concatenated, are cut into shards. A joiner
requests a manifest from every replica of the source stage. Then it requests shards from those that
agree, two at a time each, so that a fast source serves more: weights first, then moments. A missing
shard is requested elsewhere. Sources are stateless: each request names the step, and a source that
has committed another one refuses.

If the last source of a whole state is lost, what has arrived is kept until a state is in place. The
next transfer of the same state, by its digest, requests only the rest. Whole weights are usable
alone.

The joiner knows the stage's tensors, and accepts no others. It accuses a source that offers others,
or sends a wrong shard, and requests that source's shards elsewhere.
"""

from __future__ import annotations

import logging
import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgpack

from planaria.bootstrap.registry_pb2 import SILENT, Cause
from planaria.node.ports import Priority, Tensors
from planaria.node.state.stage_state import Age, StageState, StateId
from planaria.node.transaction.bounds import HASH
from planaria.node.transaction.rules import SLOWEST
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import ComplaintError, ExchangeInbox, Exchanges, Inboxes, Lost
from planaria.node.wire.frame_format import SIZES, Descriptor, FiguresError, Form, Frame, WireError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

SHARD: Final = 4 << 20  # bytes
SHARD_LIMIT: Final = 16 << 20  # bytes that a source serves at a time
SILENCE: Final = 15.0  # seconds in which a source must answer, beside those for what it owes
SOURCES: Final = 8  # of one transfer that are in use at a time; a node has no link to all
OUTSTANDING: Final = 2  # shards requested of a source and not received yet
FAILURES: Final = 3  # of the only source; with the last one it is dropped. It has as many SILENCEs
REQUESTS: Final = 16  # of one joiner in progress at a source
REASON_LIMIT: Final = 200  # characters of a source's reason
WEIGHTS: Final = "weights"  # the tensor sent without the optimizer
VALUE: Final = SIZES["float32"]  # bytes

Due: TypeAlias = Mapping[str, int]
"""The tensors of a stage, in the order of their bytes, each with its number of values."""


# The transferred state


@dataclass(frozen=True)
class Delivery:
    """A fetched state, its tensors on the CPU, and the cost of the transfer."""

    state: StageState
    bytes: int
    served: Mapping[str, int] = field(default_factory=dict)  # bytes by source; 0: unused


class StateShard(NamedTuple):
    """A shard of a state: bytes [offset, offset + size)."""

    offset: int
    size: int


@dataclass(frozen=True)
class Manifest:
    """A source's StateManifest, checked."""

    tensors: Due
    size: int  # bytes
    optimizer_step: int
    digest: bytes  # of the state; empty: none given
    message: pb.StateManifest = field(compare=False)  # the rest, apart from the layout

    @classmethod
    def parse(cls, message: pb.StateManifest, step: int, allowed: Sequence[Due]) -> Manifest:
        """Checks a StateManifest. Raises ValueError if the source has no such state, and says why.
        Raises WireError if no source of a state of `step` with `allowed` tensors may send this."""
        if message.error:
            raise ValueError(shorten(message.error))
        if message.step != step:
            raise FiguresError(f"its manifest is of step {message.step}, not {step}")
        tensors = next((due for due in allowed if message.tensors == pack_tensors(due)), None)
        if tensors is None:
            due = " or ".join(map(_describe_tensors, allowed))
            listed = shorten(repr(message.tensors[:REASON_LIMIT]))
            raise WireError(f"its manifest lists {listed} instead of {due}")
        size = VALUE * sum(tensors.values())
        if message.size != size:
            raise FiguresError(
                f"its manifest gives {message.size} bytes, but its tensors have {size}"
            )
        if not (math.isfinite(message.omega) and message.omega >= 0):
            raise FiguresError(f"its gradient's squared norm is {message.omega}")
        later = message.optimizer_step, message.boosted_at, message.last.step
        if max(later) > step:
            raise FiguresError(f"its manifest has a step later than {step}: {max(later)}")
        if len(message.digest) > HASH:
            raise FiguresError(f"its manifest has a digest of {len(message.digest)} bytes")
        return cls(tensors, size, message.optimizer_step, message.digest, message)


def pack_tensors(due: Due) -> bytes:
    """The list of tensors in a StateManifest, whose bytes a joiner knows in advance."""
    packed: bytes = msgpack.packb([[name, "float32", [values]] for name, values in due.items()])
    return packed


def _describe_tensors(due: Due) -> str:
    return ", ".join(f"{name} {Form('float32', (values,))}" for name, values in due.items())


def shorten(text: str) -> str:
    return text if len(text) <= REASON_LIMIT else text[:REASON_LIMIT] + "..."


# The source's side


class StateServer:
    """Serves this node's states to joiners.

    `state`, of (kind, stage, step) as in StateRequest, is called on the event loop. It returns the
    state of that step, else the newest one, or None without such a state. A commit must change the
    newest state's step no later than it posts its work to the compute thread. So work posted while
    a step is pinned finds the pinned weights. While the compute thread `hangs`, states readable
    without it are served beside it; for others `state` returns None.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        tensors: Tensors,
        send: Callable[[str, pb.Message | Frame], bool],
        state: Callable[[str, int, int], StageState | None],
        hangs: Callable[[], bool] = lambda: False,
    ) -> None:
        self._exchanges, self._tensors = exchanges, tensors
        self._send, self._state, self._hangs = send, state, hangs
        self._serving: Counter[str] = Counter()  # requests in progress, by joiner

    def on_message(self, peer: str, message: pb.Message) -> None:
        """Handle a StateRequest or a ShardRequest; other messages have no effect."""
        match message.WhichOneof("body"):
            case "state_request":
                self._serve(peer, self._send_manifest(peer, message))
            case "shard_request":
                self._serve(peer, self._send_shard(peer, message))

    def _serve(self, peer: str, work: Coroutine[Any, Any, None]) -> None:
        if self._serving[peer] >= REQUESTS:
            log.warning("dropped a request for state from %s: %d are being served", peer, REQUESTS)
            work.close()
            return
        self._exchanges.start(self._served(peer, work))

    async def _served(self, peer: str, work: Coroutine[Any, Any, None]) -> None:
        self._serving[peer] += 1
        await work
        self._serving[peer] -= 1

    def _pinned(self, request: pb.StateRequest | pb.ShardRequest) -> StageState:
        """The state that a joiner requests. Raises ValueError that says why it isn't served."""
        state = self._state(request.kind, request.stage, request.step)
        if state is None:
            requested = f"{request.kind} of stage {request.stage}" if request.kind else "state"
            raise ValueError(f"this node has no {requested}")
        if state.id.step != request.step:
            status = "held" if request.kind else "committed"
            raise ValueError(
                f"step {request.step} is requested, but step {state.id.step} is {status} here"
            )
        return state

    async def _send_manifest(self, peer: str, message: pb.Message) -> None:
        request = message.state_request
        manifest = pb.StateManifest(transfer=request.transfer, step=request.step)
        try:
            self._pinned(request)
            # Work queued before this may apply the next step. If the pinned step is still the
            # committed one afterwards, all figures are of this step.
            if not self._hangs():
                await self._exchanges.compute(lambda: None)
            state = self._pinned(request)
        except ValueError as error:
            manifest.error = str(error)
        else:
            tensors = _tensors_offered(state, request.optimizer)
            offered = {name: tensor.numel() for name, tensor in tensors}
            manifest.tensors = pack_tensors(offered)
            manifest.size = VALUE * sum(offered.values())
            manifest.omega = state.omega
            manifest.boosted_at = state.boosted_at
            manifest.last.CopyFrom(state.last)
            manifest.optimizer_step = state.optimizer_step
            manifest.digest = state.digest
        self._send(peer, pb.Message(ballot=message.ballot, state_manifest=manifest))

    async def _send_shard(self, peer: str, message: pb.Message) -> None:
        request = message.shard_request
        shard = StateShard(request.offset, request.size)
        try:
            descriptors, payload = await self._encode_shard(request, shard)
        except ValueError as error:
            refusal = pb.ShardRefusal(
                transfer=request.transfer, offset=request.offset, reason=str(error)
            )
            self._send(peer, pb.Message(ballot=message.ballot, shard_refusal=refusal))
            return
        fields = {"transfer": request.transfer, "offset": shard.offset, "size": shard.size}
        ballot = message.ballot.view, message.ballot.attempt
        self._send(peer, Frame("state", ballot, fields, descriptors, payload))

    async def _encode_shard(
        self, request: pb.ShardRequest, shard: StateShard
    ) -> tuple[list[Descriptor], tuple[memoryview, ...]]:
        """Raises ValueError for an invalid shard, or a state that isn't served or can't be read."""
        state = self._pinned(request)
        tensors = [tensor for _, tensor in _tensors_offered(state, request.optimizer)]
        views, read = _shard_views(tensors, shard), state.read

        def encode() -> tuple[list[Descriptor], tuple[memoryview, ...]]:
            if read is None:  # copies: the next commit must not change queued data
                values = [view.clone() for view in views]
            else:
                values = [read(shard.offset // VALUE, (shard.offset + shard.size) // VALUE)]
            return self._tensors.encode(values, "none")

        priority = Priority.CONTROL if read is None else Priority.BACKGROUND
        return encode() if self._hangs() else await self._exchanges.compute(encode, priority)


def _tensors_offered(state: StageState, optimizer: bool) -> list[tuple[str, Tensor]]:
    return [(name, t) for name, t in state.tensors.items() if optimizer or name == WEIGHTS]


def _shard_views(tensors: Sequence[Tensor], shard: StateShard) -> list[Tensor]:
    """The shard's part of each tensor, as views. Raises ValueError for an invalid shard."""
    total = VALUE * sum(tensor.numel() for tensor in tensors)
    if not 0 < shard.size <= SHARD_LIMIT or shard.offset + shard.size > total:
        raise ValueError(
            f"bytes [{shard.offset}, {shard.offset + shard.size}) are not a shard of {total} bytes "
            f"(a shard has 1 to {SHARD_LIMIT})"
        )
    if shard.offset % VALUE or shard.size % VALUE:
        raise ValueError(f"offset {shard.offset} or size {shard.size} is not a multiple of {VALUE}")
    return views_of(tensors, shard.offset // VALUE, (shard.offset + shard.size) // VALUE)


def views_of(tensors: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """Elements [start, stop) of the concatenated flat tensors, as views of these."""
    parts = []
    for tensor in tensors:
        part = tensor.detach()[max(start, 0) : max(stop, 0)]
        if part.numel():
            parts.append(part)
        start, stop = start - tensor.numel(), stop - tensor.numel()
    return parts


# The joiner's side


@dataclass
class _Source:
    """ShardPlan's record of a source."""

    answered: float = 0.0  # when it last answered, or was asked while it owed nothing
    outstanding: dict[int, StateShard] = field(default_factory=dict)  # by offset
    failures: list[str] = field(default_factory=list)

    def due(self, silence: float) -> float:
        """When the next shard has to be here: on a slow link they take turns."""
        owed = sum(shard.size for shard in self.outstanding.values())
        return self.answered + silence + owed / SLOWEST if owed else math.inf


def cut_into_shards(sizes: Iterable[int], shard_size: int, first: int = 0) -> list[StateShard]:
    """The shards of consecutive tensors of these sizes in bytes, from the byte `first` on. None
    spans two tensors, so a tensor is whole when its own shards are there."""
    return [
        StateShard(offset, min(shard_size, end - offset))
        for start, end in pairwise(accumulate(sizes, initial=first))
        for offset in range(start, end, shard_size)
    ]


class ShardPlan:
    """Decides which shard to request from which source. Pure; `now` is in seconds of any one clock.

    Shards are requested in order of offset, each from one source at a time. A source that fails one
    is dropped, the only source with its third failure. So the plan ends: `done`, or without
    `sources`.
    """

    def __init__(self, shards: Iterable[StateShard], silence: float) -> None:
        self._silence = silence
        self._sources: dict[str, _Source] = {}
        self._pending = sorted(shards)
        self.missing = len(self._pending)  # shards, requested or not
        self.dropped: dict[str, str] = {}  # reason, by source

    @property
    def done(self) -> bool:
        return not self.missing

    @property
    def sources(self) -> list[str]:
        """The sources that shards are requested from."""
        return list(self._sources)

    @property
    def wake(self) -> float:
        """Time of the next `expire`; inf: nothing is outstanding."""
        return min((s.due(self._silence) for s in self._sources.values()), default=math.inf)

    def add(self, source: str) -> None:
        """Add a source of shards. A known one stays as it is."""
        if source not in self.dropped:
            self._sources.setdefault(source, _Source())

    def ask(self, now: float) -> list[tuple[str, StateShard]]:
        """Requests for shards to send now, as (source, shard)."""
        requests = []
        while self._pending and (source := self._free()) is not None:
            state, shard = self._sources[source], self._pending.pop(0)
            if not state.outstanding:
                state.answered = now
            state.outstanding[shard.offset] = shard
            requests.append((source, shard))
        return requests

    def _free(self) -> str | None:
        """The source that owes the fewest shards; None: all owe as many as they may."""
        owed = {source: len(state.outstanding) for source, state in self._sources.items()}
        free = [source for source, shards in owed.items() if shards < OUTSTANDING]
        return min(free, key=owed.__getitem__, default=None)

    def outstanding(self, source: str, offset: int) -> StateShard | None:
        """The shard that `source` owes; None: it is late, or was not requested."""
        state = self._sources.get(source)
        return state.outstanding.get(offset) if state else None

    def received(self, source: str, offset: int, now: float) -> None:
        """Record the arrival of an outstanding shard."""
        del self._sources[source].outstanding[offset]
        self._sources[source].answered = now
        self.missing -= 1

    def failed(self, source: str, offset: int, reason: str, now: float) -> None:
        """Record that `source` can't serve an outstanding shard."""
        state = self._sources[source]
        insort(self._pending, state.outstanding.pop(offset))
        state.failures.append(reason)
        state.answered = now
        if len(self._sources) > 1 or len(state.failures) >= FAILURES:
            self.drop(source, "; ".join(dict.fromkeys(state.failures)))

    def drop(self, source: str, reason: str) -> None:
        """Drop a source; the shards that it owes are requested from others."""
        if (state := self._sources.pop(source, None)) is not None:
            self._pending = sorted([*self._pending, *state.outstanding.values()])
            self.dropped[source] = reason

    def expire(self, now: float) -> None:
        """Fail all shards owed by sources that have been silent for too long."""
        for source, state in list(self._sources.items()):
            if now >= state.due(self._silence):
                why = f"silent for {now - state.answered:.0f} s"
                for offset in list(state.outstanding):
                    if source in self._sources:
                        self.failed(source, offset, why, now)


_Answer: TypeAlias = pb.StateManifest | pb.ShardRefusal | Frame


class StateClient:
    """Fetches states, several at a time if need be. `accuse` gets a source that sent invalid data,
    the reason and the cause; `linked` says whether a link to a node is up."""

    def __init__(
        self,
        exchanges: Exchanges,
        tensors: Tensors,
        send: Callable[[str, pb.Message], bool],
        accuse: Callable[[str, str, Cause], None],
        *,
        shard_size: int = SHARD,
        silence: float = SILENCE,
        linked: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.exchanges, self.tensors, self.send = exchanges, tensors, send
        self.accuse, self.linked = accuse, linked
        self.shard_size = shard_size
        self.silence = silence
        self._numbers = count(1)
        self._inboxes: Inboxes[int, _Answer] = Inboxes(exchanges, 0)
        self._arriving: dict[int, PartialState] = {}  # whole states, by stage: the newest

    async def fetch(
        self,
        wanted: WantedState,
        sources: Sequence[str],
        deadline: float,
        on_progress: Callable[[int], None] | None = None,
    ) -> Delivery:
        """Fetch a state from `sources`: its replicas or, if `wanted` has a kind, its holders.
        `deadline`: seconds in which something of it must come. `on_progress` gets the number of
        bytes received so far. Raises ComplaintError, which names every source and what was wrong
        with it.
        """
        number = next(self._numbers)
        fetch = _TransferFetch(
            self, number, wanted, list(dict.fromkeys(sources)), deadline, on_progress
        )
        with self._inboxes.open(number) as inbox:
            return await fetch.run(inbox)

    def arriving(self, wanted: WantedState, manifest: Manifest) -> PartialState:
        """The state as far as it has arrived, or empty room for it. Raises MemoryError."""
        whole = wanted.optimizer and wanted.part is None and manifest.digest
        state = self._arriving.pop(wanted.stage, None) if whole else None
        if state is None or (state.wanted.age, state.manifest) != (wanted.age, manifest):
            del state  # memory may not suffice for two
            state = PartialState.empty(wanted, manifest, self)
        if whole:
            self._arriving[wanted.stage] = state
        return state

    def weights(self, stage: int) -> StageState | None:
        """An arriving state with all of its weights; None: there is none."""
        arriving = self._arriving.get(stage)
        return arriving.state() if arriving is not None and arriving.has_weights() else None

    def forget(self) -> None:
        """Forget arriving states: a state is in place, or they are useless."""
        self._arriving.clear()

    def on_message(self, peer: str, message: pb.Message) -> None:
        """Handle a StateManifest or a ShardRefusal; other messages have no effect."""
        match message.WhichOneof("body"):
            case "state_manifest":
                manifest = message.state_manifest
                self._inboxes.put(manifest.transfer, peer, manifest, manifest.ByteSize())
            case "shard_refusal":
                refusal = message.shard_refusal
                self._inboxes.put(refusal.transfer, peer, refusal, refusal.ByteSize())

    def on_frame(self, peer: str, frame: Frame) -> None:
        """Handle a frame of kind "state"."""
        if type(transfer := frame.fields.get("transfer")) is int:
            self._inboxes.put(transfer, peer, frame, frame.size)

    def on_peer_lost(self, peer: str, reason: str) -> None:
        self._inboxes.lost(peer, reason)


@dataclass(frozen=True)
class WantedState:
    """The state that a transfer fetches."""

    stage: int
    age: Age  # only its step is sent: a source of that step has the newest lineage
    due: Due  # the stage's tensors
    optimizer: bool = False  # all of these are fetched, else the weights alone
    kind: str = ""  # of Holding; "": the stage's own state
    ballot: tuple[int, int] = (0, 0)  # goes with every request
    part: tuple[int, int] | None = None  # first value and number of values of the weights

    def allowed(self) -> list[Due]:
        """The tensors of the state that a source may offer."""
        weights = {WEIGHTS: self.due[WEIGHTS]}
        if not self.optimizer:
            return [weights]
        # Only a snapshot may be without its moments.
        return [self.due, weights] if self.kind == "snapshot" else [self.due]

    def request(self, transfer: int, shard: StateShard | None = None) -> pb.Message:
        """The request for a shard; None: for the manifest."""
        fields: dict[str, Any] = {
            "transfer": transfer,
            "step": self.age.step,
            "optimizer": self.optimizer,
            "kind": self.kind,
            "stage": self.stage,
        }
        view, attempt = self.ballot
        message = pb.Message(ballot=pb.Ballot(view=view, attempt=attempt))
        if shard is None:
            message.state_request.MergeFrom(pb.StateRequest(**fields))
        else:
            message.shard_request.MergeFrom(pb.ShardRequest(**fields, **shard._asdict()))
        return message


@dataclass
class PartialState:
    """A fetched state as far as its shards have arrived."""

    wanted: WantedState
    manifest: Manifest
    values: Tensor  # of all tensors, concatenated
    lengths: Sequence[int]  # of the tensors, in values
    first: int  # byte of the whole state at which they begin
    missing: dict[int, StateShard]  # by offset
    bytes: int = 0  # received

    @classmethod
    def empty(cls, wanted: WantedState, manifest: Manifest, client: StateClient) -> PartialState:
        """Room for a state of which nothing has arrived. Raises MemoryError."""
        part = wanted.part
        first = VALUE * part[0] if part else 0
        lengths = [part[1]] if part else list(manifest.tensors.values())
        values = client.tensors.empty(sum(lengths))
        shards = cut_into_shards([VALUE * length for length in lengths], client.shard_size, first)
        missing = {shard.offset: shard for shard in shards}
        return cls(wanted, manifest, values, lengths, first, missing)

    def arrived(self, offset: int) -> None:
        """Record a shard in its place. It may come twice, once for a cancelled fetch."""
        if (shard := self.missing.pop(offset, None)) is not None:
            self.bytes += shard.size

    def has_weights(self) -> bool:
        return all(offset >= self.first + VALUE * self.lengths[0] for offset in self.missing)

    def put(self, shard: StateShard, parts: Iterable[Tensor]) -> None:
        position = (shard.offset - self.first) // VALUE
        for part in parts:
            self.values[position : position + part.numel()] = part.view(-1)
            position += part.numel()

    def state(self) -> StageState:
        """The fetched state, whole, or its weights alone, with which Adam begins anew."""
        lengths = self.lengths[:1] if self.missing else self.lengths
        names = list(self.manifest.tensors)[: len(lengths)]
        parts = [self.values[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]
        wanted, message = self.wanted, self.manifest.message
        adam_restarts = wanted.optimizer and len(lengths) == 1
        return StageState(
            id=StateId.after(message.last, wanted.stage, *wanted.age),
            tensors=dict(zip(names, parts, strict=True)),
            omega=message.omega,
            boosted_at=message.boosted_at,
            last=message.last,
            optimizer_step=0 if adam_restarts else self.manifest.optimizer_step,
            digest=self.manifest.digest if len(names) > 1 else b"",
        )


class _TransferFetch:
    """Fetches one state at the joiner.

    The other sources must agree with the first valid manifest. Shards are requested from then on; a
    source with a later manifest joins in. Sources beyond SOURCES replace dropped ones, those
    without a link last.
    """

    def __init__(
        self,
        client: StateClient,
        number: int,
        wanted: WantedState,
        sources: Sequence[str],
        deadline: float,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self.client, self.number, self.wanted = client, number, wanted
        self.deadline = deadline
        self.on_progress = on_progress
        self.progressed = client.exchanges.now
        if len(sources) > SOURCES:
            sources = sorted(sources, key=lambda source: not client.linked(source))
        self.unused = deque(sources)
        self.silent: dict[str, float] = {}  # no manifest yet; time of the request
        self.given_up: dict[str, str] = {}  # reasons, by source, before the plan knew it
        self.arriving: PartialState | None = None  # set by the first manifest
        self.plan = ShardPlan([], client.silence)
        self.served = dict.fromkeys(sources, 0)

    async def run(self, inbox: ExchangeInbox[_Answer]) -> Delivery:
        while self.arriving is None or not self.plan.done:
            if inbox.empty:  # else a silent source may just be unread
                self._expire(self._now)
            self._ask_shards()
            self._ask_sources()
            if not (self.silent or self.plan.sources):
                raise ComplaintError(
                    f"{self._name_of_state()} can't be fetched: {self._complaints()}"
                )
            try:
                peer, answer = await inbox.take(self._wake())
            except TimeoutError:
                self._check_deadline()
                continue
            await self._take(peer, answer)
        return Delivery(self.arriving.state(), sum(self.served.values()), self.served)

    @property
    def _now(self) -> float:
        return self.client.exchanges.now

    def _name_of_state(self) -> str:
        return f"the state of step {self.wanted.age.step}"

    def _complaints(self) -> str:
        reasons = self.given_up | self.plan.dropped
        return (
            "; ".join(f"{source}: {reason}" for source, reason in reasons.items())
            or "no source is named"
        )

    def _wake(self) -> float:
        patience = min(self.silent.values(), default=math.inf) + self._silence
        return min(self.progressed + self.deadline, patience, self.plan.wake)

    @property
    def _silence(self) -> float:
        """Seconds for a manifest. The only source may have a long task in its compute thread."""
        sources = len(self.silent) + len(self.plan.sources) + len(self.unused)
        return self.client.silence * (1 if sources > 1 else FAILURES)

    def _check_deadline(self) -> None:
        if self._now >= self.progressed + self.deadline:
            waited_for = ", ".join([*self.silent, *self.plan.sources])
            missing = f"{self.plan.missing} shards" if self.arriving else "every manifest"
            has_dropped = self.given_up or self.plan.dropped
            raise ComplaintError(
                f"nothing of {self._name_of_state()} has come for {self.deadline:g} s: "
                f"{missing} missing, waiting for {waited_for}"
                + (f"; {self._complaints()}" if has_dropped else "")
            )

    def _give_up(self, source: str, reason: str) -> None:
        log.warning("stopped fetching %s from %s: %s", self._name_of_state(), source, reason)
        if source in self.silent:
            del self.silent[source]
            self.given_up[source] = reason
        else:
            self.plan.drop(source, reason)

    def _accuse(self, source: str, reason: str, cause: Cause) -> None:
        self.client.accuse(source, f"{self._name_of_state()} from {source}: {reason}", cause)

    def _expire(self, now: float) -> None:
        self.plan.expire(now)
        for source, requested in list(self.silent.items()):
            if now >= requested + self._silence:
                self._give_up(source, f"no manifest in {now - requested:.0f} s")

    def _ask_sources(self) -> None:
        while self.unused and len(self.silent) + len(self.plan.sources) < SOURCES:
            source = self.unused.popleft()
            self.silent[source] = self._now
            if not self.client.send(source, self.wanted.request(self.number)):
                self._give_up(source, "there is no link to it")

    def _ask_shards(self) -> None:
        while requests := self.plan.ask(self._now):
            for source, shard in requests:
                if not self.client.send(source, self.wanted.request(self.number, shard)):
                    self._give_up(source, "there is no link to it")

    async def _take(self, peer: str, answer: _Answer | Lost) -> None:
        match answer:
            case Lost(reason, cause) if peer in self.silent or peer in self.plan.sources:
                self._give_up(peer, f"lost: {reason}")
                if cause != SILENT:
                    self._accuse(peer, reason, cause)
            case pb.StateManifest() if peer in self.silent:
                self._take_manifest(peer, answer)
            case pb.ShardRefusal() if self.plan.outstanding(peer, answer.offset):
                self._shard_failed(peer, answer.offset, shorten(answer.reason))
            case Frame():
                await self._take_shard(peer, answer)

    def _take_manifest(self, peer: str, message: pb.StateManifest) -> None:
        wanted, client = self.wanted, self.client
        try:
            manifest = Manifest.parse(message, wanted.age.step, wanted.allowed())
        except ValueError as error:
            self._give_up(peer, str(error))
            if isinstance(error, WireError):
                self._accuse(peer, str(error), error.cause)
            return
        if self.arriving is None:
            try:
                self.arriving = client.arriving(wanted, manifest)
            except MemoryError as error:
                raise ComplaintError(
                    f"not enough memory for {self._name_of_state()}, {manifest.size} bytes"
                ) from error
            self.plan = ShardPlan(self.arriving.missing.values(), client.silence)
        elif manifest != self.arriving.manifest:
            self._give_up(peer, "its manifest differs from that of the first source")
            return
        del self.silent[peer]
        self.plan.add(peer)

    async def _take_shard(self, peer: str, frame: Frame) -> None:
        offset = frame.fields.get("offset")
        shard = self.plan.outstanding(peer, offset) if type(offset) is int else None
        if shard is None or self.arriving is None:
            return  # late: requested from another source by now
        try:
            await self.client.exchanges.compute(partial(self._place, frame, shard, self.arriving))
        except WireError as error:
            self._shard_failed(peer, shard.offset, str(error))
            if peer in self.plan.dropped:
                self._accuse(peer, str(error), error.cause)
            return
        self.plan.received(peer, shard.offset, self._now)
        self.arriving.arrived(shard.offset)
        self.progressed = self._now
        self.served[peer] += shard.size
        if self.on_progress is not None:
            self.on_progress(self.arriving.bytes)

    def _shard_failed(self, peer: str, offset: int, reason: str) -> None:
        shard = f"the shard at {offset} of {self._name_of_state()}"
        log.warning("could not fetch %s from %s: %s", shard, peer, reason)
        self.plan.failed(peer, offset, reason, self._now)

    def _place(self, frame: Frame, shard: StateShard, arriving: PartialState) -> None:
        """Put a shard in its place, in the compute thread. Raises WireError when it is damaged, or
        not the requested one."""
        if any((d.dtype, d.codec) != ("float32", "none") for d in frame.descriptors):
            raise WireError("its shard isn't exact float32")
        size = sum(descriptor.size for descriptor in frame.descriptors)
        if size != shard.size:
            raise WireError(f"its shard has {size} bytes instead of {shard.size}")
        arriving.put(shard, self.client.tensors.decode(frame.descriptors, frame.payload))

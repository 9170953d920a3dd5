"""A stage's state from peers: pinned to a step, sharded, checksummed, from all sources at once.

The state is a few flat float32 tensors; its bytes, end to end, are cut into shards. A joiner asks
every replica of the source stage for a manifest, then the sources that agree on it for shards, two
at a time each, so that a fast source serves more of them: those of the weights before those of the
moments. A shard that doesn't come is asked for elsewhere. Sources keep nothing about a transfer:
each request names the step, and a source that has committed another one refuses.

What has come of a whole state stays when the last source is lost, until a state is in place. The
next transfer of the very same state, as its digest says, asks for the rest. Weights that are whole
are good for themselves.

The joiner knows which tensors the stage has, and takes no others: who offers them is accused, and
so is who sends a shard that isn't what was asked. What that node owes is asked of others.
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
from planaria.node.ports import Tensors
from planaria.node.state.stage_state import Age, StageState, StateId
from planaria.node.transaction.bounds import HASH
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import ComplaintError, ExchangeInbox, Exchanges, Inboxes, Lost
from planaria.node.wire.frames import (
    SIZES,
    Descriptor,
    FiguresError,
    Form,
    Frame,
    WireError,
)

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

SHARD: Final = 4 << 20  # bytes
SHARD_LIMIT: Final = 16 << 20  # bytes that a source serves at a time
SILENCE: Final = 15.0  # seconds in which a source that was asked has to answer
SOURCES: Final = 8  # of one transfer that are asked at a time; a node has no link to all
OUTSTANDING: Final = 2  # shards asked of a source and not there yet
FAILURES: Final = 3  # that a source may have; with the last one it is dropped
REQUESTS: Final = 16  # of one joiner that a source works on at a time
MANIFEST_LIMIT: Final = 16 << 10  # bytes of the list of tensors
TENSORS_LIMIT: Final = 64
TENSORS_NAMED: Final = 3  # in an error message
NAME_LIMIT: Final = 64  # characters
REASON_LIMIT: Final = 200  # characters of what a source says
WEIGHTS: Final = "weights"  # the tensor that goes without the optimizer
VALUE: Final = SIZES["float32"]  # bytes
WITHOUT_MOMENTS: Final = ("copy", "snapshot")  # kinds of Holding that may be of the weights alone

Due: TypeAlias = Mapping[str, int]
"""The tensors of a stage, in the order of their bytes, each with its number of values."""


# What is transferred


@dataclass(frozen=True)
class Delivery:
    """A state as a joiner has it, its tensors on the CPU, and what the way to it has cost."""

    state: StageState
    bytes: int
    seconds: float = 0.0
    served: Mapping[str, int] = field(default_factory=dict)  # bytes by source; 0: it helped nothing


class StateShard(NamedTuple):
    """Bytes [offset, offset + size) of the state."""

    offset: int
    size: int


@dataclass(frozen=True)
class Manifest:
    """What a source's StateManifest says, checked."""

    tensors: tuple[tuple[str, int], ...]  # name, values
    size: int  # bytes
    optimizer_step: int
    digest: bytes  # of the state; empty: the source doesn't say
    message: pb.StateManifest = field(compare=False)  # the rest, which says nothing of the layout

    @classmethod
    def parse(cls, message: pb.StateManifest, step: int, allowed: Sequence[Due]) -> Manifest:
        """Raises ValueError that says why the source has no such state, and WireError for what no
        source of a state of `step` with `allowed` tensors may say."""
        if message.error:
            raise ValueError(_shorten(message.error))
        if message.step != step:
            raise FiguresError(f"its manifest is of step {message.step}, not {step}")
        tensors = _parse_tensors(message.tensors)
        if tensors not in [tuple(due.items()) for due in allowed]:
            due = " or ".join(_name(due.items()) for due in allowed)
            raise WireError(f"its manifest has {_name(tensors)}, where {due} is due")
        size = VALUE * sum(values for _, values in tensors)
        if message.size != size:
            raise FiguresError(f"its manifest says {message.size} bytes; its tensors have {size}")
        if not (math.isfinite(message.omega) and message.omega >= 0):
            raise FiguresError(f"its gradient's squared norm, {message.omega}, is none")
        of_step = message.optimizer_step, message.boosted_at, message.last.step
        if max(of_step) > step:
            raise FiguresError(f"its manifest tells of a later step than {step}: {max(of_step)}")
        if len(message.digest) > HASH:
            raise FiguresError(f"its manifest has a digest of {len(message.digest)} bytes")
        return cls(tensors, size, message.optimizer_step, message.digest, message)


def _name(tensors: Iterable[tuple[str, int]]) -> str:
    named = [f"{name} {Form('float32', (values,))}" for name, values in tensors]
    more = f" and {len(named) - TENSORS_NAMED} more" if len(named) > TENSORS_NAMED else ""
    return (", ".join(named[:TENSORS_NAMED]) or "no tensor") + more


def _parse_tensors(packed: bytes) -> tuple[tuple[str, int], ...]:
    if len(packed) > MANIFEST_LIMIT:
        raise WireError(f"its manifest takes {len(packed)} bytes; at most {MANIFEST_LIMIT}")
    try:
        entries = msgpack.unpackb(packed)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"its manifest is not msgpack: {error}") from error
    if not isinstance(entries, list) or len(entries) > TENSORS_LIMIT:
        raise WireError(f"its manifest is no list of at most {TENSORS_LIMIT} tensors")
    return tuple(_parse_tensor(entry) for entry in entries)


def _parse_tensor(entry: Any) -> tuple[str, int]:
    match entry:
        case [str(name), "float32", [int(values)]] if (
            0 < len(name) <= NAME_LIMIT and type(values) is int and values >= 0
        ):
            return name, values
    raise WireError(f"its manifest has the tensor {_shorten(repr(entry))}, no [name, float32, [n]]")


def _shorten(text: str) -> str:
    return text if len(text) <= REASON_LIMIT else text[:REASON_LIMIT] + "..."


# The source's side


class StateServer:
    """Answers joiners that ask for a state that this node has.

    `state`, of (kind, stage, step) as in StateRequest, is called on the event loop, and returns the
    state of that step, or else the newest one. A commit must change the newest one's step no
    later than it posts its work to the compute thread: then what is posted while the step is the
    pinned one finds the pinned weights. None: there is no such state. While the compute thread
    `hangs`, what can be read without it is served beside it; `state` answers None for what can't.
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
        self._serving: Counter[str] = Counter()  # requests, by joiner

    def on_message(self, peer: str, message: pb.Message) -> None:
        """A StateRequest or a ShardRequest has come; other messages have no effect."""
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
        """Raises ValueError that says why not."""
        state = self._state(request.kind, request.stage, request.step)
        if state is None:
            what = f"{request.kind} of stage {request.stage}" if request.kind else "state"
            raise ValueError(f"there is no {what} here")
        if state.id.step != request.step:
            how = "held" if request.kind else "committed"
            raise ValueError(f"step {request.step} is asked for, but {state.id.step} is {how} here")
        return state

    async def _send_manifest(self, peer: str, message: pb.Message) -> None:
        request = message.state_request
        manifest = pb.StateManifest(transfer=request.transfer, step=request.step)
        try:
            self._pinned(request)
            # Behind this, the pinned step is applied. If it is then still the committed one, all
            # the figures are of this step.
            if not self._hangs():
                await self._exchanges.compute(lambda: None)
            state = self._pinned(request)
        except ValueError as error:
            manifest.error = str(error)
        else:
            tensors = _offered(state, request.optimizer)
            manifest.tensors = msgpack.packb(
                [[name, "float32", [tensor.numel()]] for name, tensor in tensors]
            )
            manifest.size = VALUE * sum(tensor.numel() for _, tensor in tensors)
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
            tensors = _offered(self._pinned(request), request.optimizer)
            values = _values_of([tensor for _, tensor in tensors], shard)
        except ValueError as error:
            refusal = pb.ShardRefusal(
                transfer=request.transfer, offset=request.offset, reason=str(error)
            )
            self._send(peer, pb.Message(ballot=message.ballot, shard_refusal=refusal))
            return

        def encode_shard() -> tuple[list[Descriptor], tuple[memoryview, ...]]:
            # Copies: the next commit must not change what waits to be sent.
            return self._tensors.encode([part.clone() for part in values], "none")

        hangs = self._hangs()
        descriptors, payload = (
            encode_shard() if hangs else await self._exchanges.compute(encode_shard)
        )
        fields = {"transfer": request.transfer, "offset": shard.offset, "size": shard.size}
        ballot = message.ballot.view, message.ballot.attempt
        self._send(peer, Frame("state", ballot, fields, descriptors, payload))


def _offered(state: StageState, optimizer: bool) -> list[tuple[str, Tensor]]:
    return [(name, t) for name, t in state.tensors.items() if optimizer or name == WEIGHTS]


def _values_of(tensors: Sequence[Tensor], shard: StateShard) -> list[Tensor]:
    """The shard's part of each tensor, as views. Raises ValueError for no shard of theirs."""
    total = VALUE * sum(tensor.numel() for tensor in tensors)
    if not 0 < shard.size <= SHARD_LIMIT or shard.offset + shard.size > total:
        raise ValueError(
            f"bytes [{shard.offset}, {shard.offset + shard.size}) are no shard of {total} bytes "
            f"(a shard has 1 to {SHARD_LIMIT})"
        )
    if shard.offset % VALUE or shard.size % VALUE:
        raise ValueError(f"offset {shard.offset} or size {shard.size} is no multiple of {VALUE}")
    parts = []
    start, stop = shard.offset // VALUE, (shard.offset + shard.size) // VALUE
    for tensor in tensors:
        part = tensor.detach()[max(start, 0) : max(stop, 0)]
        if part.numel():
            parts.append(part)
        start, stop = start - tensor.numel(), stop - tensor.numel()
    return parts


# The joiner's side


@dataclass
class _Source:
    """What ShardPlan knows of a source."""

    heard: float = 0.0  # when it was last heard of, or asked after it owed nothing
    outstanding: dict[int, StateShard] = field(default_factory=dict)  # by offset
    failed: set[int] = field(default_factory=set)  # offsets
    failures: list[str] = field(default_factory=list)


def cut(sizes: Iterable[int], shard_size: int, first: int = 0) -> list[StateShard]:
    """The shards of tensors of so many bytes, one behind the other from the byte `first` on. None
    has parts of two, so that a tensor is whole when its own shards are there."""
    if shard_size <= 0 or shard_size % VALUE:
        raise ValueError(f"shards of {shard_size} bytes; a positive multiple of {VALUE} it is")
    return [
        StateShard(offset, min(shard_size, end - offset))
        for start, end in pairwise(accumulate(sizes, initial=first))
        for offset in range(start, end, shard_size)
    ]


class ShardPlan:
    """Which shard to ask of which source. Pure; `now` is in seconds of any one clock.

    A shard is asked of one source at a time, those that lie before others first, and again, of a
    source that hasn't failed it where there is one, when it was not had. A source is dropped with
    its third failure, so the plan comes to an end: `done`, or no `sources`.
    """

    def __init__(self, shards: Iterable[StateShard], silence: float) -> None:
        self._silence = silence
        self._sources: dict[str, _Source] = {}
        self._pending = sorted(shards)
        self.missing = len(self._pending)  # shards, asked for or not
        self.dropped: dict[str, str] = {}  # by source: why

    @property
    def done(self) -> bool:
        return not self.missing

    @property
    def sources(self) -> list[str]:
        """The sources that are in use."""
        return list(self._sources)

    @property
    def wake(self) -> float:
        """When to call `expire` next; inf: nothing is outstanding."""
        owing = [source.heard for source in self._sources.values() if source.outstanding]
        return min(owing, default=math.inf) + self._silence

    def add(self, source: str) -> None:
        """One that has been there before stays as it is."""
        if source not in self.dropped:
            self._sources.setdefault(source, _Source())

    def ask(self, now: float) -> list[tuple[str, StateShard]]:
        """What to ask now, of whom."""
        asked = []
        while chosen := self._choose():
            source, shard = chosen
            self._pending.remove(shard)
            state = self._sources[source]
            if not state.outstanding:
                state.heard = now
            state.outstanding[shard.offset] = shard
            asked.append((source, shard))
        return asked

    def _choose(self) -> tuple[str, StateShard] | None:
        if not self._pending:
            return None
        free = [s for s, state in self._sources.items() if len(state.outstanding) < OUTSTANDING]
        for source in sorted(free, key=self._load):
            for shard in self._pending:
                if self._suits(source, shard):
                    return source, shard
        return None

    def _load(self, source: str) -> tuple[int, int]:
        state = self._sources[source]
        return len(state.outstanding), len(state.failures)

    def _suits(self, source: str, shard: StateShard) -> bool:
        """It hasn't failed this shard, or all have."""
        return shard.offset not in self._sources[source].failed or all(
            shard.offset in other.failed for other in self._sources.values()
        )

    def outstanding(self, source: str, offset: int) -> StateShard | None:
        """The shard that `source` owes; None: what comes was not asked for, or is late."""
        state = self._sources.get(source)
        return state.outstanding.get(offset) if state else None

    def received(self, source: str, offset: int, now: float) -> None:
        """An outstanding shard is there."""
        del self._sources[source].outstanding[offset]
        self._sources[source].heard = now
        self.missing -= 1

    def failed(self, source: str, offset: int, reason: str, now: float) -> None:
        """An outstanding shard is not to be had from `source`."""
        state = self._sources[source]
        insort(self._pending, state.outstanding.pop(offset))
        state.failed.add(offset)
        state.failures.append(reason)
        state.heard = now
        if len(state.failures) >= FAILURES:
            self.drop(source, "; ".join(dict.fromkeys(state.failures)))

    def drop(self, source: str, reason: str) -> None:
        """Nothing more is asked of `source`; what it owes is asked of others."""
        if (state := self._sources.pop(source, None)) is not None:
            self._pending = sorted([*self._pending, *state.outstanding.values()])
            self.dropped[source] = reason

    def expire(self, now: float) -> None:
        """Whoever has been silent for too long has failed all it owes."""
        for source, state in list(self._sources.items()):
            if state.outstanding and now >= state.heard + self._silence:
                for offset in list(state.outstanding):
                    if source in self._sources:
                        self.failed(source, offset, f"silent for {self._silence:g} s", now)


_Answer: TypeAlias = pb.StateManifest | pb.ShardRefusal | Frame


class StateClient:
    """Fetches states, several at a time if need be. `accuse` gets who has sent what can't be right,
    why, and of what it is to be accused; `linked` says to whom there is a link already."""

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
        self._arriving: dict[int, Arriving] = {}  # whole states, by stage: the newest

    async def fetch(
        self,
        stage: int,
        age: Age,
        sources: Sequence[str],
        due: Due,
        optimizer: bool,
        deadline: float,
        on_progress: Callable[[int], None] | None = None,
        ballot: tuple[int, int] = (0, 0),
        kind: str = "",
        part: tuple[int, int] | None = None,
    ) -> Delivery:
        """The state of `stage`, of that age, from `sources`: its replicas or, with a `kind` of
        Holding, its holders. `due`: what the stage has, of which all is fetched with `optimizer`,
        else the weights alone. `deadline`: seconds, for all of it. `on_progress` gets the number
        of bytes that are there. `ballot` goes with every request. `part`: so many values from the
        first one on, of the weights; they are then all that the tensor has. Raises ComplaintError
        that names every source and what was wrong with it.
        """
        transfer = next(self._numbers)
        request = _Request(transfer, stage, age, optimizer, ballot, kind, due)
        fetch = _TransferFetch(
            self, request, list(dict.fromkeys(sources)), deadline, on_progress, part
        )
        with self._inboxes.open(transfer) as inbox:
            return await fetch.run(inbox)

    def arriving(
        self, request: _Request, manifest: Manifest, part: tuple[int, int] | None
    ) -> Arriving:
        """That state as far as it is here, or a place for all of it. Raises MemoryError."""
        whole = request.optimizer and part is None and manifest.digest
        before = self._arriving.pop(request.stage, None) if whole else None
        if before is None or (before.request.age, before.manifest) != (request.age, manifest):
            del before  # there may not be memory for two
            before = Arriving.none_of(request, manifest, part, self)
        if whole:
            self._arriving[request.stage] = before
        return before

    def weights(self, stage: int) -> StageState | None:
        """What has come of a state of which all weights are here."""
        found = self._arriving.get(stage)
        return found.state() if found is not None and found.has_weights() else None

    def forget(self) -> None:
        """What has come is in place, or of no use any more."""
        self._arriving.clear()

    def on_message(self, peer: str, message: pb.Message) -> None:
        """A StateManifest or a ShardRefusal has come; other messages have no effect."""
        match message.WhichOneof("body"):
            case "state_manifest":
                manifest = message.state_manifest
                self._inboxes.put(manifest.transfer, peer, manifest, manifest.ByteSize())
            case "shard_refusal":
                refusal = message.shard_refusal
                self._inboxes.put(refusal.transfer, peer, refusal, refusal.ByteSize())

    def on_frame(self, peer: str, frame: Frame) -> None:
        """A frame of kind "state" has come."""
        if type(transfer := frame.fields.get("transfer")) is int:
            self._inboxes.put(transfer, peer, frame, frame.size)

    def on_peer_lost(self, peer: str, reason: str) -> None:
        self._inboxes.lost(peer, reason)


@dataclass(frozen=True)
class _Request:
    """What all requests of a transfer say."""

    transfer: int
    stage: int
    age: Age  # of which only the step is said: who has that has it of the newest lineage
    optimizer: bool
    ballot: tuple[int, int]
    kind: str
    due: Due

    def allowed(self) -> list[Due]:
        """What a source may offer."""
        weights = {WEIGHTS: self.due[WEIGHTS]}
        if not self.optimizer:
            return [weights]
        return [self.due, weights] if self.kind in WITHOUT_MOMENTS else [self.due]

    def manifest(self) -> pb.Message:
        request = pb.StateRequest(
            transfer=self.transfer,
            step=self.age.step,
            optimizer=self.optimizer,
            kind=self.kind,
            stage=self.stage,
        )
        return pb.Message(ballot=self._ballot(), state_request=request)

    def shard(self, shard: StateShard) -> pb.Message:
        request = pb.ShardRequest(
            transfer=self.transfer,
            step=self.age.step,
            optimizer=self.optimizer,
            offset=shard.offset,
            size=shard.size,
            kind=self.kind,
            stage=self.stage,
        )
        return pb.Message(ballot=self._ballot(), shard_request=request)

    def _ballot(self) -> pb.Ballot:
        view, attempt = self.ballot
        return pb.Ballot(view=view, attempt=attempt)


@dataclass
class Arriving:
    """A state as far as it has come."""

    request: _Request
    manifest: Manifest
    values: Tensor  # of all tensors, one behind the other
    lengths: Sequence[int]  # of these, in values
    first: int  # byte of the whole state with which they begin
    missing: dict[int, StateShard]  # by offset
    bytes: int = 0  # that are here

    @classmethod
    def none_of(
        cls,
        request: _Request,
        manifest: Manifest,
        part: tuple[int, int] | None,
        client: StateClient,
    ) -> Arriving:
        """`part`: of the weights, so many values from the first one on. Raises MemoryError."""
        first = VALUE * part[0] if part else 0
        lengths = [part[1]] if part else [values for _, values in manifest.tensors]
        values = client.tensors.empty(sum(lengths))
        shards = cut([VALUE * length for length in lengths], client.shard_size, first)
        missing = {shard.offset: shard for shard in shards}
        return cls(request, manifest, values, lengths, first, missing)

    def came(self, offset: int) -> None:
        """The shard there is in its place. It may have come twice: once for who has given up."""
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
        """All of it, or its weights alone, with which Adam starts afresh."""
        lengths = self.lengths[:1] if self.missing else self.lengths
        names = [name for name, _ in self.manifest.tensors][: len(lengths)]
        parts = [self.values[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]
        request, told = self.request, self.manifest.message
        afresh = request.optimizer and len(lengths) == 1
        return StageState(
            id=StateId.after(told.last, request.stage, *request.age),
            tensors=dict(zip(names, parts, strict=True)),
            omega=told.omega,
            boosted_at=told.boosted_at,
            last=told.last,
            optimizer_step=0 if afresh else self.manifest.optimizer_step,
            digest=self.manifest.digest if len(names) > 1 else b"",
        )


class _TransferFetch:
    """One transfer at the joiner.

    The first good manifest is the one that the others have to agree with; shards are asked for from
    then on, and a source whose manifest comes later joins in. Of more than SOURCES the others are
    asked as some are given up, those last to whom a link would have to be dialled.
    """

    def __init__(
        self,
        client: StateClient,
        request: _Request,
        sources: Sequence[str],
        deadline: float,
        on_progress: Callable[[int], None] | None,
        part: tuple[int, int] | None,
    ) -> None:
        self.client, self.part = client, part
        self.request = request
        self.deadline = deadline
        self.on_progress = on_progress
        self.started = client.exchanges.now
        if len(sources) > SOURCES:
            sources = sorted(sources, key=lambda source: not client.linked(source))
        self.unasked = deque(sources)
        self.silent: dict[str, float] = {}  # no manifest yet; since when it is asked
        self.given_up: dict[str, str] = {}  # by source: why, before the plan knew it
        self.arriving: Arriving | None = None  # since the first manifest
        self.plan = ShardPlan([], client.silence)
        self.served = dict.fromkeys(sources, 0)

    async def run(self, inbox: ExchangeInbox[_Answer]) -> Delivery:
        while self.arriving is None or not self.plan.done:
            if inbox.empty:  # else who seems silent may just be unheard
                self._expire(self._now)
            self._ask_shards()
            self._ask_sources()
            if not (self.silent or self.plan.sources):
                raise ComplaintError(f"{self._what()} is not to be had: {self._complaints()}")
            try:
                peer, answer = await inbox.take(self._wake())
            except TimeoutError:
                self._check_deadline()
                continue
            await self._take(peer, answer)
        seconds, size = self._now - self.started, sum(self.served.values())
        return Delivery(self.arriving.state(), size, seconds, self.served)

    @property
    def _now(self) -> float:
        return self.client.exchanges.now

    def _what(self) -> str:
        return f"the state of step {self.request.age.step}"

    def _complaints(self) -> str:
        said = self.given_up | self.plan.dropped
        return "; ".join(f"{source}: {why}" for source, why in said.items()) or "no source is named"

    def _wake(self) -> float:
        patience = min(self.silent.values(), default=math.inf) + self.client.silence
        return min(self.started + self.deadline, patience, self.plan.wake)

    def _check_deadline(self) -> None:
        if self._now >= self.started + self.deadline:
            waited_for = ", ".join([*self.silent, *self.plan.sources])
            missing = f"{self.plan.missing} shards" if self.arriving else "every manifest"
            gone = self.given_up or self.plan.dropped
            raise ComplaintError(
                f"{self._what()} is not there after {self.deadline:g} s: {missing} missing, "
                f"waited for {waited_for}" + (f"; {self._complaints()}" if gone else "")
            )

    def _give_up(self, source: str, reason: str) -> None:
        log.warning("no more of %s from %s: %s", self._what(), source, reason)
        if source in self.silent:
            del self.silent[source]
            self.given_up[source] = reason
        else:
            self.plan.drop(source, reason)

    def _accuse(self, source: str, reason: str, cause: Cause) -> None:
        self.client.accuse(source, f"{self._what()} from {source}: {reason}", cause)

    def _expire(self, now: float) -> None:
        self.plan.expire(now)
        for source, asked in list(self.silent.items()):
            if now >= asked + self.client.silence:
                self._give_up(source, f"no manifest in {self.client.silence:g} s")

    def _ask_sources(self) -> None:
        while self.unasked and len(self.silent) + len(self.plan.sources) < SOURCES:
            source = self.unasked.popleft()
            self.silent[source] = self._now
            if not self.client.send(source, self.request.manifest()):
                self._give_up(source, "there is no link to it")

    def _ask_shards(self) -> None:
        while asked := self.plan.ask(self._now):
            for source, shard in asked:
                if not self.client.send(source, self.request.shard(shard)):
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
                self._shard_failed(peer, answer.offset, _shorten(answer.reason))
            case Frame():
                await self._take_shard(peer, answer)

    def _take_manifest(self, peer: str, message: pb.StateManifest) -> None:
        request, client = self.request, self.client
        try:
            manifest = Manifest.parse(message, request.age.step, request.allowed())
        except ValueError as error:
            self._give_up(peer, str(error))
            if isinstance(error, WireError):
                self._accuse(peer, str(error), error.cause)
            return
        if self.arriving is None:
            try:
                self.arriving = client.arriving(request, manifest, self.part)
            except MemoryError as error:
                raise ComplaintError(
                    f"there is no memory for {self._what()}, {manifest.size} bytes"
                ) from error
            self.plan = ShardPlan(self.arriving.missing.values(), client.silence)
        elif manifest != self.arriving.manifest:
            self._give_up(peer, "its manifest is not that of the others")
            return
        del self.silent[peer]
        self.plan.add(peer)

    async def _take_shard(self, peer: str, frame: Frame) -> None:
        offset = frame.fields.get("offset")
        shard = self.plan.outstanding(peer, offset) if type(offset) is int else None
        if shard is None or self.arriving is None:
            return  # late: by now it is asked of another
        try:
            await self.client.exchanges.compute(partial(self._place, frame, shard, self.arriving))
        except WireError as error:
            self._wrong_shard(peer, shard, error)
            return
        self.plan.received(peer, shard.offset, self._now)
        self.arriving.came(shard.offset)
        self.served[peer] += shard.size
        if self.on_progress is not None:
            self.on_progress(self.arriving.bytes)

    def _wrong_shard(self, peer: str, shard: StateShard, error: WireError) -> None:
        """Who alone has the state may try again a few times: nobody else can serve it."""
        if len(self.plan.sources) > 1:
            self._give_up(peer, str(error))
        else:
            self._shard_failed(peer, shard.offset, str(error))
        if peer in self.plan.dropped:
            self._accuse(peer, str(error), error.cause)

    def _shard_failed(self, peer: str, offset: int, reason: str) -> None:
        log.warning("no shard at %d of %s from %s: %s", offset, self._what(), peer, reason)
        self.plan.failed(peer, offset, reason, self._now)

    def _place(self, frame: Frame, shard: StateShard, arriving: Arriving) -> None:
        """Put a shard where it belongs, in the compute thread. Raises WireError when it is damaged,
        or not what was asked."""
        if any((d.dtype, d.codec) != ("float32", "none") for d in frame.descriptors):
            raise WireError("a shard that isn't exact float32")
        size = sum(descriptor.size for descriptor in frame.descriptors)
        if size != shard.size:
            raise WireError(f"a shard of {size} bytes, not {shard.size}")
        arriving.put(shard, self.client.tensors.decode(frame.descriptors, frame.payload))

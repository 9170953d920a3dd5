"""Background copies of state at peers: running snapshots, and what stage 0's last node leaves.

An update is one stage's state of one step, or some of its blocks; recovery/snapshot.py defines
which, and their encoding. It is sent in frames of kind "copy", a few at a time. The holder answers
each frame and, once the update is whole and counts, sends one more `Kept`.

A holder counts an update only once its own node has committed that very step. A commit of which no
node is left never happened, and a stage must not be restored from it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from itertools import count
from typing import Any, Final, Literal, TypeVar

import torch
from google.protobuf.message import DecodeError

from planaria.bootstrap.registry_pb2 import NUMBERS, SHAPE, SILENT, Cause
from planaria.node.model.shape import ModelConfig, trained_shapes
from planaria.node.run_file import RunFile, SnapshotSection
from planaria.node.state.stage_state import TENSORS, Age, StageState, StateId
from planaria.node.state.transfer import shorten, views_of
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import ComplaintError, Exchanges, Outcome
from planaria.node.wire.frame_format import (
    NAME_LIMIT,
    FiguresError,
    Form,
    Frame,
    WireError,
    check_forms,
    crossing_bytes,
)
from planaria.node.wire.tensors import decode, encode
from planaria.recovery import snapshot
from planaria.recovery.decide import RECENT
from planaria.recovery.policy import holder_count
from planaria.recovery.snapshot import (
    HeldSnapshot,
    Layout,
    SentSnapshot,
    SnapshotUpdate,
    UpdateError,
    ValuesError,
    steps_between,
    whole_update,
)
from planaria.recovery.snapshot_pace import MOST, Pace, share_of_rows

log = logging.getLogger(__name__)

T = TypeVar("T")
CopyKind = Literal["snapshot", "deposit"]
Send = Callable[[str, pb.Message | Frame], bool]
"""Sends to a peer; False: there is no link to it."""
Take = Callable[[Sequence[torch.Tensor]], SnapshotUpdate]
"""Makes an update of a stage's tensors, in the compute thread."""
Accuse = Callable[[str, str, Cause], None]
"""Gets a node that sent invalid data, the reason and the cause of the accusation."""

FRAME: Final = 1 << 20  # bytes of payload, at most
LEAST_FRAME: Final = 16 << 10
PACE: Final = 0.1  # seconds of the budget for a frame, if it has at least LEAST_FRAME
OUTSTANDING: Final = 2  # frames that a holder hasn't answered
SILENCE: Final = 15.0  # seconds in which a holder must answer
CONFIRMED: Final = 3  # commits that a holder may also take to confirm, however long its tasks are
COMMIT_LIMIT: Final = 1 << 20  # bytes of the step's commit in an update
REMEMBERED: Final = 16  # of this node's own states


def snapshot_section(run: RunFile, config: ModelConfig) -> SnapshotSection:
    """The run's settings of snapshots. Where the policy adapts, an update has no more rows than
    `share_of_rows` allows."""
    snapshot, training = run.recovery.snapshot, run.training
    if not run.policy.adapts:
        return snapshot
    whole = _bytes_of_all_stages(config, snapshot.codec, snapshot.moments)
    crossing = crossing_bytes(config, training.microbatch * config.context, run.wire)
    sent = (config.stages + 1) * training.microbatches * sum(crossing)
    fraction = min(snapshot.fraction, share_of_rows(whole, sent))
    return snapshot.model_copy(update={"fraction": fraction})


def layout_of(config: ModelConfig, stage: int) -> Layout:
    """Positions of the stage's tensors in its flat ones."""
    return Layout(trained_shapes(config, stage).values(), config.tensors_in(stage))


@cache
def _bytes_of_all_stages(config: ModelConfig, codec: snapshot.Codec, moments: bool) -> int:
    """Bytes of a whole snapshot of each stage, for each of its holders."""
    total = 0
    for stage in range(config.stages + 1):
        if config.trained_in(stage):
            layout = layout_of(config, stage)
            size = snapshot.bytes_of_all(layout, layout.tensors if moments else 1, codec)
            total += holder_count(stage, config.stages) * size
    return total


class Allowance:
    """A token bucket as deep as one item: in any interval at most its share of the rate leaves, and
    one item. Pure; `now` is in seconds of any one clock."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free = -math.inf  # when the next item may leave

    def wait(self, now: float) -> float:
        """Seconds until the next item may leave, by the bytes per second."""
        return max(0.0, self._free - now)

    def spend(self, size: int, now: float) -> None:
        """Account for an item of `size` bytes that leaves now."""
        self._free = max(self._free, now) + size / self._rate


# Contents and time of updates


@dataclass(frozen=True)
class OutgoingCopies:
    """A stage's updates for its holders: contents and pace."""

    kind: CopyKind
    stage: int
    layout: Layout
    snapshot: SnapshotSection | None = None  # None: a deposit, which is sent once
    period: int = 1  # least number of steps between updates
    bytes_per_second: float = math.inf
    pace: Pace | None = None  # None: it is sent however slow the link is

    @classmethod
    def snapshots(
        cls, stage: int, layout: Layout, snapshot: SnapshotSection, oldest: int | None = None
    ) -> OutgoingCopies:
        """A running snapshot: the fraction r of the blocks every rC steps. `oldest`: steps that
        rows may be old on average; a link that is too slow for that gets no snapshot."""
        period = steps_between(snapshot.fraction, snapshot.period)
        pace = None if oldest is None else Pace(snapshot.fraction, period, oldest)
        return cls("snapshot", stage, layout, snapshot, period, snapshot.mbps * 1e6 / 8, pace)

    def new_sent(self) -> SentSnapshot:
        """The record of a holder that has nothing of the snapshot yet."""
        assert self.snapshot is not None, "a deposit is sent whole"
        fraction, codec = self.snapshot.fraction, self.snapshot.codec
        return SentSnapshot(self.layout, fraction, codec, self.snapshot.moments, MOST)


@dataclass(frozen=True)
class UpdateHeader:
    """The fields of each frame of a copy's update."""

    kind: str
    stage: int
    step: int
    lineage: int
    transfer: int  # the sender's number of the update
    size: int  # bytes: the blocks', then the commit's
    commit: int  # bytes of the step's commit, a serialised pb.Commit
    blocks: int
    tensors: int  # 1: weights; else with the moments
    codec: str
    omega: float
    boosted_at: int
    optimizer_step: int
    # ||x - held|| of the weights when it was taken, int8's rounding included; NaN: not known
    perturbation: float = field(compare=False)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> UpdateHeader:
        """Reads a frame's fields. Raises FiguresError for a missing or invalid one."""
        values: dict[str, Any] = {}
        for header_field in fields(cls):
            value = raw.get(header_field.name)
            if type(value).__name__ != header_field.type or (type(value) is int and value < 0):
                raise FiguresError(
                    f"its {header_field.name} is {shorten(repr(value))}, not {header_field.type}"
                )
            values[header_field.name] = value
        header = cls(**values)
        if header.codec not in snapshot.CODECS:
            raise FiguresError(f"it is in codec {header.codec!r}")
        if not (math.isfinite(header.omega) and header.omega >= 0):
            raise FiguresError(f"its gradient's squared norm is {header.omega}")
        return header

    @property
    def age(self) -> Age:
        return Age(self.lineage, self.step)


@dataclass
class _Recipient:
    """What a sender knows of one holder of its copies."""

    sent: SentSnapshot
    started: int = -1  # step of the newest update begun
    filling: bool = False  # the newest arrived, and more blocks have never been sent


@dataclass
class _Update:
    """The update of a copy that is being sent."""

    holder: str
    transfer: int
    step: int
    kept: bool = False
    lost: str = ""  # reason; "": not lost
    memory_bytes: int = 0  # for this update alone
    news: Outcome[None] | None = None  # an event that the update waits for

    def wake(self) -> None:
        """Wake the update after an event."""
        if self.news is not None:
            self.news.fulfil(None)


class CopySender:
    """Sends the state of this node's stage to its holders, to one at a time.

    `state` is called on the event loop, as by StateServer: a commit must change its step no later
    than it posts its work to the compute thread. All values of an update are of the step for which
    `committed` was called last: they are taken in the compute thread after that step, before the
    next. If an update doesn't arrive, its blocks count as never sent; the holder gets another one
    when the next is due.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        outgoing: OutgoingCopies,
        state: Callable[[], StageState | None],
        send: Send,
        silence: float = SILENCE,
        on_pace: Callable[[str, Pace], None] = lambda holder, pace: None,
    ) -> None:
        """`on_pace`: gets the holder when its link has become too slow, or fast enough again."""
        self._exchanges = exchanges
        self._outgoing = outgoing
        self._on_pace = on_pace
        self._state = state
        self._send = send
        self._silence = silence
        self._budget = Allowance(outgoing.bytes_per_second)
        paced = min(FRAME, max(LEAST_FRAME, PACE * outgoing.bytes_per_second))
        self._frame = int(paced) // 4 * 4
        self._recipients: dict[str, _Recipient] = {}
        self._outstanding: Counter[str] = Counter()  # unanswered frames, of any update
        self._transfers = count(1)
        self._update: _Update | None = None
        self._applied = Age(0, -1)
        self.bytes_sent = 0
        self.critical_seconds = 0.0  # in the compute thread

    @property
    def memory_bytes(self) -> int:
        """Bytes that the sender keeps for its holders."""
        sent = sum(recipient.sent.memory_bytes for recipient in self._recipients.values())
        return sent + (self._update.memory_bytes if self._update else 0)

    # --- events

    def set_holders(self, nodes: Iterable[str]) -> None:
        """Set the holders of this stage's copies; none: this node doesn't send."""
        wanted = set(nodes)
        for node in sorted(self._recipients.keys() - wanted):
            del self._recipients[node]
            self._lose(node, "it is no longer a holder")
        for node in sorted(wanted - self._recipients.keys()):
            self._recipients[node] = _Recipient(self._outgoing.new_sent())
        self._start()

    def committed(self, own: StateId) -> None:
        """Record that a state is in place: applied, fetched or loaded."""
        abandoned, self._applied = own.lineage != self._applied.lineage, own.age
        if abandoned:
            nodes = list(self._recipients)
            self.set_holders([])  # their copies are of an abandoned lineage
            self.set_holders(nodes)
        elif self._update is not None:
            self._update.wake()
        self._start()

    def on_kept(self, peer: str, kept: pb.Kept) -> None:
        """Handle a holder's answer to a frame or an update."""
        update = self._update
        if kept.received:
            self._outstanding[peer] = max(0, self._outstanding[peer] - 1)
        if update is None or peer != update.holder:
            return
        if kept.transfer == update.transfer:
            if kept.error:
                update.lost = update.lost or f"it refused: {shorten(kept.error)}"
            update.kept = not kept.received
        update.wake()  # after another update's answer, too: it may make room

    def on_peer_lost(self, peer: str, reason: str) -> None:
        """Handle a lost link: what was in flight on it is lost."""
        self._outstanding.pop(peer, None)
        self._lose(peer, f"the link is lost: {reason}")

    # --- an update

    def _lose(self, holder: str, reason: str) -> None:
        if self._update is not None and self._update.holder == holder:
            self._update.lost = self._update.lost or reason
            self._update.wake()

    def _start(self) -> None:
        """Begin the next update, if one is due and none is in progress."""
        state = self._state()
        if self._update is not None or state is None or state.id.age != self._applied:
            return  # a later step is being applied: `committed` follows
        if state.last.step != state.id.step:
            return  # rebuilt from an older state, whose commit isn't this step's
        pace = self._outgoing.pace
        period = self._outgoing.period if pace is None else pace.period
        due = [
            (recipient.started, node)
            for node, recipient in self._recipients.items()
            if recipient.started < 0
            or recipient.filling
            or state.id.step - recipient.started >= period
        ]
        if not due:
            return
        _, holder = min(due)
        recipient = self._recipients[holder]
        recipient.started, recipient.filling = state.id.step, False
        self._update = _Update(holder, next(self._transfers), state.id.step)
        self._exchanges.start(self._send_update(self._update, recipient, state))

    def _take(self, take: Take, state: StageState) -> SnapshotUpdate:
        started = time.perf_counter()
        update = take(list(state.tensors.values()))
        self.critical_seconds += time.perf_counter() - started
        return update

    async def deliver(self, holder: str) -> None:
        """Sends the present state, and waits until it counts. Raises ComplaintError."""
        if (state := self._state()) is None:
            raise ComplaintError("there is no state")
        self._update = _Update(holder, next(self._transfers), state.id.step)
        try:
            await self._deliver(self._update, partial(whole_update, self._outgoing.layout), state)
        finally:
            self._update = None

    async def _deliver(
        self, update: _Update, take: Take, state: StageState, commits: int = 0
    ) -> None:
        # Posted as soon as it is started, before a later step can be.
        content = await self._exchanges.compute(partial(self._take, take, state))
        update.memory_bytes = content.payload.nbytes
        header, payload = self._compose(update, state, content)
        await self._transfer(update, header, payload)
        await self._wait(update, lambda: update.kept, "the confirmation", commits)

    def _judge_link(self, update: _Update, arrived: bool, first: bool) -> None:
        """Judge the link by an update: the next one leaves with the next commit. `first`: the
        holder lacked rows."""
        pace = self._outgoing.pace
        steps = self._applied.step + 1 - update.step if arrived else RECENT
        if pace is not None and pace.arrived(steps, first):
            self._on_pace(update.holder, pace)

    async def _send_update(self, update: _Update, recipient: _Recipient, state: StageState) -> None:
        sent, first = recipient.sent, recipient.sent.lacks_blocks
        try:
            await self._deliver(update, partial(sent.take, update.step), state, CONFIRMED)
            self._judge_link(update, arrived=True, first=first)
            recipient.filling = sent.lacks_blocks
        except ComplaintError as lost:
            self._judge_link(update, arrived=False, first=first)
            sent.lost(update.step)
            copied = f"the {self._outgoing.kind} of stage {self._outgoing.stage}"
            step, holder = update.step, update.holder
            log.warning("%s at step %d did not reach %s: %s", copied, step, holder, lost)
        finally:
            self._update = None
        self._start()

    def _compose(
        self, update: _Update, state: StageState, content: SnapshotUpdate
    ) -> tuple[UpdateHeader, list[torch.Tensor]]:
        commit = state.last.SerializeToString()
        payload = [content.payload]
        if commit:
            payload.append(torch.frombuffer(bytearray(commit), dtype=torch.uint8))
        header = UpdateHeader(
            kind=self._outgoing.kind,
            stage=self._outgoing.stage,
            step=state.id.step,
            lineage=state.id.lineage,
            transfer=update.transfer,
            size=sum(part.nbytes for part in payload),
            commit=len(commit),
            blocks=content.blocks,
            tensors=content.tensors,
            codec=content.codec,
            omega=float(state.omega),
            boosted_at=state.boosted_at,
            optimizer_step=state.optimizer_step if content.tensors > 1 else 0,
            perturbation=content.perturbation,
        )
        return header, payload

    async def _transfer(
        self,
        update: _Update,
        header: UpdateHeader,
        payload: list[torch.Tensor],
    ) -> None:
        """Sends an update's frames to its holder. Raises ComplaintError when it can't."""
        holder = update.holder
        header_fields = vars(header)
        for offset in range(0, header.size, self._frame):
            end = min(offset + self._frame, header.size)
            parts = views_of(payload, offset, end)
            frame = Frame("copy", NEVER, header_fields | {"offset": offset}, *encode(parts, "none"))
            size = frame.size + len(frame.head())
            await self._wait(
                update,
                lambda: self._outstanding[holder] < OUTSTANDING,
                f"{offset} of {header.size} B",
            )
            await self._exchanges.sleep(self._budget.wait(self._exchanges.now))
            self._check(update)
            if not self._send(holder, frame):
                raise ComplaintError("there is no link to it", [holder])
            self._budget.spend(size, self._exchanges.now)
            self._outstanding[holder] += 1
            self.bytes_sent += size

    async def _wait(
        self, update: _Update, done: Callable[[], bool], expected: str, commits: int = 0
    ) -> None:
        """Wait for the holder until `done`. Raises ComplaintError, also when it isn't done for
        `silence` seconds and until so many commits after the update's own."""
        self._check(update)
        began = self._exchanges.now
        limit = began + self._silence
        while not done():
            if limit == math.inf and self._applied.step >= update.step + commits:
                seconds = self._exchanges.now - began
                raise ComplaintError(f"no answer for {seconds:.0f} s ({expected})", [update.holder])
            update.news = Outcome(self._exchanges)
            try:
                await update.news.within(limit)
            except TimeoutError:
                limit = math.inf
            self._check(update)

    @staticmethod
    def _check(update: _Update) -> None:
        if update.lost:
            raise ComplaintError(update.lost, [update.holder])


# The holder's side


@dataclass
class _PartialUpdate:
    """An update of a copy that arrives, or that doesn't count yet."""

    peer: str
    header: UpdateHeader
    payload: torch.Tensor  # uint8 [size]
    received: int = 0
    last: pb.Commit = field(default_factory=pb.Commit)  # set once it is whole


@dataclass
class _HeldCopy:
    header: UpdateHeader  # of the newest update
    last: pb.Commit
    state: HeldSnapshot

    @property
    def id(self) -> StateId:
        header = self.header
        return StateId.after(self.last, header.stage, header.lineage, header.step)


class CopyHolder:
    """Holds copies of other stages' states.

    `holds` says what may be held here, and its layout in memory: nothing else is accepted. Each is
    held once, beside an update that is arriving or waits for this node's commit.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        holds: Mapping[tuple[CopyKind, int], Layout],
        send: Send,
        accuse: Accuse,
    ) -> None:
        self._exchanges = exchanges
        self._accuse = accuse
        self._layouts: dict[tuple[str, int], Layout] = dict(holds.items())
        self._send = send
        self._arriving: dict[tuple[str, int], _PartialUpdate] = {}
        self._waiting: dict[
            tuple[str, int], _PartialUpdate
        ] = {}  # whole, until this node's own commit
        self._held: dict[tuple[str, int], _HeldCopy] = {}
        self._applied = Age(0, 0)
        self._own: deque[StateId] = deque(maxlen=REMEMBERED)
        self.critical_seconds = 0.0  # in the compute thread

    # --- holdings

    @property
    def memory_bytes(self) -> int:
        updates = [*self._arriving.values(), *self._waiting.values()]
        return sum(held.state.memory_bytes for held in self._held.values()) + sum(
            update.payload.nbytes for update in updates
        )

    def holdings(self) -> list[pb.Holding]:
        """The whole copies held here, none newer than this node's own step; of snapshots with
        their rows' steps, and their distance from the sender's weights at the newest update."""
        holdings = []
        for (kind, _), held in sorted(self._held.items()):
            if held.state.missing:
                continue
            holding = held.id.holding(kind)
            if kind == "snapshot":
                staleness = held.state.staleness()
                holding.mean_step, holding.oldest_step = staleness.mean, staleness.oldest
                holding.perturbation = held.header.perturbation
            holdings.append(holding)
        return holdings

    def state(self, kind: str, stage: int) -> StageState | None:
        """A held state, for StateServer; None: nothing is held, or blocks are missing."""
        held = self._held.get((kind, stage))
        if held is None or held.state.missing:
            return None
        return StageState(
            id=held.id,
            tensors=dict(zip(TENSORS, held.state.tensors, strict=False)),
            omega=held.header.omega,
            boosted_at=held.header.boosted_at,
            last=held.last,
            optimizer_step=held.header.optimizer_step,
        )

    # --- events

    def on_peer_lost(self, peer: str) -> None:
        """Handle a lost link: drop incomplete updates of the peer."""
        for key, update in list(self._arriving.items()):
            if update.peer == peer:
                del self._arriving[key]

    def committed(self, own: StateId) -> None:
        """Record a state of this node's own stage: applied, fetched or loaded."""
        if (deposit := self._held.get(("deposit", 0))) and deposit.header.age < own.age:
            del self._held["deposit", 0]  # the run has gone on: it is not exact any more
        if own.lineage != self._applied.lineage:
            self._own.clear()
            for key, held in list(self._held.items()):
                if held.header.lineage < own.lineage:
                    del self._held[key]
        self._applied = own.age
        self._own.append(own)
        for key, update in list(self._waiting.items()):
            if update.header.age <= self._applied:
                del self._waiting[key]
                self._check_commit(key, update, waited=True)

    def on_frame(self, peer: str, frame: Frame) -> None:
        """Handle a frame of kind "copy". An invalid one is answered, and changes nothing. Its
        sender is accused, unless the frame is only late, or of something not held here."""
        raw = frame.fields
        try:
            header = UpdateHeader.parse(raw)
            key = header.kind, header.stage
            update = self._put_bytes(peer, key, header, raw.get("offset"), frame)
        except (UpdateError, WireError) as error:
            reason = shorten(str(error))
            log.warning("refused part of an update from %s: %s", peer, reason)
            self._answer(peer, raw, received=1, error=reason)
            if isinstance(error, WireError):
                self._accuse(peer, f"part of an update from {peer}: {reason}", error.cause)
            return
        self._answer(peer, raw, received=update.received)
        if update.received == header.size:
            del self._arriving[key]
            self._check_whole(key, update)

    def _answer(
        self, peer: str, raw: Mapping[str, Any], received: int = 0, error: str = ""
    ) -> None:
        """Answer a frame or, with `received` 0, the update as a whole."""
        numbers = {name: raw.get(name) for name in ("stage", "step", "transfer")}
        valid = {
            name: value
            for name, value in numbers.items()
            if type(value) is int and 0 <= value < 1 << (32 if name == "stage" else 64)
        }
        kind = str(raw.get("kind"))[:NAME_LIMIT]
        kept = pb.Kept(kind=kind, received=received, error=shorten(error), **valid)
        self._send(peer, pb.Message(kept=kept))

    # --- an update

    def _put_bytes(
        self, peer: str, key: tuple[str, int], header: UpdateHeader, offset: Any, frame: Frame
    ) -> _PartialUpdate:
        """Copy a frame's bytes to their place in the arriving update. Raises UpdateError or
        WireError."""
        update = self._arriving.get(key)
        if offset == 0:
            update = self._arriving[key] = self._begin(peer, key, header)
        elif update is None or (update.peer, update.header) != (peer, header):
            raise UpdateError(f"bytes at {shorten(repr(offset))} of an unknown update")
        try:
            if offset != update.received:
                raise UpdateError(f"bytes at {shorten(repr(offset))}, not at {update.received}")
            check_forms(frame.descriptors, [Form("uint8", (d.size,)) for d in frame.descriptors])
            end = offset + sum(descriptor.size for descriptor in frame.descriptors)
            if end > header.size:
                raise FiguresError(f"bytes up to {end} of {header.size}")
            for part in decode(frame.descriptors, frame.payload):
                end = update.received + len(part)
                update.payload[update.received : end] = part
                update.received = end
            if update.received == offset:
                raise FiguresError("a frame without bytes")
        except (UpdateError, WireError):
            del self._arriving[key]
            raise
        return update

    def _begin(self, peer: str, key: tuple[str, int], header: UpdateHeader) -> _PartialUpdate:
        layout = self._layouts.get(key)
        if layout is None:
            raise UpdateError(f"no {header.kind} of stage {header.stage} is held here")
        if header.tensors not in (1, layout.tensors):
            raise FiguresError(f"it has {header.tensors} tensors, not 1 or {layout.tensors}")
        limit = snapshot.largest_update(layout, header.tensors) + COMMIT_LIMIT
        if not 0 < header.size <= limit or header.commit > min(header.size, COMMIT_LIMIT):
            raise FiguresError(
                f"it has {header.size} bytes, {header.commit} of them for its commit"
            )
        form = header.blocks, header.tensors, header.codec
        if header.kind == "deposit" and form != (layout.blocks, layout.tensors, "none"):
            contents = f"{header.tensors} tensors, {header.blocks} blocks in codec {header.codec}"
            raise FiguresError(f"a {header.kind} of {contents}")
        return _PartialUpdate(peer, header, torch.empty(header.size, dtype=torch.uint8))

    def _check_whole(self, key: tuple[str, int], update: _PartialUpdate) -> None:
        """Handle a whole update: it counts once this node has committed its step."""
        split = update.header.size - update.header.commit
        try:
            update.last.ParseFromString(update.payload[split:].numpy().tobytes())
        except DecodeError as error:
            self._refuse(update, f"its commit can't be parsed: {error}", NUMBERS)
            return
        update.payload = update.payload[:split]
        if update.last.step != update.header.step:
            self._refuse(update, f"its commit is of step {update.last.step}", NUMBERS)
        elif update.header.age > self._applied:
            if (older := self._waiting.pop(key, None)) is not None:
                self._refuse(older, "a newer one arrived before its step was committed here")
            self._waiting[key] = update
        else:
            self._check_commit(key, update, waited=False)

    def _check_commit(self, key: tuple[str, int], update: _PartialUpdate, waited: bool) -> None:
        """Check that an update no newer than this node's step was made by the same commit."""
        lineage, step = update.header.age
        newest = self._applied.lineage
        if lineage < newest:
            self._refuse(update, f"it is of lineage {lineage}, the run is at {newest}")
            return
        commits = [own.made for own in self._own if own.age == update.header.age]
        if (commits and commits[-1] != Ballot.of(update.last.ballot)) or (waited and not commits):
            self._refuse(update, f"step {step} was made by another commit here")
            return
        self._exchanges.start(self._accept(key, update))

    def _refuse(self, update: _PartialUpdate, reason: str, cause: Cause = SILENT) -> None:
        """Refuse an update; its sender is accused, unless the cause is SILENT."""
        log.warning("refused an update from %s: %s", update.peer, reason)
        self._answer(update.peer, vars(update.header), error=reason)
        if cause != SILENT:
            self._accuse(update.peer, f"an update from {update.peer}: {reason}", cause)

    async def _accept(self, key: tuple[str, int], update: _PartialUpdate) -> None:
        """Check the values, then let the update count: at once on the event loop, and in the
        compute thread before work that is posted there afterwards."""
        header, layout = update.header, self._layouts[key]
        codec: Any = header.codec
        try:
            decode_update = partial(
                snapshot.decode,
                layout,
                update.payload,
                count=header.blocks,
                tensors=header.tensors,
                codec=codec,
            )
            blocks, values = await self._exchanges.compute(partial(self._timed, decode_update))
        except UpdateError as error:
            # Replicas of the sender have the same non-finite values.
            self._refuse(update, str(error), SILENT if isinstance(error, ValuesError) else SHAPE)
            return
        held = self._held.get(key)
        if header.lineage < self._applied.lineage or (held and held.header.age > header.age):
            self._refuse(update, "a newer one is held already")
            return
        if header.kind != "snapshot":
            state = HeldSnapshot.whole(layout, header.step, update.payload)
            self._held[key] = _HeldCopy(header, update.last, state)
        else:
            if held is not None and held.header.tensors == header.tensors:
                state = held.state
            else:
                state = HeldSnapshot(layout, header.tensors)
            self._held[key] = _HeldCopy(header, update.last, state)
            overlay = partial(state.overlay, header.step, blocks, values)
            await self._exchanges.compute(partial(self._timed, overlay))
        self._answer(update.peer, vars(header))

    def _timed(self, work: Callable[[], T]) -> T:
        started = time.perf_counter()
        try:
            return work()
        finally:
            self.critical_seconds += time.perf_counter() - started

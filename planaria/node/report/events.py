"""Events of a run, as in event logs: one class for each kind, with its severity and its sentence.

A log has one JSON object a line (`event_line`): `time`, `node`, `kind` and the event's fields. A
float that isn't finite is null, and an optional field without a value is omitted. `parse` makes an
`Entry` of a line again.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, dataclass_transform

from annotated_types import Interval
from pydantic import BeforeValidator, Field, TypeAdapter
from rich.filesize import decimal

from planaria.bootstrap.escaping import readable
from planaria.recovery.facts import ARRIVED, OWN

if TYPE_CHECKING:
    from planaria.node.wire import stage_pb2 as pb


def _figure(value: Any) -> Any:
    return math.nan if value is None else value


Figure = Annotated[float, BeforeValidator(_figure)]
"""A float; null in JSON is nan."""
MaybeFigure = Annotated[float | None, BeforeValidator(_figure)]
Count = Annotated[int, Field(strict=True), Interval(ge=-(2**63), lt=2**63)]


class Severity(enum.IntEnum):
    """Importance of an event to a person; from NOTICE on it is news."""

    DEBUG = enum.auto()  # too frequent for a log that people read
    INFO = enum.auto()  # normal operation
    NOTICE = enum.auto()
    GOOD = enum.auto()  # a loss is repaired
    WARNING = enum.auto()  # lost work, or a second-best measure
    ERROR = enum.auto()  # a person must act

    @property
    def log_level(self) -> int:
        """The corresponding level of `logging`."""
        levels = {
            Severity.DEBUG: logging.DEBUG,
            Severity.WARNING: logging.WARNING,
            Severity.ERROR: logging.ERROR,
        }
        return levels.get(self, logging.INFO)


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Event:
    """An event. Each kind is a dataclass, whose fields are those of its JSON, in the same order."""

    kind: ClassVar[str]
    says: ClassVar[str]
    """Format of the sentence: its names are fields, and `writer`, the argument of `sentence`."""
    _severity: ClassVar[Severity]

    def __init_subclass__(cls, kind: str, severity: Severity) -> None:
        cls.kind, cls._severity = kind, severity
        dataclass(frozen=True, kw_only=True)(cls)

    @property
    def severity(self) -> Severity:
        return self._severity

    def sentence(self, node: str | None) -> str:
        """Sentence for people. `node`: the writer, or the node that the event is about."""
        return self.says.format(writer=node, **vars(self))


# --- a node's life


class Joined(Event, kind="joined", severity=Severity.INFO):
    reason: str
    host: str
    pid: Count
    says = "joined as {writer}: {reason}"


class Serving(Event, kind="serving", severity=Severity.INFO):
    """The node has built its stage and serves it."""

    stage: Count
    device: str | None = None

    def sentence(self, node: str | None) -> str:
        return f"{node} serves stage {self.stage}" + (f" on {self.device}" if self.device else "")


class GivenBack(Event, kind="given back", severity=Severity.INFO):
    """The node has one seat less."""

    stage: Count
    says = "{writer} no longer serves stage {stage}"


class Preempted(Event, kind="preempted", severity=Severity.WARNING):
    grace: Figure  # seconds
    reason: str = ""  # SIGTERM, SIGINT, or the cloud's notice

    def sentence(self, node: str | None) -> str:
        why = f" ({self.reason})" if self.reason else ""
        grace = f"{round(self.grace, 1):g} s{why}"
        return f"{node} has to end within {grace}: it saves and hands over its state"


class HandedOver(Event, kind="handed over", severity=Severity.NOTICE):
    to: str  # node
    stage: Count
    says = "{writer} has handed its state over to {to}"


class ComputeHangs(Event, kind="hangs", severity=Severity.ERROR):
    """A task of the node's compute thread takes too long."""

    task: str
    seconds: Figure  # so far
    usual: MaybeFigure = None  # the longest such task lately, in seconds

    def sentence(self, node: str | None) -> str:
        usual = f", which usually takes {self.usual:.2g} s" if self.usual else ""
        return f"{node} hangs: `{self.task}` has run for {self.seconds:.0f} s{usual}"


class ComputeGoesOn(Event, kind="goes on", severity=Severity.GOOD):
    """A hanging task has ended."""

    task: str
    says = "{writer} no longer hangs: `{task}` has ended"


class ComputeSlow(Event, kind="slow", severity=Severity.NOTICE):
    """The machine is busy: a task takes too long."""

    task: str
    seconds: Figure  # so far
    usual: MaybeFigure = None  # the longest such task lately, in seconds
    load: Figure  # processes that run or wait for a processor, on average of a minute
    cores: Count

    def sentence(self, node: str | None) -> str:
        usual = f", {self.seconds / self.usual:.0f} times as long as usual" if self.usual else ""
        return (
            f"{node} is slow: `{self.task}` has run for {self.seconds:.0f} s{usual}; the machine "
            f"is busy (load {self.load:.0f} on {self.cores} cores)"
        )


class LinkLost(Event, kind="link lost", severity=Severity.INFO):
    """A node's link to a member broke. The driver's `NodeLost` is the news of it."""

    peer: str
    reason: str
    says = "lost the link to {peer}: {reason}"


class LinkRelayed(Event, kind="relayed", severity=Severity.WARNING):
    """Another member relays a node's link to `peer`; empty `via`: no longer."""

    peer: str
    via: str

    def sentence(self, node: str | None) -> str:
        if not self.via:
            return f"{node} and {self.peer} reach each other directly again"
        return f"{node} and {self.peer} can't reach each other: {self.via} relays for them"


class MessageRefused(Event, kind="refused", severity=Severity.INFO):
    """The node refused a control message from an unauthorized sender."""

    peer: str
    body: str | None
    why: str
    says = "refused {body} from {peer}: {why}"


class Wall(Event, kind="wall", severity=Severity.DEBUG):
    """Seconds of the node's wall time by use, as in `WallClock`."""

    compute: Figure
    average: Figure
    rebuild: Figure
    send: Figure
    idle: Figure
    total: Figure
    says = "{writer} computed {compute:.1f} of {total:.1f} s"


@dataclass(frozen=True)
class HoldingCost:
    """Cost of keeping redundant state against losses: so far, or, for memory, now."""

    extra_bytes: Count = 0  # sent or written
    memory_bytes: Count = 0
    critical_seconds: Figure = 0.0  # of the compute thread

    def __add__(self, other: HoldingCost) -> HoldingCost:
        return HoldingCost(
            self.extra_bytes + other.extra_bytes,
            self.memory_bytes + other.memory_bytes,
            self.critical_seconds + other.critical_seconds,
        )


class CostSoFar(Event, kind="cost", severity=Severity.DEBUG):
    """A node's cost of redundant state so far."""

    extra_bytes: Count
    memory_bytes: Count
    critical_seconds: Figure
    parts: Mapping[str, HoldingCost]

    @staticmethod
    def of(parts: Mapping[str, HoldingCost]) -> CostSoFar:
        whole = sum(parts.values(), HoldingCost())
        return CostSoFar(**vars(whole), parts=parts)

    def sentence(self, node: str | None) -> str:
        return f"{node} keeps {decimal(self.memory_bytes)} of redundant state"


# --- steps


class Committed(Event, kind="committed", severity=Severity.INFO):
    step: Count
    loss: Figure  # nats a token

    def sentence(self, node: str | None) -> str:
        return f"step {self.step} is committed, loss {figure(self.loss)}"


class Applied(Event, kind="applied", severity=Severity.DEBUG):
    """A node has the weights after a step; replicas have the same digest of weights and moments."""

    lineage: Count
    step: Count
    digest: str
    says = "{writer} is at step {step}"


class Validated(Event, kind="validated", severity=Severity.NOTICE):
    step: Count
    loss: Figure  # nats a token

    def sentence(self, node: str | None) -> str:
        return f"validation loss {figure(self.loss)} at step {self.step}"


class Sampled(Event, kind="sampled", severity=Severity.INFO):
    """The model continued a prompt with `text`, which may hold anything."""

    step: Count  # newest committed one at the start
    prompt: str
    text: str

    def sentence(self, node: str | None) -> str:
        return f"step {self.step}: {shown(self.prompt + self.text)}"


class Aborted(Event, kind="aborted", severity=Severity.WARNING):
    step: Count
    view: Count
    reason: str
    says = "an attempt at step {step} is aborted: {reason}"


class AttemptMasked(Event, kind="masked", severity=Severity.NOTICE):
    """An attempt at a step continues without lost nodes."""

    step: Count
    nodes: tuple[str, ...]
    microbatches: Count  # of the lost nodes, counted at each stage
    reason: str

    def sentence(self, node: str | None) -> str:
        count = counted(self.microbatches, "microbatch")
        others = f"others recompute {count}" if self.microbatches else "no microbatch is lost"
        nodes = ", ".join(self.nodes)
        return f"step {self.step} continues without {nodes}: {others} ({self.reason})"


class SeatTaken(Event, kind="seat taken", severity=Severity.NOTICE):
    """The last node of a stage was lost during a step. Another node has its seat, with the same
    state, and the attempt continues."""

    step: Count
    stage: Count
    lost: str
    by: str
    microbatches: Count  # recomputed at the stage
    seconds: Figure  # without a node at the stage
    reason: str

    def sentence(self, node: str | None) -> str:
        return (
            f"step {self.step} continues: after {self.seconds:.1f} s {self.by} takes the seat of "
            f"{self.lost} at stage {self.stage}, and recomputes that stage's part of "
            f"{counted(self.microbatches, 'microbatch')}"
        )


class HeldUp(Event, kind="held up", severity=Severity.ERROR):
    """The driver knows which node delays an attempt."""

    step: Count
    node: str
    stage: Count
    reason: str
    says = "step {step} is held up by {node} of stage {stage}: {reason}"


class Relieved(Event, kind="relieved", severity=Severity.NOTICE):
    """The other replicas take microbatches that a slow node hadn't begun."""

    step: Count
    node: str
    stage: Count
    microbatches: Count

    def sentence(self, node: str | None) -> str:
        return (
            f"{self.node} of stage {self.stage} is slow: other replicas take over "
            f"{counted(self.microbatches, 'microbatch')} in step {self.step}"
        )


class NonFinite(Event, kind="not finite", severity=Severity.WARNING):
    """A node computed a tensor that is not finite from finite ones."""

    step: Count
    node: str
    stage: Count
    reason: str
    says = "{node} of stage {stage} computed a non-finite tensor: {reason}"


class Accused(Event, kind="accused", severity=Severity.WARNING):
    """A node has sent something invalid; the registry evicts it."""

    node: str
    stage: Count
    by: str  # the receiver
    reason: str
    says = "{by} accuses {node} of stage {stage}: {reason}"


class ComputedWrong(Event, kind="computed wrong", severity=Severity.WARNING):
    """Two other replicas have computed a different result of the same visit."""

    step: Count
    node: str
    stage: Count
    by: str  # the comparing node
    difference: Figure  # relative
    says = (
        "{node} of stage {stage} computes another result than two other replicas in "
        "step {step}: relative difference {difference:.2g}, measured by {by}"
    )


class ResultsDiffer(Event, kind="results differ", severity=Severity.WARNING):
    """Two nodes compute different results of the same visit, without a third to decide."""

    step: Count
    nodes: tuple[str, ...]
    stage: Count
    difference: Figure  # relative

    def sentence(self, node: str | None) -> str:
        return (
            f"{' and '.join(self.nodes)} of stage {self.stage} compute different results in step "
            f"{self.step}, relative difference {self.difference:.2g}: add a third replica, then "
            "the faulty node can be identified"
        )


class GradientStandsOut(Event, kind="gradient stands out", severity=Severity.WARNING):
    """A replica's gradients, or the sums that it makes, fail the driver's audits."""

    step: Count
    node: str
    stage: Count
    reason: str
    says = "{node} of stage {stage} fails an audit of gradients: {reason}"


class StepSkipped(Event, kind="step skipped", severity=Severity.WARNING):
    """A step was committed without an update."""

    step: Count
    reason: str
    says = "step {step} is skipped: {reason}"


class Diverged(Event, kind="diverged", severity=Severity.ERROR):
    stage: Count
    nodes: tuple[str, ...]
    step: Count
    reason: str = ""  # the faulty node, and why

    def sentence(self, node: str | None) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"replicas of stage {self.stage} differ after step {self.step}{why}"


class WeightsChanged(Event, kind="weights changed", severity=Severity.ERROR):
    """Weights or moments of a stage's only node differ from its last update's."""

    node: str
    stage: Count
    step: Count  # of that update
    restored: bool  # from a correct copy; else the run continues with the changed state
    reason: str = ""  # its source

    def sentence(self, node: str | None) -> str:
        how = f": {self.reason}" if self.restored else ", and no node has a correct copy"
        return f"{changed_by_themselves(self.node, self.stage, self.step)}{how}"


class Finished(Event, kind="finished", severity=Severity.INFO):
    step: Count
    reason: str
    validation: Figure  # nats a token
    says = "all {step} steps are committed"


class Stopped(Event, kind="stopped", severity=Severity.ERROR):
    """The run can't continue."""

    step: Count
    reason: str
    validation: Figure  # nats a token
    says = "the run is stopped at step {step}: {reason}"


# --- losses and recoveries


class NodeLost(Event, kind="lost", severity=Severity.NOTICE):
    """The driver's link to a member broke."""

    node: str
    stage: Count
    reason: str
    says = "noticed: the link to {node} of stage {stage} is broken"


class Waiting(Event, kind="waiting", severity=Severity.NOTICE):
    """The run waits until each of these stages has a node."""

    stages: tuple[Count, ...]
    reason: str
    says = "no step begins: {reason}"


class Paused(Event, kind="paused", severity=Severity.ERROR):
    """No step begins until the trouble is over."""

    reason: str
    says = "the run pauses: {reason}"


class RebuildOrdered(Event, kind="rebuilding", severity=Severity.NOTICE):
    """The driver has ordered a node to restore its stage's state."""

    node: str
    stage: Count
    method: str
    sources: tuple[str, ...]  # nodes
    exact: bool  # weights and optimizer state as they were lost
    fallback: bool  # the policy's method is unavailable
    reason: str

    @property
    def severity(self) -> Severity:
        return Severity.WARNING if self.fallback else Severity.NOTICE

    def sentence(self, node: str | None) -> str:
        text = f"rebuilding stage {self.stage} by {self.method}"
        if self.sources:
            text += f" from {', '.join(self.sources)}"
        return f"fallback: {text}: {self.reason}" if self.fallback else text


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The source of a state, and the state's step."""

    node: str
    stage: Count
    step: Count | None = None


class Fetching(Event, kind="fetching", severity=Severity.DEBUG):
    """Progress of a state transfer."""

    stage: Count
    method: str
    sources: tuple[Origin, ...]
    bytes: Count
    seconds: Figure

    @property
    def so_far(self) -> str:
        rate = decimal(round(self.bytes / max(1e-3, self.seconds)))
        return f"{decimal(self.bytes)} in {self.seconds:.1f} s, {rate}/s"

    def sentence(self, node: str | None) -> str:
        sources = ", ".join(source.node for source in self.sources)
        return f"stage {self.stage} fetches from {sources}: {self.so_far}"


class RelearningRound(Event, kind="relearning", severity=Severity.DEBUG):
    stage: Count
    round: Count  # from 1
    residual: Figure  # relative

    def sentence(self, node: str | None) -> str:
        when = f"in round {self.round}" if self.round > 1 else "at first"
        return f"stage {self.stage} relearns, residual {self.residual:.3g} {when}"


@dataclass(frozen=True, kw_only=True)
class RelearningResult:
    """Result of relearning an estimate on boundary tensors."""

    residual_before: Figure
    residual_after: Figure
    passes: Count
    seconds: Figure
    bytes: Count
    pairs: Count
    left_out: Count
    undone: bool
    updates: Count = 0
    left: Count = 0  # updates in the background

    @classmethod
    def of(cls, relearned: pb.Relearned) -> RelearningResult:
        names = {figure.name for figure in dataclasses.fields(cls)} - {"bytes"}
        figures = {name: getattr(relearned, name) for name in names}
        return cls(**figures, bytes=relearned.fetched_bytes)

    def __str__(self) -> str:
        if math.isnan(self.residual_before):
            return "not relearned: no pair of boundary tensors was complete"
        after = "-" if math.isnan(self.residual_after) else f"{self.residual_after:.3g}"
        undone = ", undone because it is worse" if self.undone else ""
        return (
            f"relearned: residual {self.residual_before:.3g} -> {after} in "
            f"{counted(self.passes, 'pass')}, "
            f"{self.seconds:.1f} s{undone}{self.going_on}"
        )

    @property
    def going_on(self) -> str:
        return f"; {self.left} more updates in the background" if self.left else ""


class RelearnedBeside(Event, kind="relearned", severity=Severity.NOTICE):
    """A stage has ended its background relearning."""

    stage: Count
    step: Count  # the first trained without
    residual: Figure  # over its newest pairs
    updates: Count  # applied in the background
    left: Count  # remaining
    steps: Count  # meanwhile
    seconds: Figure  # of computing, in gaps between tasks
    reason: str  # why some remain; or empty

    def sentence(self, node: str | None) -> str:
        measured = not math.isnan(self.residual)
        residual = f", residual {self.residual:.3g}" if measured else ""
        ended = f"; {self.left} updates remain: {self.reason}" if self.left else ""
        return (
            f"stage {self.stage} has relearned in the background: {self.updates} updates during "
            f"{self.steps} steps, {self.seconds:.1f} s of computing{residual}{ended}"
        )


class StageRebuilt(Event, kind="rebuilt", severity=Severity.GOOD):
    """A node has its stage's state, and trains. For a running snapshot `oldest_step` and
    `mean_step` are the steps of its rows; `perturbation` is its distance from the weights at its
    last update. For a joiner's partial transfer only the first two are given."""

    stall_seconds: Figure  # without training, by the driver's count
    node: str
    stage: Count
    method: str
    step: Count
    sources: tuple[Origin, ...]
    bytes: Count
    fetch_seconds: Figure
    relearned: RelearningResult | None = None
    oldest_step: Count | None = None
    mean_step: MaybeFigure = None
    perturbation: MaybeFigure = None
    rebuild_seconds: Figure

    @property
    def is_own(self) -> bool:
        """Whether the node used its own state."""
        return self.method in OWN

    def sentence(self, node: str | None) -> str:
        return (
            f"rebuilt: stage {self.stage} by {self.method} at step {self.step}, "
            f"{decimal(self.bytes)} in {self.rebuild_seconds:.1f} s, "
            f"stalled {self.stall_seconds:.1f} s{self.quality}"
        )

    @property
    def quality(self) -> str:
        """Accuracy of the restored state, if known: the end of a sentence."""
        parts = []
        if self.method in ARRIVED:
            parts.append(f"as after step {self.oldest_step}")
        elif self.oldest_step is not None:
            parts.append(f"oldest block of step {self.oldest_step}")
        if self.perturbation is not None and not math.isnan(self.perturbation):
            parts.append(f"perturbation {self.perturbation:.3g}")
        if self.relearned is not None:
            parts.append(str(self.relearned))
        return "".join(f"; {part}" for part in parts)


class SnapshotPaced(Event, kind="snapshot paced", severity=Severity.NOTICE):
    """A link is too slow for a stage's running snapshot, or fast enough again."""

    stage: Count
    holder: str
    kept: bool
    age: Figure  # of its rows on average, in steps, at the pace of the last updates

    def sentence(self, node: str | None) -> str:
        rows = f"its rows would be {self.age:.0f} steps old on average"
        if self.kept:
            return f"{node} sends {self.holder} its snapshot of stage {self.stage} again: {rows}"
        return (
            f"{node} sends {self.holder} no snapshot of stage {self.stage}: the link is slow, so "
            f"{rows}, and a guess from other stages costs no more"
        )


class RebuildFailed(Event, kind="rebuild failed", severity=Severity.WARNING):
    node: str
    reason: str
    says = "a rebuild failed and is repeated: {reason}"


class RolledBack(Event, kind="rolled back", severity=Severity.WARNING):
    """All stages go back to a checkpoint, by the policy."""

    lost: Annotated[Count, Field(alias="from")] = field(metadata={"key": "from"})  # newest step
    step: Count
    reason: str
    says = "rolled back from step {lost} to {step}: {reason}"


class Resuming(Event, kind="resuming", severity=Severity.NOTICE):
    """All stages continue from files, or older states, since nothing newer was left."""

    step: Count
    exact: bool  # all states are of this step
    reason: str

    @property
    def severity(self) -> Severity:
        return Severity.NOTICE if self.exact else Severity.WARNING

    def sentence(self, node: str | None) -> str:
        return f"{'' if self.exact else 'fallback: '}resuming at step {self.step}: {self.reason}"


# --- files


class Saved(Event, kind="saved", severity=Severity.INFO):
    holding: str  # "save" or "checkpoint"
    step: Count
    says = "step {step} of {writer} is on disk ({holding})"


class WriteFailed(Event, kind="write failed", severity=Severity.ERROR):
    """A write to the node's files of the run failed: events or ledger."""

    reason: str
    says = "{writer}: {reason}"


class WrittenAgain(Event, kind="written again", severity=Severity.GOOD):
    path: str
    dropped: Count  # lines lost for lack of memory

    def sentence(self, node: str | None) -> str:
        lost = f"; {self.dropped} lines are lost" if self.dropped else ""
        return f"{node}: {self.path} can be written again{lost}"


class SaveFailed(Event, kind="save failed", severity=Severity.ERROR):
    holding: str = "save"  # or "checkpoint"
    reason: str
    says = "save failed at {writer}: {reason}"


# --- processes of a local swarm, as `planaria up` sees them


class Started(Event, kind="started", severity=Severity.INFO):
    slot: str  # STAGE.REPLICA, or "registry"
    pid: Count

    def sentence(self, node: str | None) -> str:
        name = "the registry" if self.slot == "registry" else f"node-{self.slot}"
        return f"{name} started as process {self.pid}"


class Killed(Event, kind="killed", severity=Severity.WARNING):
    """A process was killed on purpose, by `--kill`."""

    slot: str
    pid: Count
    step: Count  # current one
    node: str | None  # None: it had not joined yet
    stage: Count
    left: Count  # other processes of the stage

    @property
    def severity(self) -> Severity:
        return Severity.NOTICE if self.left else Severity.WARNING

    def sentence(self, node: str | None) -> str:
        return f"node-{self.slot} killed during step {self.step}; {_rest(self.stage, self.left)}"


class Exited(Event, kind="exited", severity=Severity.WARNING):
    """A process ended by itself; unless replacement is off, another one is started."""

    slot: str
    pid: Count
    node: str | None
    log: str  # its path
    stage: Count | None = None  # None: the registry
    left: Count | None = None  # other processes of the stage
    how: str

    @property
    def severity(self) -> Severity:
        return Severity.NOTICE if self.stage is None or self.left else Severity.WARNING

    def sentence(self, node: str | None) -> str:
        if self.stage is None:
            return f"the registry {self.how}; training continues, and a new one starts"
        return f"node-{self.slot} {self.how}; {_rest(self.stage, self.left or 0)}"


class SwarmEnding(Event, kind="ending", severity=Severity.INFO):
    """`planaria up` is about to end its processes: later exits are no losses."""

    says = "the swarm's processes are being stopped"


# --- parts of sentences


def changed_by_themselves(node: str, stage: int, step: int) -> str:
    subject = f"weights or moments of {node} of stage {stage}"
    return f"{subject} have changed by themselves after step {step}"


def counted(number: int, noun: str) -> str:
    """A number with a noun whose plural ends in -es, such as microbatch and pass."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}es"


def figure(loss: float) -> str:
    """A loss in nats a token, for people."""
    return f"{loss:.4f}" if math.isfinite(loss) else "-"


def shown(text: str, most: int = 200) -> str:
    """Untrusted text as one line for a terminal."""
    line = " ".join(text.split())
    return readable(line if len(line) <= most else f"{line[: most - 3]}...")


def _rest(stage: int, left: int) -> str:
    if not left:
        return f"stage {stage} is lost"
    return f"{left} node{'s' if left != 1 else ''} of stage {stage} left"


def is_for_all(event: Event) -> bool:
    """Whether the event concerns the run, not only the node: it is sent to the registry."""
    return event.severity >= Severity.NOTICE or isinstance(event, Committed | Sampled | Finished)


# --- as JSON


@dataclass(frozen=True)
class Entry:
    """A line of an event log."""

    time: float  # Unix seconds
    node: str | None  # the writer, or the node that the event is about
    event: Event

    @property
    def sentence(self) -> str:
        return self.event.sentence(self.node)


def event_line(event: Event, node: str, time: float) -> dict[str, Any]:
    """The event's line in the log of `node`; `time` in Unix seconds."""
    return {"time": time, "node": node, "kind": event.kind, **fields(event)}


def fields(event: Event) -> dict[str, Any]:
    """An event's fields, as JSON has them."""
    values = _plain(event)
    assert isinstance(values, dict)
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no NaN
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            attribute.metadata.get("key", attribute.name): _plain(getattr(value, attribute.name))
            for attribute in dataclasses.fields(value)
            if not (attribute.default is None and getattr(value, attribute.name) is None)
        }
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return value


def entries(lines: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """Entries of the lines of known kinds. Raises ValueError."""
    return [entry for line in lines if (entry := parse(line)) is not None]


def parse(line: Mapping[str, Any]) -> Entry | None:
    """Entry of a line; None: unknown kind. Raises ValueError for a missing or invalid field."""
    reader = _readers().get(str(line.get("kind")))
    if reader is None:
        return None
    time, node = _HEAD.validate_python((line.get("time"), line.get("node")))
    return Entry(time, node, reader.validate_python(line))


_HEAD: TypeAdapter[tuple[float, str | None]] = TypeAdapter(tuple[float, str | None])


@cache
def _readers() -> dict[str, TypeAdapter[Event]]:
    return {kind.kind: TypeAdapter(kind) for kind in Event.__subclasses__()}

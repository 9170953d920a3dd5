"""Relearning at the joiners: one alone, or those of neighbouring lost stages together.

Together they form a small pipeline of their own. The joiner of the lowest stage leads: it learns
which boundary tensors the others have, and orders rounds. A round measures the error over the pairs
of the newest step, trains on the next few pieces, or keeps or undoes the result. A piece is some
samples of a pair. All joiners process a round's pieces in the same order, so they can't deadlock.
One piece is in flight at a time: it updates every stage that it passes, and the next one needs the
updated weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from planaria.bootstrap.registry_pb2 import NUMBERS, Cause
from planaria.node.ports import Tensors
from planaria.node.report.events import RelearningResult
from planaria.node.state.boundary import BoundaryPair, FetchedTensors
from planaria.node.state.transfer import shorten
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import (
    OPEN_LIMIT,
    ComplaintError,
    ExchangeInbox,
    Exchanges,
    Hearing,
    Lost,
)
from planaria.node.wire.frame_format import Form, Frame, WireError, check_forms
from planaria.recovery.relearning import (
    decayed_rate,
    ratio,
    sample_parts,
    shuffled,
    updates_per_check,
)

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")
Direction = Literal["forward", "backward"]
Item: TypeAlias = pb.Relearn | Frame

TOGETHER: Final = 8
"""Pieces in a training round of several joiners: after each round they check the time."""
HELD: Final = 8
"""Messages and frames of one joiner that may wait here. In step, it sends two at a time."""
EARLY_LIMIT: Final = 16 << 20
"""Bytes of one joiner that may wait until this node begins: only its report comes that early."""


class PairSlice(NamedTuple):
    """A piece of a lesson: samples [first, end) of a pair of boundary tensors."""

    pair: BoundaryPair
    first: int
    end: int


class PairSliceResult(NamedTuple):
    """The result of a piece at the end of its run of stages."""

    gradient: list[Tensor]  # one tensor; empty when measuring
    norm: float  # the residual's denominator
    error: float | None  # squared, when measuring; else None


class Lesson(Protocol):
    """The arithmetic of one stage that relearns, on a copy of its weights. All of it runs in the
    compute thread; tensors are float32 [samples, tokens, dim]. The run's input may be passed along,
    as a second tensor."""

    def start(self, piece: PairSlice, with_start: bool) -> list[Tensor]:
        """A piece's input to its run of lost stages."""

    def pass_on(self, inputs: list[Tensor], lr: float | None) -> list[Tensor]:
        """Forward pass; with a learning rate, call `pass_back` next."""

    def pass_back(self, gradient: Tensor) -> Tensor:
        """Update by the gradient at the output; returns that at the input."""

    def end(
        self, piece: PairSlice, inputs: list[Tensor], norm: float | None, lr: float | None
    ) -> PairSliceResult:
        """Forward pass and comparison with the run's output; with a learning rate, an update.
        `norm`: the denominator, unless the run's input is in `inputs`."""

    def finish(self, undo: bool) -> None:
        """Make the learned weights the stage's; with `undo` those stay as they are, and Adam is
        fresh."""

    def is_finite(self) -> bool:
        """Whether the learned weights are finite."""

    def changed(self) -> Tensor:
        """The learned change, float32 [n], against the stage's weights as they are now. Call
        `renew` next."""

    def renew(self) -> None:
        """Continue learning from the stage's weights as they are now."""


@dataclass(frozen=True)
class RelearningTerms:
    """How long a block relearns, and how."""

    samples: int  # trained on at a time, at most
    passes: int  # over all pairs, at most
    seconds: float  # at most, with the measuring before and after; 0: no training
    lr: float  # initial learning rate
    patience: float  # seconds to wait for another joiner
    enough: float = 0.0  # residual error at which a lone joiner may train; 0: none
    each_step: int = 0  # updates in each step that it then trains; 0: no limit
    within: int = 1  # number of such steps after which it has learned enough


class RelearningCourse:
    """Which piece of the boundary tensors each relearning update takes, and its learning rate."""

    def __init__(self, pairs: Sequence[BoundaryPair], samples: int, terms: RelearningTerms) -> None:
        """`samples`: of each pair."""
        self.terms = terms
        self.pieces = [
            PairSlice(pair, part.start, part.stop)
            for pair in pairs
            for part in sample_parts(samples, terms.samples)
        ]
        newest = max((pair.step for pair in pairs), default=0)
        self.newest = [PairSlice(pair, 0, samples) for pair in pairs if pair.step == newest]
        self.updates = terms.passes * len(self.pieces)
        self._order: tuple[int, list[int]] = (-1, [])  # a pass and its order

    def pass_and_place(self, update: int) -> tuple[int, int]:
        """The pass of an update, and its place there."""
        return divmod(update, len(self.pieces))

    def piece(self, update: int) -> PairSlice:
        pass_number, place = self.pass_and_place(update)
        if self._order[0] != pass_number:
            self._order = pass_number, shuffled(len(self.pieces), pass_number)
        return self.pieces[self._order[1][place]]

    def rate(self, update: int, time_gone: float = 0.0) -> float:
        return decayed_rate(self.terms.lr, update / self.updates, time_gone)


@dataclass(frozen=True)
class RelearningBlock:
    """The nodes that relearn together: one for each stage, this node among them."""

    ballot: Ballot
    stage: int  # this node's
    joiners: Mapping[int, str]  # by stage

    @property
    def leader(self) -> int:
        """The stage that leads the block: the first."""
        return min(self.joiners)

    @property
    def others(self) -> dict[int, str]:
        return {stage: node for stage, node in self.joiners.items() if stage != self.stage}


class Relearning(Hearing):
    """A node's side of relearning, for one block at a time. `measured` gets the round and the
    residual error of each measurement of a block that this node leads."""

    def __init__(
        self,
        exchanges: Exchanges,
        tensors: Tensors,
        send: Callable[[str, pb.Message | Frame], bool],
        measured: Callable[[int, float], None] = lambda round, residual: None,
        limit: int = OPEN_LIMIT,
    ) -> None:
        """`limit`: bytes of one peer that may wait."""
        self.exchanges, self.tensors, self.send = exchanges, tensors, send
        self.measured = measured
        super().__init__(exchanges, EARLY_LIMIT, limit)

    async def run(
        self,
        block: RelearningBlock,
        lesson: Lesson,
        fetched: FetchedTensors,
        terms: RelearningTerms,
    ) -> pb.Relearned:
        """Train the stage of `lesson` on what was fetched.

        Moments stay as they are. When the error over the newest step's pairs is not finite
        or has grown, the former weights are restored, with a fresh Adam, and `undone` is set. The
        residuals are those of the whole block: the same at every joiner, like all of the result but
        `seconds` and `fetched_bytes`.

        Raises ComplaintError when another joiner is lost, late or wrong. Then, and when this is
        cancelled, the weights are void, and nothing runs on but the current work of the compute
        thread.
        """
        started = self.exchanges.now
        with self._inboxes.open(block.ballot) as inbox:
            joiner = _Joiner(self, block, lesson, fetched, terms, _Mailbox(self.exchanges, inbox))
            try:
                leads = block.leader == block.stage
                result = await (joiner.lead() if leads else joiner.follow())
                await joiner.compute(partial(lesson.finish, result.undone))
            finally:
                joiner.over = True
                self._inboxes.forget(Ballot(block.ballot.view, block.ballot.attempt + 1))
        result.seconds = self.exchanges.now - started
        result.fetched_bytes = fetched.bytes
        log.info("stage %d %s", block.stage, RelearningResult.of(result))
        return result

    def on_message(self, peer: str, message: pb.Message) -> None:
        """Handle a Relearn. It waits until this node begins; an older one has no effect."""
        relearn = message.relearn
        self._inboxes.put(Ballot.of(message.ballot), peer, relearn, relearn.ByteSize())


def whole_pairs(
    reports: Mapping[int, Sequence[pb.BoundaryPair]],
) -> tuple[list[BoundaryPair], int]:
    """The pairs to train on, in order, by the report of each stage's joiner, and the number of
    pairs with one side only."""
    inputs, outputs = set(), set()
    for stage, report in reports.items():
        for pair_report in report:
            pair = _parse_pair(pair_report)
            if not pair.stages or not reports.keys() >= set(pair.stages):
                continue
            if pair_report.input and stage == pair.stages[0]:
                inputs.add(pair)
            if pair_report.output and stage == pair.stages[-1]:
                outputs.add(pair)
    return sorted(inputs & outputs), len(inputs ^ outputs)


def _parse_pair(report: pb.BoundaryPair) -> BoundaryPair:
    return BoundaryPair(report.step, report.microbatch, tuple(report.stages))


def _pair_report(pair: BoundaryPair, **sides: bool) -> pb.BoundaryPair:
    return pb.BoundaryPair(step=pair.step, microbatch=pair.microbatch, stages=pair.stages, **sides)


class _Joiner:
    """One node's part in the relearning of a block."""

    def __init__(
        self,
        node: Relearning,
        block: RelearningBlock,
        lesson: Lesson,
        fetched: FetchedTensors,
        terms: RelearningTerms,
        mailbox: _Mailbox,
    ) -> None:
        self.node, self.block, self.lesson = node, block, lesson
        self.fetched, self.terms, self.mailbox = fetched, terms, mailbox
        self.over = False
        self.round = 0
        self.course = RelearningCourse([], 0, terms)
        self.updates = 0
        # Of pieces that end here: the residual's denominator, and the error when last measured.
        self.norms: dict[PairSlice, float] = {}
        self.errors: dict[PairSlice, float] = {}

    # --- leading and following

    async def lead(self) -> pb.Relearned:
        exchanges = self.node.exchanges
        reports: dict[int, Sequence[pb.BoundaryPair]] = {self.block.stage: self._report()}
        for stage, node in self.block.others.items():
            reports[stage] = (await self._hear(node, 0)).pairs
        pairs, left_out = whole_pairs(reports)
        result = pb.Relearned(
            residual_before=math.nan, residual_after=math.nan, pairs=len(pairs), left_out=left_out
        )
        if pairs:
            reported = list(map(_pair_report, pairs))
            started = exchanges.now
            before = await self._measure(pb.Relearn(work=pb.Relearn.MEASURE, pairs=reported))
            begin = exchanges.now
            # Measuring afterwards takes as long again.
            end = started + self.terms.seconds - (begin - started)
            if self.terms.enough:
                after = await self._train_until_enough(before, end)
            else:
                await self._train(self.course.updates, end, begin)
                after = await self._measure(pb.Relearn(work=pb.Relearn.MEASURE))
            result.residual_before, result.residual_after = before, after
            result.undone = not (math.isfinite(after) and after <= before)
            result.updates = self.updates
            result.passes, _ = self.course.pass_and_place(self.updates)
            if self.terms.enough and not result.undone:
                result.left = self.course.updates - self.updates
        work = pb.Relearn.UNDO if result.undone else pb.Relearn.KEEP
        self._order(pb.Relearn(work=work, result=result))
        return result

    async def _train(self, target: int, end: float, begin: float | None = None) -> None:
        """Train until `target` updates are made, or the time is over. The rate falls with the time
        since `begin`, if given."""
        per_round = TOGETHER if self.block.others else 1
        while self.updates < target and (now := self.node.exchanges.now) < end:
            order = pb.Relearn(
                work=pb.Relearn.TRAIN,
                first=self.updates,
                count=min(per_round, target - self.updates),
                time_gone=0.0 if begin is None else (now - begin) / (end - begin),
            )
            await self._round(order)

    async def _train_until_enough(self, residual: float, end: float) -> float:
        """Train while other stages wait for it. The rest is learned later, so the rate doesn't fall
        with the time. Returns the residual error."""
        most, between = self.course.updates, updates_per_check(len(self.course.pieces))
        exchanges = self.node.exchanges
        while residual > self.terms.enough and self.updates < most and exchanges.now < end:
            await self._train(min(most, self.updates + between), end)
            residual = await self._measure(pb.Relearn(work=pb.Relearn.MEASURE))
        return residual

    async def _measure(self, order: pb.Relearn) -> float:
        answers = await self._round(order)
        residual = ratio(
            math.fsum(answer.squared_error for answer in answers),
            math.fsum(answer.squared_norm for answer in answers),
        )
        self.node.measured(self.round, residual)
        return residual

    async def _round(self, order: pb.Relearn) -> list[pb.Relearn]:
        """All joiners' answers, once all have finished the round: none may run ahead."""
        self._order(order)
        await self._obey(order)
        others = [await self._hear(node, self.round) for node in self.block.others.values()]
        return [self._answer(), *others]

    def _order(self, order: pb.Relearn) -> None:
        self.round += 1
        order.round = self.round
        for node in self.block.others.values():
            self._tell(node, order)

    async def follow(self) -> pb.Relearned:
        leader = self.block.joiners[self.block.leader]
        self._tell(leader, pb.Relearn(work=pb.Relearn.ANSWER, pairs=self._report()))
        for self.round in count(1):
            order = await self._hear(leader, self.round)
            if order.work in (pb.Relearn.KEEP, pb.Relearn.UNDO):
                return order.result
            await self._obey(order)
            self._tell(leader, self._answer())
        raise AssertionError("rounds end with the leader's last")

    async def _obey(self, order: pb.Relearn) -> None:
        if order.pairs:
            self._take_pairs([_parse_pair(report) for report in order.pairs])
        if order.work == pb.Relearn.TRAIN:
            await self._update(order)
            return
        for place, piece in enumerate(self.course.newest):
            # The first measurement passes the run's input along: the end needs it for the norm.
            await self._visit(piece, place, None, with_start=self.round == 1)

    async def _update(self, order: pb.Relearn) -> None:
        course = self.course
        if order.first != self.updates or order.count > course.updates - self.updates:
            leader = self.block.joiners[self.block.leader]
            updates = f"{order.count} updates after {order.first}"
            reason = (
                f"{leader} requested {updates}, but {self.updates} of {course.updates} are made"
            )
            raise ComplaintError(reason, [leader], NUMBERS)
        for _ in range(order.count):
            pass_number, place = course.pass_and_place(self.updates)
            lr = course.rate(self.updates, order.time_gone)
            # The first pass, too, passes the run's input along: not all of it has been measured.
            await self._visit(course.piece(self.updates), place, lr, with_start=pass_number == 0)
            self.updates += 1

    def _report(self) -> list[pb.BoundaryPair]:
        inputs, outputs = self.fetched.inputs, self.fetched.outputs
        return [
            _pair_report(pair, input=pair in inputs, output=pair in outputs)
            for pair in sorted(inputs.keys() | outputs.keys())
        ]

    def _answer(self) -> pb.Relearn:
        return pb.Relearn(
            round=self.round,
            work=pb.Relearn.ANSWER,
            squared_error=math.fsum(self.errors.values()),
            squared_norm=math.fsum(self.norms[piece] for piece in self.errors),
        )

    def _take_pairs(self, pairs: Sequence[BoundaryPair]) -> None:
        """Set the boundary pairs that the leader wants measured and trained on."""
        for pair in pairs:
            first_and_last = pair.stages[:1], pair.stages[-1:]
            this_stage = (self.block.stage,)
            if (
                not pair.stages
                or not self.block.joiners.keys() >= set(pair.stages)
                or (first_and_last[0] == this_stage and pair not in self.fetched.inputs)
                or (first_and_last[1] == this_stage and pair not in self.fetched.outputs)
            ):
                leader = self.block.joiners[self.block.leader]
                shown = shorten(str(pair))
                reason = f"{leader} requested training on {shown}, which is not possible"
                raise ComplaintError(reason, [leader], NUMBERS)
        self.course = RelearningCourse(pairs, self.fetched.shape[0], self.terms)

    # --- one piece

    async def _visit(
        self, piece: PairSlice, place: int, lr: float | None, with_start: bool
    ) -> None:
        """Pass a piece forward to the end of its run of stages, and back: gradients, or nothing
        when measuring, without a learning rate. `with_start`: the run's input is passed along."""
        stages, lesson = piece.pair.stages, self.lesson
        if self.block.stage not in stages:
            return
        train = lr is not None
        index = stages.index(self.block.stage)
        stage_before = stages[index - 1] if index > 0 else None
        stage_after = stages[index + 1] if index + 1 < len(stages) else None
        shape = (piece.end - piece.first, *self.fetched.shape[1:])
        if stage_before is None:
            inputs = await self.compute(partial(lesson.start, piece, with_start))
        else:
            inputs = await self._receive(stage_before, place, "forward", [shape] * (1 + with_start))
        if stage_after is None:
            result = await self.compute(
                partial(lesson.end, piece, inputs, self.norms.get(piece), lr)
            )
            self.norms[piece], gradient = result.norm, result.gradient
            if result.error is not None:
                self.errors[piece] = result.error
        else:
            outputs = await self.compute(partial(lesson.pass_on, inputs, lr))
            await self._send(stage_after, place, "forward", outputs)
            gradient = await self._receive(stage_after, place, "backward", [shape] * train)
            if train:
                gradient = [await self.compute(partial(lesson.pass_back, *gradient))]
        if stage_before is not None:
            await self._send(stage_before, place, "backward", gradient)

    # --- the compute thread and the other joiners

    async def compute(self, work: Callable[[], T]) -> T:
        def relearn() -> T:
            if self.over:
                raise ComplaintError("this relearning is over")
            return work()

        return await self.node.exchanges.compute(relearn)

    def _tell(self, node: str, relearn: pb.Relearn) -> None:
        if not self.node.send(
            node, pb.Message(ballot=self.block.ballot.message(), relearn=relearn)
        ):
            raise ComplaintError(f"there is no link to {node} for relearning", [node])

    async def _hear(self, node: str, number: int) -> pb.Relearn:
        expected = f"its message in round {number} of relearning"
        answer = await self.mailbox.take(node, number, expected, self.terms.patience)
        assert isinstance(answer, pb.Relearn)
        return answer

    async def _send(
        self, stage: int, place: int, direction: Direction, tensors: list[Tensor]
    ) -> None:
        node = self.block.joiners[stage]
        fields = {"round": self.round, "piece": place, "way": direction}
        descriptors, payload = await self.compute(lambda: self.node.tensors.encode(tensors, "none"))
        frame = Frame("relearn", self.block.ballot, fields, descriptors, payload)
        if not self.node.send(node, frame):
            raise ComplaintError(f"there is no link to {node} for relearning", [node])

    async def _receive(
        self, stage: int, place: int, direction: Direction, shapes: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        node = self.block.joiners[stage]
        expected = f"piece {place} passed {direction} in round {self.round} of relearning"
        frame = await self.mailbox.take(
            node, (self.round, place, direction), expected, self.terms.patience
        )
        assert isinstance(frame, Frame)
        try:
            check_forms(frame.descriptors, [Form("float32", shape) for shape in shapes])
            return await self.compute(
                lambda: self.node.tensors.decode(frame.descriptors, frame.payload)
            )
        except WireError as error:
            reason = f"{node} sent a bad {expected}: {error}"
            raise ComplaintError(reason, [node], error.cause) from error


class _Mailbox:
    """Messages and frames of the other joiners, until they are taken."""

    def __init__(self, exchanges: Exchanges, inbox: ExchangeInbox[Item]) -> None:
        self._exchanges, self._inbox = exchanges, inbox
        self._items: dict[tuple[str, object], Item] = {}
        self._lost: dict[str, Lost] = {}  # by node: why nothing more comes from it

    async def take(self, peer: str, key: object, expected: str, patience: float) -> Item:
        """Waits for another joiner's message or frame. Raises ComplaintError that names it."""
        until = self._exchanges.now + patience
        while (peer, key) not in self._items:
            if peer in self._lost:
                lost = self._lost[peer]
                reason = f"{peer} did not send {expected}: {lost.reason}"
                raise ComplaintError(reason, [peer], lost.cause)
            try:
                self._put(*await self._inbox.take(until))
            except TimeoutError:
                reason = f"waited {patience:g} s for {peer} to send {expected}"
                raise ComplaintError(reason, [peer]) from None
        return self._items.pop((peer, key))

    def _put(self, peer: str, item: Item | Lost) -> None:
        match item:
            case Lost(reason, cause):
                self._lose(peer, f"lost: {reason}", cause)
            case pb.Relearn():
                self._hold(peer, item.round, item)
            case Frame(fields={"round": int(number), "piece": int(place), "way": str(direction)}):
                self._hold(peer, (number, place, direction), item)
            case Frame(fields=fields):
                names = shorten(str(sorted(fields)))
                self._lose(peer, f"it sent a frame with the fields {names}", NUMBERS)

    def _hold(self, peer: str, key: object, item: Item) -> None:
        if sum(sender == peer for sender, _ in self._items) >= HELD:
            self._lose(peer, f"it sent more than {HELD} unrequested messages", NUMBERS)
        else:
            self._items[peer, key] = item

    def _lose(self, peer: str, reason: str, cause: Cause) -> None:
        self._lost.setdefault(peer, Lost(reason, cause))

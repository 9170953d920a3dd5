"""One seat at a stage: what a node does there, without loop, clock, socket, thread or tensor.

Its peers are other seats, on any node; in the step transaction a seat is called a node. An agent
owns the state machines of the transaction (`MemberSide`, `Driver`) and the current attempt. It also
owns what it keeps for others, and the exchanges that average, fetch and relearn. Events come in,
each with its time; requests go out through ports (node/ports.py). The daemon implements these with
asyncio, gRPC and torch, tests/simulation in a virtual world. A node has no other description.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.registry_pb2 import NUMBERS, SHAPE, SILENT, Cause
from planaria.node.driver.driver import Driver
from planaria.node.driver.phases import DriverPhase
from planaria.node.model import learning_rate
from planaria.node.model.shape import VALUE, ModelConfig
from planaria.node.ports import Learned, Ports
from planaria.node.report.events import Applied, Event, HoldingCost, RelearningRound
from planaria.node.run_file import AUDITED, RunFile
from planaria.node.state.background_relearning import GapRelearning
from planaria.node.state.boundary import BoundaryClient, BoundaryServer
from planaria.node.state.feeding import FEWEST, UNSENT, GradientFeed
from planaria.node.state.observing import ObserverService
from planaria.node.state.own_saves import OwnSaves
from planaria.node.state.rebuild import Rebuilding
from planaria.node.state.reducing import Reducing, make_averaging
from planaria.node.state.relearn import Relearning
from planaria.node.state.serving import StateService
from planaria.node.state.stage_state import StageState, StateId
from planaria.node.state.transfer import StateClient
from planaria.node.transaction.attempt import Attempt, Workplace
from planaria.node.transaction.bounds import LONGEST_WORDS
from planaria.node.transaction.commits import entering
from planaria.node.transaction.effects import (
    Adopt,
    AllHome,
    Apply,
    AuditSum,
    Ballot,
    DropAttempt,
    Effect,
    Fetch,
    GoOn,
    Halted,
    Note,
    Rejoin,
    Send,
    StartAttempt,
    Suspect,
)
from planaria.node.transaction.in_flight_window import InFlightWindow
from planaria.node.transaction.member import FrameUse, MemberPhase, MemberSide
from planaria.node.transaction.plan_encoding import active
from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.budget import HeldFrames
from planaria.node.wire.exchange import ComplaintError, Exchange
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.link_speed import LARGEST
from planaria.node.wire.outbox import NodeOutbox

if TYPE_CHECKING:
    from planaria.node.state.holdings import Holdings

log = logging.getLogger("planaria")

SLACK = 16 << 20
"""Bytes for heads and other small items."""
TO_DRIVER = frozenset(
    ["status", "synced", "scored", "home", "ready", "failed", "cut", "account", "stale", "compared"]
)
TO_MEMBER = frozenset(["query", "sync", "step", "records", "reduce", "halt"])
OF_AN_ATTEMPT = frozenset(["activation", "gradient", "average", "twin"])
"""Kinds of frames without which the attempt fails."""


class Agent:
    """One seat at a stage, from when the stage is built. Its events are called on one thread."""

    def __init__(
        self,
        node: str,
        stage: int,
        run: RunFile,
        config: ModelConfig,
        ports: Ports,
        make_holdings: Callable[[Agent], Holdings],
    ) -> None:
        """Called in the compute thread, after `ports.arithmetic` was made there."""
        self.node, self.stage, self.run, self.config = node, stage, run, config
        self.net, self.exchanges, self.record = ports.net, ports.exchanges, ports.record
        self.arithmetic, self.tensors = ports.arithmetic, ports.tensors
        self.ports, self.chance = ports, ports.chance
        self.peers: dict[str, int] = {}  # all members, and their stages
        self.outbox = NodeOutbox(ports.net, self._undelivered, held_bytes(run, config))
        self.crossing = crossing_bytes(run, config)
        self.passing = 4 * run.training.microbatch * config.context * config.crossing
        """Maximum bytes of a microbatch at a boundary."""
        self.held = HeldFrames(self.crossing)  # of a coming attempt
        self.attempt: Attempt | None = None
        self.reducing = Reducing(self)
        self.fetching: Exchange[None] | None = None
        self.based_on = (0, pb.Commit())  # step of the attempt's weights, newest commit in them
        self.learned = Learned(self.arithmetic.digest(), omega=0.0, optimizer_step=0)
        self.finished = False  # whether the run has finished, for good
        self.tokens_per_second = 0.0
        self.damaged = False  # whether the weights beside a hanging thread are damaged
        self.driver = self._new_driver()
        self.driver.identity = ports.identity
        self.member = self._new_member()
        self.member.digest = self.learned.digest
        self.member.weightless = self.arithmetic.weightless
        self.member.origin = self.arithmetic.origin
        self.own_saves = OwnSaves(self)
        self.gaps = GapRelearning(self.member, self.exchanges, self.record.tell)
        self.observers = ObserverService(self)
        self.holdings = make_holdings(self)
        self.member.recording = self.record.recording
        self.workplace = Workplace(
            node=node,
            masking=run.recovery.masking == "reassign",
            filling=InFlightWindow(run.training.in_flight, config.stages),
            work=self.arithmetic.work,
            compute=ports.compute,
            host=self,
            boundary=self.holdings.boundary,
            redundant=self.holdings.twin is not None,
        )
        self._make_exchanges()
        self._make_handlers()

    def _new_driver(self) -> Driver:
        return Driver(self.node, transaction_rules(self.run, self.config), self.chance)

    def _new_member(self) -> MemberSide:
        return MemberSide(self.node, self.stage)

    def _make_exchanges(self) -> None:
        """Makes the exchanges with peers: of gradients, states and boundary tensors."""

        def relearned(round: int, residual: float) -> None:
            self.record.tell(RelearningRound(stage=self.stage, round=round, residual=residual))

        exchanges, tensors, send = self.exchanges, self.tensors, self.send
        self.averaging, self.auditor = make_averaging(self, SLACK)
        self.feed = GradientFeed(self)
        self.serving = StateService(self)
        self.member.holdings = self.serving.listed
        self.states = StateClient(exchanges, tensors, send, self.accuse, linked=self.net.linked)
        parse, crossing = self.arithmetic.boundary_tensor, self.crossing
        self.crossings = BoundaryClient(exchanges, send, parse, self.accuse, crossing)
        self.relearning = Relearning(exchanges, tensors, send, relearned, crossing)
        self.rebuilding = Rebuilding(self)

    def _make_handlers(self) -> None:
        """Makes the tables of handlers, by a message's body and by a frame's kind."""

        def to_driver(peer: str, message: pb.Message) -> None:
            self.carry_out(self.driver.received(peer, message, self.exchanges.now))

        def to_member(peer: str, message: pb.Message) -> None:
            self.carry_out(self.member.received(peer, message))

        self.on_body: dict[str | None, Callable[[str, pb.Message], None]] = {
            **dict.fromkeys(TO_DRIVER, to_driver),
            **dict.fromkeys(TO_MEMBER, to_member),
            "inquiry": self._answer_inquiry,
            "check": self._check,
            "state_request": self.serving.on_message,
            "shard_request": self.serving.on_message,
            "pin_request": self.observers.pin,
            "state_manifest": self.states.on_message,
            "shard_refusal": self.states.on_message,
            "kept": self.holdings.on_message,
            "boundary_manifest": self.crossings.on_message,
            "relearn": self.relearning.on_message,
        }
        if (keeper := self.holdings.boundary) is not None:
            server = BoundaryServer(keeper, self.tensors, self.send)
            self.on_body["boundary_request"] = server.on_message
        self.on_kind: dict[str, Callable[[str, Frame], None]] = {
            "state": self.states.on_frame,
            "average": self.averaging.on_frame,
            "audit": self.auditor.on_frame,
            "boundary": self.crossings.on_frame,
            "relearn": self.relearning.on_frame,
            "follow": self.feed.on_frame,
            "twin": self.holdings.on_frame,
            "copy": self.holdings.on_frame,
        }

    # --- events

    def viewed(self, view: registry.View, now: float) -> None:
        """The registry has issued `view`, with this node at this stage."""
        self.peers = active(view)
        self.carry_out(self.member.viewed(view))
        self.carry_out(self.driver.viewed(view, now))

    def on_message(self, peer: str, message: pb.Message) -> None:
        if (handle := self.on_body.get(message.WhichOneof("body"))) is not None:
            handle(peer, message)

    def on_frame(self, peer: str, frame: Frame) -> None:
        self.on_kind.get(frame.kind, self._take)(peer, frame)

    def on_link_up(self, peer: str, now: float) -> None:
        self.carry_out(self.driver.link_up(peer, now))
        self.outbox.linked(peer)

    def on_link_lost(
        self,
        peer: str,
        reason: str,
        undelivered: Sequence[Frame],
        now: float,
        cause: Cause = SILENT,
    ) -> None:
        """`cause`: for any but SILENT, that of what the peer has sent."""
        exchanges = self.averaging, self.auditor, self.states, self.crossings, self.relearning
        for exchange in exchanges:
            exchange.on_peer_lost(peer, reason)
        if peer not in self.peers:
            return
        self.holdings.on_peer_lost(peer, reason)
        if cause != SILENT:
            self.cut_off(self.member.attempt, peer, reason, cause)
        for frame in undelivered:
            # A ready member can't fail the attempt any more, so lost frames are sent again.
            if frame.kind == "twin" and frame.ballot == self.member.attempt:
                self.send(peer, frame)
        # Those of older attempts may be among them.
        if lost := [f.ballot for f in undelivered if f.kind in ("activation", "gradient")]:
            why = f"the link to {peer} broke before a frame was delivered: {reason}"
            self.cut_off(Ballot(*max(lost)), peer, why)
        self.carry_out(self.member.link_lost(peer))
        self.carry_out(self.driver.link_lost(peer, reason, now))

    def compute_hangs(self, why: str) -> None:
        """The node's compute thread hangs, for the reason `why`; empty: it goes on."""
        self.member.hang, self.damaged = why, False
        if why and self.is_readable():  # nothing changes the weights now: their digest must match
            self.damaged = self.arithmetic.digest() != self.member.digest
        if self.member.driver:
            self.account()

    def account(self, given_up: Sequence[int] = ()) -> None:
        """Reports this node's progress in the attempt to the driver."""
        account = pb.Account(
            computed=self.workplace.compute.computed,
            computing=self.workplace.compute.computing,
            done=self.attempt.passes_done() if self.attempt is not None else (),
            given_up=given_up,
            hang=self.member.hang[:LONGEST_WORDS],
            fetched=self.rebuilding.fetched,
        )
        self.tell_driver(self.member.promised, account=account)

    def _answer_inquiry(self, peer: str, message: pb.Message) -> None:
        ballot = Ballot.of(message.ballot)
        if not self.member.obeys(peer, ballot) or ballot != self.member.promised:
            return
        if why := message.inquiry.replace:
            leave = self.record.request_heir if self.is_readable() else self.leave_unread
            leave(why)
        if message.inquiry.relieve and self.attempt is not None:
            self.attempt.give_up(self.account)
        self.account()

    def _check(self, peer: str, message: pb.Message) -> None:
        """Computes, as a third node, a visit of which two nodes' results differ."""
        ballot = Ballot.of(message.ballot)
        if self.member.obeys(peer, ballot) and self.attempt and self.attempt.ballot == ballot:
            self.attempt.check(message.check)

    def tick(self, now: float) -> None:
        self.carry_out(self.driver.tick(now))
        self.observers.pins.expire(now)
        self.serving.tick(now)
        self.outbox.tick(now)
        self.own_saves.tick(now)

    # --- sending

    def send(self, peer: str, item: pb.Message | Frame) -> bool:
        """Sends an item to a peer's seat once its link is up. False: there will be none."""
        return self.outbox.send(peer, item, peer in self.peers, self.exchanges.now)

    def _undelivered(self, peer: str, item: pb.Message | Frame, reason: str) -> None:
        if isinstance(item, Frame) and item.kind in OF_AN_ATTEMPT:
            self.cut_off(Ballot(*item.ballot), peer, reason)

    # --- the attempt's reports

    def tell_driver(self, ballot: Ballot, **body: Any) -> None:
        self.carry_out([ballot.send(self.member.driver, **body)])

    def cut_off(self, ballot: Ballot, node: str, reason: str, cause: Cause = SILENT) -> None:
        self.carry_out(self.member.cut_off(ballot, node, reason, cause))

    def attempt_failed(
        self, ballot: Ballot, reason: str, accused: Sequence[str], cause: Cause = SILENT
    ) -> None:
        self.carry_out(self.member.failed(ballot, reason, accused, cause))

    def accuse(self, node: str, reason: str, cause: Cause) -> None:
        """Accuses a node for an invalid message that belongs to no attempt."""
        self.carry_out(self.member.accuse(node, reason, cause))

    def crashed(self, error: BaseException) -> None:
        self.exchanges.crashed(error)

    # --- effects

    def carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self._carry_out_one(effect)

    def _carry_out_one(self, effect: Effect) -> None:
        match effect:
            case Send(to, message) if to == self.node:
                self.exchanges.call_soon(lambda: self.on_message(to, message))
            case Send(to, message):
                self.send(to, message)
            case StartAttempt(ballot, begin):
                self.based_on = self.member.committed, self.member.last
                self._forget(ballot)
                self.holdings.attempt_begins(ballot, begin)
                self.gaps.attempt_begins(begin)
                self._follow_plan(self._begin_attempt, ballot, begin)
            case GoOn(ballot, begin) if self.attempt is not None:
                self._forget(ballot)
                self.holdings.choose_holders(begin)
                self.gaps.attempt_begins(begin)
                self._follow_plan(self.attempt.go_on, ballot, begin)
            case DropAttempt(ballot):
                self._forget(ballot.next())
                self.holdings.dropped()
                if self.attempt is not None:
                    self.attempt.drop()
                    self.attempt = None
            case AllHome(ballot) if self.attempt is not None:
                self.attempt.hurry(self.exchanges.now + self.run.swarm.progress)
                self.reducing.hurry(ballot)
            case Apply(commit):
                # Posts at once: later work must find it ahead of itself in the thread.
                self.exchanges.start(self._apply(commit))
                self.exchanges.start(self.reducing.answer_audit(commit))
            case AuditSum():
                self.exchanges.start(self.reducing.audit(effect))
            case Note(commit):
                self.record.committed(commit)
            case Adopt(ballot):
                self.exchanges.start(self.feed.adopt(ballot))
            case Fetch(ballot, sync):
                self.feed.gradients.forget(ballot)
                self.gaps.end("the stage gets another state")
                if self.attempt is not None:  # the last one, of another state
                    self.attempt.end()
                    self.attempt = None
                if self.fetching is not None:
                    self.fetching.cancel()
                self.fetching = self.exchanges.start(self._fetch(ballot, sync))
            case Suspect(node, why, cause):
                self.record.suspect(node, why, cause)
            case Rejoin(reason):
                self.record.rejoin(reason)
            case Halted(halt):
                self.own_saves.save_last()
                if halt.finished:
                    self.driver.run_finished(halt)
                if not (halt.finished and self.finished):  # reported before
                    self.record.halted(halt)
                self.finished = self.finished or halt.finished
            case Event():
                self.record.tell(effect)

    def _begin_attempt(self, ballot: Ballot, begin: pb.Begin) -> None:
        """Replaces the attempt by the one of `begin`. Raises ValueError for an invalid plan."""
        if self.attempt is not None:
            self.attempt.end()
        self.attempt = None
        self.attempt = Attempt(self.workplace, ballot, begin)
        self.attempt.start()

    def _follow_plan(
        self, follow: Callable[[Ballot, pb.Begin], None], ballot: Ballot, begin: pb.Begin
    ) -> None:
        try:
            follow(ballot, begin)
        except ValueError as error:
            self.attempt_failed(ballot, str(error), [])
            return
        if begin.kind == pb.Begin.TRAIN and self.attempt is not None:
            self.reducing.start(ballot, self.attempt)
        for peer, frame in self.held.take():
            self._take(peer, frame)

    def _take(self, peer: str, frame: Frame) -> None:
        """Gives a microbatch's frame to the attempt, or keeps it for a coming one."""
        match self.member.frames(Ballot(*frame.ballot)):
            case FrameUse.TAKE if frame.size > self.passing:
                why = f"{peer} sent a microbatch of {frame.size} bytes, not {self.passing} at most"
                self.cut_off(Ballot(*frame.ballot), peer, why, SHAPE)
            case FrameUse.TAKE if self.attempt is not None:
                self.attempt.take(peer, frame)
            case FrameUse.HOLD:
                for node, why in self.held.hold(peer, frame).items():
                    self._refuse(node, why)

    def _refuse(self, peer: str, why: str) -> None:
        """Has a peer removed that floods this node with frames."""
        if self.member.phase.may_vote:
            self.cut_off(self.member.attempt, peer, why, NUMBERS)
        else:
            self.record.suspect(peer, why, NUMBERS)

    def _forget(self, before: Ballot) -> None:
        """Drops sums and twins' gradients of attempts older than `before`."""
        self.reducing.forget(before)
        self.holdings.forget(before)

    # --- commits and state

    async def _apply(self, commit: pb.Commit) -> None:
        member, stage = self.member, self.stage
        lr = learning_rate.rate_of(commit.step, self.run)
        begin = self.attempt.begin if self.attempt else pb.Begin()  # a joiner has none
        replicas = [place.node for place in begin.members if place.stage == stage]
        first = self.node == min(replicas, default="")
        fetched = {joiner.step for joiner in begin.joining if joiner.stage == stage}
        lineage, boosted_at = member.lineage, member.boosted_at
        before = self._state(lineage, *self.based_on, boosted_at)
        after = self._state(lineage, commit.step, commit, boosted_at)
        self.holdings.before_commit(commit.step, lineage)
        keep = self.serving.before_commit(fetched, before)
        take = self.observers.pins.keep(before, commit.step, self.exchanges.now)
        self.feed.gradients.forget(Ballot.of(commit.ballot))
        task, fixed = self.gaps.task, entering(commit, stage)

        def apply() -> Learned:
            keep()
            take()
            beside = task.take_change(fixed) if task is not None else None
            learned = self.arithmetic.apply(commit, lr, beside)
            if not commit.skipped:
                self.averaging.feedback.commit(Ballot.of(commit.ballot))
            self.holdings.apply(commit, lr)
            if task is not None:
                task.renew()
            self.holdings.save(replace(after, **learned._asdict()), first)
            return learned

        self.learned = await self.exchanges.compute(apply)
        if task is not None:
            self.exchanges.start(self.gaps.committed(task))
        self.record.committed(commit)
        if commit.seconds:
            self.tokens_per_second = commit.tokens / commit.seconds
        digest = self.learned.digest
        self.record.tell(Applied(lineage=lineage, step=commit.step, digest=digest.hex()))
        self.carry_out(member.applied(digest))
        self.holdings.in_place(after.id)
        self.record.report_changed()

    async def _fetch(self, ballot: Ballot, sync: pb.Sync) -> None:
        member = self.member
        log.info("%s", sync.reason)
        try:
            if sync.method == "twin":
                synced = await self.rebuilding.rebuild_twin(ballot, sync)
                if synced is not None:
                    self.states.forget()
                    self.carry_out(member.fetched(synced, member.last, member.boosted_at))
                return
            await self.exchanges.compute(self.averaging.feedback.drop)
            rebuilt = await self.rebuilding.rebuild(ballot, sync)
        except ComplaintError as error:
            self.attempt_failed(ballot, str(error), error.accused, error.cause)
            return
        if rebuilt is None:
            return
        synced, state, relearning_task = rebuilt
        self.gaps.begin(relearning_task)
        self.states.forget()
        self.learned = Learned(synced.digest, state.omega, state.optimizer_step)
        cost = f"{synced.fetched_bytes} bytes, {synced.seconds:.2f} s"
        log.info("stage %s is at step %d by %s: %s", self.stage, sync.step, sync.method, cost)
        self.record.committed(state.last)  # the node that was to record it may be gone
        self.carry_out(member.fetched(synced, state.last, state.boosted_at))
        self.holdings.in_place(state.id)

    def own_state(self) -> StageState | None:
        """The state of this seat's stage, as of the newest commit; None: there is none."""
        member = self.member
        syncing = member.phase is MemberPhase.SYNCING and member.sync.method != "twin"
        if syncing or (member.following is not None and member.following.state is None):
            return None
        return self.committed_state()

    def committed_state(self) -> StageState:
        """The state of this seat's stage, as of the newest commit."""
        member = self.member
        return self._state(member.lineage, member.committed, member.last, member.boosted_at)

    def _state(self, lineage: int, step: int, last: pb.Commit, boosted_at: int) -> StageState:
        return StageState(
            id=StateId.after(last, self.stage, lineage, step),
            tensors=self.arithmetic.tensors,
            omega=self.learned.omega,
            boosted_at=boosted_at,
            last=last,
            optimizer_step=self.learned.optimizer_step,
            digest=self.learned.digest,
        )

    def is_readable(self) -> bool:
        """Whether this seat's state can be read beside a hanging compute thread: it is in main
        memory, no update was under way, and the weights are those of the last commit."""
        tensors = self.arithmetic.tensors.values()
        here = all(tensor.device.type == "cpu" for tensor in tensors)
        return here and not (self.member.changing or self.damaged)

    def leave_unread(self, why: str) -> None:
        """Takes the node out of the run: others would wait for its unreadable state."""
        how = "damaged" if self.damaged else "out of reach"
        self.record.rejoin(f"{why}; its state is {how}, so the node leaves without a handover")

    # --- reports

    @property
    def members(self) -> Sequence[pb.Place]:
        """Members of the current attempt here, or of the last one."""
        return self.attempt.begin.members if self.attempt is not None else []

    def doing(self) -> str:
        """What this seat waits for while its compute is idle, for the wall clock; empty:
        unknown."""
        if self.reducing.runs and self.attempt is not None and self.attempt.is_complete:
            return "average"
        phases = {self.member.phase, self.driver.phase}
        return "rebuild" if phases & {MemberPhase.SYNCING, DriverPhase.SYNCING} else ""

    def costs(self) -> dict[str, HoldingCost]:
        """The costs of keeping state for a loss, by purpose."""
        kept = self.attempt.kept if self.attempt is not None else 0
        masking = HoldingCost(memory_bytes=max(kept, self.workplace.most_kept))
        return self.holdings.costs() | {"masking": masking}

    def report(self) -> registry.SeatReport:
        """The report of this seat to the registry."""
        member, halt = self.member, self.member.halt
        driving = self.driver.phase is not DriverPhase.INACTIVE
        parts = [self.driver.explain()] if driving else []
        if left := member.relearning:
            parts.append(f"relearning in the background, {left} updates remain")
        return registry.SeatReport(
            stage=self.stage,
            committed=member.committed,
            lineage=member.lineage,
            phase=member.phase.value,
            loss=member.last.loss,
            microbatches=self.workplace.computed,
            tokens_per_second=self.tokens_per_second,
            message=(halt.reason if halt else "") or member.hang or "; ".join(filter(None, parts)),
            stopped=halt is not None and not halt.finished,
            finished=halt is not None and halt.finished,
            in_flight=self.workplace.filling.out if self.stage == 0 else 0,
            seconds=self.workplace.seconds_per_microbatch,
            saved=self.own_saves.step,
            saves=self.own_saves.steps,
            unsent=self.holdings.unsent,
        )


def crossing_bytes(run: RunFile, config: ModelConfig) -> int:
    """Maximum bytes across a boundary that one peer may send ahead: the tensors of two windows, in
    float32, and some more."""
    training = run.training
    count = max(training.microbatches, training.validation_microbatches)
    return 8 * count * training.microbatch * config.context * config.crossing + SLACK


def frame_bytes(run: RunFile, config: ModelConfig) -> int:
    """Maximum bytes of a frame that a node of this run may send."""
    return max(crossing_bytes(run, config), 4 * max(config.trained), LARGEST)


def held_bytes(run: RunFile, config: ModelConfig) -> int:
    """Maximum bytes that may wait here for one peer: what crosses a boundary, what follows, and as
    much for all that is averaged, copied and fetched."""
    return crossing_bytes(run, config) + 2 * max(UNSENT, FEWEST * 4 * max(config.trained))


def transaction_rules(run: RunFile, config: ModelConfig) -> TransactionRules:
    """The run file's settings for the driver of the step transaction."""
    training, recovery, stages = run.training, run.recovery, range(config.stages + 1)
    return TransactionRules(
        stages=config.stages,
        steps=run.steps,
        microbatches=training.microbatches,
        validation_microbatches=training.validation_microbatches,
        validate_every=training.validate_every,
        clip=training.clip,
        policy=run.policy,
        strict=recovery.strict,
        masking=recovery.masking == "reassign",
        relearn=recovery.relearn.passes > 0,
        single_waits=recovery.wait_for_saves is not None,
        adapters=training.lora is not None,
        relearn_seconds=recovery.relearn.seconds,
        progress=run.swarm.progress,
        tokens=training.microbatch * config.context,
        state_bytes=2 * max(config.state_bytes(of) + VALUE * config.values_in(of) for of in stages),
        spot_check=run.trust.spot_check,
        tolerance=run.trust.tolerance,
        audits=run.trust.gradients != "off" and run.wire.averaging in AUDITED,
        exclude=run.trust.gradients == "exclude",
        lr_scale=partial(
            learning_rate.boost, factor=recovery.lr_boost, over=recovery.lr_boost_steps
        ),
    )

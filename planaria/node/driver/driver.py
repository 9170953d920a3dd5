"""The driver's side of the step transaction: a state machine without clock, socket or tensor.

One procedure serves every new view, lost link, failed attempt and rebuild: *gather*. It queries all
active members and commits the step that any member has committed already. It gets state to those
without it, and begins the next step. A commit needs `Ready` from every active member.

The driver holds the view, the phase, and what outlives a phase. The phase acts: `Gathering`,
`Syncing`, `Attempting` or `Resting`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from types import MappingProxyType

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.operator_orders import last_step, order_in_words
from planaria.bootstrap.registry_pb2 import AUDIT
from planaria.node.averaging.examination import AuditResult
from planaria.node.driver.attempt_state import AttemptState, Planning, Vote, planned
from planaria.node.driver.attempting import Attempting
from planaria.node.driver.audits import Audits
from planaria.node.driver.divergence import DivergenceRepair
from planaria.node.driver.fault_policy import FaultPolicy
from planaria.node.driver.gathering import Gathering
from planaria.node.driver.hangs import HangDetector, slow_and_alone
from planaria.node.driver.joiners import Joiners
from planaria.node.driver.phases import DriverPhase, Phase, Resting, Turn
from planaria.node.driver.query_answers import Answers, ComingView, Standing
from planaria.node.driver.rebuilds import Rebuilds
from planaria.node.driver.records import record_holders, to_replicate
from planaria.node.driver.skipping import why_skipped
from planaria.node.driver.spot_checks import SpotChecks
from planaria.node.driver.status_validation import KnownFacts
from planaria.node.report.events import Aborted, Committed, GradientStandsOut, NodeLost, StepSkipped
from planaria.node.transaction.bounds import fault_to_driver
from planaria.node.transaction.effects import NEVER, Ballot, Effect, Send
from planaria.node.transaction.plan_encoding import PlanEncoder, active
from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.commit_chain import has_records, seal, without_records
from planaria.recovery.orders import window_orders

DRIVERS = 32
"""Number of views whose drivers are remembered."""


class Driver:
    """The driver's state machine. Every event method returns the effects to carry out, in order."""

    def __init__(self, node: str, rules: TransactionRules, chance: Random) -> None:
        self.node = node
        self.rules = rules
        self.audits = Audits(rules, chance)
        self.checks = SpotChecks(rules.spot_check, rules.tolerance, chance)
        self.encoder = PlanEncoder()
        self.identity: Identity | None = None  # without it, decisions aren't signed
        self.current: Phase = Resting(self, DriverPhase.INACTIVE)
        self.view = registry.View()
        self.drivers: dict[int, registry.Member] = {}  # by view, of the last ones
        self.keepers = frozenset[str]()  # get the attempt's records before they vote
        self.recorded = frozenset[str]()  # got that commit's records before they voted
        self.coming: ComingView | None = None
        self.members: dict[str, int] = {}  # active members of the ballot's view: node -> stage
        self.ballot = NEVER
        self.standing = Standing()
        self.knows = False  # whether it has the run's standing since it began to drive
        self.faults = FaultPolicy(node)
        self.joining = Joiners(rules.relearn_seconds, self.faults.idle.has_no_part)
        self.rebuilds = Rebuilds()  # since the last attempt began
        self.trains_since: float | None = None  # since the last loss of a whole stage
        self.seconds: dict[str, float] = {}  # per microbatch, by node
        self.hanging = HangDetector(rules.progress)
        self.divergence = DivergenceRepair()
        self.resent = (0, 0)  # step sent to joiners once more before going back
        self.ledgers: dict[str, pb.Recording] = {}  # of stage 0, as last reported
        self.noted_again = (0, 0)  # step sent once more to be recorded
        self.pause_until = 0.0
        self.unrecorded = ""  # why no step is begun: no ledger is written
        # The last pause after skipped steps: the members then, and what they were sent.
        self.paused: tuple[Mapping[str, int], pb.Halt] = {}, pb.Halt()
        self.validated: tuple[int, float] = (0, math.nan)  # step, loss
        self.finished = False  # all steps are committed, whichever nodes are lost later

    @property
    def phase(self) -> DriverPhase:
        return self.current.kind

    # --- events

    def viewed(self, view: registry.View, now: float) -> list[Effect]:
        """The registry has issued `view`."""
        if view.number <= max(self.view.number, self.coming.view.number if self.coming else 0):
            return []
        for member in view.members:
            if member.node == view.driver:
                self.drivers[view.number] = member
        for number in sorted(self.drivers)[:-DRIVERS]:
            del self.drivers[number]
        if view.driver != self.node:
            self.current, self.view = Resting(self, DriverPhase.INACTIVE), view
            self.coming, self.knows = None, False
            rebuilds, self.rebuilds = self.rebuilds, Rebuilds()
            return rebuilds.events(now)  # the next driver doesn't know of them
        if (turn := self.current.viewed(view, now)) is None:
            self.coming = ComingView(view, now, set())
            turn = self.current.gather(f"view {view.number}: {view.reason}", now)
        return self._take(turn)

    def received(self, peer: str, message: pb.Message, now: float) -> list[Effect]:
        """A control message for this state machine has come from `peer`."""
        body = message.WhichOneof("body")
        if body == "status" and self.coming is not None:
            self.coming.unanswered.discard(peer)
        if self.phase is DriverPhase.INACTIVE or peer not in self.members:
            return []
        if peer in self.current.lost and body != "stale":
            return []
        if wrong := fault_to_driver(message, self.rules):
            return self._take(
                self.current.invalid(peer, f"it sent an invalid message: {wrong}", now)
            )
        if body == "stale":
            return self._superseded(peer, Ballot.of(message.ballot), now)
        return self._take(self.current.received(peer, message, now))

    def link_lost(self, peer: str, reason: str, now: float) -> list[Effect]:
        """Messages to or from `peer` may be lost: what waits for it can't go on."""
        if self.phase is DriverPhase.INACTIVE:
            return []
        if self.coming is not None and peer in self.coming.unanswered:
            return [self.coming.greeting(peer)]  # its link may only have been dialled again
        if peer not in self.members or peer in self.current.lost:
            return []
        lost = NodeLost(node=peer, stage=self.members[peer], reason=reason)
        why = f"the link to {peer} is lost: {reason}"
        return self._take(self.current.link_lost(lost, why, now))

    def link_up(self, peer: str, now: float) -> list[Effect]:
        """A masked node that is reached again wasn't lost: it is a member, so nothing can be
        committed without it."""
        if peer not in self.current.lost:
            return []
        return self._take(self.current.gather(f"{peer} isn't lost: its link is up again", now))

    def tick(self, now: float) -> list[Effect]:
        """Does what has become due."""
        return self._take(self.current.tick(now))

    def rest(self, why: str, now: float) -> list[Effect]:
        """Ends the attempt, and begins no other, since this node is about to leave."""
        if self.view.driver != self.node:
            return []
        self.pause(math.inf)
        return self._take(self.current.gather(why, now))

    def explain(self) -> str:
        """A description of what goes on, or is awaited."""
        slow = slow_and_alone(self.members, self.seconds)
        changed = [str(weights) for weights in self.divergence.accepted.values()]
        waiting = [
            f"{node} waits until stage {stage} has relearned"
            for node, (stage, _) in self.joining.waiting.items()
        ]
        return "; ".join([self.current.explain(), *slow, *waiting, *changed])

    def _take(self, turn: Turn) -> list[Effect]:
        self.current = turn.phase
        return turn.effects

    def _superseded(self, peer: str, newer: Ballot, now: float) -> list[Effect]:
        """Handles that `peer` has promised itself to a newer ballot. If it is of another view, the
        registry will say which node drives. If it is of this one, only this driver could have made
        it."""
        if newer.view != self.ballot.view or newer <= self.ballot:
            return []
        made = self.ballot.attempt
        why = f"it promised itself to attempt {newer.attempt}; the newest of the view is {made}"
        return self._take(self.current.invalid(peer, why, now))

    # --- members

    def account(self, peer: str, account: pb.Account, now: float) -> None:
        """Takes in what a member reports of its computing and of the state that it fetches."""
        self.hanging.hear(peer, account.hang, now)
        self.joining.fetches(peer, account.fetched, now)

    def training(self) -> dict[str, int]:
        """Members with a part in attempts, and their stages."""
        without = self.joining.joiners.keys() | self.joining.waiting.keys() | self.current.masked
        return {n: stage for n, stage in sorted(self.members.items()) if n not in without}

    def present(self) -> dict[str, int]:
        """All members but those that are lost, or wait for a state."""
        without = self.current.lost | {self.current.seat} | self.joining.waiting.keys()
        return {n: stage for n, stage in sorted(self.members.items()) if n not in without}

    def masked_members(self) -> list[str]:
        """Lost nodes that are still members of the newest view."""
        masked = self.current.masked
        return sorted(masked & active(self._newest_view()).keys()) if masked else []

    def adopt_later(self, view: registry.View, now: float) -> tuple[ComingView, list[str]]:
        """Notes a view to adopt at a step boundary; also returns training members it lacks."""
        stay = active(view)
        gone = [node for node, stage in self.training().items() if stay.get(node) != stage]
        self.coming = ComingView(view, now, stay.keys() - self.members.keys())
        return self.coming, gone

    def planning(self) -> Planning:
        relays = self._newest_view().relays
        apart = self.faults.cuts | {frozenset((relay.a, relay.b)) for relay in relays}
        return Planning(self.rules, self.seconds, apart)

    def _newest_view(self) -> registry.View:
        return self.coming.view if self.coming is not None else self.view

    # --- faults

    def accuse(self, by: str, failed: pb.Failed, harmed: bool = True) -> list[Effect]:
        """Handles a member's accusation of others, as `FaultPolicy.accuse` does."""
        return self.faults.accuse(by, failed, self.members, harmed)

    def charge_holdup(self, node: str, why: str, times: int = 1) -> list[Effect]:
        """Charges a node with a failure that it reports, or causes by silence."""
        return self.faults.charge_holdup(node, why, self.members, self.training(), times)

    def lost_between(self, pairs: Collection[frozenset[str]], why: str) -> list[Effect]:
        """Handles that messages were lost between the nodes of each pair."""
        return self.faults.lost_between(pairs, why, self.members, self.training())

    def count_failure(self, now: float) -> None:
        """Counts a failed attempt or rebuild; after several, the driver pauses before the next."""
        self.faults.failures.count += 1
        if pause := self.faults.failures.pause():
            self.pause(now + pause)

    def pause(self, until: float) -> None:
        """Begins no step before `until`, nor before the end of a longer pause."""
        self.pause_until = max(self.pause_until, until)

    # --- gathering

    def gather(self, why: str, now: float) -> Turn:
        """Queries all members anew, in the newest view."""
        taken_over = self.phase is DriverPhase.INACTIVE
        if self.rebuilds.stalled is None:
            self.rebuilds.stalled = now
        self.checks.over()
        self.recorded = frozenset()
        if self.coming is not None:
            self.view, self.coming = self.coming.view, None
            self.members = dict(sorted(active(self.view).items()))
            for part in (self.faults, self.divergence, self.checks, self.hanging):
                part.keep(self.members)
            self.ballot = Ballot(self.view.number, 0)
        self.ballot = self.ballot.next()
        answers = Answers(
            why,
            self.ballot,
            active(self.view),
            stages=self.rules.stages,
            began=now,
            distrusted=self.divergence.distrusted,
            leaving={member.node for member in self.view.members if member.leaving},
        )
        queries = self.ballot.send_all(answers.members, query=pb.Query())
        return Turn([*queries], Gathering(self, answers, taken_over))

    def known_facts(self) -> KnownFacts:
        """What this driver knows without trusting the members' answers."""
        at, view = self.standing, self.view
        decided = (at.lineage, at.committed) if self.knows else None
        registered = view.lineage, view.committed
        return KnownFacts(self.node, registered, decided, view.run, self.drivers)

    def agree(self, answers: Answers) -> None:
        """Takes the newest state that a member has for the run's."""
        self.standing, self.ledgers = answers.standing(), answers.ledgers()
        if not self.knows:
            self.audits.restore(self.standing.last)
        self.knows = True
        having_view = (node for node, s in answers.statuses.items() if not s.viewless)
        self.encoder.doubt(self.view.number, self.members, having_view)

    def open_lineage(self, answers: Answers, step: int) -> None:
        """Opens a lineage: the run goes back to `step`, so later commits differ from former."""
        lineages = [holding.source.lineage for holding in answers.held()]
        lineage = 1 + max(self.standing.lineage, self.view.lineage, *lineages)
        self.standing = replace(self.standing, lineage=lineage, committed=step)
        self.divergence.went_back()

    def aborted(self, step: int, why: str) -> Aborted:
        return Aborted(step=step, view=self.ballot.view, reason=why)

    # --- steps

    def begin_next(self, now: float) -> Turn:
        """Begins what comes next: the next step, a validation, a pause, or the end."""
        if self.paused_by_operator() and not self.is_over():
            events = self._report_rebuilds(now)  # the pause isn't their stall
            return Turn(events, Resting(self, DriverPhase.WAITING, self.paused_by_operator()))
        begin = self.what_next()
        return self.finish(now) if begin is None else self.send_step(pb.Step(begin=begin), now)

    def is_over(self) -> bool:
        step = self.standing.committed
        validated = not self.rules.validation_microbatches or self.validated[0] == step
        return step >= self.last_step and validated

    @property
    def last_step(self) -> int:
        """The run's last step, for these nodes."""
        return last_step(self._newest_view(), self.standing.committed, self.rules.steps)

    @property
    def is_to_rest(self) -> bool:
        """Whether the operator lets no step follow: the run is stopped, or its settings change."""
        step = self.standing.committed
        return last_step(self._newest_view(), step, step + 1) == step

    def paused_by_operator(self) -> str:
        """Why no step is begun; empty: the run isn't paused."""
        view, has_next = self._newest_view(), self.standing.committed < self.last_step
        return order_in_words(view) if view.order == registry.PAUSE and has_next else ""

    def what_next(self) -> pb.Begin | None:
        """The next step or validation; None: a pause, or the end."""
        if self.is_over() or self.paused_by_operator():
            return None
        rules, standing, members = self.rules, self.standing, self.training()
        step, every = standing.committed, rules.validate_every
        due = step >= self.last_step or (every and step and step % every == 0)
        if due and rules.validation_microbatches and self.validated[0] != step:
            count = rules.validation_microbatches
            orders = window_orders(step + 1, count, rules.stages, swapped=False)
            begin = pb.Begin(step=step, kind=pb.Begin.EVALUATE)
        else:
            orders = window_orders(step + 1, rules.microbatches, rules.stages, rules.policy.swapped)
            begin = pb.Begin(step=step + 1)
            begin.lr_scale.extend(
                rules.lr_scale(step + 1, standing.boosted_at.get(stage, 0))
                for stage in range(rules.stages + 1)
            )
        begin.plan.extend(self._plan(members, orders))
        begin.non_finite = self.faults.lets_non_finite_through(members)
        for node, stage in members.items():
            begin.members.add(node=node, stage=stage)
        begin.joining.extend(self.joining.listed())
        return begin

    def _plan(
        self, members: Mapping[str, int], orders: Sequence[Sequence[int]]
    ) -> list[pb.Microbatch]:
        idle = self.faults.idle.nodes | self.faults.spoiling.why.keys()
        return planned(members, orders, self.seconds, idle, self.planning().apart)

    def commit(self, state: AttemptState, now: float) -> list[Effect]:
        """Commits the step of an attempt in which all have voted."""
        vote = state.vote
        self.divergence.committed(vote)
        skipped = why_skipped(vote.norms(), self.standing.last)
        commit = state.commit(self.ballot, self.rules, self.standing, now)
        commit.doubted.extend(self.checks.take_doubted())
        effects: list[Effect] = [*self.audits.draw(state, commit)]
        if self.identity is not None:
            seal(commit, self.identity, self.view.run)
        self.recorded = vote.keepers
        self.standing = replace(self.standing, committed=commit.step, last=commit)
        self.faults.committed()
        self.hanging.committed(commit.seconds, vote.ready)
        effects += self.faults.accuse_non_finite(state.begin, self.members)
        effects += [StepSkipped(step=commit.step, reason=skipped)] if skipped else []
        return [*effects, Committed(step=commit.step, loss=commit.loss)]

    def audit_over(self, result: AuditResult) -> list[Effect]:
        """Reports who fails an audit; accuses them if the rules exclude them."""
        effects: list[Effect] = []
        for node, why in self.audits.examined(result, self.members).items():
            stage = self.members[node]
            effects.append(GradientStandsOut(step=result.step, node=node, stage=stage, reason=why))
            if self.rules.exclude:
                failed = pb.Failed(reason=why, accused=[node], cause=AUDIT)
                effects += self.accuse(self.node, failed)
        return effects

    def finish(self, now: float) -> Turn:
        step = self.standing.committed
        self.finished = step >= self.rules.steps
        if self.validated[0] != step:  # a stopped run may lack a stage
            self.validated = step, math.nan
        loss = self.validated[1]
        return self.halt(pb.Halt(finished=True, step=step, validation_loss=loss), now)

    def run_finished(self, halt: pb.Halt) -> None:
        """Another driver says that the run is finished: whichever nodes are lost, it stays so. One
        that is stopped, or gets other settings, goes on later, so lost stages are rebuilt."""
        self.finished = halt.step >= self.rules.steps
        self.validated = halt.step, halt.validation_loss

    def halt(self, halt: pb.Halt, now: float) -> Turn:
        """Has all members halt, since the run is over or can't go on."""
        why = "all steps are committed" if halt.finished else halt.reason
        effects = self.ballot.send_all(sorted(self.members), halt=halt)
        events = self._report_rebuilds(now)
        return Turn([*effects, *events], Resting(self, DriverPhase.HALTED, why))

    def _report_rebuilds(self, now: float) -> list[Effect]:
        rebuilds, self.rebuilds = self.rebuilds, Rebuilds()
        if self.trains_since is None or rebuilds.stages():
            self.trains_since = now
        return rebuilds.events(now)

    # --- messages

    def send_step(self, step: pb.Step, now: float) -> Turn:
        """Sends a commit, and begins an attempt if `step` has one."""
        if not step.ByteSize():
            return self.current.stays()
        self.ballot = self.ballot.next()
        effects = self.tell_step(step, self.checks.draw(step.begin))
        if not step.HasField("begin"):
            return self.current.stays(effects)
        vote = Vote(self.training(), self.keepers)
        state = AttemptState(step.begin, self.ballot, now, now, self.current.masked, vote)
        return Turn(effects + self._report_rebuilds(now), Attempting(self, state))

    def tell_step(
        self, step: pb.Step, checks: Mapping[str, Sequence[pb.Check]] = MappingProxyType({})
    ) -> list[Effect]:
        """Sends all present members a commit, and each its part of a plan. `checks`: by node."""
        present = self.present()
        if not step.HasField("begin"):
            return [*self.tell_commit(present)]
        self.keepers = frozenset(record_holders(self.training(), self.ledgers))
        if step.HasField("commit"):
            sends = self.tell_commit(present)
        else:
            sends = self.ballot.send_all(present, step=pb.Step())
        begins = {send.to: send.message.step.begin for send in sends}
        self.encoder.tell(self.ballot, step.begin, begins, present)
        for node in checks.keys() & begins.keys():
            begins[node].checks.extend(checks[node])
        for node in self.keepers & begins.keys():
            begins[node].keeps = True
        return [*sends]

    def tell_commit(self, nodes: Iterable[str]) -> list[Send]:
        """Sends the last commit, with its records to those that are to keep them."""
        whole, bare = self.standing.last, without_records(self.standing.last)
        with_records, without = (self.ballot.says(step=pb.Step(commit=c)) for c in (whole, bare))
        keep = record_holders(self.present(), self.ledgers) - self.recorded
        return [Send.copy(node, with_records if node in keep else without) for node in nodes]

    def to_note(self) -> list[str]:
        """Nodes of stage 0 to record the last step once more, since no ledger has it."""
        at, last = self.standing, self.standing.last
        again = self.noted_again == (at.lineage, at.committed)
        return to_replicate(self.ledgers) if has_records(last) and not again else []

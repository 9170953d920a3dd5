"""The driver's side of the step transaction: a state machine without clock, socket or tensor.

One procedure serves every new view, lost link, failed attempt and rebuild: *gather*. It queries all
active members and commits the step that any member has committed already. It gets state to those
without it, and begins the next step. A commit needs `Ready` from every active member.

Each activity is one object, made when it begins: `Gathering`, `Syncing` or `Attempting`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from random import Random
from types import MappingProxyType
from typing import Any

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.identity import Identity
from planaria.bootstrap.neighbours import stages_of
from planaria.bootstrap.registry_pb2 import HANG, NONFINITE, NUMBERS, SILENT
from planaria.node.driver.attempting import Attempting, Vote, planned
from planaria.node.driver.divergence import DivergenceRepair
from planaria.node.driver.fault_policy import (
    HELD_UP,
    NOBODY_ELSE,
    UNVOTED,
    VAIN,
    Charges,
    FailedAttempts,
    NonFiniteSources,
    RestingMembers,
)
from planaria.node.driver.gathering import (
    Coming,
    Gathering,
    Standing,
)
from planaria.node.driver.hangs import HangDetector, is_last, is_late, slow_and_alone
from planaria.node.driver.joining import FOLLOWED, FOLLOWS, Joining
from planaria.node.driver.phases import DriverPhase, Resting
from planaria.node.driver.records import record_holders, to_replicate
from planaria.node.driver.spot_checks import (
    WRONG,
    CheckedVisit,
    SpotChecks,
    UndecidedCheck,
    WrongResult,
)
from planaria.node.driver.status_validation import KnownFacts, examine
from planaria.node.driver.syncing import (
    Rebuilds,
    Syncing,
    copy_twins,
    decide_each,
    name_checkpoint,
    rebuild,
    rebuilt,
)
from planaria.node.driver.takeover import Takeover, beside
from planaria.node.report.events import (
    Aborted,
    Accused,
    AttemptMasked,
    Committed,
    ComputedWrong,
    GradientStandsOut,
    HeldUp,
    NodeLost,
    NonFinite,
    Paused,
    RebuildFailed,
    RebuildOrdered,
    Relieved,
    ResultsDiffer,
    Resuming,
    RolledBack,
    SeatTaken,
    Validated,
    Waiting,
)
from planaria.node.transaction.bounds import fault_to_driver
from planaria.node.transaction.effects import NEVER, Ballot, Effect, Rejoin, Send, Suspect
from planaria.node.transaction.gradient_outliers import GradientOutliers
from planaria.node.transaction.leaving import may_have_heir
from planaria.node.transaction.plan_encoding import PlanEncoder, active
from planaria.node.transaction.routing import Pair
from planaria.node.transaction.rules import TransactionRules
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.chain import has_records, seal, without_records
from planaria.node.wire.naming import node_of
from planaria.recovery.decide import Resume, resume
from planaria.recovery.facts import COPIED, Rebuild, RollBack, Source, Stop
from planaria.recovery.orders import window_orders
from planaria.recovery.relearning import time_for

INACTIVE = Resting(DriverPhase.INACTIVE)
UNRECORDED_PAUSE = 2.0
"""Seconds between two checks whether a ledger can be written again."""
UNWRITTEN_PAUSE = 0.05
"""Seconds between two checks whether the last step is in the ledger."""
SKIPS = 3
"""Skipped steps in a row after which the run pauses."""
EVICTED = 3.0
"""Seconds that a complete attempt without a lost node waits for the view without that node; then
the node isn't lost, and the attempt is given up."""
COMPLAINED = 2.0
"""Seconds that votes are awaited beyond the members' wait for each other: a member that waits in
vain reports for which node."""
DRIVERS = 32
"""Number of views whose drivers are remembered."""
REPLACED = 2.0
"""Seconds until the driver checks whether a node has been replaced."""


class Driver:
    """The driver's state machine. Every event method returns the effects to carry out, in order."""

    def __init__(self, node: str, rules: TransactionRules, chance: Random) -> None:
        self.node = node
        self.rules = rules
        self.standing_out = GradientOutliers()
        self.checks = SpotChecks(rules.spot_check, rules.tolerance, chance)
        self.telling = PlanEncoder()
        self.identity: Identity | None = None  # without it, decisions aren't signed
        self.current: Gathering | Syncing | Attempting | Resting = INACTIVE
        self.view = registry.View()
        self.drivers: dict[int, registry.Member] = {}  # by view, of the last ones
        self.keepers = frozenset[str]()  # get the attempt's records before they vote
        self.recorded = frozenset[str]()  # got that commit's records before they voted
        self.coming: Coming | None = None
        self.members: dict[str, int] = {}  # active members of the ballot's view: node -> stage
        self.ballot = NEVER
        self.standing = Standing()
        self.knows = False  # whether it has the run's standing since it began to drive
        self.idle = RestingMembers()  # accused nodes
        self.joining = Joining(self.idle.has_no_part)
        self.rebuilds = Rebuilds()  # since the last attempt began
        self.trains_since: float | None = None  # since the last loss of a whole stage
        self.seconds: dict[str, float] = {}  # per microbatch, by node
        self.hanging = HangDetector(rules.progress)
        self.failures = FailedAttempts()
        self.charges = Charges()
        self.doubts = DivergenceRepair()
        self.spoiling = NonFiniteSources()
        self.cuts: set[Pair] = set()  # pairs of members without a link at one end
        self.resent = (0, 0)  # step sent to joiners once more before going back
        self.ledgers: dict[str, pb.Recording] = {}  # of stage 0, as last reported
        self.noted_again = (0, 0)  # step sent once more to be recorded
        self.pause_until = 0.0
        self.unrecorded = ""  # why no step is begun: no ledger is written
        self.paused: tuple[Mapping[str, int], pb.Halt] = {}, pb.Halt()  # by skips: members then
        self.validated: tuple[int, float] = (0, math.nan)  # step, loss
        self.finished = False  # for good, whichever nodes are lost later

    @property
    def phase(self) -> DriverPhase:
        match self.current:
            case Attempting() as attempt:
                return DriverPhase.REDUCING if attempt.is_home() else DriverPhase.RUNNING
            case Gathering():
                return DriverPhase.GATHERING
            case Syncing():
                return DriverPhase.SYNCING
            case Resting(phase):
                return phase

    # --- events

    def viewed(self, view: registry.View, now: float) -> list[Effect]:
        """The registry has issued `view`."""
        if view.number <= max(self.view.number, self.coming.view.number if self.coming else 0):
            return []
        self._note_who_drives(view)
        if view.driver != self.node:
            self.current, self.view, self.coming = INACTIVE, view, None
            self.knows = False
            return []
        if isinstance(self.current, Attempting | Syncing):
            effects = self._adopt_later(view, now)
            if effects is not None:
                return effects
        taken_over = self.current == INACTIVE
        self.coming = Coming(view, now, set())
        return self._gather(f"view {view.number}: {view.reason}", now, taken_over)

    def received(self, peer: str, message: pb.Message, now: float) -> list[Effect]:
        """A control message for this state machine has come from `peer`."""
        body = message.WhichOneof("body")
        ballot = Ballot.of(message.ballot)
        if body == "status" and self.coming is not None:
            self.coming.unanswered.discard(peer)
        if self.current == INACTIVE or peer not in self.members:
            return []
        if peer in self._lost() and body != "stale":
            return []
        if wrong := fault_to_driver(message, self.rules):
            return self._nonsense(peer, f"it tells of {wrong}", now)
        if body == "stale":
            return self._superseded(peer, ballot, now)
        is_current = ballot == self.ballot
        joiner = self.joining.joiners.get(peer)
        match body, self.current:
            case "scored", Attempting() as attempt if attempt.since <= ballot:
                effects = self._scored(attempt, peer, message.scored.microbatches, now)
                return self._if_all_scored(attempt) if effects is None else effects
            case "home", Attempting() as attempt if attempt.since <= ballot:
                if (effects := self._scored(attempt, peer, [message.home], now)) is not None:
                    return effects
                attempt.came_home(message.home, now)
                return self._if_all_home(attempt, now)
            case "ready", Attempting() as attempt if is_current:
                voted, step = message.ready.step, attempt.begin.step
                if voted != step:
                    why = f"it votes for step {voted}, and this is step {step}"
                    return self._nonsense(peer, why, now)
                if joiner is None:
                    self.seconds[peer] = message.ready.seconds_per_microbatch
                attempt.heard(peer, message.ready, now)
                return self._if_all_ready(now)
            case "status" | "synced" | "failed", Attempting() as attempt if (
                peer == attempt.awaited_seat() and attempt.since <= ballot
            ):
                return self._heard_of_seat(attempt, message, now)
            case "synced", _ if joiner is not None:
                joiner.caught_up = message.synced
            case "failed", _ if joiner is not None:  # it may not have received this ballot yet
                effects = self._accuse(peer, message.failed)
                effects += self._give_up_following(peer, message.failed.reason, now)
                return effects + self._if_all_ready(now)
            case "account", Attempting() as attempt if attempt.since <= ballot:
                return self._accounted(attempt, peer, message.account, now)
            case "account", _:
                self.hanging.hear(peer, message.account.hang, now)
            case "cut", _ if ballot == NEVER:
                return self._accused_apart(peer, message.cut)
            case "cut", Attempting() as attempt if attempt.since <= ballot:
                return self._cut(attempt, peer, message.cut, now)
            case "status", Gathering() as gathering if is_current:
                gathering.statuses[peer] = message.status
                if message.status.following:
                    self.doubts.trust(peer)  # it knows that its old state is void
                self.hanging.hear(peer, message.status.hang, now)
                if message.status.seconds_per_microbatch:
                    self.seconds[peer] = message.status.seconds_per_microbatch
                    self.hanging.knows(peer)
                return self._resolve(gathering, now) if gathering.is_complete else []
            case "synced", Syncing() as syncing if is_current:
                return self._synced(syncing, peer, message.synced, now)
            case "compared", Attempting() if is_current:
                return self._compared(peer, message.compared, now)
            case "failed", Attempting() | Syncing() if is_current:
                return self._failed(peer, message.failed, now)
        return []

    def link_lost(self, peer: str, reason: str, now: float) -> list[Effect]:
        """Messages to or from `peer` may be lost: what waits for it can't go on."""
        if self.current == INACTIVE:
            return []
        if self.coming is not None and peer in self.coming.unanswered:
            return [self.coming.greeting(peer)]  # its link may only have been dialled again
        if peer not in self.members or peer in self._lost():
            return []
        if isinstance(self.current, Attempting) and self.current.awaited_seat() == peer:
            return self._ask_seat(self.current, now)  # its link may only have been dialled again
        lost = NodeLost(node=peer, stage=self.members[peer], reason=reason)
        if peer in self.joining.waiting and isinstance(self.current, Attempting):
            return [lost]
        if peer in self.joining.joiners and isinstance(self.current, Attempting):
            self.joining.joiners[peer].caught_up = None
            self.current.forget(peer)
            return [lost, *self._if_all_ready(now)]
        why = f"the link to {peer} is lost: {reason}"
        wrong = self._alone(peer, why)
        effects = self._lose([peer], why, now)
        return [lost, *wrong, *(self._gather(why, now) if effects is None else effects)]

    def link_up(self, peer: str, now: float) -> list[Effect]:
        """A masked node that is reached again wasn't lost: it is a member, so nothing can be
        committed without it."""
        if peer in self._lost():
            return self._gather(f"{peer} isn't lost: its link is up again", now)
        return []

    def tick(self, now: float) -> list[Effect]:
        """Does what has become due."""
        match self.current:
            case Gathering() as gathering:
                condemned = self.hanging.condemned(self.members, gathering.statuses, now)
                return gathering.ask_again(now, condemned)
            case Resting(DriverPhase.PAUSING, why) if now >= self.pause_until:
                again = why if self.hanging.why else self.unrecorded
                return self._gather(again, now) if again else self._next(now)
            case Attempting() as attempt if attempt.is_home() and attempt.vote.is_complete:
                return self._if_all_ready(now)
            case Attempting() as attempt:
                effects: list[Effect] = []
                limit = FOLLOWED * self.rules.progress
                for node, why in self.joining.hopeless(now, limit).items():
                    effects += self._give_up_following(node, why, now)
                by, why = attempt.unreachable(now)
                if by:
                    effects += self._fails(by, why, now)
                if why := why or attempt.vacant(now):
                    effects += self._gather(why, now)
                elif attempt.takeover is not None and attempt.takeover.may_ask(now):
                    effects += self._ask_seat(attempt, now)
                return effects or self._out_of_patience(attempt, now) or self._inquire(attempt, now)
            case Syncing() as syncing:
                return self._out_of_patience(syncing, now)
        return []

    def explain(self) -> str:
        """A description of what goes on, or is awaited."""
        slow = slow_and_alone(self.members, self.seconds)
        changed = [str(weights) for weights in self.doubts.accepted.values()]
        waiting = [
            f"{node} waits until stage {waiting.stage} has relearned"
            for node, waiting in self.joining.waiting.items()
        ]
        return "; ".join([self.current.explain(), *slow, *waiting, *changed])

    # --- gather

    def _adopt_later(self, view: registry.View, now: float) -> list[Effect] | None:
        """Goes on until the view can be adopted at the end, and greets newcomers. None: can't go
        on."""
        known = self.members.keys() | (active(self.coming.view) if self.coming else {})
        stay = active(view)
        gone = [node for node, stage in self._training().items() if stay.get(node) != stage]
        self.coming = coming = Coming(view, now, stay.keys() - self.members.keys())
        effects = self._lose(gone, view.reason, now)
        if effects is None:
            return None
        match self.current:
            case Attempting() as attempt if attempt.needs_seat(stay):
                former, seat = attempt.awaited_seat(), attempt.choose_seat(stay, known)
                if not seat and attempt.begins_anew_with(stay):
                    return None
                if not seat:  # a newcomer may have it soon
                    self.members = {n: s for n, s in self.members.items() if n != former}
                    return effects + self._greetings(coming)
                stages = {n: stage for n, stage in self.members.items() if n != former}
                self.members = stages | {seat: stay[seat]}
                coming.unanswered.discard(seat)
                effects += self._ask_seat(attempt, now)
        return effects + self._greetings(coming)

    def _greetings(self, coming: Coming) -> list[Effect]:
        return [coming.greeting(node) for node in sorted(coming.unanswered)]

    def _gather(self, why: str, now: float, taken_over: bool = False) -> list[Effect]:
        effects: list[Effect] = []
        match self.current:
            case Attempting(begin=begin) as attempt if begin.kind == pb.Begin.TRAIN:
                effects += self._give_up(attempt, why)
            case Syncing(awaited=awaited, began=began) if awaited:
                self.rebuilds.spent += now - began
        if self.rebuilds.stalled is None:
            self.rebuilds.stalled = now
        self.checks.over()
        self.recorded = frozenset()
        if self.coming is not None:
            self.view, self.coming = self.coming.view, None
            self.members = dict(sorted(active(self.view).items()))
            self.idle.keep(self.members)
            self.spoiling.keep(self.members)
            self.cuts = {pair for pair in self.cuts if pair <= self.members.keys()}
            self.doubts.keep(self.members)
            self.charges.keep(self.members)
            self.checks.keep(self.members)
            self.failures.keep(self.members)
            self.hanging.keep(self.members)
            self.ballot = Ballot(self.view.number, 0)
        self.ballot = self.ballot.next()
        self.current = gathering = Gathering(
            why,
            self.ballot,
            active(self.view),
            stages=self.rules.stages,
            began=now,
            asked=now,
            suspected=now,
            taken_over=taken_over,
            distrusted=self.doubts.distrusted,
            leaving={member.node for member in self.view.members if member.leaving},
        )
        return effects + gathering.ask()

    def _give_up(self, attempt: Attempting, why: str) -> list[Effect]:
        """Suspects the awaited nodes if two attempts in a row fail for the same reason."""
        effects: list[Effect] = []
        if self.failures.again(why) and (waited_for := attempt.waited_for()):
            why += f"; it waited for {', '.join(waited_for.values())}"
            effects += [Suspect(node, why) for node in waited_for if node != self.node]
        return [self._aborted(attempt.begin.step, why), *effects]

    def _aborted(self, step: int, why: str) -> Aborted:
        return Aborted(step=step, view=self.ballot.view, reason=why)

    def _resolve(self, gathering: Gathering, now: float) -> list[Effect]:
        """All members have answered: agree on the step, then get state to nodes without it."""
        effects = self.doubts.settle(gathering, self.rules, self.standing.committed)
        verdict = examine(gathering.statuses, self._known_facts(), self.doubts.distrusted)
        if verdict.parted:
            halt = pb.Halt(reason=verdict.parted, step=self.standing.committed)
            return effects + self._halt(halt, now)
        for node, why in verdict.lies.items():
            failed = pb.Failed(reason=why, accused=[node], cause=NUMBERS)
            effects += self._accuse(self.node, failed)
        gathering.distrusted = self.doubts.distrusted | verdict.doubted
        gathering.distrusted |= self._without_part(gathering) | self._far_ahead(gathering)
        if gathering.distrusted >= gathering.statuses.keys():
            gathering.distrusted = verdict.doubted
        self.standing = standing = gathering.standing()
        self.knows = True
        self.telling.doubt(self.view.number, self.members, gathering.having_view())
        tried = {status.attempting for status in gathering.statuses.values()}
        if gathering.taken_over and standing.committed + 1 in tried:
            effects.append(self._aborted(standing.committed + 1, "its driver is gone"))
        behind, all_lost = gathering.behind(), gathering.all_lost(self.view)
        at = standing.lineage, standing.committed
        if all_lost and self.resent != at:
            self.resent, behind = at, behind + gathering.missing_one()
        self.ledgers = gathering.ledgers()
        if behind:
            effects += self._tell_commit(behind)
            return effects + self._gather(f"step {standing.committed} is committed by some", now)
        if noting := self._to_note():
            self.noted_again = at
            effects += self._tell_commit(noting)
            return effects + self._gather(f"no ledger has step {standing.committed}", now)
        without = gathering.without_checkpoint() if self.rules.adapters else []
        if without and not self.finished:
            return effects + self._wait_for_origin(without)
        if all_lost or at == (0, 0):
            saved = resume(gathering.held(), self.rules.stages)
            if saved is not None:
                return effects + self._resume(gathering, saved, all_lost, now)
        if all_lost and self.rules.policy.checkpoints:
            if vacant := gathering.vacant():
                return effects + self._wait_for_nodes(vacant)
            reason = "everything is lost, and no checkpoint is whole yet: back to initial weights"
            return effects + self._roll_back(gathering, RollBack(0, 0, reason), now)
        if all_lost:
            reason = (
                f"everything is lost: {all_lost}; start nodes that have saves (--save-dir) of it, "
                "or a new run"
            )
            return effects + self._halt(pb.Halt(reason=reason, step=standing.committed), now)
        members, halt = self.paused
        if self.members.keys() <= members.keys() and halt.step == standing.committed:
            return effects + self._halt(halt, now)
        return effects + self._sync(gathering, now)

    def _known_facts(self) -> KnownFacts:
        at, view = self.standing, self.view
        decided = (at.lineage, at.committed) if self.knows else None
        registered = view.lineage, view.committed
        return KnownFacts(self.node, registered, decided, view.run, self.drivers)

    def _note_who_drives(self, view: registry.View) -> None:
        for member in view.members:
            if member.node == view.driver:
                self.drivers[view.number] = member
        for number in sorted(self.drivers)[:-DRIVERS]:
            del self.drivers[number]

    # --- sync: state for those without it

    def _sync(self, gathering: Gathering, now: float) -> list[Effect]:
        vacant, decisions = gathering.vacant(), decide_each(gathering, self.rules)
        for decision in decisions.values():
            if isinstance(decision, Stop):
                halt = pb.Halt(reason=decision.reason, step=self.standing.committed)
                return self._finish(now) if self.finished else self._halt(halt, now)
        effects = self._go_on_following(gathering, now)
        rebuilds = {of: d for of, d in decisions.items() if isinstance(d, Rebuild)}
        if self.finished:
            rebuilds = {of: d for of, d in rebuilds.items() if d.same_weights}
        if vacant:  # a later newcomer may have more; replicas need not wait for that
            rebuilds = {of: d for of, d in rebuilds.items() if d.method in COPIED}
        elif len(rebuilds) < len(decisions) and not self.finished:
            back = next(d for d in decisions.values() if isinstance(d, RollBack))
            return self._roll_back(gathering, back, now)
        lacking = self.joining.lacking(gathering)
        for stage in self._put_off(gathering, lacking, now):
            rebuilds.pop(stage, None)
        follow = not vacant and all(self._may_follow(d, lacking) for d in rebuilds.values())
        relearning = self._seconds_for_relearning(now)
        syncs = rebuild(gathering, rebuilds, lacking, self.rules, follow, relearning)
        if follow:
            self.joining.begin(syncs, gathering, now)
            fetching = {effect.to for effect in syncs if isinstance(effect, Send)}
            effects, syncs = effects + syncs, []
            # They must know it before anything is committed without them.
            if anew := self.doubts.distrusted.union(filter(self.idle.has_no_part, fetching)):
                names = ", ".join(sorted(anew))
                return effects + self._gather(f"{names} copies its state anew", now)
        if not (vacant or self.finished):
            syncs = syncs or copy_twins(gathering, self.rules)
        if syncs:
            return effects + self._wait_for_state(gathering, syncs, now)
        if vacant and not self.finished:
            return effects + self._wait_for_nodes(vacant)
        if weightless := gathering.weightless():
            return effects + self._wait_for_origin(sorted(weightless))
        if node := self.hanging.to_replace(self.members, gathering.having(), now):
            return effects + self._replace(node, now)
        over, paused = self._is_over(), self.unrecorded
        self.unrecorded = gathering.unwritten() if over else gathering.unrecorded()
        if self.unrecorded:
            self.pause_until = now + (UNWRITTEN_PAUSE if over else UNRECORDED_PAUSE)
            self.current = Resting(DriverPhase.PAUSING, self.unrecorded)
            return effects if paused or over else [*effects, Paused(reason=self.unrecorded)]
        if now < self.pause_until:
            self.current = Resting(DriverPhase.PAUSING, gathering.why)
            return effects
        return effects + self._next(now)

    def _put_off(
        self, gathering: Gathering, lacking: Mapping[int, list[str]], now: float
    ) -> set[int]:
        """Stages that no node copies yet, since they relearn while they train. A leaving node's
        stage is copied at once."""
        leaving = {stage for m in self.view.members if m.leaving for stage in stages_of(m)}
        relearning = set() if self._is_over() else gathering.relearning() - leaving
        return self.joining.put_off(lacking, relearning, self.rules.relearn_seconds, now)

    def _wait_for_state(
        self, gathering: Gathering, effects: list[Effect], now: float
    ) -> list[Effect]:
        awaited = {effect.to for effect in effects if isinstance(effect, Send)}
        for node in awaited:
            self.joining.joiners.pop(node, None)
        self.current = Syncing(gathering, awaited, now, now)
        return effects

    def _seconds_for_relearning(self, now: float) -> float:
        stalled = now if self.rebuilds.stalled is None else self.rebuilds.stalled
        trained = 0.0 if self.trains_since is None else stalled - self.trains_since
        return time_for(self.rules.relearn_seconds, max(0.0, trained), self.rebuilds.spent)

    def _wait_for_nodes(self, vacant: Sequence[int]) -> list[Effect]:
        stages = ", ".join(map(str, vacant))
        why = f"waiting for a node to join stage {stages}: planaria node --join ..."
        self.current = Resting(DriverPhase.WAITING, why)
        return [Waiting(stages=tuple(vacant), reason=why)]

    def _wait_for_origin(self, stages: Sequence[int]) -> list[Effect]:
        why = (
            "waiting for a node that has the checkpoint which the run begins from, for stage "
            f"{', '.join(map(str, stages))}: planaria node --join ... --model DIR"
        )
        self.current = Resting(DriverPhase.WAITING, why)
        return [Waiting(stages=tuple(stages), reason=why)]

    def _roll_back(self, gathering: Gathering, to: RollBack, now: float) -> list[Effect]:
        """Takes all stages back, by the checkpoint policy."""
        step = self.standing.committed
        effects: list[Effect] = [RolledBack(lost=step, step=to.step, reason=to.reason)]
        self._open_lineage(gathering, to.step)
        for node, stage in sorted(self.members.items()):
            source = Source(node, stage, to.step, to.lineage)
            sync = self.standing.sync("checkpoint", to.reason, [source])
            effects.append(self.ballot.send(node, sync=sync))
        return self._wait_for_state(gathering, self._with_checkpoint(effects, gathering), now)

    def _resume(self, gathering: Gathering, saved: Resume, why: str, now: float) -> list[Effect]:
        """Resumes from files, the only state left to go on from: nodes with a fitting one go back
        to it, the others copy later."""
        if vacant := gathering.vacant():
            return self._wait_for_nodes(vacant)
        reason = "; ".join(filter(None, (why, saved.reason)))
        effects: list[Effect] = [Resuming(step=saved.step, exact=saved.exact, reason=reason)]
        self._open_lineage(gathering, saved.step)
        for holding in chain.from_iterable(saved.held.values()):
            method = "save" if holding.kind == "checkpoint" else holding.kind
            sync = self.standing.sync(method, reason, [holding.source])
            effects.append(self.ballot.send(holding.source.node, sync=sync))
        return self._wait_for_state(gathering, self._with_checkpoint(effects, gathering), now)

    def _with_checkpoint(self, effects: list[Effect], gathering: Gathering) -> list[Effect]:
        return name_checkpoint(effects, gathering) if self.rules.adapters else effects

    def _open_lineage(self, gathering: Gathering, step: int) -> None:
        """Opens a lineage: commits after `step` differ from earlier ones."""
        lineages = [holding.source.lineage for holding in gathering.held()]
        lineage = 1 + max(self.standing.lineage, self.view.lineage, *lineages)
        self.standing = replace(self.standing, lineage=lineage, committed=step)
        self.doubts.went_back()

    def _synced(self, syncing: Syncing, peer: str, synced: pb.Synced, now: float) -> list[Effect]:
        if synced.method != "twin":
            self.doubts.trust(peer)
        self.rebuilds.rebuilt += syncing.came(peer, synced, now)
        return [] if syncing.awaited else self._gather("state is in place", now)

    # --- joiners that follow while the others train

    def _training(self) -> dict[str, int]:
        without = self.joining.joiners.keys() | self.joining.waiting.keys() | self._masked()
        return {n: stage for n, stage in sorted(self.members.items()) if n not in without}

    def _without_part(self, gathering: Gathering) -> set[str]:
        """Nodes that only follow, since replicas can't use what they send, or they must go. While
        their stage has others, they can copy from those, and no node has to wait for them."""
        if self._is_over() or self.rules.policy.waits or not gathering.newest.committed:
            return set()
        apart = {n for n in gathering.members if self.idle.has_no_part(n) and n != self.node}
        left = {gathering.members[n] for n, s in gathering.having().items() if not s.following}
        stay = {gathering.members[n] for n in gathering.having().keys() - apart} & left
        return {
            node
            for node in apart
            if gathering.members[node] in stay - self.rebuilds.stages()
            and self.joining.failures[node] < FOLLOWS
        }

    def _far_ahead(self, gathering: Gathering) -> set[str]:
        """Nodes that are to be removed and claim a state that no other node has."""
        ages = {
            node: (status.lineage, status.committed) for node, status in gathering.statuses.items()
        }
        others = [age for node, age in ages.items() if not self.idle.is_to_go(node)]
        return {
            n for n, age in ages.items() if self.idle.is_to_go(n) and age > max(others, default=age)
        }

    def _may_follow(self, decision: Rebuild, lacking: Mapping[int, list[str]]) -> bool:
        """Whether nodes may follow. Replicas of a just rebuilt stage are awaited, as was its first
        node; with some policies, all are."""
        tried = any(self.joining.failures[node] >= FOLLOWS for node in lacking[decision.stage])
        new = decision.stage in self.rebuilds.stages()
        copied = decision.method in COPIED and not self.rules.policy.waits
        copied = copied and self.standing.committed > 0
        copied = copied and any(s.node not in self.hanging.why for s in decision.sources)
        return copied and not (tried or new or self._is_over())

    def _go_on_following(self, gathering: Gathering, now: float) -> list[Effect]:
        rebuilt = self.rebuilds.stages()
        unsure, entered = self.joining.go_on(gathering, rebuilt, self._is_over(), now)
        self.rebuilds.rebuilt += [joiner.entered(n, now) for n, joiner in entered.items()]
        return self._tell_commit(unsure)

    def _give_up_following(self, peer: str, reason: str, now: float) -> list[Effect]:
        """Gives up a joiner's try; it gets a new `Sync` at the next step boundary."""
        if not self.joining.gives_up(peer):
            return []
        why = f"{peer} can't follow: {reason}"
        failed = RebuildFailed(node=peer, reason=why)
        match self.current:
            case Attempting() as attempt:
                attempt.forget(peer)
                attempt.regather = why
            case Resting(DriverPhase.PAUSING | DriverPhase.WAITING):
                return [failed, *self._gather(why, now)]
        return [failed]

    # --- attempt

    def _next(self, now: float) -> list[Effect]:
        """Begins what comes next: the next step, a validation, or the end."""
        begin = self._what_next()
        return self._finish(now) if begin is None else self._send_step(pb.Step(begin=begin), now)

    def rest(self, why: str, now: float) -> list[Effect]:
        """Ends the attempt, and begins no other, since this node is about to leave."""
        if self.view.driver != self.node:
            return []
        self.pause_until = math.inf
        return self._gather(why, now)

    def _is_over(self) -> bool:
        step = self.standing.committed
        validated = not self.rules.validation_microbatches or self.validated[0] == step
        return step >= self.rules.steps and validated

    def _what_next(self) -> pb.Begin | None:
        if self._is_over():
            return None
        rules, standing, members = self.rules, self.standing, self._training()
        step, every = standing.committed, rules.validate_every
        due = step >= rules.steps or (every and step and step % every == 0)
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
        begin.non_finite = self._lets_through()
        for node, stage in members.items():
            begin.members.add(node=node, stage=stage)
        begin.joining.extend(self.joining.listed())
        return begin

    def _plan(
        self, members: Mapping[str, int], orders: Sequence[Sequence[int]]
    ) -> list[pb.Microbatch]:
        idle = self.idle.nodes | self.spoiling.why.keys()
        return planned(members, orders, self.seconds, idle, self._apart())

    def _apart(self) -> set[Pair]:
        """Pairs of members between which as few microbatches as possible go."""
        return self.cuts | {frozenset((relay.a, relay.b)) for relay in self._newest_view().relays}

    def _send_step(self, step: pb.Step, now: float) -> list[Effect]:
        if not step.ByteSize():
            return []
        self.ballot = self.ballot.next()
        effects = self._tell_step(step, self.checks.draw(step.begin))
        if step.HasField("begin"):
            self.current = Attempting(
                step.begin, self.ballot, now, now, self._masked(), self._put_to_the_vote()
            )
            effects += self._report_rebuilds(now)
        return effects

    def _report_rebuilds(self, now: float) -> list[Effect]:
        rebuilds, self.rebuilds = self.rebuilds, Rebuilds()
        if self.trains_since is None or rebuilds.stages():
            self.trains_since = now
        return rebuilds.events(now)

    def _scored(
        self, attempt: Attempting, peer: str, scored: Iterable[pb.Home], now: float
    ) -> list[Effect] | None:
        """Takes in losses from a source. None: all are valid, and still of this source."""
        for home in scored:
            if not (math.isfinite(home.loss) or attempt.begin.non_finite):
                why = f"its loss in microbatch {home.microbatch} is not finite"
                return self._not_finite(attempt, peer, peer, why, now)
            try:
                if not attempt.is_source(peer, home):
                    return []
            except ValueError as error:
                return self._nonsense(peer, f"it tells of {error}", now)
        return None

    def _if_all_scored(self, attempt: Attempting) -> list[Effect]:
        """Sends records to the record holders while gradients are on their way, and lets joiners
        vote."""
        vote, training = attempt.vote, attempt.begin.kind == pb.Begin.TRAIN
        if not training or attempt.takeover is not None or vote.records or not attempt.is_scored():
            return []
        vote.records = attempt.records()
        records = pb.Records(microbatches=vote.records)
        return [
            *self.ballot.send_all(sorted(vote.keepers), records=records),
            *self.ballot.send_all(sorted(self.joining.caught_up()), reduce=pb.Reduce()),
        ]

    def _if_all_home(self, attempt: Attempting, now: float) -> list[Effect]:
        if attempt.takeover is not None or not attempt.is_home():
            return self._if_all_scored(attempt)
        if attempt.begin.kind == pb.Begin.EVALUATE:
            step, loss = self.standing.committed, attempt.mean_loss()
            self.validated = step, loss
            event = Validated(step=step, loss=loss)
            return [
                event,
                *self._spoilt(attempt.begin),
                *self._after_step(attempt, pb.Step(), now),
            ]
        effects = self._if_all_scored(attempt)
        if not attempt.vote.hurried:
            attempt.vote.hurried = True
            asked = {*attempt.vote.awaited, *self.joining.caught_up()}
            effects += self.ballot.send_all(sorted(asked), reduce=pb.Reduce())
        return effects + self._if_all_ready(now)

    def _put_to_the_vote(self) -> Vote:
        return Vote(self._training(), self.keepers)

    def _if_all_ready(self, now: float) -> list[Effect]:
        """Decide when all training members are ready, after a short wait for joiners.

        Not while a node without which the attempt goes on is a member: in a view that this driver
        doesn't have, others may train with that node and without this one."""
        match self.current:
            case Attempting(vote=vote, takeover=None) as attempt if (
                vote.is_complete and attempt.is_home()
            ):
                pass
            case _:
                return []
        if (effects := self._diverging(vote, now)) is not None:
            return effects
        self.ledgers = vote.ledgers()
        if why := vote.unrecorded():
            return self._gather(why, now)
        if self._to_note():
            return self._gather(f"no ledger has step {self.standing.committed}", now)
        if members := self._masked_members():
            if now - vote.complete < EVICTED:
                return []
            return self._gather(f"{', '.join(members)} isn't lost after all", now)
        if self.joining.hold_up(vote, attempt.began, now):
            return []
        return self._decide(attempt, vote, now)

    def _decide(self, attempt: Attempting, vote: Vote, now: float) -> list[Effect]:
        """All members are ready: commit, and begin what comes next in the same message."""
        effects = self._let_in(vote, now)
        self.doubts.committed(vote)
        commit = attempt.commit(vote, self.ballot, self.rules, self.standing, now)
        commit.doubted.extend(self.checks.take_doubted())
        if self.identity is not None:
            seal(commit, self.identity, self.view.run)
        self.recorded = vote.keepers
        self.standing = replace(self.standing, committed=commit.step, last=commit)
        self.failures = FailedAttempts()
        self.charges.committed()
        self.idle.committed()
        effects += self._standing_out(vote, commit)
        self.hanging.committed(commit.seconds, vote.ready)
        effects += self._spoilt(attempt.begin)
        if not attempt.begin.non_finite:  # else its source is known
            effects += vote.not_finite(commit.step)
        effects.append(Committed(step=commit.step, loss=commit.loss))
        self._let_copy(attempt, vote, now)
        if commit.skips >= SKIPS:
            return effects + self._skipped(vote, commit, now)
        return effects + self._after_step(attempt, pb.Step(commit=commit), now)

    def _standing_out(self, vote: Vote, commit: pb.Commit) -> list[Effect]:
        """Events about gradient outliers; accuses them if the rules exclude them."""
        effects: list[Effect] = []
        for node, why in self.standing_out.heard(vote.stages, vote.ready).items():
            stage = vote.stages[node]
            event = GradientStandsOut(step=commit.step, node=node, stage=stage, reason=why)
            effects.append(event)
            if self.rules.exclude:
                failed = pb.Failed(reason=f"its gradients: {why}", accused=[node], cause=NUMBERS)
                effects += self._accuse(self.node, failed)
        return effects

    def _skipped(self, vote: Vote, commit: pb.Commit, now: float) -> list[Effect]:
        """Pauses the run after a few skipped steps in a row. One may be an overflow; more teach
        nothing until a node joins."""
        effects = self._send_step(pb.Step(commit=commit), now)
        halt = pb.Halt(reason=vote.explain_skips(commit.skips), step=commit.step)
        self.paused = self.members, halt
        return effects + self._halt(halt, now)

    def _let_in(self, vote: Vote, now: float) -> list[Effect]:
        """Lets joiners train that have the attempt's gradient and agree with a replica on it."""
        effects: list[Effect] = []
        for node, joiner in list(self.joining.joiners.items()):
            if node not in vote.joiners or self.joining.stays_out(node):
                continue
            if other := vote.dissents_from(joiner.stage, vote.joiners[node]):
                why = f"its weights, or its gradient, are not those of {other}"
                effects += self.doubts.differ(
                    joiner.stage, [other], {node: why}, self.standing.committed
                )
                effects += self._give_up_following(node, why, now)
            else:
                del self.joining.joiners[node]
                self.rebuilds.rebuilt.append(joiner.entered(node, now))
        return effects

    def _let_copy(self, attempt: Attempting, vote: Vote, now: float) -> None:
        """Regathers for members that waited for relearning until its end, or for long enough."""
        seconds = self.rules.relearn_seconds
        copying = self.joining.no_longer_wait(vote.relearning(), seconds, now)
        if copying:
            attempt.regather = f"{', '.join(copying)} may have a state now"

    # --- replicas that differ

    def _diverging(self, vote: Vote, now: float) -> list[Effect] | None:
        """Tries the step again after wrong replicas have copied their state. If it isn't known
        which are wrong, the holdings decide, once all members are queried. None: replicas agree."""
        effects, why = self.doubts.look(vote, self.standing.committed)
        return effects + self._gather(why, now) if why else None

    def _after_step(self, attempt: Attempting, step: pb.Step, now: float) -> list[Effect]:
        """A step boundary: adopts a newer view, if there is one."""
        coming, why = self.coming, attempt.regather
        if coming is not None and coming.is_due(now, self.rules.progress):
            why = f"view {coming.view.number}: {coming.view.reason}"
        begin = None if why else self._what_next()
        if begin is not None:
            step.begin.CopyFrom(begin)
            return self._send_step(step, now)
        self.finished = self.finished or self._is_over()
        effects = self._send_step(step, now)
        self.current = Resting(DriverPhase.WAITING)  # the attempt is over
        return effects + self._gather(why or "all shall have the end", now)

    # --- an attempt that goes on without lost nodes

    def _masked(self) -> frozenset[str]:
        return self.current.masked if isinstance(self.current, Attempting) else frozenset()

    def _lost(self) -> frozenset[str]:
        return self.current.lost if isinstance(self.current, Attempting) else frozenset()

    def _seats_awaited(self) -> set[str]:
        return {self.current.awaited_seat()} if isinstance(self.current, Attempting) else set()

    def _masked_members(self) -> list[str]:
        masked = self._masked()
        return sorted(masked & active(self._newest_view()).keys()) if masked else []

    def _newest_view(self) -> registry.View:
        return self.coming.view if self.coming is not None else self.view

    def _can_mask(self, nodes: Collection[str]) -> Attempting | None:
        """The attempt, if it can go on without these nodes."""
        attempt = self.current
        if not isinstance(attempt, Attempting) or self.node in nodes:
            return None
        return attempt if attempt.can_do_without(nodes, self.rules) else None

    def _lose(self, nodes: Collection[str], why: str, now: float) -> list[Effect] | None:
        """Goes on without these nodes, after a takeover if one leaves its stage without any. None:
        the attempt can't."""
        nodes = [node for node in nodes if node not in self._lost() | self._seats_awaited()]
        if not nodes:
            return []
        if (attempt := self._can_mask(nodes)) is not None:
            return self._mask(attempt, nodes, why, now)
        attempt = self.current if isinstance(self.current, Attempting) else None
        if attempt is None or self.node in nodes:
            return None
        if (last := attempt.to_be_taken_over(nodes, self.rules)) is None:
            return None
        others = [node for node in nodes if node != last]
        self.current = attempt.waiting_for(Takeover(last, self.members[last], now, why))
        return self._mask(self.current, others, why, now) if others else []

    def _mask(
        self, attempt: Attempting, nodes: Sequence[str], why: str, now: float
    ) -> list[Effect]:
        """Goes on by a plan that gives these nodes' microbatches to others."""
        attempt, moved = attempt.without(nodes, self.rules, self.seconds, self._apart(), now)
        step, names = attempt.begin.step, tuple(sorted(nodes))
        event = AttemptMasked(step=step, nodes=names, microbatches=moved, reason=why)
        return [event, *self._goes_on(attempt, now)]

    def _goes_on(self, attempt: Attempting, now: float) -> list[Effect]:
        """Goes on by a new plan, which has no votes yet."""
        self.current, self.ballot = attempt, self.ballot.next()
        self.checks.over()
        effects = self._tell_step(pb.Step(begin=attempt.begin))
        attempt.vote = self._put_to_the_vote()
        return effects + self._if_all_home(attempt, now)

    def _cut(self, attempt: Attempting, peer: str, cut: pb.Cut, now: float) -> list[Effect]:
        """`peer` can't reach a node, which is lost or may be found to be; or it can't use what that
        node has sent."""
        if cut.node in attempt.lost or cut.node not in self.members:
            return []  # a view that has yet to come here may have it already
        failed = pb.Failed(reason=cut.reason, accused=[cut.node], cause=cut.cause)
        if cut.cause == NONFINITE:
            return self._not_finite(attempt, cut.node, peer, cut.reason, now)
        if cut.cause != SILENT:
            return self._wronged(peer, failed, now)
        self.cuts.add(frozenset((peer, cut.node)))
        why = f"{peer} can't reach {cut.node}: {cut.reason}"
        attempt.unreached.setdefault(cut.node, (now, peer, why))
        return [] if self._is_here(cut.node) else [Suspect(cut.node, cut.reason)]

    def _is_here(self, seat: str) -> bool:
        """Whether it is a seat of this node, which ends when it suspects itself."""
        return node_of(seat) == node_of(self.node)

    # --- an attempt that waits for a takeover

    def _ask_seat(self, attempt: Attempting, now: float) -> list[Effect]:
        """Queries the new seat; its answer leads to the `Sync` with its state."""
        assert attempt.takeover is not None
        takeover, attempt.progressed = attempt.takeover, now
        takeover.asked, takeover.ordered = now, False
        return [self.ballot.send(takeover.seat, query=pb.Query())]

    def _heard_of_seat(self, attempt: Attempting, message: pb.Message, now: float) -> list[Effect]:
        assert attempt.takeover is not None
        takeover, at = attempt.takeover, self.standing
        match message.WhichOneof("body"):
            case "status" if (at.lineage, at.committed) == (0, 0) and not message.status.weightless:
                return self._taken_over(attempt, now)  # it has initial weights, as all have
            case "status" if not takeover.ordered:
                return self._hand_over(attempt, takeover)
            case "synced" if takeover.ordered and message.synced.step == at.committed:
                seconds, stall = now - takeover.asked, now - takeover.since
                event = rebuilt(takeover.seat, takeover.stage, message.synced, seconds, stall)
                return [event, *self._taken_over(attempt, now)]
            case "failed":
                failed = RebuildFailed(node=takeover.seat, reason=message.failed.reason)
                return [failed, *self._failed(takeover.seat, message.failed, now)]
        return []

    def _hand_over(self, attempt: Attempting, takeover: Takeover) -> list[Effect]:
        takeover.ordered = True
        holders, at = attempt.holders(takeover), self.standing
        near = beside(takeover.seat, holders)  # no link is between them; others, if that is lost
        holders = near + [node for node in holders if node not in near]
        reason = (
            f"{takeover.seat} takes the seat of {takeover.lost} at stage {takeover.stage} in step "
            f"{attempt.begin.step}: its twin at the stage before takes over"
        )
        sources = [Source(node, takeover.stage, at.committed, at.lineage) for node in holders]
        sync = at.sync("redundant", reason, sources, last=at.last)
        event = RebuildOrdered(
            node=takeover.seat,
            stage=takeover.stage,
            method="redundant",
            sources=tuple(holders),
            exact=True,
            fallback=False,
            reason=reason,
        )
        return [event, self.ballot.send(takeover.seat, sync=sync)]

    def _taken_over(self, attempt: Attempting, now: float) -> list[Effect]:
        """Goes on by a plan that gives the new seat the lost node's microbatches."""
        assert attempt.takeover is not None
        takeover = attempt.takeover
        attempt, moved = attempt.taken_over(self.rules, self.seconds, self._apart(), now)
        event = SeatTaken(
            step=attempt.begin.step,
            stage=takeover.stage,
            lost=takeover.lost,
            by=takeover.seat,
            microbatches=moved,
            seconds=now - takeover.since,
            reason=takeover.why,
        )
        return [event, *self._goes_on(attempt, now)]

    # --- accusations beside the attempt

    def _accused_apart(self, peer: str, cut: pb.Cut) -> list[Effect]:
        """Accuses a node whose data, of no attempt, `peer` can't use and had from others."""
        if cut.node not in self.members or cut.cause == SILENT:
            return []
        if self.failures.accused.get(peer, {}).get(self.members[cut.node]) == cut.node:
            return []  # already known
        failed = pb.Failed(reason=cut.reason, accused=[cut.node], cause=cut.cause)
        return self._accuse(peer, failed, harmed=False)

    # --- stragglers and hangs

    def _inquire(self, attempt: Attempting, now: float) -> list[Effect]:
        """Asks all members for accounts if the attempt is late."""
        usual, taken = self.hanging.usual, now - attempt.began
        late = is_late(taken, usual) if usual else taken >= self.rules.progress / 4
        if not late or not attempt.inquest.is_due(now):
            return []
        effects = self._to_rest(inquiry=pb.Inquiry())
        if usual and attempt.may_relieve(self.rules):
            for node in attempt.inquest.slow(attempt.begin.members):
                if attempt.can_do_without([node], self.rules):
                    effects.append(self.ballot.send(node, inquiry=pb.Inquiry(relieve=True)))
        return effects

    def _accounted(
        self, attempt: Attempting, peer: str, account: pb.Account, now: float
    ) -> list[Effect]:
        self.hanging.hear(peer, account.hang, now)
        attempt.inquest.heard(peer, account, now)
        effects: list[Effect] = []
        if account.given_up and attempt.may_relieve(self.rules):
            effects += self._relieve(attempt, peer, account.given_up, now)
        hanging = self.hanging.still_for_too_long(attempt.inquest.standing_still())
        if account.hang:
            hanging[peer] = account.hang
        for node, why in hanging.items():
            effects += self._held_up(node, why, now)
        return effects

    def _relieve(
        self, attempt: Attempting, node: str, given_up: Collection[int], now: float
    ) -> list[Effect]:
        """Gives microbatches that a slow node hasn't begun to others of its stage. The node won't
        do them, so if no such others are left, the step is tried again."""
        step, stage = attempt.begin.step, self.members[node]
        others = attempt.relieved(node, given_up, self.rules, self.seconds, self._apart())
        if others is None:
            why = f"{node} of stage {stage} is slow, and nobody is left to do what it has given up"
            return self._gather(why, now)
        relieved, moved = others
        event = Relieved(step=step, node=node, stage=stage, microbatches=moved)
        return [event, *self._goes_on(relieved, now)]

    def _held_up(self, node: str, why: str, now: float) -> list[Effect]:
        """Goes on, or begins again, without a hanging node. A node that alone has its stage's state
        is named, and awaited until `rules.progress` is over."""
        attempt, stages = self.current, self._training()
        if not isinstance(attempt, Attempting) or node in attempt.held_up or node not in stages:
            return []
        attempt.held_up[node] = why
        stage, step = stages[node], attempt.begin.step
        effects: list[Effect] = [HeldUp(step=step, node=node, stage=stage, reason=why)]
        others = [n for n, of in stages.items() if of == stage and n not in attempt.held_up]
        if is_last(node, stages, stages.keys() - attempt.held_up.keys()):
            return effects
        if node == self.node:
            return [*effects, Rejoin(f"{why}; {others[0]} can drive")]
        effects.append(Suspect(node, why, HANG))
        if (can_mask := self._can_mask([node])) is not None:
            return effects + self._mask(can_mask, [node], why, now)
        return effects + self._gather(f"{node} of stage {stage} hangs: {why}", now)

    def _replace(self, node: str, now: float) -> list[Effect]:
        """Lets an heir copy the state of a stage's last node, if possible; then that node goes."""
        why = f"{node} of stage {self.members[node]} is to be replaced: {self.hanging.why[node]}"
        self.current, self.pause_until = Resting(DriverPhase.PAUSING, why), now + REPLACED
        last = is_last(node, self.members, self.members)
        if last and may_have_heir(self.view, node) and self.hanging.heir_has_time(node, now):
            return [self.ballot.send(node, inquiry=pb.Inquiry(replace=why))]
        if node == self.node:
            return [Rejoin(why)]
        return [Suspect(node, why, HANG)]

    # --- failures

    def _wronged(self, peer: str, failed: pb.Failed, now: float) -> list[Effect]:
        """Handles unusable data from a node. If it is corroborated, the attempt goes on without the
        node, if it can, and the registry removes it; until then it has no microbatches. An accused
        driver makes room for another one. A single accuser gets as little as possible to do with
        the accused, so that others can find out."""
        accused = self.failures.guilty(peer, failed, self.members)
        guilty = [node for node in accused if self._believes(peer, node)]
        if self.node in guilty and peer != self.node and (others := self._others_of_stage()):
            return [Rejoin(f"{peer} says, too: {failed.reason}; {others[0]} can drive")]
        self.cuts |= {frozenset((peer, node)) for node in accused if node not in guilty}
        if guilty and (attempt := self._can_mask(guilty)) is not None:
            why = f"{peer} says: {failed.reason}"
            return self._accuse(peer, failed) + self._mask(attempt, guilty, why, now)
        return self._failed(peer, failed, now)

    def _compared(self, peer: str, compared: pb.Compared, now: float) -> list[Effect]:
        """Handles a comparison of a doubled visit. Accuses a node that was wrong `WRONG` times."""
        match self.checks.compared(peer, compared):
            case CheckedVisit() as again:
                neighbours = sorted({again.before, again.behind})
                return [self.ballot.send(node, check=again.message()) for node in neighbours]
            case UndecidedCheck(nodes, step, off):
                at = self.members[nodes[0]]
                return [ResultsDiffer(step=step, nodes=nodes, stage=at, difference=off)]
            case WrongResult(node, by, step, off, times):
                stage = self.members[node]
                event = ComputedWrong(step=step, node=node, stage=stage, by=by, difference=off)
                return [event, *(self._miscomputes(node, off, now) if times >= WRONG else [])]
        return []

    def _miscomputes(self, node: str, off: float, now: float) -> list[Effect]:
        by = self.checks.accusers(node)
        reason = f"it computes otherwise than two others of its stage, off by {off:.2g}"
        self.checks.doubt(node, self.members[node])
        failed = pb.Failed(reason=reason, accused=[node], cause=NUMBERS)
        return self._wronged(by[0] if len(by) == 1 else self.node, failed, now)

    def _not_finite(
        self, attempt: Attempting, node: str, by: str, reason: str, now: float
    ) -> list[Effect]:
        """Handles a non-finite tensor, whose source the first boundary names. The step is tried
        again without that node. If all nodes of its stage make such tensors, the model causes them,
        and they are let through. A node that makes one without any work is wrong."""
        if node in self.spoiling.why and not attempt.has_work_for(node):
            failed = pb.Failed(reason=reason, accused=[node], cause=NONFINITE)
            return self._wronged(by, failed, now)
        self.spoiling.heard(node, by, reason)
        self.failures.count += 1
        event = NonFinite(
            step=attempt.begin.step, node=node, stage=self.members[node], reason=reason
        )
        return [event, *self._gather(f"{node} made what is not finite: {reason}", now)]

    def _spoilt(self, begin: pb.Begin) -> list[Effect]:
        """Accuses repeated sources of non-finite values at the end of a step. If only one member
        reported a source, others are to find out."""
        effects: list[Effect] = []
        for node, reason in self.spoiling.over(begin).items():
            reporters = self.spoiling.by.get(node, set())
            several = len({*map(node_of, reporters)}) > 1
            by = self.node if several else min(reporters, default=node)
            if by not in self.members:  # it has left, and was the only one to report
                continue
            self.cuts |= {frozenset((reporter, node)) for reporter in reporters if reporter != node}
            failed = pb.Failed(reason=reason, accused=[node], cause=NONFINITE)
            effects += self._accuse(by, failed)
        return effects

    def _lets_through(self) -> bool:
        if not self.spoiling.why:
            return False
        training, idle = self._training(), self.idle.nodes
        return self.spoiling.lets_through({n: training[n] for n in training.keys() - idle})

    def _nonsense(self, peer: str, why: str, now: float) -> list[Effect]:
        """Treats a member's invalid message as its failure, and accuses it. An invalid answer to a
        query counts as none."""
        failed = pb.Failed(reason=why, accused=[peer], cause=NUMBERS)
        if peer in self.joining.joiners:
            return self._accuse(peer, failed) + self._give_up_following(peer, why, now)
        match self.current:
            case Attempting():
                return self._wronged(peer, failed, now)
            case Syncing():
                return self._failed(peer, failed, now)
        return self._accuse(peer, failed)

    def _others_of_stage(self) -> list[str]:
        """Nodes that could drive in this node's place."""
        stages = self._training()
        own = stages.get(self.node)
        return [node for node, stage in stages.items() if stage == own and node != self.node]

    def _accuse(self, peer: str, failed: pb.Failed, harmed: bool = True) -> list[Effect]:
        """Carries out an accusation. `harmed`: whether the attempt or the rebuild failed by it; if
        not, the accused stays a member, whoever accuses it."""
        effects: list[Effect] = []
        for node in self.failures.guilty(peer, failed, self.members):
            if failed.cause != SILENT and not (self._believes(peer, node) and harmed):
                if self.charges.keeps(peer, node):
                    self.idle.rest(node, self.members[peer] == self.members[node])
                effects += self._in_vain(peer, node, failed)
            else:
                if failed.cause != SILENT:
                    self.idle.stop([node])
                if not self._is_here(node):
                    effects.append(Suspect(node, failed.reason, failed.cause))
            if failed.cause != SILENT:
                stage, by = self.members[node], peer if peer != node else self.node
                effects.append(Accused(node=node, stage=stage, by=by, reason=failed.reason))
        return effects

    def _believes(self, peer: str, node: str) -> bool:
        """Whether the driver believes an accusation. It believes its own observations, and no other
        member alone: its accusation of a node must not rest on one member's."""
        if peer in (node, self.node):
            return True
        believed = self.charges.believes(peer, node)
        if believed:
            self.failures.proven(node)
        return believed

    def _in_vain(self, peer: str, node: str, failed: pb.Failed) -> list[Effect]:
        if not self.charges.in_vain(peer):
            return []
        why = f"it has accused others {VAIN} times, {node} the last time, and {NOBODY_ELSE}"
        event = Accused(node=peer, stage=self.members[peer], by=self.node, reason=why)
        self.idle.stop([peer])
        return [event, *([Suspect(peer, why, NUMBERS)] if peer != self.node else [])]

    def _failed(self, peer: str, failed: pb.Failed, now: float) -> list[Effect]:
        accusations = self._fails(peer, failed.reason, now)
        effects = self._accuse(peer, failed)
        pair = frozenset({peer, *failed.accused})
        match self.current:
            case Attempting(began=began) if (
                failed.cause == SILENT
                and len(pair) == 2
                and pair <= self.members.keys()
                and now - began >= self.rules.progress  # no link was lost
            ):
                effects += self._lost_between([pair], failed.reason)
        if isinstance(self.current, Syncing):
            effects.append(RebuildFailed(node=peer, reason=failed.reason))
        return effects + accusations + self._gather(f"{peer} says: {failed.reason}", now)

    def _fails(self, peer: str, why: str, now: float) -> list[Effect]:
        """Counts a failure that `peer` reported."""
        self.failures.count += 1
        if pause := self.failures.pause():
            self.pause_until = now + pause
        return self._alone(peer, why) if isinstance(self.current, Attempting) else []

    def _alone(self, peer: str, why: str, times: int = 1) -> list[Effect]:
        """Accuses a node that alone prevents commits, by its reports, link or silence, whatever it
        says."""
        if not self.failures.alone(peer, times) or peer == self.node:
            return []
        why = f"it holds the run up again and again, as {NOBODY_ELSE}: {why}"
        self.idle.stop([peer])
        event = Accused(node=peer, stage=self.members[peer], by=self.node, reason=why)
        return [event, Suspect(peer, why, NUMBERS)]

    def _out_of_patience(self, current: Attempting | Syncing, now: float) -> list[Effect]:
        seconds = now - current.progressed
        voting = isinstance(current, Attempting) and current.is_home()
        if seconds < self.rules.progress + (COMPLAINED if voting else 0):
            return []
        self.failures.count += 1
        held_up: Mapping[str, str] = self.hanging.why
        missing: set[frozenset[str]] = set()
        if isinstance(current, Attempting):
            held_up, missing = current.held_up, current.missing()
        problem = "held up" if held_up else "no progress"
        waited = f"{problem} for {seconds:.0f} s: {current.explain()}"
        effects: list[Effect] = []
        for node in sorted({*current.awaited, *held_up} - {self.node}):
            if node not in held_up:
                effects.append(Suspect(node, waited))
                if isinstance(current, Attempting) and current.is_home():
                    effects += self._alone(node, waited, HELD_UP // UNVOTED)
            elif isinstance(current, Syncing) or node not in self.hanging.why:
                effects.append(Suspect(node, held_up[node], HANG))  # else it may be copied first
        return effects + self._lost_between(missing, waited) + self._gather(waited, now)

    def _lost_between(self, pairs: Collection[frozenset[str]], why: str) -> list[Effect]:
        """Messages were lost between the nodes of each pair. Until it is known which one is wrong,
        one rests: then all goes well, or the other one loses something, too."""
        guilty = self.failures.between(pairs)
        if guilty == self.node and (others := self._others_of_stage()):
            return [Rejoin(f"{why}, as before, with somebody else; {others[0]} can drive")]
        if guilty:
            return self._alone(guilty, why, HELD_UP) if guilty in self.members else []
        for pair in sorted(pairs, key=sorted):
            self._let_one_rest(pair)
        return []

    def _let_one_rest(self, pair: frozenset[str]) -> None:
        training, common = self._training(), self.failures.lost_at
        working = Counter(stage for node, stage in training.items() if node not in self.idle)
        candidates = sorted(pair & training.keys() - {self.node})
        able = [n for n in candidates if working[training[n]] > (n not in self.idle)]
        if able:
            node = min(able, key=lambda node: node not in common)
            by_replica = {training.get(node) for node in pair} == {training[node]}
            self.idle.rest(node, by_replica)

    def _superseded(self, peer: str, newer: Ballot, now: float) -> list[Effect]:
        """`peer` has promised itself to a newer ballot. If it is of another view, the registry will
        say which node drives. If it is of this one, only this driver could have made it."""
        if newer.view != self.ballot.view or newer <= self.ballot:
            return []
        made = self.ballot.attempt
        why = f"it has heard of attempt {newer.attempt}, and this is only the {made}. of the view"
        return self._nonsense(peer, why, now)

    # --- the end

    def _finish(self, now: float) -> list[Effect]:
        self.finished = True
        step, loss = self.standing.committed, self.validated[1]
        return self._halt(pb.Halt(finished=True, step=step, validation_loss=loss), now)

    def _halt(self, halt: pb.Halt, now: float) -> list[Effect]:
        why = "all steps are committed" if halt.finished else halt.reason
        self.current = Resting(DriverPhase.HALTED, why)
        effects = self.ballot.send_all(sorted(self.members), halt=halt)
        return [*effects, *self._report_rebuilds(now)]

    def _rest(self) -> dict[str, int]:
        """All members but those that are lost, or wait for a state."""
        without = self._lost() | self._seats_awaited() | self.joining.waiting.keys()
        return {n: stage for n, stage in sorted(self.members.items()) if n not in without}

    def _to_rest(self, **body: Any) -> list[Effect]:
        return [*self.ballot.send_all(self._rest(), **body)]

    def _tell_step(
        self, step: pb.Step, checks: Mapping[str, Sequence[pb.Check]] = MappingProxyType({})
    ) -> list[Effect]:
        """Sends a step to the rest: of a plan, each node's part. `checks`: spot checks by node."""
        if not step.HasField("begin"):
            return self._tell_commit(self._rest())
        rest, spare = self._rest(), self.rules.masking == "spare"
        self.keepers = frozenset(record_holders(self._training(), self.ledgers))
        if step.HasField("commit"):
            sends = self._send_commit(rest)
        else:
            sends = self.ballot.send_all(rest, step=pb.Step())
        begins = {send.to: send.message.step.begin for send in sends}
        self.telling.tell(self.ballot, step.begin, begins, rest, spare)
        for node in checks.keys() & begins.keys():
            begins[node].checks.extend(checks[node])
        for node in self.keepers & begins.keys():
            begins[node].keeps = True
        return [*sends]

    def _tell_commit(self, nodes: Iterable[str]) -> list[Effect]:
        return [*self._send_commit(nodes)]

    def _send_commit(self, nodes: Iterable[str]) -> list[Send]:
        messages: dict[int, pb.Message] = {}  # by commit
        sends = []
        for node, commit in self._commit_for(nodes).items():
            if id(commit) not in messages:
                messages[id(commit)] = self.ballot.says(step=pb.Step(commit=commit))
            sends.append(Send.copy(node, messages[id(commit)]))
        return sends

    def _commit_for(self, nodes: Iterable[str]) -> dict[str, pb.Commit]:
        """The last commit, in the form for each of these nodes."""
        whole, bare = self.standing.last, without_records(self.standing.last)
        keep = record_holders(self._rest(), self.ledgers) - self.recorded
        return {node: whole if node in keep else bare for node in nodes}

    def _to_note(self) -> list[str]:
        """Nodes that are sent the last step's records once more."""
        at, last = self.standing, self.standing.last
        again = self.noted_again == (at.lineage, at.committed)
        return to_replicate(self.ledgers) if has_records(last) and not again else []

"""Attempting: the members compute a step, and the driver commits it once all have voted.

What is planned and done is an `AttemptState`. Lost, hanging and slow members lead to another plan,
or the attempt is given up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.registry_pb2 import HANG, NONFINITE, SILENT
from planaria.node.driver.attempt_state import AttemptState, Vote
from planaria.node.driver.fault_policy import HELD_UP, UNVOTED
from planaria.node.driver.hangs import is_last
from planaria.node.driver.joiners import FOLLOWED
from planaria.node.driver.phases import DriverPhase, Phase, Turn
from planaria.node.driver.rebuilds import rebuilt
from planaria.node.driver.records import unrecorded
from planaria.node.driver.skipping import why_paused
from planaria.node.driver.spot_checks import WRONG, CheckedVisit, UndecidedCheck, WrongResult
from planaria.node.driver.takeover import Takeover, to_be_taken_over, twin_holders
from planaria.node.report.events import (
    AttemptMasked,
    ComputedWrong,
    HeldUp,
    NodeLost,
    NonFinite,
    RebuildFailed,
    Relieved,
    ResultsDiffer,
    Validated,
)
from planaria.node.transaction.effects import Ballot, Effect, Rejoin, Suspect
from planaria.node.transaction.plan_encoding import active
from planaria.node.transaction.routing import routes, shortened
from planaria.node.wire import stage_pb2 as pb

if TYPE_CHECKING:
    from planaria.node.driver.driver import Driver

EVICTED = 3.0
"""Seconds that a complete attempt without a lost node waits for the view without that node; then
the node isn't lost, and the attempt is given up."""
COMPLAINED = 2.0
"""Seconds that votes are awaited beyond the members' wait for each other: a member that waits in
vain reports for which node."""


class Attempting(Phase):
    state: AttemptState

    def __init__(self, driver: Driver, state: AttemptState) -> None:
        super().__init__(driver)
        self.state = state

    @property
    def kind(self) -> DriverPhase:
        return DriverPhase.REDUCING if self.state.is_home() else DriverPhase.RUNNING

    def explain(self) -> str:
        return self.state.explain()

    # --- events

    def received(self, peer: str, message: pb.Message, now: float) -> Turn:
        ballot, driver = Ballot.of(message.ballot), self.driver
        of_attempt, is_current = self.state.since <= ballot, ballot == driver.ballot
        follows = peer in driver.joining.joiners
        match message.WhichOneof("body"):
            case "scored" if of_attempt:
                wrong = self._scored(peer, message.scored.microbatches, now)
                return self.stays(self._send_records()) if wrong is None else wrong
            case "home" if of_attempt:
                if (wrong := self._scored(peer, [message.home], now)) is not None:
                    return wrong
                self.state.homes[message.home.microbatch] = message.home
                self.state.progressed = now
                return self._if_all_home(now)
            case "ready" if is_current:
                return self._voted(peer, message.ready, now)
            case "status" | "synced" | "failed" if peer == self.seat and of_attempt:
                return self._heard_of_seat(message, now)
            case "failed" if follows:
                given_up = super().received(peer, message, now)
                return self._if_all_ready(now).after(given_up.effects)
            case "failed" if is_current:
                return self._failed(peer, message.failed, now)
            case "account" if of_attempt:
                return self._accounted(peer, message.account, now)
            case "cut" if of_attempt:
                return self._complained(peer, message.cut, now)
            case "compared" if is_current:
                return self._compared(peer, message.compared, now)
        return super().received(peer, message, now)

    def viewed(self, view: registry.View, now: float) -> Turn | None:
        """Goes on until the view can be adopted at the end, and greets newcomers."""
        driver = self.driver
        known = driver.members.keys() | (active(driver.coming.view) if driver.coming else {})
        stay = active(view)
        coming, gone = driver.adopt_later(view, now)
        effects = self._lose(gone, view.reason, now)
        if effects is None:
            return None
        takeover, former = self.state.takeover, self.seat
        if takeover is not None and not stay.keys() & {takeover.lost, former}:
            takeover.choose(stay, known, twin_holders(self.state.begin, takeover.stage, self.lost))
            if not takeover.seat and takeover.stage in stay.values():
                return None  # a node that had joined before waits for the next attempt
            driver.members = {n: s for n, s in driver.members.items() if n != former}
            if takeover.seat:  # without one, a newcomer may take it soon
                driver.members |= {takeover.seat: takeover.stage}
                coming.unanswered.discard(takeover.seat)
                effects += self._ask_seat(now)
        return self.stays([*effects, *coming.greetings()])

    def link_lost(self, lost: NodeLost, why: str, now: float) -> Turn:
        driver, node = self.driver, lost.node
        if node == self.seat:
            return self.stays(self._ask_seat(now))  # its link may only have been dialled again
        if node in driver.joining.waiting:
            return self.stays([lost])
        if node in driver.joining.joiners:
            driver.joining.joiners[node].caught_up = None
            self.state.vote.joiners.pop(node, None)
            return self._if_all_ready(now).after([lost])
        effects = [lost, *driver.charge_holdup(node, why)]
        goes_on = self._lose([node], why, now)
        turn = self.gather(why, now) if goes_on is None else self.stays(goes_on)
        return turn.after(effects)

    def tick(self, now: float) -> Turn:
        driver, state = self.driver, self.state
        if state.takeover is None and state.is_home() and state.vote.is_complete:
            return self._if_all_ready(now)
        effects: list[Effect] = []
        limit = FOLLOWED * driver.rules.progress
        for node, why in driver.joining.hopeless(now, limit).items():
            effects += self.give_up_following(node, why, now).effects
        by, why = state.unreachable(now)
        if by:
            driver.count_failure(now)
            effects += driver.charge_holdup(by, why)
        takeover = state.takeover
        if why := why or (takeover.overdue(now) if takeover is not None else ""):
            return self.gather(why, now).after(effects)
        if takeover is not None and takeover.may_ask(now):
            effects += self._ask_seat(now)
        return self.stays(effects) if effects else self._out_of_patience(now)

    # --- ends

    def gather(self, why: str, now: float) -> Turn:
        if self.state.begin.kind != pb.Begin.TRAIN:
            return super().gather(why, now)
        waited_for = self.state.waited_for()
        reason, suspects = self.driver.faults.given_up(why, waited_for)
        aborted = self.driver.aborted(self.state.begin.step, reason)
        return super().gather(why, now).after([aborted, *suspects])

    def unfollowed(self, peer: str, why: str, now: float) -> Turn:
        self.state.vote.joiners.pop(peer, None)
        self.state.regather = why
        return self.stays()

    def _after_step(self, step: pb.Step, now: float) -> Turn:
        """Sends the commit and begins what comes next; adopts a newer view first, if one is due."""
        driver, coming, why = self.driver, self.driver.coming, self.state.regather
        if coming is not None and coming.is_due(now, driver.rules.progress):
            why = f"view {coming.view.number}: {coming.view.reason}"
        begin = None if why else driver.what_next()
        if begin is not None:
            step.begin.CopyFrom(begin)
            return driver.send_step(step, now)
        all_committed = driver.standing.committed >= driver.rules.steps
        driver.finished = driver.finished or (all_committed and driver.is_over())
        turn = driver.send_step(step, now)
        why = why or "all members must have the last commit"
        return super().gather(why, now).after(turn.effects)

    # --- microbatches

    def _scored(self, peer: str, scored: Iterable[pb.Home], now: float) -> Turn | None:
        """Takes in microbatches' losses. None: all are valid, and still of this source."""
        for home in scored:
            if not (math.isfinite(home.loss) or self.state.begin.non_finite):
                why = f"its loss in microbatch {home.microbatch} is not finite"
                return self._not_finite(peer, peer, why, now)
            try:
                if not self.state.is_source(peer, home):
                    return self.stays()
            except ValueError as error:
                return self.invalid(peer, f"it sent {error}", now)
        return None

    def _send_records(self) -> list[Effect]:
        """Once all microbatches are scored, sends records to the record holders while gradients are
        on their way, and lets joiners vote."""
        state, vote, ballot = self.state, self.state.vote, self.driver.ballot
        scored = len(state.scored) == len(state.begin.plan) and state.takeover is None
        if state.begin.kind != pb.Begin.TRAIN or vote.records or not scored:
            return []
        vote.records = [home for _, home in sorted(state.scored.items())]
        records = pb.Records(microbatches=vote.records)
        return [
            *ballot.send_all(sorted(vote.keepers), records=records),
            *ballot.send_all(sorted(self.driver.joining.caught_up()), reduce=pb.Reduce()),
        ]

    def _ask_for_votes(self) -> list[Effect]:
        """Asks for the votes once all microbatches are home; before, sends the records."""
        effects, vote = self._send_records(), self.state.vote
        if self.state.takeover is None and self.state.is_home() and not vote.hurried:
            vote.hurried = True
            asked = {*vote.awaited, *self.driver.joining.caught_up()}
            effects += self.driver.ballot.send_all(sorted(asked), reduce=pb.Reduce())
        return effects

    def _if_all_home(self, now: float) -> Turn:
        driver, state = self.driver, self.state
        if state.begin.kind == pb.Begin.TRAIN:
            return self._if_all_ready(now).after(self._ask_for_votes())
        if not state.is_home():
            return self.stays()
        driver.validated = driver.standing.committed, state.mean_loss()
        event = Validated(step=driver.validated[0], loss=driver.validated[1])
        accused = driver.faults.accuse_non_finite(state.begin, driver.members)
        return self._after_step(pb.Step(), now).after([event, *accused])

    # --- votes

    def _voted(self, peer: str, ready: pb.Ready, now: float) -> Turn:
        step = self.state.begin.step
        if ready.step != step:
            why = f"it voted for step {ready.step} in an attempt at step {step}"
            return self.invalid(peer, why, now)
        if peer not in self.driver.joining.joiners:
            seconds, stages = self.driver.seconds, self.driver.members
            seconds[peer] = ready.seconds_per_microbatch or shortened(peer, stages, seconds)
        self.state.voted(peer, ready, now)
        return self._if_all_ready(now)

    def _if_all_ready(self, now: float) -> Turn:
        """Commits the step, or gathers, once all training members have voted; waits shortly for
        joiners.

        Not while a node without which the attempt goes on is a member: in a view that this driver
        doesn't have, others may train with that node and without this one."""
        driver, state, vote = self.driver, self.state, self.state.vote
        if state.takeover is not None or not (vote.is_complete and state.is_home()):
            return self.stays()
        effects, why = driver.divergence.compare(vote, driver.standing.committed)
        if why:  # once all members are queried, holdings decide which replica is wrong
            return self.gather(why, now).after(effects)
        driver.ledgers = vote.ledgers()
        if why := unrecorded(driver.ledgers.values()):
            return self.gather(why, now)
        if driver.to_note():
            return self.gather(f"no ledger has step {driver.standing.committed}", now)
        if members := driver.masked_members():
            if now - vote.complete < EVICTED:
                return self.stays()
            return self.gather(f"{', '.join(members)} isn't lost after all", now)
        if driver.joining.must_wait(vote, state.began, now):
            return self.stays()
        return self._decide(now)

    def _decide(self, now: float) -> Turn:
        """All members are ready: commits, and begins what comes next in the same message."""
        driver, vote = self.driver, self.state.vote
        effects = self._let_joiners_in(vote, now) + driver.commit(self.state, now)
        if copying := driver.joining.no_longer_wait(vote.relearning(), now):
            self.state.regather = f"{', '.join(copying)} can get a state now"
        step = pb.Step(commit=driver.standing.last)
        if not (why := why_paused(step.commit, vote.norms())):
            return self._after_step(step, now).after(effects)
        # One may be an overflow; more teach nothing until a node joins.
        turn = driver.send_step(step, now)
        halt = pb.Halt(reason=why, step=step.commit.step)
        driver.paused = driver.members, halt
        return driver.halt(halt, now).after(effects + turn.effects)

    def _let_joiners_in(self, vote: Vote, now: float) -> list[Effect]:
        """Makes joiners training members that have voted as a replica of their stage has."""
        driver, effects, step = self.driver, list[Effect](), self.driver.standing.committed
        for node, joiner in driver.joining.may_enter(vote):
            if other := vote.dissents_from(joiner.stage, vote.joiners[node]):
                why = f"its weights or gradient differ from those of {other}"
                effects += driver.divergence.report_wrong(joiner.stage, [other], {node: why}, step)
                effects += self.give_up_following(node, why, now).effects
            else:
                del driver.joining.joiners[node]
                driver.rebuilds.rebuilt.append(joiner.entered(node, now))
        return effects

    # --- going on without lost nodes

    def _can_mask(self, nodes: Collection[str]) -> bool:
        """Whether the attempt can go on without these nodes."""
        driver = self.driver
        return driver.node not in nodes and self.state.can_do_without(nodes, driver.rules)

    def _lose(self, nodes: Collection[str], why: str, now: float) -> list[Effect] | None:
        """Goes on without lost nodes, by a takeover if a stage has no other. None: impossible."""
        driver = self.driver
        nodes = [node for node in nodes if node not in self.lost | {self.seat}]
        if not nodes:
            return []
        if self._can_mask(nodes):
            return self._mask(nodes, why, now)
        if driver.node in nodes:
            return None
        last = to_be_taken_over(self.state.begin, nodes, driver.rules)
        if last is None or self.state.takeover is not None:  # one at a time
            return None
        others = [node for node in nodes if node != last]
        takeover = Takeover(last, driver.members[last], now, why)
        self.state = replace(self.state, takeover=takeover, progressed=now)
        return self._mask(others, why, now) if others else []

    def _mask(self, nodes: Sequence[str], why: str, now: float) -> list[Effect]:
        """Goes on with the attempt by a plan that gives these nodes' microbatches to others."""
        driver = self.driver
        state, moved = self.state.without(nodes, driver.planning(), now)
        step, names = state.begin.step, tuple(sorted(nodes))
        event = AttemptMasked(step=step, nodes=names, microbatches=moved, reason=why)
        return [event, *self._go_on(state)]

    def _go_on(self, state: AttemptState) -> list[Effect]:
        """Sends the attempt's new plan, and drops the votes by the former one."""
        driver, self.state = self.driver, state
        driver.ballot = driver.ballot.next()
        driver.checks.over()
        effects = driver.tell_step(pb.Step(begin=state.begin))
        state.vote = Vote(driver.training(), driver.keepers)
        return effects + self._ask_for_votes()

    def _complained(self, peer: str, cut: pb.Cut, now: float) -> Turn:
        """Handles a member's complaint: it can't reach another node, or use what that has sent."""
        driver = self.driver
        if cut.node in self.lost or cut.node not in driver.members:
            return self.stays()  # a view that has yet to come here may have it already
        if cut.cause == NONFINITE:
            return self._not_finite(cut.node, peer, cut.reason, now)
        if cut.cause != SILENT:
            failed = pb.Failed(reason=cut.reason, accused=[cut.node], cause=cut.cause)
            return self.accused_by(peer, failed, now)
        driver.faults.cuts.add(frozenset((peer, cut.node)))
        why = f"{peer} can't reach {cut.node}: {cut.reason}"
        self.state.unreached.setdefault(cut.node, (now, peer, why))
        here = driver.faults.is_here(cut.node)
        return self.stays([] if here else [Suspect(cut.node, cut.reason)])

    # --- a takeover

    def _ask_seat(self, now: float) -> list[Effect]:
        """Queries the new seat; its answer leads to the `Sync` with its state."""
        assert self.state.takeover is not None
        takeover, self.state.progressed = self.state.takeover, now
        takeover.asked, takeover.ordered = now, False
        return [self.driver.ballot.send(takeover.seat, query=pb.Query())]

    def _heard_of_seat(self, message: pb.Message, now: float) -> Turn:
        assert self.state.takeover is not None
        takeover, at = self.state.takeover, self.driver.standing
        match message.WhichOneof("body"):
            case "status" if (at.lineage, at.committed) == (0, 0) and not message.status.weightless:
                return self.stays(self._taken_over(now))  # it has initial weights, as all have
            case "status" if not takeover.ordered:
                begin = self.state.begin
                twins = twin_holders(begin, takeover.stage, self.lost)
                ordered, sync = takeover.order(begin.step, twins, at)
                return self.stays([ordered, self.driver.ballot.send(takeover.seat, sync=sync)])
            case "synced" if takeover.ordered and message.synced.step == at.committed:
                seconds, stall = now - takeover.asked, now - takeover.since
                event = rebuilt(takeover.seat, takeover.stage, message.synced, seconds, stall)
                return self.stays([event, *self._taken_over(now)])
            case "failed":
                failed = RebuildFailed(node=takeover.seat, reason=message.failed.reason)
                return self._failed(takeover.seat, message.failed, now).after([failed])
        return self.stays()

    def _taken_over(self, now: float) -> list[Effect]:
        """Goes on by a plan that gives the new seat the lost node's microbatches."""
        assert self.state.takeover is not None
        takeover, driver = self.state.takeover, self.driver
        state, moved = self.state.taken_over(driver.planning(), now)
        return [takeover.taken(state.begin.step, moved, now), *self._go_on(state)]

    # --- stragglers and hangs

    def _inquire(self, now: float) -> list[Effect]:
        """Asks all members for accounts if the attempt is late."""
        driver, state = self.driver, self.state
        if not driver.hanging.is_late(now - state.began) or not state.inquest.is_due(now):
            return []
        effects: list[Effect] = [*driver.ballot.send_all(driver.present(), inquiry=pb.Inquiry())]
        if driver.hanging.usual and state.may_replan(driver.rules):
            for node in state.inquest.slow(state.begin):
                if state.can_do_without([node], driver.rules):
                    effects.append(driver.ballot.send(node, inquiry=pb.Inquiry(relieve=True)))
        return effects

    def _accounted(self, peer: str, account: pb.Account, now: float) -> Turn:
        driver, inquest = self.driver, self.state.inquest
        driver.account(peer, account, now)
        self.state.account(peer, account, now)
        turn = self.stays()
        if account.given_up and self.state.may_replan(driver.rules):
            turn = self._relieve(peer, account.given_up, now)
        hanging = driver.hanging.still_for_too_long(inquest.standing_still())
        if account.hang:
            hanging[peer] = account.hang
        for node, why in hanging.items():
            if turn.phase is self:
                turn = self._held_up(node, why, now).after(turn.effects)
        return turn

    def _relieve(self, node: str, given_up: Collection[int], now: float) -> Turn:
        """Gives microbatches that a slow node hasn't begun to others of its stage. The node won't
        do them, so if no such others are left, the step is tried again."""
        driver = self.driver
        step, stage = self.state.begin.step, driver.members[node]
        relieved = self.state.relieved(node, given_up, driver.planning())
        if relieved is None:
            why = f"{node} of stage {stage} is slow, and no other node is left for what it gave up"
            return self.gather(why, now)
        state, moved = relieved
        event = Relieved(step=step, node=node, stage=stage, microbatches=moved)
        return self.stays([event, *self._go_on(state)])

    def _held_up(self, node: str, why: str, now: float) -> Turn:
        """Goes on with the attempt, or begins again, without a hanging node. A node that alone has
        its stage's state is named, and awaited until `rules.progress` is over."""
        driver, held_up, stages = self.driver, self.state.held_up, self.driver.training()
        if node in held_up or node not in stages:
            return self.stays()
        held_up[node] = why
        stage, step = stages[node], self.state.begin.step
        effects: list[Effect] = [HeldUp(step=step, node=node, stage=stage, reason=why)]
        if is_last(node, stages, stages.keys() - held_up.keys()):
            return self.stays(effects)
        if node == driver.node:
            others = [n for n, of in stages.items() if of == stage and n not in held_up]
            return self.stays([*effects, Rejoin(f"{why}; {others[0]} can drive")])
        effects.append(Suspect(node, why, HANG))
        if self._can_mask([node]):
            return self.stays(effects + self._mask([node], why, now))
        return self.gather(f"{node} of stage {stage} hangs: {why}", now).after(effects)

    # --- faults

    def _compared(self, peer: str, compared: pb.Compared, now: float) -> Turn:
        """Handles a comparison of a doubled visit. A node that was wrong `WRONG` times is accused,
        once for each machine that finds it wrong."""
        driver = self.driver
        match driver.checks.compared(peer, compared):
            case CheckedVisit() as again:
                neighbours = sorted({again.before, again.behind})
                sends = [driver.ballot.send(node, check=again.message()) for node in neighbours]
                return self.stays(sends)
            case UndecidedCheck(nodes, step, off):
                at = driver.members[nodes[0]]
                return self.stays([ResultsDiffer(step=step, nodes=nodes, stage=at, difference=off)])
            case WrongResult(node, by, step, off, times):
                stage = driver.members[node]
                event = ComputedWrong(step=step, node=node, stage=stage, by=by, difference=off)
                if times < WRONG or driver.checks.is_known(node):
                    return self.stays([event])
                by, failed = driver.checks.charge(node, stage, off)
                return self.accused_by(by or driver.node, failed, now).after([event])
        return self.stays()

    def _not_finite(self, node: str, by: str, reason: str, now: float) -> Turn:
        """A member reports a non-finite tensor, whose source the first boundary names. The step is
        tried again without that node. If all nodes of its stage make such tensors, the model causes
        them, and they are let through. A node that makes one without any work is wrong."""
        driver, state = self.driver, self.state
        spoiling = driver.faults.spoiling
        has_work = any(node in route.nodes for route in routes(state.begin).values())
        if node in spoiling.why and not has_work:
            failed = pb.Failed(reason=reason, accused=[node], cause=NONFINITE)
            return self.accused_by(by, failed, now)
        spoiling.heard(node, by, reason)
        driver.faults.failures.count += 1
        stage = driver.members[node]
        event = NonFinite(step=state.begin.step, node=node, stage=stage, reason=reason)
        return self.gather(f"{node} made non-finite values: {reason}", now).after([event])

    def accused_by(self, peer: str, failed: pb.Failed, now: float) -> Turn:
        """Goes on without the members that are found guilty; else the attempt has failed."""
        driver = self.driver
        guilty = driver.faults.convicted(peer, failed, driver.members)
        others = driver.faults.successors(driver.training())
        if driver.node in guilty and peer != driver.node and others:
            reason = f"{peer} also says: {failed.reason}; {others[0]} can drive"
            return self.stays([Rejoin(reason)])
        here = any(map(driver.faults.is_here, guilty))  # not removed: a commit would wait for it
        if guilty and not here and self._can_mask(guilty):
            effects = driver.accuse(peer, failed)
            return self.stays(effects + self._mask(guilty, f"{peer} says: {failed.reason}", now))
        return self._failed(peer, failed, now)

    def _failed(self, peer: str, failed: pb.Failed, now: float) -> Turn:
        driver = self.driver
        driver.count_failure(now)
        accusations = driver.charge_holdup(peer, failed.reason)
        effects = driver.accuse(peer, failed)
        pair = frozenset({peer, *failed.accused})
        if (
            failed.cause == SILENT
            and len(pair) == 2
            and pair <= driver.members.keys()
            and now - self.state.began >= driver.rules.progress  # no link was lost
        ):
            effects += driver.lost_between([pair], failed.reason)
        turn = self.gather(f"{peer} says: {failed.reason}", now)
        return turn.after(effects + accusations)

    def _out_of_patience(self, now: float) -> Turn:
        """Gives up the attempt after `rules.progress` seconds without any progress; asks the
        members of a late attempt for accounts before."""
        driver, state = self.driver, self.state
        seconds, voting = now - state.progressed, state.is_home()
        if seconds < driver.rules.progress + (COMPLAINED if voting else 0):
            return self.stays(self._inquire(now))
        driver.faults.failures.count += 1
        problem = "held up" if state.held_up else "no progress"
        waited = f"{problem} for {seconds:.0f} s (swarm.progress): {state.explain()}"
        late = sorted(set(state.awaited) - state.held_up.keys())
        is_here = driver.faults.is_here  # to suspect a seat of its own node would end the driver
        effects: list[Effect] = [Suspect(node, waited) for node in late if not is_here(node)]
        for node in late if voting else ():
            effects += driver.charge_holdup(node, waited, HELD_UP // UNVOTED)
        hanging = state.held_up.keys() - driver.hanging.why.keys()  # others may be copied first
        effects += [
            Suspect(node, state.held_up[node], HANG)
            for node in sorted(hanging)
            if not is_here(node)
        ]
        effects += driver.lost_between(state.lost_between(), waited)
        return self.gather(waited, now).after(effects)

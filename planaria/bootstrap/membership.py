"""The membership state machine: issues numbered views of the members and their stages.

Pure: an event method takes `now` (seconds of a monotonic clock) and returns effects for the shell
to carry out. It has no clock, socket or task. Its data are messages of
`proto/bootstrap/registry.proto`; a `View` never changes after it was issued.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable

from planaria.bootstrap import registry_pb2 as pb
from planaria.bootstrap.accusations import Accusations, Convicted, evidence
from planaria.bootstrap.awaited_saves import CRASHED, AwaitedSaves, awaited_in_words
from planaria.bootstrap.candidates import SeatAssigned
from planaria.bootstrap.commit_watermark import CommitWatermark, age_of
from planaria.bootstrap.effects import Effect, Evict, Issue, Refused, not_served
from planaria.bootstrap.escaping import readable
from planaria.bootstrap.history import DECISION_LENGTH, ViewHistory
from planaria.bootstrap.identity import Identity, instance_of
from planaria.bootstrap.isolation import Isolation
from planaria.bootstrap.joining import Asked, JoinAttempt, Joining, refusal_of_former
from planaria.bootstrap.leases import Leases
from planaria.bootstrap.member_table import Members, NodeRecord
from planaria.bootstrap.neighbours import place_of
from planaria.bootstrap.next_driver import Driving
from planaria.bootstrap.operator_orders import Orders, stopped_at
from planaria.bootstrap.placement import assign
from planaria.bootstrap.quarantine import Quarantine
from planaria.bootstrap.rules import PROTOCOL, MembershipRules, problem_with
from planaria.bootstrap.truncation import truncate_description
from planaria.bootstrap.unreachable_pairs import LOOKS, ToEvict, UnreachablePairs
from planaria.bootstrap.views import check_shown, is_genuine, sign

CONTRADICTED_EVERY = 60.0  # seconds between two decisions about refused reports of a node
LEAVES_COLLECTED = 0.3  # seconds to collect leave announcements, without placement meanwhile
SECONDS_PER_MEMBER = 2e-4  # between two join batches; sending a view takes half of that
OWNER_AWAITED = (
    "stage 0 is vacant: waiting for a node of the run's owner "
    "(`planaria node --join @owner.invite`)"
)


class Membership:
    """The registry's state machine. Carry out the effects in order before the next event."""

    def __init__(
        self,
        rules: MembershipRules,
        key: Identity | None = None,
        history: ViewHistory | None = None,
    ) -> None:
        """`key`: the run's, which signs views; None: a new one. `history`: that of the run under
        former rules."""
        self.rules, self.key = rules, key or Identity.generate()
        self.view = pb.View(run=rules.run, reason="no node has joined yet")
        self.history = history or ViewHistory()
        self._issued = -math.inf  # time of the newest view
        self._banned: list[str] = []  # instances, in order
        numbers = itertools.count(1)  # of dials
        self.members = Members(rules)
        self._watermark = CommitWatermark(rules.steps)
        self._unreachable = UnreachablePairs(self.members)
        self._quarantine = Quarantine()
        self._accusations = Accusations(self.members)
        self._driving = Driving(self.members, self._accusations)
        self._leases = Leases(self.members, self._unreachable, self.history, numbers)
        self.isolation = Isolation(self.members, self._leases, self.history, numbers)
        self._joining = Joining(
            self.members, self._driving, self.isolation, self._quarantine, self.history, numbers
        )
        self._orders = Orders()
        self._awaited = AwaitedSaves(rules.wait_for_saves)
        self._unsettled = False  # whether a stage is vacant, or a node has several seats
        self._placed_at = -math.inf  # time of the last periodic placement
        self._collecting_until = math.inf  # end of the collection of leave announcements
        self._effects: list[Effect] = []
        self._changes: list[str] = []  # descriptions; if not empty, a view is due

    # -- events ----------------------------------------------------------------------------------

    def join(
        self, attempts: Iterable[JoinAttempt], now: float
    ) -> tuple[list[pb.JoinReply | Refused], list[Effect]]:
        """Makes nodes members or standbys, in one view; answers are in the order of requests. A
        repeated request gets the same answer.

        While no member is heard, the reply is a question: the node must dial the members, as the
        registry does (`Dial`), and join again. If none answers, all are evicted. An instance in
        quarantine gets its remaining time. A node at a member's address replaces it: at once with
        the same key, else once the member is gone. Elsewhere, a key has one member at a time. The
        shell adds view and `run_file` to the reply: a copy of thousands of members for each would
        take too long.
        """
        results = [self._let_in(attempt, now) for attempt in attempts]
        effects = self._finish(now)
        return [self.reply_to(r.name) if isinstance(r, NodeRecord) else r for r in results], effects

    def wait(self, names: Iterable[str], now: float) -> None:
        """Extends the leases of joined nodes that wait for their reply, and can't renew yet."""
        for name in names:
            if (node := self.members.by_name.get(name)) is not None:
                node.renewed = now

    def joins_due(self, now: float) -> float:
        """The time of the decision about a join that arrives now, together with others until then:
        at once, unless a view was just issued. All members must get each view, and a view of many
        joins costs little more than that of one."""
        return max(now, self._issued + SECONDS_PER_MEMBER * len(self.members))

    def learn(self, renewal: pb.Renewal, now: float) -> list[Effect]:
        """Goes on from the view in the first renewal of a KeepAlive stream, if this registry lacks
        its journal. Raises Refused for another run, and for a view that the run's key has not
        signed."""
        if renewal.run and renewal.run != self.rules.run:
            raise not_served(self.rules.run, renewal.run)
        is_member = renewal.node in self.members.by_name
        check_shown(renewal, self.view.number, is_member, self.key.public, self.rules.run)
        if self._should_learn(renewal, now):
            self._learn(renewal.view, now)
        return self._take_effects()

    def stream_opened(self, renewal: pb.Renewal, now: float) -> list[Effect]:
        """Processes the first renewal of a KeepAlive stream, which replaces an older stream. Learns
        from it before, as `learn` does."""
        learned, effects = self.learn(renewal, now), self.lease_renewed(renewal, now)
        node = self.members.by_name.get(renewal.node)
        opened = [] if node is None else self._leases.stream_opened(node)
        return [*learned, *opened, *effects]

    def lease_renewed(self, renewal: pb.Renewal, now: float) -> list[Effect]:
        """Processes a renewal on an open stream. This is the hot path: no scan, no copy."""
        node = self.members.by_name.get(renewal.node)
        if node is None:
            reason = self.history.why_gone(renewal.node)
            return [Evict(renewal.node, f"{reason}; join again under a new node id")]
        self._leases.renewed(node, now)
        reports = renewal.HasField("report")
        effects = self._reported(node, renewal.report, now) if reports else []
        if renewal.probe and renewal.probe == node.probe:
            self._leases.answered(node)
        return effects

    def _reported(self, node: NodeRecord, report: pb.Report, now: float) -> list[Effect]:
        """Takes in a node's report of its seats, speed, links and intentions."""
        name = node.name
        committed = max((seat.committed for seat in report.seats), default=0)
        if problem := self._watermark.impossible(committed):
            if now >= node.contradicted + CONTRADICTED_EVERY:
                node.contradicted, place = now, place_of(node.member)
                self.history.note(f"refused a report of {name} ({place}): {problem}")
            return []
        node.report = report
        if name == self.view.driver:
            self._watermark.reach(max(map(age_of, report.seats), default=(0, 0)))
        if self.rules.load is not None:
            node.note_speeds(self.rules.load, self.members.by_name)
        node.holds = {seat.stage for seat in report.seats if self._watermark.has_state(seat)}
        complaints, unlisted = report.complaints, report.unlisted
        if complaints or unlisted or self._unreachable.any:
            of_members = (c for c in complaints if c.peer in self.members.by_name)
            self._unreachable.set_complaints(name, of_members, now, unlisted)
        for rebuild in report.rebuilds:  # rare, and from few nodes
            self.history.rebuilt(rebuild)
        if self._orders.awaits_saves and self._end_if_saved():
            return self._finish(now)
        if report.leaving != node.leaving and now >= self.isolation.quiet_until:
            self.members.set_leaving(node, report.leaving)
            self._collecting_until = min(self._collecting_until, now + LEAVES_COLLECTED)
            how = "will leave soon" if node.leaving else "stays after all"
            self._changes.append(f"{name} ({place_of(node.member)}) {how}")
            return self._finish(now)
        return []

    def stream_lost(self, name: str, now: float) -> list[Effect]:
        """Processes the loss of a node's newest KeepAlive stream."""
        node = self.members.by_name.get(name)
        if node is None or not node.streaming:
            return []
        return self._leases.stream_lost(node, now)

    def suspect(self, suspicion: pb.Suspicion, now: float) -> list[Effect]:
        """Processes a member's report that another one is silent, or its accusation with a cause.
        Raises Refused if the accuser is no member."""
        accuser, accused = suspicion.accuser, suspicion.accused
        if accuser not in self.members.by_name:
            raise Refused(
                "FAILED_PRECONDITION",
                f"accuser {accuser!r} is no member, so {accused!r} is not probed; join first",
            )
        if accuser == accused:
            raise Refused("INVALID_ARGUMENT", f"node {accuser} accuses itself; leave instead")
        node = self.members.by_name.get(accused)
        if node is None:
            return []
        node.accusers[accuser] = evidence(suspicion)
        self.history.note(f"{accused} is suspected by {accuser}: {evidence(suspicion)}")
        for_cause = suspicion.cause != pb.SILENT and not node.doomed
        if for_cause and (convicted := self._accusations.heard(suspicion, now)):
            node.cause = convicted.cause
            self._leases.doom(node, convicted.why)
            return self.tick(now)
        return self._leases.suspect(node, now)

    def dialled(self, question: int, name: str, alive: bool | None) -> None:
        """Processes the result of a `Dial`; None: no answer, so the node may still be alive."""
        self.isolation.dialled(question, name, alive)
        if (node := self.members.by_name.get(name)) is not None:
            self._leases.dialled(node, question, alive)
            if node.claim is not None and node.claim.question == question:
                node.claim.alive, node.claim.answered = alive, True

    def leave(self, name: str, why: str, now: float) -> list[Effect]:
        """Processes a node's announcement that it leaves now. Idempotent."""
        node = self.members.by_name.get(name)
        if node is None:
            return []
        self._leases.doom(node, f"left: {readable(why) or 'no reason given'}")
        return self.tick(now)

    def evict(self, name: str, why: str, now: float) -> list[Effect]:
        """Evicts a node on an authorized request. No effect on a former member."""
        node = self.members.by_name.get(name)
        if node is None:
            return []
        self._evict(node, why, now)
        return self._finish(now)

    def command(self, word: str, why: str, now: float) -> tuple[str, list[Effect]]:
        """Gives an operator's order to the run. Returns what it changes, in a sentence, too. Raises
        Refused."""
        if changed := self._orders.give(word, why):
            self._changes.append(changed)
            self._end_if_saved()
        return changed, self._finish(now)

    def change(self, change: pb.Change, now: float) -> list[Effect]:
        """Orders a change of settings. Raises Refused as `Orders.change` does."""
        seats, stages = self.members.seat_reports(), self.rules.stages
        self._changes.append(self._orders.change(change, seats, stages))
        self._end_if_saved()
        return self._finish(now)

    def _end_if_saved(self, vacant: Collection[int] = ()) -> bool:
        """Carries out an order to stop, or to change settings, once the run is saved: ends the
        membership, or has all nodes join again. Returns whether it is saved. `vacant`: stages that
        no node can take."""
        changing = self._orders.order != pb.STOP
        seats, awaited = self.members.seat_reports(), self._awaited.stages
        saved = self._orders.review(seats, vacant, awaited, self.rules.stages, self.view.number)
        if saved:
            self._changes.append(saved)
        if saved and changing:
            self._driving.started = False
            for node in list(self.members):
                self._remove(node, "left: the run's settings have changed")
        return bool(saved)

    def bar(self, banned: Iterable[str]) -> None:
        """Sets the banned instances; the next view, issued by a tick, publishes them."""
        self._banned = sorted(banned)

    def tick(self, now: float) -> list[Effect]:
        """Evicts nodes past their deadline, and names the first driver when the wait is over."""
        if not self.isolation.allows_views(now):
            return []
        for node, reason in self._leases.expired(now):
            self._evict(node, reason, now)
            returns = not reason.startswith("left: ") or reason.startswith(f"left: {CRASHED}")
            if node.cause == pb.SILENT and returns:
                self._awaited.lost(node, self.members.vacant(), now)
        self._review_unreachable(now)
        self._review_accusations(now)
        if over := ", ".join(map(str, self._awaited.ended(now))):
            self._changes.append(f"no save of stage {over} is awaited any longer")
        placement_due = self._unsettled and now >= self._placed_at + self.rules.lease / LOOKS
        if placement_due or now >= self._collecting_until:
            self._placed_at = now
            self._staff(now)
        if self._driving.is_due(now) and not self._changes:
            self._changes.append(f"the start grace of {self.rules.start_grace:g} s is over")
        if self.members and list(self.view.banned) != self._banned and not self._changes:
            self._changes.append("the run's operator changed the list of banned instances")
        return self._finish(now)

    def restore(self, view: pb.View, now: float) -> None:
        """Continues from the newest view of an earlier registry of the run: its members count as
        alive, with a fresh lease, and no new view is issued within the grace.

        Raises ValueError if the view can't be one of this run.
        """
        problem = problem_with(view, self.rules)
        if not is_genuine(view, self.key.public, self.rules.run):
            problem = problem or "it is not signed by the run's key"
        if problem:
            raise ValueError(f"view {view.number} can't be restored: {problem}")
        former = set(self.members.by_name)
        self.members.restore(view, now)
        for name in former.difference(self.members.by_name):
            self._accusations.gone(name)
        for node in self.members:
            self.history.former.pop(node.name, None)
            if not self.rules.allows(instance_of(node.member.key)):
                node.doomed = "its instance is no longer on this run's allow list"
        self.view = view
        self._joining.restore()
        self._orders.restore(view)
        self._driving.restore(view, now)
        self._watermark.reach((view.lineage, view.committed))
        self._unreachable.restore(view.relays, now)
        self._quarantine.restore(view.quarantined, now)
        self._awaited.restore(view.awaited, now)
        self._unsettled = True
        restored = f"restored view {view.number} with {len(view.members)} nodes"
        if self.members:  # otherwise no member could return
            self.isolation.quiet_until = now + self.rules.grace
            restored += f"; no new view for {self.rules.grace:g} s"
        self._leases.restart()
        self.history.note(restored)

    def paused(self, seconds: float, now: float) -> None:
        """Extends leases and waits for saves by a pause of the registry (suspended, starved), in
        which no renewal or join arrived."""
        self.history.note(
            f"the registry was suspended for {seconds:.1f} s: it extends all leases by that time"
        )
        self._unreachable.paused(seconds, now)
        self._accusations.paused(seconds)
        self._leases.paused(seconds, now)
        self.isolation.paused(seconds, now)
        self._awaited.paused(seconds)
        self._driving.paused(seconds)

    # -- answers ---------------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        """The newest committed step that the driver has reported."""
        return self._watermark.newest[1]

    def describe(self, now: float) -> pb.Description:
        """The registry's full state, for people. The shell adds run file and uptime."""
        description = pb.Description(
            run=self.rules.run,
            view=self.view,
            members=self.members.described(now),
            protocol=PROTOCOL,
            cuts=self._unreachable.listed(now),
            quarantined=self._quarantine.listed(now),
        )
        self.history.describe(description, now)
        truncate_description(description)
        return description

    def reply_to(self, name: str) -> pb.JoinReply | Refused:
        """The reply to an admitted node, by the newest view. Refused: it is no longer a member, for
        example because another node of its batch replaced it."""
        node = self.members.by_name.get(name)
        if node is None:
            return refusal_of_former(name, self.history)
        return pb.JoinReply(
            run=self.rules.run,
            view=pb.View(number=self.view.number),
            reason=node.why,
            lease=self.rules.lease,
            key=self.key.public,
        )

    # -- decisions -------------------------------------------------------------------------------

    def _let_in(self, attempt: JoinAttempt, now: float) -> NodeRecord | pb.JoinReply | Refused:
        if self._orders.order == pb.STOPPED:
            return Refused("FAILED_PRECONDITION", stopped_at(self.view.committed))
        try:
            decision = self._joining.decide(attempt, now)
        except Refused as refused:
            return refused
        if isinstance(decision, Asked):
            self._effects += decision.dials
            return decision.reply
        if isinstance(decision, list):
            for replaced, reason in decision:
                self._evict(replaced, reason, now)
            decision = self._joining.admit(attempt, now)
            self._leases.schedule(decision)
            self._awaited.joined(decision.member.key)
            self._changes.append(f"{decision.name} joined: {decision.why}")
        return decision

    def _review_accusations(self, now: float) -> None:
        """Decides accusations by the driver alone: the accused stays, and another node drives."""
        for decision in self._accusations.review(now):
            if isinstance(decision, Convicted):
                node = self.members.by_name[decision.node]
                node.cause = decision.cause
                self._evict(node, decision.why, now)
            elif decision.heir:
                self._driving.heir = decision.heir
                self._changes.append(
                    f"{decision.finding}; {decision.heir} drives instead, and observes for itself"
                )
            else:
                self.history.note(decision.finding)

    def _review_unreachable(self, now: float) -> None:
        """Assigns relays to members that can't reach each other, or evicts one of them."""
        while self._unreachable.any:
            evicted = False
            for decision in self._unreachable.review(now):
                if isinstance(decision, ToEvict):
                    self._evict(self.members.by_name[decision.node], decision.why, now)
                    evicted = True
                else:
                    self._changes.append(decision)
            if not evicted:
                return

    def _evict(self, node: NodeRecord, reason: str, now: float) -> None:
        """Removes a member, with quarantine if that is for cause; the next view says so."""
        self._remove(node, reason)
        if not reason.startswith("left: "):
            self.history.evicted(node.member, reason, now)
        if node.cause != pb.SILENT:
            instance = instance_of(node.member.key)
            self._quarantine.add(instance, node.name, node.cause, reason, now)
        self._changes.append(f"{node.name} ({place_of(node.member)}) is gone: {reason}")

    def _remove(self, node: NodeRecord, reason: str) -> None:
        self.members.remove(node)
        self.history.gone(node.name, reason)
        self._unreachable.gone(node.name)
        self._accusations.gone(node.name)
        self._effects.append(Evict(node.name, reason))

    def _staff(self, now: float) -> None:
        """Gives each stage a member that stays. Before the run has begun, a node gets a second seat
        only after `start_grace` without a join. A finished run needs no placement, unless an order
        waits for saves."""
        if now < self._collecting_until < math.inf:
            return
        self._collecting_until = math.inf
        if self.members.settled:
            return
        finished = any(seat.finished for seat in self.members.seat_reports())
        if finished and not self._orders.awaits_saves:
            return
        candidates, rules = self.members.candidates(now), self.rules
        begun = self._driving.has_begun(now)
        calm = self._driving.started and self._orders.order == pb.TRAIN and not finished
        outlook = self.members.outlook(candidates, now) if calm else None
        for change in assign(
            candidates, rules.stages, begun, rules.policy, rules.max_replicas, outlook
        ):
            self.members.apply(change, self.view.number + 1, now)
            verb = "takes" if isinstance(change, SeatAssigned) else "gives back"
            self._changes.append(f"{change.node} {verb} stage {change.stage}: {change.why}")
        self._end_if_saved(self.members.vacant())

    def _finish(self, now: float) -> list[Effect]:
        """Issues a view if anything has changed."""
        if self._changes:
            self._staff(now)
            seats, reported = self.members.seat_reports(), now >= self.isolation.quiet_until
            if self._driving.started and reported and self._watermark.is_lost(seats):
                self._driving.started = False
                self._changes.append(
                    "no node has the run's state any more: waiting for nodes as at the start"
                )
            self._driving.note_covered(now)
            self._unsettled = bool(self.members.vacant()) or self.members.several_seats
            self._issue(now)
        return self._take_effects()

    def _issue(self, now: float) -> None:
        driver, awaited = self._driving.name(now)
        if driver != self.view.driver:
            self._changes.append(f"{driver} drives" if driver else "no stage-0 member can drive")
        self.members.driver = driver
        changes = "; ".join(self._changes)[:DECISION_LENGTH]
        owner_awaited = not self.members.count(0) and any(
            not node.member.owner for node in self.members
        )
        saves = self._awaited.listed(now)
        waits = "" if driver else awaited_in_words(saves)
        reason = "; ".join(filter(None, (changes, awaited, OWNER_AWAITED * owner_awaited, waits)))
        view = pb.View(
            run=self.rules.run,
            number=self.view.number + 1,
            members=[n.member for n in self.members],
            driver=driver,
            reason=reason,
            lineage=self._watermark.newest[0],
            committed=self._watermark.newest[1],
            relays=self._unreachable.relays(),
            quarantined=self._quarantine.listed(now),
            banned=self._banned,
            order=self._orders.order,
            ordered=self._orders.why,
            changes=self._orders.changes,
            awaited=saves,
        )
        sign(view, self.key, self.view)
        self.view, self._issued = view, now
        self.history.note(f"view {view.number}: {reason}")
        self._changes = []
        self._effects.append(Issue(self.view))

    def _should_learn(self, renewal: pb.Renewal, now: float) -> bool:
        """Whether to go on from a member's newer view: this registry has not yet led the run."""
        return (
            renewal.view.number > self.view.number
            and renewal.run == self.rules.run
            and (not self._driving.started or now < self.isolation.quiet_until)
            and any(m.node == renewal.node for m in renewal.view.members)
        )

    def _learn(self, view: pb.View, now: float) -> None:
        """Goes on from a view that a node has shown, unless it is invalid."""
        former = list(self.members.by_name)
        try:
            self.restore(view, now)
        except ValueError as error:
            self.history.note(f"a node's view is rejected: {error}")
            return
        for name in (name for name in former if name not in self.members.by_name):
            reason = f"not a member of view {view.number}, which other nodes have"
            self.history.gone(name, reason)
            self._effects.append(Evict(name, reason))
        self._effects.append(Issue(view))

    def _take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

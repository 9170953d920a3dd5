"""The member's side of the step transaction: a state machine without clock, socket or tensor.

It obeys only the driver of the newest view that the registry has sent. It promises itself to the
newest ballot that it has received, and ignores older ones from then on. It keeps its reduced
gradient until the driver decides or a newer driver queries it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.registry_pb2 import DIVERGENCE, NONFINITE, NUMBERS, SILENT, Cause
from planaria.node.report.events import MessageRefused
from planaria.node.transaction.bounds import LONGEST_WORDS, fault_to_member
from planaria.node.transaction.commits import fault_in_chain, fault_in_relearned
from planaria.node.transaction.effects import (
    NEVER,
    Adopt,
    AllHome,
    Apply,
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
from planaria.node.transaction.following import FollowingJoiner
from planaria.node.transaction.plan_encoding import PlanDecoder, active
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.commit_chain import (
    has_records,
    hash_of,
    hash_of_records,
    is_sealed,
    with_records,
)
from planaria.node.wire.seat_names import node_of
from planaria.recovery.facts import COPIED


class MemberPhase(enum.Enum):
    IDLE = "idle"
    SYNCING = "syncing"
    FOLLOWING = "following"
    RUNNING = "running"
    REDUCING = "reducing"
    READY = "ready"
    HALTED = "halted"

    @property
    def may_vote(self) -> bool:
        """Whether an attempt runs in which the member has yet to vote."""
        return self in (MemberPhase.RUNNING, MemberPhase.REDUCING)

    @property
    def attempts(self) -> bool:
        return self.may_vote or self is MemberPhase.READY


class FrameUse(enum.Enum):
    """What a node does with a frame of an attempt: compute on it, keep it for later, or drop it."""

    TAKE = enum.auto()
    HOLD = enum.auto()
    DROP = enum.auto()


class Reports:
    """What a member has reported, so that it reports each fault once. `node`: its seat."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._refused: set[tuple[str, str]] = set()  # in this view: node and kind of message
        self.accused: set[str] = set()  # nodes reported to the registry since the last commit

    def is_first_refusal(self, peer: str, body: str) -> bool:
        """Whether a refused message is the first of its kind from this node in this view."""
        new = (node_of(peer), body) not in self._refused
        self._refused.add((node_of(peer), body))
        return new

    def accuse(self, node: str, reason: str, cause: Cause) -> list[Effect]:
        """Accuses a node to the registry, once in a step, for what this member saw itself.

        The registry doesn't act on one member's accusation, and counts what the driver passes on as
        the driver's. Only the driver can tell whether the model causes non-finite values, and which
        of two replicas differs: for these causes nobody is accused here."""
        own = node_of(node) == node_of(self._node)
        if own or cause in (SILENT, NONFINITE, DIVERGENCE) or node in self.accused:
            return []
        self.accused.add(node)
        return [Suspect(node, reason[:LONGEST_WORDS], cause)]


class MemberSide:
    """One node's part in the transaction. Every event method returns the effects to carry out."""

    def __init__(self, node: str, stage: int) -> None:
        self.node = node
        self.stage = stage
        self.phase = MemberPhase.IDLE
        self.view = registry.View()
        self.promised = NEVER
        self.driver = ""
        self.began = NEVER  # ballot with which the running or ready attempt began
        self.attempt = NEVER  # its current ballot, by a newer plan
        self.step = 0  # step of the attempt
        self.lineage = 0  # how often the run had gone back to files before that step
        self.committed = 0
        self.last = pb.Commit()
        self.heard = PlanDecoder()
        self.decider, self.key = "", b""  # driver of the attempt, and its key
        self.keeps = False  # whether it keeps the attempt's records
        self.records: Sequence[pb.Home] = ()  # the records, once received
        self.ready: pb.Ready | None = None  # its vote, until it may cast it
        self.boosted_at = 0
        self.digest = b""
        self.changing = False  # the weights change, so it can't report them
        self.trained = False  # since it got its state: no commit was made without it
        self.void = False  # the weights are useless, even for a start
        self.weightless = False  # it lacks the run's initial weights
        self.origin = False  # it has the run's initial checkpoint
        self.sync = pb.Sync()
        self.following: FollowingJoiner | None = None
        self.holdings: Callable[[], Sequence[pb.Holding]] = lambda: ()
        self.recording: Callable[[], pb.Recording] = lambda: pb.NO_LEDGER
        self.unanswered: tuple[str, Ballot] | None = None
        self.seconds_per_microbatch = 0.0
        self.offered = 0  # relearning updates, when it was last ready
        self.relearning = 0  # updates that aren't in the weights yet
        self.hang = ""  # why its compute hangs; empty: it doesn't
        self.halt: pb.Halt | None = None
        self.reports = Reports(node)

    # --- events

    def viewed(self, view: registry.View) -> list[Effect]:
        """The registry has issued `view`."""
        if view.number <= self.view.number:
            return []
        self.view = view
        self.reports = Reports(self.node)
        if all(member.node != self.node for member in view.members):
            return [Rejoin(f"view {view.number} is without this node: {view.reason}")]
        return []

    def received(self, peer: str, message: pb.Message) -> list[Effect]:
        """A control message for this state machine has come from `peer`."""
        ballot = Ballot.of(message.ballot)
        body = message.WhichOneof("body")
        if not self.obeys(peer, ballot):
            return self._refuse(peer, body or "nothing", ballot)
        if ballot < self.promised or (body == "query" and ballot == self.promised != NEVER):
            if body == "query" and ballot == self.promised and peer == self.driver:
                return self._answer(peer, ballot)
            return [self.promised.send(peer, stale=pb.Stale())]
        if wrong := fault_to_member(message, self.stage):
            return self._refuse_driver(peer, body or "nothing", f"an invalid message: {wrong}")
        match body:
            case "query":
                return self._queried(peer, ballot)
            case "step":
                return self._stepped(peer, ballot, message.step)
            case "sync":
                return self._synced(peer, ballot, message.sync)
            case "records":
                return self._keep_records(ballot, message.records)
            case "reduce":
                return self._all_home(ballot)
            case "halt":
                self._promise(peer, ballot)
                return self._halt(message.halt)
            case _:
                return [MessageRefused(peer=peer, body=body or "nothing", why="unexpected")]

    def obeys(self, peer: str, ballot: Ballot) -> bool:
        """Whether `peer` drives by the newest view from the registry, and may have made that
        ballot. No message says which node drives."""
        return self.view.driver == peer != "" and ballot.view <= self.view.number

    def _refuse(self, peer: str, body: str, ballot: Ballot) -> list[Effect]:
        """Reports a message of a node that doesn't drive."""
        if not self.reports.is_first_refusal(peer, body):
            return []
        number, driver = self.view.number, self.view.driver or "nobody"
        why = f"{driver} drives view {number}, the newest one here; it is of view {ballot.view}"
        return [MessageRefused(peer=peer, body=body, why=why)]

    def reduced(self, ballot: Ballot, ready: pb.Ready) -> list[Effect]:
        """Votes, since the stage's gradient is averaged and has every microbatch once. `ready`: its
        norm, whether it is finite, the digest of the current weights (empty: not computed), seconds
        per microbatch, and the relearned updates that may enter."""
        if not self.phase.may_vote or ballot != self.attempt:
            return []
        self.seconds_per_microbatch = ready.seconds_per_microbatch
        self.offered = ready.relearned
        self.ready = pb.Ready(step=self.step, applied=self.digest, recording=self.recording())
        self.ready.MergeFrom(ready)
        self.ready.digest = ready.digest or self.digest
        return self._vote()

    def _vote(self) -> list[Effect]:
        """Sends the vote. A record holder first needs the records: then other nodes know a commit's
        records, whichever receiver of the commit fails."""
        if self.ready is None or (self.keeps and not self.records):
            return []
        ready, self.ready = self.ready, None
        self.phase = MemberPhase.READY
        return [self._to_driver(ready=ready)]

    def applied(self, digest: bytes) -> list[Effect]:
        """Follows up on an update: the optimizer has applied the last commit."""
        return self._changed(digest) + self._follow_on()

    def voided(self, ballot: Ballot) -> bool:
        """Notes that the state is about to be overwritten by one that isn't fit to train yet. True:
        that one is still wanted. Until `fetched` this node has no state to offer."""
        wanted = self.phase is MemberPhase.SYNCING and ballot == self.promised
        if wanted:
            self.lineage = self.committed = 0
            self.void = True
        return wanted

    def arrived(self, ballot: Ballot) -> bool:
        """Notes that a state has come. True: it is wanted, put it in place and call `fetched`."""
        following = self.following
        wanted = self.phase is MemberPhase.SYNCING and ballot == self.promised
        if following is not None and self.phase is MemberPhase.FOLLOWING:
            wanted = ballot == following.ballot and following.state is None
        self.changing = self.changing or wanted
        return wanted

    def fetched(self, synced: pb.Synced, last: pb.Commit, boosted_at: int) -> list[Effect]:
        """Reports that the state of `synced.step` is in place; `last`: the commit that made it."""
        self.lineage, self.committed = self.sync.lineage, synced.step
        self.void = self.weightless = False
        self.last, self.boosted_at = last, boosted_at
        answer = self._changed(synced.digest)
        if self.following is not None:
            self.following.state = synced
            return answer + self._follow_on()
        if self.phase is not MemberPhase.SYNCING:
            return answer  # queried in the meantime: the status says it
        self.phase = MemberPhase.IDLE
        return [self._to_driver(synced=synced)]

    def failed(
        self, ballot: Ballot, reason: str, accused: Sequence[str], cause: Cause = SILENT
    ) -> list[Effect]:
        """Reports that this node can't do its part of what runs under `ballot`."""
        failed = pb.Failed(reason=reason[:LONGEST_WORDS], accused=accused, cause=cause)
        reports = [
            report for node in accused for report in self.reports.accuse(node, reason, cause)
        ]
        if self.following is not None:
            return reports + self._unfollow(failed) if ballot == self.following.ballot else []
        running = self.phase.may_vote and self._is_of_attempt(ballot)
        syncing = self.phase is MemberPhase.SYNCING and ballot == self.promised
        if not running and not syncing:
            return []
        self.phase = MemberPhase.IDLE
        drop: list[Effect] = [DropAttempt(self.attempt)] if running else []
        return [*drop, *reports, self._to_driver(failed=failed)]

    def cut_off(
        self, ballot: Ballot, node: str, reason: str, cause: Cause = SILENT
    ) -> list[Effect]:
        """Reports that data from or for `node` can't get through or can't be used. The driver
        decides whether the attempt can go on without that node. After this node's vote, data for
        others may be lost."""
        if not (self.phase.attempts and self._is_of_attempt(ballot)):
            return []
        reports = self.reports.accuse(node, reason, cause)
        return [*reports, self._to_driver(cut=_cut(node, reason, cause))]

    def accuse(self, node: str, reason: str, cause: Cause) -> list[Effect]:
        """Accuses `node` for an invalid state, boundary tensor or copy. No attempt depends on
        it."""
        reports = self.reports.accuse(node, reason, cause)
        if self.driver in ("", node):
            return reports
        return [*reports, NEVER.send(self.driver, cut=_cut(node, reason, cause))]

    def gradient_came(self, ballot: Ballot, feeder: str) -> list[Effect]:
        """Handles a joiner's reduced gradient of an attempt, which a replica of its stage sent."""
        if self.following is not None:
            self.following.came(ballot, feeder)
        return self._follow_on()

    def gradient_refused(self, reason: str, feeder: str, cause: Cause) -> list[Effect]:
        """Stops following: what a replica has sent for a gradient is unusable."""
        if self.following is None:
            return []
        return self.failed(self.following.ballot, reason, [feeder], cause)

    def gradient_missed(self, ballot: Ballot) -> list[Effect]:
        """Notes that a joiner's gradient won't come: too many of them wait."""
        if self.following is not None:
            self.following.missed(ballot)
        return self._follow_on()

    def link_lost(self, peer: str) -> list[Effect]:
        """Handles the loss of a link: messages and frames of `peer`, and for it, are lost."""
        if self.following is not None:
            self.following.lost(peer)
            self.following.caught_up = self.following.caught_up and peer != self.driver
        return self._follow_on()

    def frames(self, ballot: Ballot) -> FrameUse:
        """What to do with a frame that was sent by the plan of `ballot`."""
        if self._is_of_attempt(ballot) and self.phase.attempts:  # others may still work on it
            return FrameUse.TAKE
        if self.phase is not MemberPhase.HALTED and ballot > max(self.promised, self.attempt):
            return FrameUse.HOLD
        return FrameUse.DROP

    # --- transitions

    def _promise(self, driver: str, ballot: Ballot) -> None:
        self.promised = ballot
        self.driver = driver

    def _to_driver(self, **body: Any) -> Send:
        return self.promised.send(self.driver, **body)

    def _queried(self, peer: str, ballot: Ballot) -> list[Effect]:
        attempting = self.step if self.phase.attempts else 0
        self._promise(peer, ballot)
        if ballot.view == self.view.number:
            self.heard.queried(ballot.view, active(self.view))
        self.halt = None  # the driver queries again
        effects: list[Effect] = []
        if self.phase.may_vote:
            effects.append(DropAttempt(self.attempt))
        if self.phase is not MemberPhase.READY:
            self.phase = MemberPhase.FOLLOWING if self.following is not None else MemberPhase.IDLE
        if self.following is not None:
            self.following.doubt()
            self.following.caught_up = False
        return effects + self._answer(peer, ballot, attempting)

    def _changed(self, digest: bytes) -> list[Effect]:
        """Ends a change of the weights; answers a query that came meanwhile."""
        self.digest = digest
        self.changing = False
        if self.unanswered is None:
            return []
        (peer, ballot), self.unanswered = self.unanswered, None
        return self._answer(peer, ballot) if ballot == self.promised else []

    def _is_of_attempt(self, ballot: Ballot) -> bool:
        return self.began <= ballot <= self.attempt

    def _answer(self, peer: str, ballot: Ballot, attempting: int = 0) -> list[Effect]:
        if self.changing:
            self.unanswered = (peer, ballot)
            not_yet = pb.Account(computing=True, hang=self.hang[:LONGEST_WORDS])
            return [ballot.send(peer, account=not_yet)]
        is_ready = self.phase is MemberPhase.READY
        status = pb.Status(
            committed=self.committed,
            ready=self.step if is_ready else 0,
            ready_ballot=self.attempt.message() if is_ready else None,
            last=self.last,
            boosted_at=self.boosted_at,
            digest=self.digest,
            seconds_per_microbatch=self.seconds_per_microbatch,
            attempting=attempting,
            hang=self.hang[:LONGEST_WORDS],
            lineage=self.lineage,
            holdings=self.holdings(),
            following=self.following.step if self.following is not None else 0,
            following_lineage=self.sync.lineage,
            heard=self.following.heard if self.following is not None else 0,
            recording=self.recording(),
            weightless=self.weightless,
            origin=self.origin,
            trained=self.trained,
            relearning=self.relearning,
            viewless=not self.heard.has(ballot.view),
        )
        return [ballot.send(peer, status=status)]

    def _stepped(self, peer: str, ballot: Ballot, step: pb.Step) -> list[Effect]:
        self._promise(peer, ballot)
        effects: list[Effect] = []
        if step.HasField("commit"):
            effects += self._commit(step.commit)
        if step.HasField("begin"):
            try:
                begin = self.heard.whole(ballot, step.begin)
            except ValueError as error:
                return effects + self._cannot(str(error))
            effects += self._begun(ballot, begin)
        return effects

    def _begun(self, ballot: Ballot, begin: pb.Begin) -> list[Effect]:
        self.decider = self.driver
        self.key = next((m.key for m in self.view.members if m.node == self.driver), b"")
        self.keeps, self.records, self.ready = begin.keeps, (), None
        if any(joiner.node == self.node for joiner in begin.joining):
            return self._begun_without(ballot, begin)
        if ballot <= self.attempt:
            return []
        if self.node in begin.entering:
            return self._entered(ballot, begin)
        if begin.HasField("since"):
            return self._went_on(ballot, begin)
        if self.void:  # the run starts over, since no node has a state
            return [Rejoin("a rebuild that was given up has overwritten its weights")]
        if begin.step != self.committed + (begin.kind == pb.Begin.TRAIN):
            return self._cannot(
                f"asked to begin step {begin.step}, but step {self.committed} is the last "
                "one committed here"
            )
        self.following = None
        self.trained = True
        self.phase = MemberPhase.RUNNING
        self.began = self.attempt = ballot
        self.step = begin.step
        return [StartAttempt(ballot, begin)]

    def _went_on(self, ballot: Ballot, begin: pb.Begin) -> list[Effect]:
        """Goes on by a new plan. A vote is void: its gradient lacks what others have to redo."""
        since = Ballot.of(begin.since)
        if not self.phase.attempts or since != self.began:
            return self._cannot(f"asked to go on with attempt {since}, which isn't running here")
        self.phase = MemberPhase.RUNNING
        self.attempt = ballot
        return [GoOn(ballot, begin)]

    def _entered(self, ballot: Ballot, begin: pb.Begin) -> list[Effect]:
        """Takes a lost node's place in a running attempt. Its state is the one with which the
        attempt began, so it may train as if it had begun it."""
        since = Ballot.of(begin.since)
        if self.phase is not MemberPhase.IDLE or self.void or begin.step != self.committed + 1:
            return self._cannot(
                f"asked to enter attempt {since} at step {begin.step}, but this node has step "
                f"{self.committed} and is {self.phase.value}"
            )
        self.phase, self.trained = MemberPhase.RUNNING, True
        self.began, self.attempt, self.step = since, ballot, begin.step
        return [StartAttempt(since, begin), GoOn(ballot, begin)]

    def _commit(self, commit: pb.Commit) -> list[Effect]:
        ready = self.phase is MemberPhase.READY and self.attempt == Ballot.of(commit.ballot)
        if self.following is not None and not ready:
            return self._hear(commit)
        lacks_records = not has_records(self.last) and has_records(commit)
        if lacks_records and hash_of(commit) == hash_of(self.last):
            self.last = commit
            return [Note(commit)]
        if commit.step != self.committed + 1 or not ready:
            return []  # a repetition, or not for this node: the next query finds out
        if not has_records(commit) and hash_of_records(self.records) == commit.records:
            commit = with_records(commit, self.records)
        if self.key and not is_sealed(commit, self.key, self.view.run):
            why = f"step {commit.step}, which {self.decider} hasn't signed"
        else:
            why = fault_in_chain(commit, self.last, self.lineage)
        if why := why or fault_in_relearned(commit, self.stage, self.offered):
            return self._refuse_driver(self.driver, "step", f"a commit of {why}")
        effects: list[Effect] = []
        if self.records and not has_records(commit):
            # No reason to stay behind: others have applied the commit.
            why = f"a commit of step {commit.step} with other records than before"
            effects = self._refuse_driver(self.decider, "step", why)
        return [*effects, *self._apply(commit)]

    def _refuse_driver(self, driver: str, body: str, fault: str) -> list[Effect]:
        refused = MessageRefused(peer=driver, body=body, why=fault)
        return [refused, Suspect(driver, f"the driver {driver} sent {fault}", NUMBERS)]

    def _cannot(self, reason: str) -> list[Effect]:
        """Reports that this node can't do what the driver wants."""
        return [self._to_driver(failed=pb.Failed(reason=reason))]

    def _apply(self, commit: pb.Commit) -> list[Effect]:
        self.phase = MemberPhase.IDLE
        if self.following is not None:
            self.following.applied(commit)
            self.phase = MemberPhase.FOLLOWING
        self.committed = commit.step
        self.last, self.records = commit, ()
        self.changing = True
        self.reports.accused.clear()
        return [Apply(commit)]

    def _keep_records(self, ballot: Ballot, records: pb.Records) -> list[Effect]:
        if not self.phase.may_vote or ballot != self.attempt:
            return []
        self.records = records.microbatches
        return self._vote()

    def _all_home(self, ballot: Ballot) -> list[Effect]:
        if self.following is not None:
            self.following.vote = ballot
            return self._follow_on()
        if self.phase is not MemberPhase.RUNNING or ballot != self.attempt:
            return []
        self.phase = MemberPhase.REDUCING
        return [AllHome(ballot)]

    def _synced(self, peer: str, ballot: Ballot, sync: pb.Sync) -> list[Effect]:
        self._promise(peer, ballot)
        effects: list[Effect] = [DropAttempt(self.attempt)] if self.phase.attempts else []
        if sync.method in COPIED and (sync.lineage, sync.step) == (self.lineage, self.committed):
            self.lineage = self.committed = 0  # its state differs from its replicas'
        self.trained = False
        self.phase = MemberPhase.FOLLOWING if sync.follow else MemberPhase.SYNCING
        self.following = FollowingJoiner(ballot, sync.step, sync.step) if sync.follow else None
        self.sync = sync
        return [*effects, Fetch(ballot, sync)]

    def _halt(self, halt: pb.Halt) -> list[Effect]:
        self.halt = halt
        self.following = None
        if self.phase is MemberPhase.READY:  # a later driver may commit it
            return [Halted(halt)]
        effects: list[Effect] = [DropAttempt(self.attempt)] if self.phase.attempts else []
        self.phase = MemberPhase.HALTED
        return [*effects, Halted(halt)]

    # --- following

    def _begun_without(self, ballot: Ballot, begin: pb.Begin) -> list[Effect]:
        """Handles an attempt of the others, in which this node is a joiner."""
        self.trained = False
        if self.following is None:
            return self._cannot("it doesn't follow")
        self.phase = MemberPhase.FOLLOWING
        self.following.begun(ballot, begin, self.node)
        return self._follow_on()

    def _hear(self, commit: pb.Commit) -> list[Effect]:
        assert self.following is not None
        if commit.step <= self.following.heard:
            return []
        if why := self.following.fault_in(commit, self.stage):
            return self._unfollow(pb.Failed(reason=why))
        self.phase = MemberPhase.FOLLOWING  # it was about to vote, but the others didn't wait
        self.following.hear(commit)
        return self._follow_on()

    def _follow_on(self) -> list[Effect]:
        """Applies a joiner's next commit; else votes, if asked to; else reports its state."""
        following = self.following
        if following is None or self.phase is not MemberPhase.FOLLOWING:
            return []
        if reason := following.broken():
            return self._unfollow(pb.Failed(reason=reason))
        if self.changing or following.state is None:
            return []
        if (commit := following.due()) is not None:
            following.applied(commit)
            self.committed, self.last, self.changing = commit.step, commit, True
            return [Adopt(Ballot.of(commit.ballot)), Apply(commit)]
        if following.may_vote(self.committed):
            self.phase = MemberPhase.REDUCING
            self.attempt, self.step = following.attempt
            self.began = self.attempt
            return [Adopt(self.attempt)]
        if following.commits or following.caught_up:
            return []
        following.caught_up = True
        synced = pb.Synced()
        synced.CopyFrom(following.state)
        synced.digest = self.digest
        return [self._to_driver(synced=synced)]

    def _unfollow(self, failed: pb.Failed) -> list[Effect]:
        self.following = None
        self.phase = MemberPhase.IDLE
        return [self._to_driver(failed=failed)]


def _cut(node: str, reason: str, cause: Cause) -> pb.Cut:
    return pb.Cut(node=node, reason=reason[:LONGEST_WORDS], cause=cause)

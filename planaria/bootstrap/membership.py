"""The membership state machine: issues numbered views of the members and their stages.

Pure: an event method takes `now` (seconds of a monotonic clock) and returns effects for the shell
to carry out. It has no clock, socket or task. Its data are messages of
`proto/bootstrap/registry.proto`; a `View` never changes after it was issued.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from planaria.bootstrap.accusations import WHY_LENGTH, Accusations, Convicted, evidence
from planaria.bootstrap.address import EVERYWHERE, not_to_dial
from planaria.bootstrap.commit_watermark import Age, CommitWatermark
from planaria.bootstrap.cuts import LOOKS, Cuts, Goes
from planaria.bootstrap.failure_domains import FailureDomain, is_block
from planaria.bootstrap.identity import Identity, instance_of
from planaria.bootstrap.invites import is_instance
from planaria.bootstrap.neighbours import Neighbours, related, stages_of
from planaria.bootstrap.placement import Candidate, SeatAssigned, Staffing, assign
from planaria.bootstrap.quarantine import MOST_KEPT, Quarantine
from planaria.bootstrap.registry_pb2 import (
    SILENT,
    Cause,
    Description,
    Eviction,
    JoinReply,
    JoinRequest,
    Member,
    MemberDescription,
    Rebuild,
    Renewal,
    Report,
    Seat,
    SeatReport,
    Suspicion,
    View,
)
from planaria.bootstrap.spelling import misspelt, readable
from planaria.bootstrap.truncation import fit
from planaria.bootstrap.views import is_genuine, sign
from planaria.recovery.policy import POLICIES, Policy

PROTOCOL = 1
DECISIONS_KEPT = 200
DECISION_LENGTH = 4000  # characters of a decision, or of a view's reason
EVICTED_KEPT = 10_000
EVICTIONS_LISTED = 20
REBUILDS_LISTED = 100
ACCUSERS_NAMED = 3
CONTRADICTED_EVERY = 60.0  # seconds between two notices to a node about refused reports
WITHOUT_STATE = frozenset(["syncing", "following"])  # phases in reports (node/transaction)
LEAVES_COLLECTED = 0.3  # seconds to collect leave announcements, without placement meanwhile
SECONDS_PER_MEMBER = 2e-4  # between two join batches; sending a view takes half of that
OWNER_AWAITED = (
    "stage 0 is vacant: waiting for a node of the run's owner "
    "(`planaria node --join @owner.invite`)"
)
MOST_DIALLED = 100  # silent members that are dialled; of more, every n-th


@dataclass(frozen=True)
class MembershipRules:
    """The registry's parameters. Times in seconds."""

    run: str
    stages: int  # body stages, L; stages are numbered 0..L
    replicas: int = 1  # nodes per stage to wait for before the first driver is named
    max_replicas: int = 64  # useful nodes per stage; more become standbys
    start_grace: float = 20.0  # maximum wait for `replicas` after the latest join
    lease: float = 5.0
    probe_timeout: float = 3.0
    reconnect: float = 0.4  # for a node that lost its stream and refuses connections to return
    dial_timeout: float = 4.0  # for a silent member to answer a dial
    corroboration_time: float = 1.0  # for corroboration of the driver's accusation
    restart_grace: float | None = None  # lease + 1
    steps: int = 0  # of the run; 0: unknown
    data: str = ""  # content hash that stage-0 nodes must have; empty: not checked
    policy: Policy = POLICIES["checkfree"]
    joins_per_second: float = 200.0
    max_nodes: int = 10_000
    max_per_block: int = 0  # nodes per address block; 0: unlimited
    allowed: frozenset[str] | None = None  # instances that may be members; None: all

    def __post_init__(self) -> None:
        if not self.run:
            raise ValueError("run is empty: give the run a name")
        if self.stages < 1:
            raise ValueError(f"stages = {self.stages}: at least one body stage is needed")
        if not 1 <= self.replicas <= self.max_replicas:
            raise ValueError(
                f"replicas = {self.replicas}: choose 1 to max_replicas = {self.max_replicas}"
            )
        above = ("lease", "probe_timeout", "reconnect", "dial_timeout", "corroboration_time")
        for name in (*above, "joins_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be above 0")

    @property
    def grace(self) -> float:
        """Seconds without new views after a restart: a dead member's fresh lease expires within."""
        return self.lease + 1.0 if self.restart_grace is None else self.restart_grace


class Refused(Exception):  # noqa: N818  an answer, not a fault
    """A refused request. `code`: a gRPC status name; `reason`: problem, value and remedy."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True)
class Issue:
    """Write the view to the journal, then send it to all watchers."""

    view: View


@dataclass(frozen=True)
class Probe:
    """Request an immediate answer with `number` on the node's KeepAlive stream."""

    node: str
    number: int


@dataclass(frozen=True)
class Evict:
    """Notify the node of its eviction on its KeepAlive stream; close the stream."""

    node: str
    reason: str


@dataclass(frozen=True)
class Settle:
    """Answer all pending suspicions of the node."""

    node: str
    member: bool
    reason: str


@dataclass(frozen=True)
class Contradict:
    """Notify the node on its KeepAlive stream that its report is refused, and why."""

    node: str
    reason: str


@dataclass(frozen=True)
class Dial:
    """Check for `seconds` whether the node answers at HOST:PORT, and call `dialled`."""

    question: int
    node: str
    address: str
    seconds: float


Effect = Issue | Probe | Evict | Settle | Contradict | Dial


class JoinAttempt(NamedTuple):
    """A join request, its address block (failure_domains.py), its time of arrival, and whether the
    run's owner started the node."""

    request: JoinRequest
    block: str
    arrived: float
    owner: bool


@dataclass(eq=False)
class _Claim:
    """A join with another key from a member's address."""

    question: int  # number of the dial to the member
    asked: float
    alive: bool | None = None
    answered: bool = False


@dataclass(eq=False)
class _Node:
    """A member or standby, and its health."""

    member: Member
    why: str  # reason of the latest decision about its seats
    renewed: float
    placed: float  # time since which it serves, or is a standby
    due: float = math.inf  # time of its live entry in the heap of deadlines
    reasons: dict[int, str] = field(default_factory=dict)  # for each of its seats, by stage
    report: Report = field(default_factory=Report)
    holds: set[int] | None = None  # stages with state, by its last report; None: no report yet
    streaming: bool = False
    lost: float | None = None  # time of the loss of its stream
    dial: int = 0  # number of the dial since then
    gone: bool = False  # whether it refused that dial
    reached_by: str = ""  # a member that reaches it, which spares it from eviction
    checked: float = -math.inf  # time of the last check of `reached_by`
    probe: int = 0  # number of the unanswered probe; 0: none
    probed: float = 0.0
    accusers: dict[str, str] = field(default_factory=dict)  # accuser -> reason, until settled
    doomed: str = ""  # reason of its eviction, due at once; empty: none
    cause: Cause = SILENT  # of that eviction
    claim: _Claim | None = None  # the newest claim to its address
    contradicted: float = -math.inf  # time of the last notice
    stages: list[int] = field(init=False)  # of its seats; empty: a standby

    def __post_init__(self) -> None:
        self.become(self.member)

    def become(self, member: Member) -> None:
        self.member, self.stages = member, stages_of(member)

    @property
    def leaving(self) -> bool:
        """Whether the view says that it will leave soon."""
        return self.member.leaving

    def awaited(self, reconnect: float) -> float:
        """The deadline for its return after the loss of its stream and a refused dial."""
        return self.lost + reconnect if self.lost is not None and self.gone else math.inf

    def heard(self, lease: float, now: float) -> bool:
        """Whether it is alive, as far as the registry knows."""
        silent = self.lost is not None or now >= self.renewed + lease
        return not (silent or self.probe or self.doomed or self.reached_by)


@dataclass(eq=False)
class _Question:
    """A check for any live member, made when only a newcomer is heard."""

    number: int
    asked: float
    dialled: list[Member]
    open: set[str]  # members that the registry still dials
    answered: dict[str, str] = field(default_factory=dict)  # member that answered -> its dialler


class Membership:
    """The state machine. Carry out the effects in order before the next event."""

    def __init__(self, rules: MembershipRules, key: Identity | None = None) -> None:
        """`key`: the run's, which signs views; None: a new one."""
        self.rules, self.key = rules, key or Identity.generate()
        self.view = View(run=rules.run, reason="no node has joined yet")
        self.decisions: deque[str] = deque(maxlen=DECISIONS_KEPT)  # newest last
        self.decided = 0  # decisions ever taken
        self._nodes: dict[str, _Node] = {}  # in join order
        self._by_address: dict[str, _Node] = {}
        self._by_key: dict[bytes, list[_Node]] = {}
        self._staffing: Staffing | None = None  # None: to be recounted
        self._neighbour_graph: Neighbours | None = None  # None: to be recomputed
        self._number = 0
        self._issued = -math.inf  # time of the newest view
        self._joined = 0
        self._watermark = CommitWatermark(rules.steps, rules.lease)
        self._started = False  # whether any driver has been named
        self._covered: float | None = None  # time since which each stage has a member
        self._joined_at = 0.0  # time of the latest join
        self._unsettled = False  # whether a stage is vacant, or a node has several seats
        self._placed_at = -math.inf  # time of the last periodic placement
        self._collecting_until = math.inf  # end of the collection of leave announcements
        self._quiet_until = -math.inf  # after a restart: no new view before
        self._isolated = False  # whether no member can be heard
        self._question: _Question | None = None
        self._questions = self._probes = 0
        self._join_allowance = rules.joins_per_second
        self._allowance_at: float | None = None
        self._deadlines: list[tuple[float, str]] = []  # heap; stale entries are dropped on access
        self._cuts = Cuts(rules.lease)
        self._quarantine = Quarantine()
        self._banned: list[str] = []  # instances, in order
        self._evicted: dict[str, str] = {}  # node -> reason; the oldest are dropped
        self._accusations = Accusations(rules.corroboration_time)
        self._heir = ""  # the next driver, by an accusation
        self._rebuilds: dict[tuple[int, int, str], Rebuild] = {}  # by step, stage, method
        self._evictions: deque[tuple[float, Eviction]] = deque(maxlen=EVICTIONS_LISTED)
        self._effects: list[Effect] = []
        self._changes: list[str] = []  # descriptions; if not empty, a view is due

    # -- events ----------------------------------------------------------------------------------

    def join(
        self, request: JoinRequest, now: float, block: str = "", owner: bool = True
    ) -> tuple[JoinReply, list[Effect]]:
        """Makes a node a member or a standby. A repeated request gets the same answer. `block`: the
        address block of the request, see failure_domains.py. `owner`: see `JoinAttempt`; only the
        owner's nodes serve stage 0.

        While no member is heard, the reply is a question: the node must dial the members, as the
        registry does (`Dial`), and join again. If none answers, all are evicted. An instance in
        quarantine gets its remaining time. A node at a member's address replaces it: at once with
        the same key, else once the member is gone. Elsewhere, a key has one member at a time. The
        shell adds `run_file` to the reply. Raises Refused.
        """
        (answer,), effects = self.join_together([JoinAttempt(request, block, now, owner)], now)
        if isinstance(answer, Refused):
            raise answer
        if answer.HasField("view"):
            answer.view.CopyFrom(self.view)
        return answer, effects

    def join_together(
        self, attempts: Iterable[JoinAttempt], now: float
    ) -> tuple[list[JoinReply | Refused], list[Effect]]:
        """As `join`, for several requests, in one view; answers are in the same order. Their view
        has only its number: a copy of thousands of members for each would take too long."""
        results: list[_Node | JoinReply | Refused] = []
        for attempt in attempts:
            try:
                results.append(self._let_in(attempt, now))
            except Refused as refused:
                results.append(refused)
        effects = self._finish(now)
        replies = [
            self.reply_to(result.member.node) if isinstance(result, _Node) else result
            for result in results
        ]
        return replies, effects

    def wait(self, names: Iterable[str], now: float) -> None:
        """Extends the leases of joined nodes that wait for their reply, and can't renew yet."""
        for name in names:
            if (node := self._nodes.get(name)) is not None:
                node.renewed = now

    def joins_due(self, now: float) -> float:
        """The time of the decision about a join that arrives now, together with others until then:
        at once, unless a view was just issued. All members must get each view, and a view of many
        joins costs little more than that of one."""
        return max(now, self._issued + SECONDS_PER_MEMBER * len(self._nodes))

    def stream_opened(self, renewal: Renewal, now: float) -> list[Effect]:
        """Processes the first renewal of a KeepAlive stream, which replaces an older stream.

        A registry without its journal learns the membership from the view in the renewal. Raises
        Refused for another run, and for a view that the run's key has not signed.
        """
        if renewal.run and renewal.run != self.rules.run:
            raise Refused("NOT_FOUND", not_served(self.rules.run, renewal.run))
        self._check_shown(renewal)
        if self._should_learn(renewal, now):
            self._learn(renewal.view, now)
        node = self._nodes.get(renewal.node)
        effects = self.renewed(renewal, now)
        if node is not None:
            node.streaming, node.lost, node.dial, node.gone = True, None, 0, False
            if node.probe:
                self._effects.append(Probe(renewal.node, node.probe))
            elif node.accusers:
                effects += self._answered(node, now)
        return [*self._take_effects(), *effects]

    def renewed(self, renewal: Renewal, now: float) -> list[Effect]:
        """Processes a renewal on an open stream. This is the hot path: no scan, no copy."""
        node = self._nodes.get(renewal.node)
        if node is None:
            reason = self._evicted.get(renewal.node, "not a member of the current view")
            return [Evict(renewal.node, f"{reason}; join again under a new node id")]
        node.renewed = now
        if node.reached_by:
            node.reached_by = ""
            self._note(f"{renewal.node} ({place_of(node.member)}) is heard again")
        effects: list[Effect] = []
        if renewal.HasField("report"):
            effects = self._reported(node, renewal.report, now)
        if renewal.probe and renewal.probe == node.probe:
            effects += self._answered(node, now)
        return effects

    def _reported(self, node: _Node, report: Report, now: float) -> list[Effect]:
        name = node.member.node
        committed = _committed(report)
        if problem := self._watermark.impossible(committed):
            return self._contradict(node, problem, now)
        node.report = report
        effects: list[Effect] = []
        if name == self.view.driver:
            reported = max(map(_age, report.seats), default=(0, 0))
            if problem := self._watermark.driven(reported, self._vouched, now):
                effects = self._contradict(node, problem, now)
        node.holds = {seat.stage for seat in report.seats if self._has_state(seat)}
        complaints, unlisted = report.complaints, report.unlisted
        if complaints or unlisted or self._cuts.any:
            of_members = (c for c in complaints if c.peer in self._nodes)
            self._cuts.report(name, of_members, now, unlisted)
        for rebuild in report.rebuilds:  # rare, and from few nodes
            self._remember(rebuild)
        if report.leaving != node.leaving and now >= self._quiet_until:
            self._announce(node, now)
            effects += self._finish(now)
        return effects

    def _vouched(self) -> Age:
        """The newest age confirmed by members of every stage."""
        newest = dict.fromkeys(range(self.rules.stages + 1), (0, 0))
        for node in self._nodes.values():
            for seat in node.report.seats:
                if seat.stage in node.stages:
                    newest[seat.stage] = max(newest[seat.stage], _age(seat))
        return min(newest.values())

    def _contradict(self, node: _Node, reason: str, now: float) -> list[Effect]:
        if now < node.contradicted + CONTRADICTED_EVERY:
            return []
        node.contradicted = now
        self._note(f"refused a report of {node.member.node} ({place_of(node.member)}): {reason}")
        return [Contradict(node.member.node, reason)]

    def _remember(self, rebuild: Rebuild) -> None:
        """Stores a rebuild for `describe`, since the driver that reported it may leave."""
        copy = self._rebuilds[rebuild.step, rebuild.stage, rebuild.method[:WHY_LENGTH]] = Rebuild()
        copy.CopyFrom(rebuild)
        copy.method = rebuild.method[:WHY_LENGTH]
        while len(self._rebuilds) > REBUILDS_LISTED:
            del self._rebuilds[next(iter(self._rebuilds))]

    def stream_lost(self, name: str, now: float) -> list[Effect]:
        """The node's newest KeepAlive stream broke. A machine whose process has ended refuses a
        dial, which shortens the wait. A node without a network, or one that can't be dialled, has
        its lease to return."""
        node = self._nodes.get(name)
        if node is None or not node.streaming:
            return []
        node.streaming = False
        return self._miss(node, now)

    def suspect(self, suspicion: Suspicion, now: float) -> list[Effect]:
        """A member reports another one silent, or accuses it with a cause. Raises Refused if the
        accuser is no member."""
        accuser, accused = suspicion.accuser, suspicion.accused
        if accuser not in self._nodes:
            raise Refused(
                "FAILED_PRECONDITION",
                f"accuser {accuser!r} is no member, so {accused!r} is not probed; join first",
            )
        if accuser == accused:
            raise Refused("INVALID_ARGUMENT", f"node {accuser} accuses itself; leave instead")
        node = self._nodes.get(accused)
        if node is None:
            reason = self._evicted.get(accused, "not a member of the current view")
            return [Settle(accused, False, reason)]
        node.accusers[accuser] = evidence(suspicion)
        self._note(f"{accused} is suspected by {accuser}: {evidence(suspicion)}")
        convicted = None
        if suspicion.cause != SILENT and not node.doomed:
            convicted = self._accusations.heard(suspicion, _MembersNow(self, now), now)
        if convicted is not None:
            node.cause = convicted.cause
            self._doom(accused, node, convicted.why)
            return self.tick(now)
        if not node.streaming:
            return self._miss(node, now) if node.lost is None else []
        if node.probe:
            return []
        self._probes += 1
        node.probe, node.probed = self._probes, now
        self._schedule(accused, node)
        return [Probe(accused, node.probe)]

    def dialled(self, question: int, name: str, alive: bool | None) -> None:
        """Processes the result of a `Dial`; None: no answer, so the node may still be alive."""
        if self._question is not None and self._question.number == question:
            self._question.open.discard(name)
            if alive:
                self._question.answered[name] = "the registry"
        node = self._nodes.get(name)
        if node is not None and node.claim is not None and node.claim.question == question:
            node.claim.alive, node.claim.answered = alive, True
        if node is not None and node.dial == question and alive is False:
            node.gone = True
            self._schedule(name, node)

    def leave(self, name: str, why: str, now: float) -> list[Effect]:
        """A node announces its departure. Idempotent."""
        node = self._nodes.get(name)
        if node is None:
            return []
        self._doom(name, node, f"left: {readable(why) or 'no reason given'}")
        return self.tick(now)

    def evict(self, name: str, why: str, now: float) -> list[Effect]:
        """Evicts a node on an authorized request. No effect on a former member."""
        node = self._nodes.get(name)
        if node is None:
            return []
        self._evict(node, why, now)
        return self._finish(now)

    def reported_step(self, name: str) -> int:
        """The newest step that a member reports as committed; 0: it is no member."""
        node = self._nodes.get(name)
        return 0 if node is None else _committed(node.report)

    def bar(self, banned: Iterable[str]) -> None:
        """Sets the banned instances; the next view, issued by a tick, publishes them."""
        self._banned = sorted(banned)

    def tick(self, now: float) -> list[Effect]:
        """Evicts nodes past their deadline, and names the first driver when the wait is over."""
        if now < self._quiet_until:
            return []
        if self._hears_nobody(now):
            self._isolated = True
            return []
        self._question = None
        if self._isolated:
            self._isolated = False
            self._quiet_until = now + self.rules.grace
            self._note(f"members are heard again; no new view for {self.rules.grace:g} s")
            return []
        while self._deadlines and self._deadlines[0][0] <= now:
            due, name = heapq.heappop(self._deadlines)
            node = self._nodes.get(name)
            if node is None or node.due != due:
                continue
            node.due = math.inf
            reason = self._overdue(node, now)
            if reason:
                self._evict(node, reason, now)
            else:
                self._schedule(name, node)
        self._review_cuts(now)
        self._review_accusations(now)
        placement_due = self._unsettled and now >= self._placed_at + self.rules.lease / LOOKS
        if placement_due or now >= self._collecting_until:
            self._placed_at = now
            self._staff(now)
        grace_over = self._covered is not None and now >= self._covered + self.rules.start_grace
        if grace_over and not self._started and not self._changes:
            self._changes.append(f"the start grace of {self.rules.start_grace:g} s is over")
        if self._nodes and list(self.view.banned) != self._banned and not self._changes:
            self._changes.append("the run's operator changed the list of banned instances")
        return self._finish(now)

    def restore(self, view: View, now: float) -> None:
        """Continues from the newest view of an earlier registry of the run: its members count as
        alive, with a fresh lease, and no new view is issued within the grace.

        Raises ValueError if the view can't be one of this run.
        """
        problem = _problem(view, self.rules)
        if not self.is_genuine(view):
            problem = problem or "it is not signed by the run's key"
        if problem:
            raise ValueError(f"view {view.number} can't be restored: {problem}")
        former, self._nodes = self._nodes, {}
        self._by_address, self._by_key = {}, {}
        self._invalidate()
        for member in view.members:
            before = "a member before the restart"
            node = former.get(member.node) or _Node(member, before, now, now)
            node.reasons = {s: node.reasons.get(s, before) for s in stages_of(member)}
            node.become(member)
            node.due = math.inf
            self._enter(node)
            self._evicted.pop(member.node, None)
        for name in former.keys() - self._nodes.keys():
            self._accusations.gone(name)
        self.view = view
        self._number = view.number
        self._joined = max([self._joined, *(m.joined for m in view.members)])
        self._watermark.restore((view.lineage, view.committed), now)
        # A started run lacks a driver only while stage 0 is vacant.
        led = bool(view.driver) or (view.committed > 0 and 0 in self._vacant())
        self._started = self._started or (led and bool(self._nodes))
        self._covered = now if not self._vacant() else None
        self._joined_at, self._unsettled = now, True
        if self._nodes:  # otherwise no member could return
            self._quiet_until = now + self.rules.grace
        self._deadlines = []
        self._cuts.restore(view.relays, now)
        self._quarantine.restore(view.quarantined, now)
        allowed = self.rules.allowed
        for name, node in self._nodes.items():
            if allowed is not None and instance_of(node.member.key) not in allowed:
                node.doomed = "its instance is no longer on this run's allow list"
            self._schedule(name, node)
        self._note(
            f"restored view {view.number} with {len(view.members)} nodes; "
            f"no new view for {self.rules.grace:g} s"
        )

    def paused(self, seconds: float, now: float) -> None:
        """Extends leases by a pause of the registry (suspended, starved), in which no renewal
        arrived. A long pause counts as a restart: nodes have disconnected, and need the grace to
        return."""
        self._note(
            f"the registry was suspended for {seconds:.1f} s: it extends all leases by that time"
        )
        self._deadlines, self._question = [], None
        self._cuts.paused(seconds, now)
        self._accusations.paused(seconds)
        for name, node in self._nodes.items():
            node.renewed = min(now, node.renewed + seconds)
            node.probed = min(now, node.probed + seconds)
            if node.lost is not None:
                node.lost = min(now, node.lost + seconds)
            node.due = math.inf
            self._schedule(name, node)
        if seconds > self.rules.lease / 2:
            self._quiet_until = max(self._quiet_until, now + self.rules.grace)

    # -- answers ---------------------------------------------------------------------------------

    def key_of(self, name: str) -> bytes | None:
        """The public key of a member; None: `name` is no member."""
        node = self._nodes.get(name)
        return None if node is None else node.member.key

    def is_genuine(self, view: View) -> bool:
        """Whether a registry of this run has issued the view."""
        return is_genuine(view, self.key.public, self.rules.run)

    def describe(self, now: float) -> Description:
        """The full state, for people. The shell adds run file and uptime."""
        description = Description(
            run=self.rules.run,
            view=self.view,
            members=[
                MemberDescription(
                    member=node.member,
                    report=node.report,
                    since_renewal=max(0.0, now - node.renewed),
                    suspected=bool(node.accusers),
                    reached_by=node.reached_by,
                    why=[node.reasons.get(s, node.why) for s in node.stages] or [node.why],
                    instance=instance_of(node.member.key),
                )
                for node in self._nodes.values()
            ],
            decisions=self.decisions,
            protocol=PROTOCOL,
            cuts=self._cuts.listed(_MembersNow(self, now), now),
            quarantined=self._quarantine.listed(now),
            evictions=[
                Eviction(member=eviction.member, reason=eviction.reason, seconds=now - when)
                for when, eviction in self._evictions
            ],
            rebuilds=[rebuild for _, rebuild in sorted(self._rebuilds.items())],
        )
        for rebuild in description.rebuilds:
            rebuild.method = readable(rebuild.method)
        fit(description)
        return description

    def validate_state(self) -> None:
        """Asserts the invariants after an event; called by tests."""
        view, rules = self.view, self.rules
        members = list(view.members)
        assert not self._effects, "effects left behind"
        assert not self._changes, "a change without a view"
        assert [m.node for m in members] == list(self._nodes), "the view lags the membership"
        assert members == [n.member for n in self._nodes.values()], "the view lags the membership"
        assert not set(self._nodes) & set(self._evicted), "an evicted node is listed"
        nodes = list(self._nodes.values())
        assert self._by_address == {n.member.address: n for n in nodes if n.member.address}
        assert {id(n) for same in self._by_key.values() for n in same} == {*map(id, nodes)}
        counted, self._staffing = self._staffing, None
        assert counted is None or counted == self._staffed(), "newcomers were added otherwise"
        assert view.number == self._number
        assert list(view.relays) == self._cuts.relays(), "the view lags the relays"
        self._cuts.validate_state()
        assert (view.lineage, view.committed) <= self._watermark.newest
        assert not view.number or not _problem(view, rules), _problem(view, rules)
        if self._started and not view.driver:
            assert not any(0 in stages_of(m) for m in members), "a stage-0 member, but no driver"
        for name, node in self._nodes.items():
            assert node.due <= self._deadline(node), "a deadline would be missed"
            assert (node.due, name) in self._deadlines
            assert not (node.streaming and node.lost is not None)
            assert not node.probe or node.accusers, "a probe that nobody asked for"

    # -- joining ---------------------------------------------------------------------------------

    def _let_in(self, attempt: JoinAttempt, now: float) -> _Node | JoinReply:
        """Admits a node, or returns another answer. Raises Refused."""
        request, block, arrived, owner = attempt
        self._check_request(request)
        repeated = self._nodes.get(request.node)
        if repeated is not None:
            self._check_repeated(request, repeated.member)
            repeated.renewed = now
            return repeated
        self._check_evicted(request.node)
        if now < self._quiet_until:
            raise Refused(
                "UNAVAILABLE",
                "the registry was unreachable and waits for its members to reconnect; "
                f"join again in {self._quiet_until - now:.1f} s",
            )
        instance = instance_of(request.key)
        self._check_allowed(request.node, instance)
        if wait := self._quarantine.left(instance, now):
            reason = self._quarantine.sentence(instance, now)
            if wait == math.inf:
                raise Refused("PERMISSION_DENIED", reason)
            return JoinReply(run=self.rules.run, reason=reason, quarantine=wait)
        former = self._at_address(request.address)
        is_another = former is not None and former.member.key != request.key
        if former and is_another and (dial := self._contest(request, former, now)):
            self._effects.append(dial)
            return self._ask_again(dial.question)
        replaced = self._replaced(request, former)
        if len(self._nodes) > len(replaced) and self._hears_nobody(now):
            others = [node for node in self._nodes.values() if node not in replaced]
            return self._ask(request, others, now)
        self._check_block(instance, block, replaced)
        self._check_limits(len(replaced), arrived)
        if _is_bound(request):
            self._check_stage(request, owner)
        for node in replaced:
            where = f"from {request.address}" if node is former else "with its key"
            self._evict(node, f"restarted: {request.node} joined {where}", now)
        return self._admit(attempt, now)

    def _check_evicted(self, name: str) -> None:
        if name in self._evicted:
            raise _gone(name, self._evicted[name])

    def _check_request(self, request: JoinRequest) -> None:
        if request.protocol != PROTOCOL:
            older = "node" if request.protocol < PROTOCOL else "registry"
            raise Refused(
                "FAILED_PRECONDITION",
                f"the node speaks protocol {request.protocol}, the registry {PROTOCOL}; "
                f"install the same version of planaria on both (the {older}'s is the older)",
            )
        if problem := misspelt_member(request):
            raise Refused("INVALID_ARGUMENT", problem)
        if not (math.isfinite(request.speed) and request.speed >= 0):
            raise Refused(
                "INVALID_ARGUMENT",
                f"speed = {request.speed}: must be a number of at least 0 (0: unknown)",
            )

    def _check_repeated(self, request: JoinRequest, member: Member) -> None:
        same = ("key", "address", "data", "speed", "host", "device")
        differs = any(getattr(request, name) != getattr(member, name) for name in same)
        if differs or (_is_bound(request) and request.stage not in stages_of(member)):
            raise Refused(
                "ALREADY_EXISTS",
                f"node {request.node} is already a member, with other properties "
                f"({place_of(member)}, address {member.address or 'none'}); "
                "choose a new node id at each start",
            )

    def _check_allowed(self, node: str, instance: str) -> None:
        if self.rules.allowed is not None and instance not in self.rules.allowed:
            raise Refused(
                "PERMISSION_DENIED",
                f"{node} is not on this run's allow list: ask its operator to add the instance "
                f"{instance} to the file of --allow, and to restart the registry",
            )

    def _replaced(self, request: JoinRequest, at_address: _Node | None) -> list[_Node]:
        """The members that the new node replaces. A key has one member at a time, since keys need
        invites and names do not. Raises Refused while that member is connected from elsewhere."""
        same = list(self._by_key.get(request.key, ()))
        if at_address is not None and at_address not in same:
            same.append(at_address)
        other = next((node for node in same if node.streaming and node is not at_address), None)
        if other is not None:
            raise Refused(
                "ABORTED",
                f"{other.member.node} ({place_of(other.member)}, at "
                f"{other.member.address or 'no address'}) has the same key and is connected: end "
                "it. If this is another node, give it its own folder with --out, not a copy",
            )
        return same

    def _check_block(self, instance: str, block: str, replaced: list[_Node]) -> None:
        """Raises Refused if the block is full; a restarted node may reuse its own place."""
        most = self.rules.max_per_block
        if not (block and most):
            return
        others = (node for node in self._nodes.values() if node not in replaced)
        in_block = [node for node in others if node.member.block == block]
        restarts = any(instance_of(n.member.key) == instance and not n.streaming for n in in_block)
        if len(in_block) - restarts >= most:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"{len(in_block)} nodes have joined from {block}, and this run allows {most} per "
                "address block; end one, or ask the run's operator to raise --most-per-block",
            )

    def _check_limits(self, replaces: int, arrived: float) -> None:
        if len(self._nodes) - replaces >= self.rules.max_nodes:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"the run has {len(self._nodes)} nodes, its maximum; "
                "try again when one has left, or raise max_nodes",
            )
        rate = self.rules.joins_per_second
        since = 0.0 if self._allowance_at is None else arrived - self._allowance_at
        self._join_allowance = min(max(1.0, rate), self._join_allowance + since * rate)
        self._allowance_at = arrived
        if self._join_allowance < 1:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"more than {rate:g} joins per second; "
                f"join again in {(1 - self._join_allowance) / rate:.1f} s",
            )
        self._join_allowance -= 1

    def _check_stage(self, request: JoinRequest, owner: bool) -> None:
        stage = request.stage
        if stage > self.rules.stages:
            raise Refused(
                "OUT_OF_RANGE",
                f"stage {stage} does not exist: this run has stages 0 to {self.rules.stages}; "
                "choose one of them, or leave --stage out",
            )
        if stage == 0 and not owner:
            raise Refused(
                "PERMISSION_DENIED",
                f"only nodes of the run's owner serve stage 0, and {request.node} is not one: join "
                "with an invite of role owner (`planaria invite --role owner`; a certificate of "
                "your own has to name owner.planaria), or leave --stage out",
            )
        if stage == 0 and self.rules.data and not request.data:
            raise Refused(
                "FAILED_PRECONDITION",
                "stage 0 needs the prepared data, and the node has none; "
                "make it with `planaria data prepare`, or name its folder with --data DIR",
            )
        if stage == 0 and not self._has_data(request.data):
            raise Refused(
                "FAILED_PRECONDITION",
                f"stage 0 needs the data with content hash {self.rules.data}, and the node has "
                f"{request.data}; prepare it from the same corpus with the same tokenizer with "
                "`planaria data prepare`, or name its copy with --data DIR",
            )
        other = self._unreachable(request.address, stage)
        if other is not None and not self._has_relay():
            raise Refused(
                "ABORTED",  # a dialable member may join later
                f"at stage {stage} the node needs a link to {other.node} ({place_of(other)}), but "
                "neither can be dialled, and no member can relay for them; give one of them "
                "`--advertise HOST:PORT`, or choose another stage",
            )

    def _at_address(self, address: str) -> _Node | None:
        return self._by_address.get(address)

    def _contest(self, request: JoinRequest, former: _Node, now: float) -> Dial | None:
        """A node with another key joins from a member's address. Returns None, so that the member
        is replaced, if it neither answers a dial nor renews. Raises Refused."""
        rules, claim, name = self.rules, former.claim, former.member.node
        whose = f"{request.address} is the address of {name} ({place_of(former.member)})"
        if claim is None or now >= claim.asked + rules.dial_timeout + rules.lease:
            self._questions += 1
            former.claim = _Claim(self._questions, now)
            self._note(f"{request.node} joins with another key, and {whose}: the registry dials it")
            return Dial(self._questions, name, request.address, rules.dial_timeout)
        if claim.alive:
            raise Refused(
                "ALREADY_EXISTS",
                f"{whose}, which has another key and answers; choose another address with "
                f"--advertise, or end {name}",
            )
        if former.streaming and former.renewed > claim.asked:
            raise Refused(
                "ABORTED",
                f"{whose}, which has another key and renews its lease; join again when it is gone, "
                "or choose another address with --advertise",
            )
        if not claim.answered or (former.streaming and now < claim.asked + rules.lease / 2):
            raise Refused("UNAVAILABLE", f"{whose}, and the registry checks whether it is alive")
        return None

    def _ask_again(self, question: int) -> JoinReply:
        reason = "the address is a member's, which the registry dials: join again"
        return JoinReply(run=self.rules.run, reason=reason, question=question)

    def _has_data(self, data: str) -> bool:
        return not self.rules.data or data == self.rules.data

    def _unreachable(self, address: str, stage: int) -> Member | None:
        """A member that a node with this address must link to, and can reach by relay only."""
        if address:
            return None
        members = (n.member for n in self._nodes.values())
        hidden = (m for m in members if not m.address)
        return next((m for m in hidden if _related(self.rules, stages_of(m), [stage])), None)

    def _has_relay(self) -> bool:
        """Whether any member can relay between two nodes that can't be dialled."""
        return any(n.member.address and not n.leaving for n in self._nodes.values())

    def _admit(self, attempt: JoinAttempt, now: float) -> _Node:
        request, block = attempt.request, attempt.block
        stage: int | None
        if request.standby:
            stage, why = None, "standby, as requested"
        elif _is_bound(request):
            stage, why = request.stage, f"stage {request.stage}, as requested"
        else:
            stage, why = self._choose(attempt)
        self._joined += 1
        member = Member(
            node=request.node,
            address=request.address,
            seats=[] if stage is None else [Seat(stage=stage)],
            room=request.room or 1,
            joined=self._joined,
            speed=request.speed,
            host=request.host,
            device=request.device,
            data=request.data,
            key=request.key,
            block=block,
            standby=request.standby,
            owner=attempt.owner,
        )
        node = _Node(member, why, now, now)
        self._staffed().add(node.stages, member.speed, _location(member))
        self._enter(node)
        node.reasons = dict.fromkeys(node.stages, why)
        self._schedule(request.node, node)
        self._changes.append(f"{request.node} joined: {why}")
        self._joined_at = now
        return node

    def _enter(self, node: _Node) -> None:
        member = node.member
        self._nodes[member.node] = node
        self._neighbour_graph = None
        self._by_key.setdefault(member.key, []).append(node)
        if member.address:
            self._by_address[member.address] = node

    def _choose(self, attempt: JoinAttempt) -> tuple[int | None, str]:
        """A stage for a node that asked for none, and the reason; None: standby. The stage of its
        saves counts only while no node has its state."""
        request, place = attempt.request, FailureDomain(attempt.block, attempt.request.host)
        numbers, staff = range(self.rules.stages + 1), self._staffed()
        wanted = [s for s in numbers if staff.count[s] < self.rules.max_replicas]
        may_drive = attempt.owner and self._has_data(request.data)
        served = [s for s in wanted if s or may_drive]
        direct = [s for s in served if self._unreachable(request.address, s) is None]
        carried = served if self._has_relay() else direct
        vacant = [s for s in (*direct, *carried) if not staff.count[s]]
        fits = direct or carried
        saved = request.stage if request.HasField("stage") else None
        if saved in fits and not self._is_held(saved):
            return saved, f"stage {saved}, for which it has saves"
        if vacant:
            return vacant[0], f"stage {vacant[0]} was vacant"
        if fits:
            return _choose_among(fits, staff, place)
        if not wanted:
            return None, f"standby: every stage has {self.rules.max_replicas} nodes or more"
        if not served:
            lacking = "lacks the run's data" if attempt.owner else "is not the run owner's"
            return None, f"standby: only stage 0 has room, and the node {lacking}"
        other = self._unreachable(request.address, served[0])
        return None, (
            "standby: it only dials out, and every stage with room needs a link to such a node "
            f"({other.node if other else ''}); give it `--advertise HOST:PORT`"
        )

    def _staffed(self) -> Staffing:
        """The staffing, counted once and updated per join, since many may join at once."""
        if self._staffing is None:
            self._staffing = Staffing(self.rules.stages)
            for node in self._serving():
                if not node.leaving:
                    self._staffing.add(node.stages, node.member.speed, _location(node.member))
        return self._staffing

    def _neighbours(self) -> Neighbours:
        """The neighbours, as `_staffed`, but recomputed after each join."""
        if self._neighbour_graph is None:
            members, rules = (node.member for node in self._nodes.values()), self.rules
            driver = self.view.driver
            self._neighbour_graph = Neighbours(members, driver, rules.stages, rules.policy.swapped)
        return self._neighbour_graph

    def _invalidate(self) -> None:
        """Invalidates staffing and neighbours after a change of seats."""
        self._staffing = self._neighbour_graph = None

    def _is_held(self, stage: int) -> bool:
        """Whether a staying node has the stage's state, in a run in progress."""
        staying = (node for node in self._nodes.values() if not node.leaving)
        return self._started and any(node.holds and stage in node.holds for node in staying)

    def reply_to(self, name: str) -> JoinReply | Refused:
        """The reply to an admitted node, by the newest view. Refused: it is no longer a member, for
        example because another node of its batch replaced it."""
        node = self._nodes.get(name)
        if node is None:
            reason = self._evicted.get(name, "not a member of the current view")
            return _gone(name, reason)
        return JoinReply(
            run=self.rules.run,
            view=View(number=self._number),
            reason=node.why,
            lease=self.rules.lease,
            key=self.key.public,
        )

    # -- no member is heard ------------------------------------------------------------------------

    def _ask(self, request: JoinRequest, others: list[_Node], now: float) -> JoinReply:
        """No member is heard, only a newcomer: the members are gone, or cut off from this registry
        and still training. Registry and newcomer dial them. If none answers, all are evicted; if
        one does, a second run must not begin. Raises Refused once the newcomer has dialled."""
        question, seconds = self._question, self.rules.dial_timeout
        if question is None or now >= question.asked + self._lasts(question):
            question = self._question = self._new_question(request.node, others, now)
            for member in question.dialled:
                self._effects.append(Dial(question.number, member.node, member.address, seconds))
            return self._put(question)
        if request.question != question.number:
            return self._put(question)
        question.answered |= dict.fromkeys(request.answered, request.node)
        alive = [node.member for node in others if node.member.node in question.answered]
        if alive:
            names = ", ".join(f"{m.node} ({place_of(m)}, {m.address})" for m in alive)
            self._note(
                f"{request.node} has to wait: these nodes answer a dial, but are not heard: {names}"
            )
            raise Refused(
                "ABORTED",
                f"the run continues without this registry: {names} answers a dial, but is not "
                "connected to the registry. No node can join until it is; check that it can reach "
                "the registry's address, or end it",
            )
        hidden = [node.member.node for node in others if not node.member.address]
        wait = question.asked + self.rules.grace - now
        if hidden and wait > 0:
            raise Refused(
                "UNAVAILABLE",
                f"no member is heard, and {', '.join(hidden)} can't be dialled; "
                f"join again in {wait:.1f} s, when they have had time to reconnect",
            )
        if question.open:
            raise Refused("UNAVAILABLE", "no member is heard, and some are being dialled")
        self._give_up(request)
        raise Refused("UNAVAILABLE", "all members are gone; join again")

    def _lasts(self, question: _Question) -> float:
        """Seconds after which the question must be repeated."""
        return self.rules.dial_timeout + (0.0 if question.answered else self.rules.grace)

    def _new_question(self, newcomer: str, others: list[_Node], now: float) -> _Question:
        addressed = [node.member for node in others if node.member.address]
        dialled = addressed[:: math.ceil(len(addressed) / MOST_DIALLED) or 1]
        self._questions += 1
        self._note(f"{newcomer} asks to join, and no member is heard: dialling {len(dialled)}")
        return _Question(self._questions, now, dialled, {member.node for member in dialled})

    def _put(self, question: _Question) -> JoinReply:
        return JoinReply(
            run=self.rules.run,
            reason="no member is heard: dial them, and join again",
            question=question.number,
            unheard=question.dialled,
            dial_seconds=self.rules.dial_timeout,
        )

    def _give_up(self, request: JoinRequest) -> None:
        for name, node in self._nodes.items():
            reason = f"not heard, and no answer to dials by the registry and {request.node}"
            if not node.member.address:
                reason = f"not heard, and not reconnected within {self.rules.grace:g} s"
            elif node.member.address == request.address:
                reason = f"restarted: {request.node} joined from {request.address}"
            self._doom(name, node, reason)
        self._question, self._isolated = None, False

    # -- eviction ----------------------------------------------------------------------------------

    def _deadline(self, node: _Node) -> float:
        """The earliest deadline of the node."""
        if node.doomed:
            return -math.inf
        due = node.renewed + self.rules.lease
        if node.probe:
            due = min(due, node.probed + self.rules.probe_timeout)
        if node.reached_by:
            due = max(due, node.checked + self.rules.lease / LOOKS)
        return min(due, node.awaited(self.rules.reconnect))

    def _overdue(self, node: _Node, now: float) -> str:
        """Why the node is past its deadline; empty: it isn't."""
        if node.doomed:
            return node.doomed
        was_reached = bool(node.reached_by)
        named = list(node.accusers.items())[:ACCUSERS_NAMED]
        accused = "".join(f"; suspected by {a}: {w}" for a, w in named)
        if now >= node.awaited(self.rules.reconnect):
            return f"its stream broke, without a new one for {self.rules.reconnect:g} s{accused}"
        if node.probe and now >= node.probed + self.rules.probe_timeout:
            why = f"no answer to a probe for {self.rules.probe_timeout:g} s"
        elif now >= node.renewed + self.rules.lease:
            why = f"not renewed for {self.rules.lease:g} s"
        else:
            return ""
        if self._spare(node, now):
            return ""
        return f"{why}{', and no member reaches it any more' * was_reached}{accused}"

    def _spare(self, node: _Node, now: float) -> bool:
        """Spares a silent node that is the last holder of a stage while another member reaches it;
        the check is repeated soon."""
        context, name, former_helper = _MembersNow(self, now), node.member.node, node.reached_by
        node.reached_by = self._cuts.reached_by(context, name) if context.spared(name) else ""
        if not node.reached_by:
            return False
        why = (
            f"{name} ({place_of(node.member)}) is not heard, but {node.reached_by} reaches it: "
            "it stays, as the only node with its stage's state"
        )
        if not former_helper:
            self._note(why)
        if node.accusers:
            self._effects.append(Settle(name, True, why))
        node.checked, node.probe, node.accusers = now, 0, {}
        return True

    def _schedule(self, name: str, node: _Node) -> None:
        due = self._deadline(node)
        if due < node.due:
            node.due = due
            heapq.heappush(self._deadlines, (due, name))

    def _hears_nobody(self, now: float) -> bool:
        """Whether no member is heard. Then this registry's own network is down: the members
        continue training, and get the same time to return as after a restart."""
        has_members = False
        for node in self._nodes.values():
            if node.doomed:
                continue
            if node.lost is None and now < node.renewed + self.rules.lease:
                return False
            has_members = True
        return has_members

    def _review_accusations(self, now: float) -> None:
        """Decides accusations by the driver alone: the accused stays, and another node drives."""
        for decision in self._accusations.review(_MembersNow(self, now), now):
            if isinstance(decision, Convicted):
                node = self._nodes[decision.node]
                node.cause = decision.cause
                self._evict(node, decision.why, now)
            elif decision.heir:
                self._heir = decision.heir
                self._changes.append(
                    f"{decision.finding}; {decision.heir} drives instead, and observes for itself"
                )
            else:
                self._note(decision.finding)

    def _doom(self, name: str, node: _Node, reason: str) -> None:
        node.doomed = reason
        self._schedule(name, node)

    def _miss(self, node: _Node, now: float) -> list[Effect]:
        """Records the loss of the node's stream, and dials it."""
        self._questions += 1
        node.lost, node.dial = now, self._questions
        name, address = node.member.node, node.member.address
        return [Dial(node.dial, name, address, self.rules.lease)] if address else []

    def _answered(self, node: _Node, now: float) -> list[Effect]:
        """Settles suspicions of a node that answered. For its reachability, see cuts.py."""
        name = node.member.node
        node.accusers, node.probe = {}, 0
        return [Settle(name, True, f"{name} answered the registry's probe")]

    def _review_cuts(self, now: float) -> None:
        """Assigns relays to members that can't reach each other, or evicts one of them."""
        while self._cuts.any:
            evicted = False
            for decision in self._cuts.review(_MembersNow(self, now), now):
                if isinstance(decision, Goes):
                    self._evict(self._nodes[decision.node], decision.why, now)
                    evicted = True
                else:
                    self._changes.append(decision.change)
            if not evicted:
                return

    def _evict(self, node: _Node, reason: str, now: float) -> None:
        name = node.member.node
        self._take_out(node)
        self._evicted[name] = reason[:WHY_LENGTH]
        while len(self._evicted) > EVICTED_KEPT:
            del self._evicted[next(iter(self._evicted))]
        if not reason.startswith("left: "):
            eviction = Eviction(member=node.member, reason=reason[:DECISION_LENGTH])
            self._evictions.append((now, eviction))
        if node.cause != SILENT:
            instance = instance_of(node.member.key)
            self._quarantine.add(instance, name, node.cause, reason, now)
        self._cuts.gone(name)
        self._accusations.gone(name)
        self._changes.append(f"{name} ({place_of(node.member)}) is gone: {reason}")
        self._effects.append(Evict(name, reason))
        if node.accusers:
            self._effects.append(Settle(name, False, reason))

    def _take_out(self, node: _Node) -> None:
        member = node.member
        del self._nodes[member.node]
        self._by_address.pop(member.address, None)
        self._by_key[member.key].remove(node)
        if not self._by_key[member.key]:
            del self._by_key[member.key]
        self._invalidate()

    # -- views -----------------------------------------------------------------------------------

    def _finish(self, now: float) -> list[Effect]:
        """Issues a view if anything has changed."""
        if self._changes:
            self._staff(now)
            if self._started and self._everything_is_lost():
                self._started = False
                self._changes.append(
                    "no node has the run's state any more: waiting for nodes as at the start"
                )
            vacant = self._vacant()
            if vacant:
                self._covered = None
            elif self._covered is None:
                self._covered = now
            several = any(len(node.stages) > 1 for node in self._serving())
            self._unsettled = bool(vacant) or several
            self._issue(now)
        return self._take_effects()

    def _everything_is_lost(self) -> bool:
        """Whether a run with state has lost it at all serving nodes. Files may restore it, and the
        newest may be at a node yet to come. Step 1 is no proof: it may be so new that only one node
        has reported it."""
        seats = (seat for n in self._nodes.values() for seat in n.report.seats)
        return self._watermark.newest > (0, 1) and not any(_age(seat) > (0, 0) for seat in seats)

    def _finished(self) -> bool:
        return any(seat.finished for node in self._nodes.values() for seat in node.report.seats)

    def _has_state(self, seat: SeatReport) -> bool:
        """Whether a seat has its stage's state. Age (0, 0) counts only at the start of a run."""
        if seat.phase in WITHOUT_STATE:
            return False
        return _age(seat) > (0, 0) or self._watermark.newest <= (0, 1)

    def _staff(self, now: float) -> None:
        """Gives each stage a member that stays. Before the run has begun, a node gets a second seat
        only after `start_grace` without a join. A finished run needs no placement."""
        if now < self._collecting_until < math.inf:
            return
        self._collecting_until = math.inf
        if all(self._staffed().count) and all(len(n.stages) == 1 for n in self._nodes.values()):
            return  # no seat to assign or return
        if self._finished():
            return
        begun = self._started or now > self._joined_at + self.rules.start_grace
        candidates, rules = self._candidates(now), self.rules
        for change in assign(candidates, rules.stages, begun, rules.policy, rules.max_replicas):
            node = self._nodes[change.node]
            stays = {stage for stage in node.stages if stage != change.stage}
            if isinstance(change, SeatAssigned):
                stays = (stays - {change.gives}) | {change.stage}
            if not node.member.seats:
                node.placed = now
            self._reseat(node, stays)
            node.why = change.why
            node.reasons = {s: node.reasons.get(s, change.why) for s in sorted(stays)}
            verb = "takes" if isinstance(change, SeatAssigned) else "gives back"
            self._changes.append(f"{change.node} {verb} stage {change.stage}: {change.why}")

    def _announce(self, node: _Node, now: float) -> None:
        """Publishes that a node will leave soon, or stays after all."""
        member = _copy(node.member)
        member.leaving = node.report.leaving
        node.become(member)
        self._invalidate()
        self._collecting_until = min(self._collecting_until, now + LEAVES_COLLECTED)
        how = "will leave soon" if node.leaving else "stays after all"
        self._changes.append(f"{node.member.node} ({place_of(node.member)}) {how}")

    def _reseat(self, node: _Node, stages: set[int]) -> None:
        """Changes a node's seats; new seats do not inherit state reported for former ones."""
        former = {seat.stage: seat for seat in node.member.seats}
        member, since = _copy(node.member), self._number + 1
        del member.seats[:]
        member.seats.extend(former.get(s, Seat(stage=s, since=since)) for s in sorted(stages))
        node.become(member)
        self._invalidate()
        if node.holds is not None:
            node.holds &= former.keys()

    def _candidates(self, now: float) -> list[Candidate]:
        """All nodes, in the form for placement.py."""
        numbers, carried = range(self.rules.stages + 1), self._has_relay()
        served = frozenset(numbers[1:]), frozenset(numbers)  # without and with stage 0
        candidates = []
        for node in self._nodes.values():
            member, seated = node.member, frozenset(node.stages)
            fits = served[member.owner and self._has_data(member.data)]
            if not carried:
                fits = frozenset(s for s in fits if not self._unreachable(member.address, s))
            candidate = Candidate(
                member.node,
                seated,
                frozenset(node.holds or ()) & seated,
                fits,
                member.room or 1,
                member.speed or 1.0,
                heard=node.heard(self.rules.lease, now),
                leaving=node.leaving,
                drives=member.node == self.view.driver,
                place=_location(member),
                waits=member.standby,
            )
            candidates.append(candidate)
        return candidates

    def _issue(self, now: float) -> None:
        awaited = "" if self._started else self._awaited(now)
        driver = "" if awaited else self._driver()
        if driver != self.view.driver:
            self._neighbour_graph = None
            self._changes.append(f"{driver} drives" if driver else "no stage-0 member can drive")
        self._started = self._started or bool(driver)
        self._number += 1
        changes = "; ".join(self._changes)[:DECISION_LENGTH]
        strangers = not all(node.member.owner for node in self._nodes.values())
        owner = OWNER_AWAITED if strangers and 0 in self._vacant() else ""
        reason = "; ".join(filter(None, (changes, awaited, owner)))
        view = View(
            run=self.rules.run,
            number=self._number,
            members=[n.member for n in self._nodes.values()],
            driver=driver,
            reason=reason,
            lineage=self._watermark.newest[0],
            committed=self._watermark.newest[1],
            relays=self._cuts.relays(),
            quarantined=self._quarantine.listed(now),
            banned=self._banned,
        )
        sign(view, self.key, self.view)
        self.view, self._issued = view, now
        self._note(f"view {self._number}: {reason}")
        self._changes = []
        self._effects.append(Issue(self.view))

    def _driver(self) -> str:
        """The next driver: an heir, else the present one, else the oldest staying stage-0 member
        that has lost the drive least often. Empty: none."""
        heir, self._heir = self._heir, ""
        for name in (heir, self.view.driver):
            if name in self._nodes and 0 in self._nodes[name].stages:
                return name
        ends = {
            node.member.node: (node.leaving, self._accusations.lost_alone(node.member.node))
            for node in self._serving()
            if 0 in node.stages
        }
        return min(ends, key=lambda node: ends[node], default="")

    def _awaited(self, now: float) -> str:
        """The nodes that the run's first driver waits for, as text; empty: none."""
        since = min(self._covered, self._joined_at) if self._covered is not None else math.inf
        if now >= since + self.rules.start_grace:
            return ""
        wanted = self.rules.replicas
        count = self._count()
        needed = [
            f"{wanted - count[s]} more node{'s' if wanted - count[s] > 1 else ''} "
            f"at stage {s} ({count[s]} of {wanted})"
            for s in range(self.rules.stages + 1)
            if count[s] < wanted
        ]
        return f"waiting for {', '.join(needed)}" if needed else ""

    def _serving(self) -> Iterable[_Node]:
        return (node for node in self._nodes.values() if node.stages)

    def _count(self) -> Counter[int]:
        """The number of nodes at each stage."""
        return Counter(itertools.chain.from_iterable(node.stages for node in self._serving()))

    def _vacant(self) -> list[int]:
        served = frozenset[int]().union(*(node.stages for node in self._nodes.values()))
        return [s for s in range(self.rules.stages + 1) if s not in served]

    # -- learning after the loss of the journal --------------------------------------------------

    def _check_shown(self, renewal: Renewal) -> None:
        """Raises Refused for a forged view, or if this registry lacks the run's key; the node stays
        a member and trains until its registry is back."""
        view, is_member = renewal.view, renewal.node in self._nodes
        if renewal.shown > max(view.number, self._number):
            raise Refused(
                "OUT_OF_RANGE",
                f"{renewal.node} has view {renewal.shown}, and this registry none after view "
                f"{self._number}: call again with the view",
            )
        if view.number <= (self._number if is_member else 0) or self.is_genuine(view):
            return
        raise Refused(
            "FAILED_PRECONDITION",
            f"{renewal.node} shows view {view.number}, which this registry's key has not signed. "
            "If the registry lacks its former key, start it with the folder of that key "
            "(--authority DIR); if the key is lost, restart all nodes",
        )

    def _should_learn(self, renewal: Renewal, now: float) -> bool:
        """Whether a member shows a newer view, and this registry has not yet led the run."""
        return (
            renewal.view.number > self._number
            and renewal.run == self.rules.run
            and (not self._started or now < self._quiet_until)
            and any(m.node == renewal.node for m in renewal.view.members)
        )

    def _learn(self, view: View, now: float) -> None:
        former = self._nodes
        try:
            if problem := self._watermark.impossible(view.committed):
                raise ValueError(problem)
            self.restore(view, now)
        except ValueError as error:
            self._note(f"a node's view is rejected: {error}")
            return
        for name in former.keys() - self._nodes.keys():
            self._evicted[name] = f"not a member of view {view.number}, which other nodes have"
            self._effects.append(Evict(name, self._evicted[name]))
            if former[name].accusers:
                self._effects.append(Settle(name, False, self._evicted[name]))
        self._effects.append(Issue(view))

    def _take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _note(self, decision: str) -> None:
        self.decisions.append(decision[:DECISION_LENGTH])
        self.decided += 1


@dataclass(frozen=True)
class _MembersNow:
    """The members' state at `now`, for cuts.py and accusations.py."""

    machine: Membership
    now: float

    def names(self) -> Iterable[str]:
        return self.machine._nodes

    def heard(self, node: str) -> bool:
        record = self.machine._nodes.get(node)
        return record is not None and record.heard(self.machine.rules.lease, self.now)

    def heard_since(self, node: str, time: float) -> bool:
        return self.machine._nodes[node].renewed > time

    def linkable(self, a: str, b: str) -> bool:
        return any(self.machine._nodes[node].member.address for node in (a, b))

    def neighbours(self, a: str, b: str) -> bool:
        return b in self.machine._neighbours().of(a)

    def believed(self, node: str) -> bool:
        record, lease = self.machine._nodes[node], self.machine.rules.lease
        alive = self.now < record.renewed + lease and not (record.gone or record.doomed)
        return alive and self.now >= record.placed + lease / 2

    def spared(self, node: str) -> bool:
        record = self.machine._nodes[node]
        if self.hangs(node):
            return False
        reported = {seat.stage for seat in record.report.seats}
        if record.renewed >= record.placed + self.machine.rules.lease:
            reported.update(record.stages)  # it has had time to report them
        without_state = reported - (record.holds or set())
        with_state = (stage for stage in record.stages if stage not in without_state)
        return any(all(other is record for other in self._holders(stage)) for stage in with_state)

    def drives(self, node: str) -> bool:
        return node == self.driver

    def replicas(self, node: str) -> int:
        stages = self.machine._nodes[node].stages
        return min((sum(1 for _ in self._holders(stage)) for stage in stages), default=0)

    @property
    def driver(self) -> str:
        return self.machine.view.driver

    def serving(self) -> Collection[str]:
        return [node.member.node for node in self.machine._serving()]

    def place(self, node: str) -> FailureDomain:
        return _location(self.machine._nodes[node].member)

    def hangs(self, node: str) -> bool:
        return self.machine._nodes[node].report.stalled_seconds > 0

    def may_drive(self, node: str) -> bool:
        record = self.machine._nodes[node]
        alive = record.lost is None and self.now < record.renewed + self.machine.rules.lease
        return alive and 0 in record.stages and not (record.doomed or record.leaving)

    def _holders(self, stage: int) -> Iterable[_Node]:
        """The nodes with the stage's state that are heard."""
        with_state = (n for n in self.machine._nodes.values() if n.holds and stage in n.holds)
        seated = (n for n in with_state if stage in n.stages)
        return (n for n in seated if self.heard(n.member.node))


def _choose_among(fits: list[int], staff: Staffing, place: FailureDomain) -> tuple[int, str]:
    """The weakest stage. First, stages with several nodes in one failure domain other than the
    newcomer's. Else the stage of least capacity, or, up to twice that, the one with the fewest
    nodes in the newcomer's domain."""
    in_one = [s for s in fits if staff.count[s] > 1 and staff.is_apart(place, s)]
    least = min(staff.capacity[s] for s in in_one or fits)
    suitable = [s for s in in_one or fits if staff.capacity[s] <= 2 * least]

    def order(stage: int) -> tuple[bool, bool, float, int]:
        blocks, hosts = staff.shared(place, stage)
        return blocks > 0, hosts > 0, staff.capacity[stage], stage

    stage = min(suitable, key=order)
    if in_one:
        return stage, f"stage {stage} had all its nodes in one failure domain"
    if staff.capacity[stage] > least:
        return (
            stage,
            f"stage {stage} had no node in its failure domain (capacity {staff.capacity[stage]:g})",
        )
    return stage, f"stage {stage} had the least capacity ({staff.capacity[stage]:g})"


def _location(member: Member) -> FailureDomain:
    return FailureDomain(member.block, member.host)


def _gone(name: str, reason: str) -> Refused:
    why = f"node {name} is no longer a member ({reason}); join again under a new node id"
    return Refused("ALREADY_EXISTS", why)


def _is_bound(request: JoinRequest) -> bool:
    """Whether the node accepts only the stage in its request."""
    return request.HasField("stage") and not request.saved


def _copy(member: Member) -> Member:
    """A mutable copy, since members of an issued view never change."""
    copy = Member()
    copy.CopyFrom(member)
    return copy


def _committed(report: Report) -> int:
    """The newest step that a report has as committed."""
    return max((seat.committed for seat in report.seats), default=0)


def _age(seat: SeatReport) -> Age:
    """Lineage and committed step of the seat's state."""
    return seat.lineage, seat.committed


def place_of(member: Member) -> str:
    stages = stages_of(member)
    many = "s" if len(stages) > 1 else ""
    return f"stage{many} {', '.join(map(str, stages))}" if stages else "standby"


def not_served(run: str, requested: str) -> str:
    return readable(f"this registry serves run {run}, not {requested}; check the address")


def misspelt_member(member: Member | JoinRequest) -> str:
    """Why a member's address or names are invalid; empty: they are valid."""
    problem = member.address and not_to_dial(member.address, EVERYWHERE)
    problem = problem or misspelt("node id", member.node)
    problem = problem or (member.data and misspelt("content of data", member.data))
    for kind, text in (("host", member.host), ("device", member.device)):
        problem = problem or (
            "" if text.isprintable() else f"the {kind} {text[:40]!r} isn't printable"
        )
    return problem


def first_misspelt(members: Iterable[Member]) -> str:
    """The first spelling error among the members; empty: none."""
    return next(filter(None, map(misspelt_member, members)), "")


def _related(
    rules: MembershipRules, stages_here: Iterable[int], stages_there: Iterable[int]
) -> bool:
    """Whether nodes with seats at `some` stages need links to nodes at `others`."""
    pairs = itertools.product(stages_here, stages_there)
    return any(related(a, b, rules.stages, rules.policy.swapped) for a, b in pairs)


def _problem(view: View, rules: MembershipRules) -> str:
    """Why the view can't be one of the run; empty: it can."""
    members = list(view.members)
    addresses = [m.address for m in members if m.address]
    joined = [m.joined for m in members]
    if view.run != rules.run:
        return f"it is of run {view.run}, not {rules.run}"
    if not view.reason.isprintable():
        return f"its reason isn't printable: {view.reason[:40]!r}"
    if not 0 < view.number < 2**62:
        return f"its number is {view.number}"
    if len(members) > rules.max_nodes:
        return f"it has {len(members)} nodes, more than {rules.max_nodes}"
    if len({m.node for m in members}) < len(members):
        return "a node is listed twice"
    if problem := "".join(map(misspelt_member, members)):
        return problem
    if not all(is_block(m.block) for m in members):
        return "a node's address block is invalid"
    if len(set(addresses)) < len(addresses):
        return "an address is listed twice"
    if joined != sorted(set(joined)):
        return "its nodes are not in the order of joining"
    if any(stage > rules.stages for m in members for stage in stages_of(m)):
        return f"it has stages above {rules.stages}"
    if stranger := next((m.node for m in members if 0 in stages_of(m) and not m.owner), ""):
        return f"its stage 0 has {stranger}, which is not the run owner's"
    if any(stages_of(m) != sorted(set(stages_of(m))) for m in members):
        return "a node has two seats at a stage, or they are not in order"
    ends = [(relay.a, relay.b) for relay in view.relays]
    if ends != sorted(set(ends)) or any(
        not relay.a < relay.b or relay.via in (relay.a, relay.b) for relay in view.relays
    ):
        return "its relays are not in order"
    if not {name for r in view.relays for name in (r.a, r.b, r.via)} <= {m.node for m in members}:
        return "a relay names a node that is no member"
    invalid = any(not entry.instance or not entry.seconds >= 0 for entry in view.quarantined)
    if invalid or len(view.quarantined) > MOST_KEPT:
        return "its quarantine has an invalid entry, or too many"
    if list(view.banned) != sorted(set(view.banned)) or not all(map(is_instance, view.banned)):
        return "its banned instances are invalid, or not in order"
    if view.driver and view.driver not in {m.node for m in members if 0 in stages_of(m)}:
        return f"its driver {view.driver} is no stage-0 member"
    return ""

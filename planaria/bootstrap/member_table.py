"""The table of members with its indexes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from planaria.bootstrap import registry_pb2 as pb
from planaria.bootstrap.candidates import Candidate, SeatAssigned, SeatReleased
from planaria.bootstrap.failure_domains import FailureDomain
from planaria.bootstrap.identity import instance_of
from planaria.bootstrap.neighbours import Neighbours, related, stages_of
from planaria.bootstrap.placement import Staffing
from planaria.bootstrap.rules import MembershipRules
from planaria.bootstrap.step_time import MOST_WEIGHED, UNKNOWN, LinkSpeed, Load, Outlook, outlook

RESTS = 2  # leases from one change of seats to the next move: measurements get up to date
LONGER = 4  # factor for a stage on its next rest: measurements may be no better than before
NEWS = 0.2  # share of a new measurement in what is remembered


@dataclass(eq=False)
class Claim:
    """A claim to a member's address: a node with another key has joined from there."""

    question: int  # number of the dial to the member
    asked: float
    alive: bool | None = None
    answered: bool = False


@dataclass(eq=False)
class NodeRecord:
    """A member or standby, and its health. The table changes `member`."""

    member: pb.Member
    why: str  # reason of the latest decision about its seats
    renewed: float
    placed: float  # time since which it serves, or is a standby
    due: float = math.inf  # time of its live entry in the heap of deadlines
    reasons: dict[int, str] = field(default_factory=dict)  # for each of its seats, by stage
    report: pb.Report = field(default_factory=pb.Report)
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
    cause: pb.Cause = pb.SILENT  # of that eviction
    claim: Claim | None = None  # the newest claim to its address
    contradicted: float = -math.inf  # time of the last report that was refused, as noted
    since: dict[int, float] = field(default_factory=dict)  # stage -> when it got the seat
    layer: float = 0.0  # seconds of a microbatch in a layer, a recent mean; 0: not measured
    ends: float = 0.0  # the same for stage 0
    links: dict[str, LinkSpeed] = field(default_factory=dict)  # to peers, as each reported last
    stages: list[int] = field(init=False)  # of its seats; empty: a standby

    def __post_init__(self) -> None:
        self.stages = stages_of(self.member)
        self.since = dict.fromkeys(self.stages, self.renewed)

    def note_speeds(self, load: Load, members: Container[str]) -> None:
        """Remembers what its newest report has of its speed, and of its links to `members`: a
        standby has neither. What traffic shows counts more than the last `planaria probe`, which
        may be long ago. Figures that can't be are ignored."""
        measured = {
            seat.stage: seat.seconds
            for seat in self.report.seats
            if seat.stage in self.stages and 0 < seat.seconds < math.inf
        }
        if ends := measured.pop(0, 0.0):
            self.ends += (NEWS if self.ends else 1.0) * (ends - self.ends)
        if layers := sum(load.layers[stage - 1] for stage in measured):
            layer = sum(measured.values()) / layers
            self.layer += (NEWS if self.layer else 1.0) * (layer - self.layer)
        self.links = {peer: speed for peer, speed in self.links.items() if peer in members}
        for link in (*self.report.links, *self.report.seen):
            room = link.peer in self.links or len(self.links) < MOST_WEIGHED
            if room and link.peer in members and link.mbps >= 0 <= link.rtt_ms < math.inf:
                rate = link.mbps * 1e6 / 8 or self.links.get(link.peer, UNKNOWN).rate
                self.links[link.peer] = LinkSpeed(link.rtt_ms / 2e3, rate)

    @property
    def name(self) -> str:
        return self.member.node

    @property
    def leaving(self) -> bool:
        """Whether the view says that it will leave soon."""
        return self.member.leaving

    @property
    def place(self) -> FailureDomain:
        return FailureDomain(self.member.block, self.member.host)

    def leased(self, lease: float, now: float) -> bool:
        """Whether the node's lease is valid, and its stream isn't lost."""
        return self.lost is None and now < self.renewed + lease

    def heard(self, lease: float, now: float) -> bool:
        """Whether the node is alive, as far as the registry knows."""
        return self.leased(lease, now) and not (self.probe or self.doomed or self.reached_by)


class Members:
    """The members in the order of joining. Each change of the table updates its indexes."""

    def __init__(self, rules: MembershipRules) -> None:
        self.rules = rules
        self.clear()

    def clear(self) -> None:
        """Forgets all members."""
        self.by_name: dict[str, NodeRecord] = {}  # in join order
        self.by_address: dict[str, NodeRecord] = {}
        self._by_key: dict[bytes, list[NodeRecord]] = {}
        self._hidden: dict[str, NodeRecord] = {}  # those without an address, in join order
        self._at: list[dict[str, NodeRecord]] = [{} for _ in range(self.rules.stages + 1)]
        self._standbys: set[str] = set()
        self._staffing: Staffing | None = None  # None: to be recounted
        self._neighbour_graph: Neighbours | None = None  # None: to be recomputed
        self._moved: dict[int, tuple[int, float]] = {}  # stage -> how often, and when last
        self._driver = ""

    # -- changes ---------------------------------------------------------------------------------

    def restore(self, view: pb.View, now: float) -> None:
        """Replaces the table by a view's members. Known ones keep their health."""
        former, before = self.by_name, "a member before the restart"
        self.clear()
        for member in view.members:
            node = former.get(member.node) or NodeRecord(member, before, now, now)
            node.member, node.stages = member, stages_of(member)
            node.reasons = {s: node.reasons.get(s, before) for s in node.stages}
            node.since = {s: node.since.get(s, now) for s in node.stages}
            self.enter(node)
        self.driver = view.driver

    def enter(self, node: NodeRecord) -> None:
        member = node.member
        self.by_name[member.node] = node
        self._by_key.setdefault(member.key, []).append(node)
        if member.address:
            self.by_address[member.address] = node
        else:
            self._hidden[member.node] = node
        if self._staffing is not None and not node.leaving:
            self._staffing.add(node.stages, member.speed, node.place)
        self._neighbour_graph = None
        self._moved.clear()
        self._seat(node)

    def remove(self, node: NodeRecord) -> None:
        member = node.member
        del self.by_name[member.node]
        self.by_address.pop(member.address, None)
        self._hidden.pop(member.node, None)
        self._by_key[member.key].remove(node)
        if not self._by_key[member.key]:
            del self._by_key[member.key]
        self._moved.clear()
        self._unseat(node)

    def apply(self, change: SeatAssigned | SeatReleased, since: int, now: float) -> None:
        """Carries out a change of placement, for view `since`."""
        node = self.by_name[change.node]
        stages = set(node.stages) - {change.stage}
        if isinstance(change, SeatAssigned):
            stages = (stages - {change.gives}) | {change.stage}
            if self._at[change.stage]:
                times, _ = self._moved.get(change.stage, (0, now))
                self._moved[change.stage] = times + 1, now
        if not node.stages:
            node.placed = now
        # New seats are of view `since`, and don't inherit state reported for former ones.
        former = {seat.stage: seat for seat in node.member.seats}
        member = deepcopy(node.member)
        del member.seats[:]
        member.seats.extend(former.get(s, pb.Seat(stage=s, since=since)) for s in sorted(stages))
        self._become(node, member)
        if node.holds is not None:
            node.holds &= former.keys()
        if isinstance(change, SeatReleased) and not stages:
            node.member.standby = True  # a copy that no view has yet
        node.why = change.why
        node.reasons = {s: node.reasons.get(s, change.why) for s in sorted(stages)}
        node.since = {s: node.since.get(s, now) for s in stages}

    def set_leaving(self, node: NodeRecord, leaving: bool) -> None:
        member = deepcopy(node.member)  # members of an issued view never change
        member.leaving = leaving
        self._become(node, member)

    @property
    def driver(self) -> str:
        return self._driver

    @driver.setter
    def driver(self, name: str) -> None:
        if name != self._driver:
            self._driver, self._neighbour_graph = name, None

    def _become(self, node: NodeRecord, member: pb.Member) -> None:
        """Replaces what the next view says of a node."""
        self._unseat(node)
        node.member, node.stages = member, stages_of(member)
        self._seat(node)

    def _seat(self, node: NodeRecord) -> None:
        for stage in node.stages:
            self._at[stage][node.name] = node
        if not node.stages:
            self._standbys.add(node.name)

    def _unseat(self, node: NodeRecord) -> None:
        self._staffing = self._neighbour_graph = None
        self._standbys.discard(node.name)
        for stage in node.stages:
            del self._at[stage][node.name]

    # -- answers ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[NodeRecord]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    def with_key(self, key: bytes) -> Sequence[NodeRecord]:
        return self._by_key.get(key, ())

    def at(self, stage: int) -> list[NodeRecord]:
        """The stage's nodes, in the order of joining."""
        return sorted(self._at[stage].values(), key=lambda node: node.member.joined)

    def count(self, stage: int) -> int:
        return len(self._at[stage])

    def vacant(self) -> list[int]:
        return [stage for stage, nodes in enumerate(self._at) if not nodes]

    @property
    def several_seats(self) -> bool:
        """Whether any node has several seats."""
        return sum(map(len, self._at)) > len(self.by_name) - len(self._standbys)

    @property
    def settled(self) -> bool:
        """Whether each stage has a node that stays, and each node one seat."""
        return all(self.staffing().count) and not (self._standbys or self.several_seats)

    def staffing(self) -> Staffing:
        """The staffing of all stages, counted once and updated per join: many may join at once."""
        if self._staffing is None:
            self._staffing = Staffing.empty(self.rules.stages)
            for node in self:
                if not node.leaving:
                    self._staffing.add(node.stages, node.member.speed, node.place)
        return self._staffing

    def neighbours(self) -> Neighbours:
        """Which members keep links with each other, recomputed after a change."""
        if self._neighbour_graph is None:
            members, rules = (node.member for node in self), self.rules
            swapped = rules.policy.swapped
            self._neighbour_graph = Neighbours(members, self.driver, rules.stages, swapped)
        return self._neighbour_graph

    def unreachable(self, address: str, stage: int) -> pb.Member | None:
        """A member that a node with this address must link to, and can reach by relay only."""
        if address:
            return None
        stages, swapped = self.rules.stages, self.rules.policy.swapped
        return next(
            (
                node.member
                for node in self._hidden.values()
                if any(related(other, stage, stages, swapped) for other in node.stages)
            ),
            None,
        )

    def has_relay(self) -> bool:
        """Whether any member can relay between two nodes that can't be dialled."""
        return any(not node.leaving for node in self.by_address.values())

    def has_holder(self, stage: int) -> bool:
        """Whether a staying node reports the stage's state."""
        return any(node.holds and stage in node.holds for node in self if not node.leaving)

    def seat_reports(self) -> Iterator[pb.SeatReport]:
        return itertools.chain.from_iterable(node.report.seats for node in self)

    def hears_nobody(self, now: float) -> bool:
        """Whether no member is heard. Then this registry's own network is down: the members
        continue training, and get the same time to return as after a restart."""
        lease = self.rules.lease
        return any(not node.doomed for node in self) and not any(
            node.leased(lease, now) and not node.doomed for node in self
        )

    def candidates(self, now: float) -> list[Candidate]:
        """All members as candidates for seats, as placement.py needs them."""
        numbers, carried = range(self.rules.stages + 1), self.has_relay()
        served = frozenset(numbers[1:]), frozenset(numbers)  # without and with stage 0
        candidates = []
        for node in self:
            member, seated = node.member, frozenset(node.stages)
            fits = served[self.rules.serves_stage_0(member.owner, member.data)]
            if not carried:
                fits = frozenset(s for s in fits if not self.unreachable(member.address, s))
            candidate = Candidate(
                member.node,
                seated,
                frozenset(node.holds or ()) & seated,
                fits,
                member.room or 1,
                member.speed or 1.0,
                heard=node.heard(self.rules.lease, now),
                leaving=node.leaving,
                drives=member.node == self.driver,
                place=node.place,
                waits=member.standby,
                joined=frozenset(seat.stage for seat in member.seats if not seat.since),
                requested=frozenset(seat.stage for seat in member.seats if seat.requested),
                layer=node.layer,
                ends=node.ends,
                since=node.since,
            )
            candidates.append(candidate)
        return candidates

    def outlook(self, candidates: Iterable[Candidate], now: float) -> Outlook | None:
        """What is known of speeds and links; None: too little, or there are too many nodes."""
        load = self.rules.load
        if load is None or len(self) > MOST_WEIGHED:
            return None
        links = {(node.name, peer): link for node in self for peer, link in node.links.items()}
        rest = RESTS * self.rules.lease
        newest = max((since for node in self for since in node.since.values()), default=now)
        resting = {s for s, (n, since) in self._moved.items() if now < since + rest * LONGER**n}
        return outlook(load, candidates, links, now >= newest + rest, frozenset(resting))

    def described(self, now: float) -> list[pb.MemberDescription]:
        """All members as a description of the run has them, for people."""
        return [
            pb.MemberDescription(
                member=node.member,
                report=node.report,
                since_renewal=max(0.0, now - node.renewed),
                suspected=bool(node.accusers),
                reached_by=node.reached_by,
                why=[node.reasons.get(s, node.why) for s in node.stages] or [node.why],
                instance=instance_of(node.member.key),
            )
            for node in self
        ]

    # -- answers to unreachable_pairs.py and accusations.py

    def serving(self) -> list[str]:
        """The members with seats, in the order of joining."""
        return [node.name for node in self if node.stages]

    def heard(self, name: str, now: float) -> bool:
        """Whether the node is a member and alive, as far as the registry knows."""
        node = self.by_name.get(name)
        return node is not None and node.heard(self.rules.lease, now)

    def linkable(self, a: str, b: str) -> bool:
        """Whether a link of these two members is possible: one of them can be dialled."""
        return any(self.by_name[name].member.address for name in (a, b))

    def are_neighbours(self, a: str, b: str) -> bool:
        """Whether the two need a link in every step, so that no complaint implies a link."""
        return b in self.neighbours().of(a)

    def silence_counts(self, name: str, now: float) -> bool:
        """Whether the node's silence implies that its links work: its lease is valid, though its
        stream may be broken, and its placement is old enough to have tested its links."""
        node, lease = self.by_name[name], self.rules.lease
        alive = now < node.renewed + lease and not (node.gone or node.doomed)
        return alive and now >= node.placed + lease / 2

    def last_working(self, name: str, now: float) -> bool:
        """Whether the node makes progress and is the last holder of a stage."""
        node = self.by_name[name]
        if self.hangs(name):
            return False
        reported = {seat.stage for seat in node.report.seats}
        if node.renewed >= node.placed + self.rules.lease:
            reported.update(node.stages)  # it has had time to report them
        without_state = reported - (node.holds or set())
        with_state = (stage for stage in node.stages if stage not in without_state)
        return any(all(other is node for other in self._holders(s, now)) for s in with_state)

    def replicas(self, name: str, now: float) -> int:
        """The least number of heard nodes with the state of one of its stages."""
        stages = self.by_name[name].stages
        return min((sum(1 for _ in self._holders(stage, now)) for stage in stages), default=0)

    def hangs(self, name: str) -> bool:
        """Whether the node itself reports a hang."""
        return self.by_name[name].report.stalled_seconds > 0

    def may_drive(self, name: str, now: float) -> bool:
        """Whether the node has a seat at stage 0, is heard, and stays."""
        node = self.by_name[name]
        alive = node.leased(self.rules.lease, now)
        return alive and 0 in node.stages and not (node.doomed or node.leaving)

    def _holders(self, stage: int, now: float) -> Iterable[NodeRecord]:
        """The stage's nodes that have its state, and are heard."""
        with_state = (node for node in self.at(stage) if node.holds and stage in node.holds)
        return (node for node in with_state if node.heard(self.rules.lease, now))

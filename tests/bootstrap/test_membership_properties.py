"""Tests that the membership keeps its promises under any order of events."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from planaria.bootstrap.effects import Dial, Effect, Issue, Refused
from planaria.bootstrap.membership import Membership
from planaria.bootstrap.neighbours import stages_of
from planaria.bootstrap.registry_pb2 import (
    Complaint,
    JoinReply,
    JoinRequest,
    Renewal,
    Report,
    SeatReport,
    Suspicion,
    View,
)
from planaria.bootstrap.rules import PROTOCOL, MembershipRules
from planaria.bootstrap.views import follows, is_genuine
from tests.bootstrap.conftest import identity
from tests.membership import join, validate_state

KEY = identity("registry")
RULES = MembershipRules(
    run="r",
    stages=3,
    replicas=2,
    max_replicas=2,
    start_grace=4,
    lease=3,
    probe_timeout=1,
    reconnect=0.5,
    data="hash",
    joins_per_second=20,
    max_nodes=12,
)
PICK = st.integers(0, 11)
THERE = st.lists(st.integers(0, 2), max_size=1)


class Registry(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = Membership(RULES, KEY)
        self.now = 0.0
        self.quiet_until = 0.0
        self.last = 0
        self.ids = 0
        self.asked: dict[str, int] = {}  # the stages that nodes asked for
        self.renewed: dict[str, float] = {}
        self.broken: set[str] = set()  # nodes whose streams are broken
        self.known: list[str] = []
        self.shown = View(run="r")  # the newest view that nodes hold

    def after(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Issue):
                assert effect.view.number > self.last
                assert is_genuine(effect.view, self.machine.key.public, self.machine.rules.run)
                assert follows(effect.view, self.shown)
                assert self.now >= self.quiet_until, "a new view during the grace"
                self.last = effect.view.number
                self.shown = effect.view

    def node(self, pick: int) -> str:
        return self.known[-1 - pick % len(self.known)] if self.known else "nobody"

    @rule(
        stage=st.none() | st.integers(0, 4),
        address=st.sampled_from(["", "", "new", "h1:1", "h2:1"]),
        data=st.sampled_from(["", "hash", "hash", "other"]),
        speed=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        owner=st.booleans(),
        by_registry=THERE,
        by_newcomer=THERE,
    )
    def join(
        self,
        stage: int | None,
        address: str,
        data: str,
        speed: float,
        owner: bool,
        by_registry: list[int],
        by_newcomer: list[int],
    ) -> None:
        """A node joins. If no member is heard, it counts whom registry and newcomer reach."""
        self.ids += 1
        node = f"n{self.ids}"
        request = JoinRequest(
            protocol=PROTOCOL,
            node=node,
            address=f"{node}:1" if address == "new" else address,
            stage=stage,
            data=data,
            speed=speed,
            key=(node if address in ("new", "") else address).encode(),
        )
        try:
            reply, effects = join(self.machine, request, self.now, owner=owner)
            if reply.question:
                answered = self.dial(reply, effects, by_registry), self.dial(reply, [], by_newcomer)
                request.question, request.answered[:] = reply.question, answered[1]
                self.join_again(request, {*answered[0], *answered[1]})
                reply, effects = join(self.machine, request, self.now, owner=owner)
                assert not reply.question
        except Refused as refusal:
            assert refusal.reason
            return
        self.after(effects)
        self.known.append(node)
        self.renewed[node] = self.now
        if stage is not None:
            self.asked[node] = stage
        assert node in [m.node for m in reply.view.members]
        assert join(self.machine, request, self.now) == (reply, [])

    def join_again(self, request: JoinRequest, answering: set[str]) -> None:
        """Join again; raise Refused if the members stay. Otherwise check that all were silent and
        unreachable."""
        before = list(self.machine.view.members)
        try:
            join(self.machine, request, self.now)
        except Refused:
            self.after(self.machine.tick(self.now))
            if self.machine.view.members:
                assert list(self.machine.view.members) == before
                raise
        own = {member.node for member in before if member.address == request.address}
        assert answering <= own, "who answers there is the newcomer itself"
        assert not any(self.heard(member.node) for member in before)

    def heard(self, name: str) -> bool:
        return name not in self.broken and self.now < self.renewed[name] + RULES.lease

    def dial(self, reply: JoinReply, effects: list[Effect], reached: list[int]) -> list[str]:
        """Return the members that answer, and give the machine the results of its dials."""
        answered = [m.node for i, m in enumerate(reply.unheard) if i in reached]
        for effect in effects:
            assert isinstance(effect, Dial)
            assert not self.heard(effect.node)
            self.machine.dialled(effect.question, effect.node, effect.node in answered)
        return answered

    @rule(
        pick=PICK,
        first=st.booleans(),
        probe=st.integers(0, 6),
        step=st.integers(0, 50),
        missed=st.lists(PICK, max_size=3),
        leaving=st.booleans(),
    )
    def renew(
        self, pick: int, first: bool, probe: int, step: int, missed: list[int], leaving: bool
    ) -> None:
        complaints = [Complaint(peer=self.node(index)) for index in missed]
        seats = [SeatReport(committed=step)]
        report = Report(seats=seats, complaints=complaints, leaving=leaving)
        renewal = Renewal(node=self.node(pick), probe=probe, report=report)
        event = self.machine.lease_renewed
        if first:
            self.broken.discard(renewal.node)
            renewal.run = "r"
            renewal.view.CopyFrom(self.shown)
            event = self.machine.stream_opened
        self.after(event(renewal, self.now))
        self.renewed[renewal.node] = self.now

    @rule(pick=PICK, answers=st.sampled_from([True, False, None]))
    def break_stream(self, pick: int, answers: bool | None) -> None:
        """Break a stream. `answers`: the result of the registry's dial; None: none yet."""
        node = self.node(pick)
        if node in self.machine.members.by_name and self.machine.members.by_name[node].streaming:
            self.broken.add(node)
        dials = self.machine.stream_lost(node, self.now)
        self.after(dials)
        for dial in dials:
            assert isinstance(dial, Dial)
            if answers is not None:
                self.machine.dialled(dial.question, node, answers)

    @rule(accuser=PICK, accused=PICK)
    def suspect(self, accuser: int, accused: int) -> None:
        suspicion = Suspicion(accuser=self.node(accuser), accused=self.node(accused))
        try:
            self.after(self.machine.suspect(suspicion, self.now))
        except Refused as refusal:
            assert refusal.reason
        node = self.machine.members.by_name.get(suspicion.accused)
        if node is not None and node.lost is not None:  # without a stream to probe
            self.broken.add(suspicion.accused)

    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        self.after(self.machine.leave(self.node(pick), "", self.now))

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.1, 3.1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.after(self.machine.tick(self.now))
        if self.now >= self.machine.isolation.quiet_until and not self.machine.isolation.isolated:
            members = list(self.machine.view.members)
            for member in members:
                if self.now >= self.renewed[member.node] + RULES.lease:
                    others = [m for m in members if m != member and self.heard(m.node)]
                    served = {stage for other in others for stage in stages_of(other)}
                    assert self.machine.members.by_name[member.node].reached_by
                    assert set(stages_of(member)) - served

    @rule(seconds=st.sampled_from([1.2, 4.0]))
    def hold_up(self, seconds: float) -> None:
        self.now += seconds
        self.machine.paused(seconds, self.now)
        self.renewed = {n: min(self.now, t + seconds) for n, t in self.renewed.items()}
        if seconds > RULES.lease / 2:
            self.quiet_until = max(self.quiet_until, self.now + RULES.grace)

    @precondition(lambda self: self.last > 0)
    @rule(journal=st.booleans())
    def restart(self, journal: bool) -> None:
        if not journal and not self.machine.view.members:
            return
        self.machine = Membership(RULES, KEY)
        if journal:
            self.machine.restore(self.shown, self.now)
        else:
            witness = self.shown.members[0].node
            renewal = Renewal(node=witness, run="r", view=self.shown)
            (issue,) = self.machine.stream_opened(renewal, self.now)
            assert issue == Issue(self.shown)
        # Without members there is no grace to wait for.
        self.quiet_until = self.now + RULES.grace if self.shown.members else self.now
        self.renewed = {m.node: self.now for m in self.shown.members}
        self.broken = set()

    @invariant()
    def sound(self) -> None:
        validate_state(self.machine)
        for member in self.machine.view.members:
            if member.node in self.asked:
                assert stages_of(member) == [self.asked[member.node]]
            if 0 in stages_of(member):
                assert member.data == RULES.data
                assert member.owner


Registry.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
TestRegistry = Registry.TestCase

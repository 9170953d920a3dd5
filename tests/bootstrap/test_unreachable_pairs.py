"""Tests of members that can't reach each other, in virtual time: no needless loss, and an end."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from planaria.bootstrap.effects import Effect, Evict
from planaria.bootstrap.membership import Membership
from planaria.bootstrap.neighbours import related
from planaria.bootstrap.registry_pb2 import Complaint, JoinRequest, Renewal, Report, SeatReport
from planaria.bootstrap.rules import PROTOCOL, MembershipRules
from tests.membership import join, validate_state

LEASE, SILENCE, STEP = 5.0, 3.0, 1.0
STAGES = 3
Pair = frozenset[str]


class World:
    """Nodes, some of which can't reach each other or the registry. A node complains of a neighbour,
    or of a node for which it is a relay, `SILENCE` seconds after it last reached it. With
    `carrying`, relays forward if they can."""

    def __init__(self, stages: list[int], carrying: bool = True) -> None:
        rules = MembershipRules(run="r", stages=STAGES, lease=LEASE, start_grace=0, max_replicas=9)
        self.machine = Membership(rules)
        self.now, self.carrying = 0.0, carrying
        self.blocked: set[Pair] = set()
        self.unheard: set[str] = set()  # nodes that can't reach the registry
        self.dead: set[str] = set()
        self.renewed: dict[str, float] = {}
        self.stalled: set[str] = set()
        self.apart_since: dict[tuple[str, str], float] = {}
        self.evicted: list[str] = []
        self.stages_before: dict[str, int] = {}
        for number, stage in enumerate(stages):
            name = f"n{number}"
            request = JoinRequest(protocol=PROTOCOL, node=name, address=f"{name}:1", stage=stage)
            request.key = name.encode()
            self.after(join(self.machine, request, self.now)[1])
            self.after(self.machine.stream_opened(Renewal(node=name, run="r"), self.now))
            self.renewed[name] = self.now

    @property
    def stages(self) -> dict[str, int]:
        return {m.node: m.seats[0].stage for m in self.machine.view.members}

    def after(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Evict):
                self.check_needed(effect.node)
                self.evicted.append(effect.node)

    def check_needed(self, node: str) -> None:
        """Check I6: a living last holder that makes progress is evicted only if nobody can reach
        it; one that the registry doesn't hear, if no node that is heard has a link with it."""
        stages = {**self.stages_before, **self.stages}
        others = [n for n in stages if n != node and n not in self.evicted and self.hears(n)]
        last = all(stages[other] != stages[node] for other in others)
        reached = [other for other in others if not self.apart(node, other)]
        if not self.hears(node):
            saying = [other for other in reached if other not in self.unheard]
            reached = [other for other in saying if self.needs(node, other)]
        bad = node in self.stalled | self.dead
        assert bad or not last or not reached, f"{node} reaches {reached}"

    def hears(self, node: str) -> bool:
        """Return whether the registry hears the node."""
        return self.now < self.renewed[node] + LEASE

    def apart(self, node: str, peer: str) -> bool:
        return peer in self.dead or {node, peer} in self.blocked

    def needs(self, node: str, peer: str) -> bool:
        stages = {**self.stages_before, **self.stages}
        ends = [(r.via, (r.a, r.b)) for r in self.machine.view.relays]
        carries = any(
            (node == via and peer in pair) or (peer == via and node in pair) for via, pair in ends
        )
        return carries or related(stages[node], stages[peer], STAGES, False)

    def relayed(self, node: str, peer: str) -> bool:
        return self.carrying and any(
            {r.a, r.b} == {node, peer}
            and r.via not in self.dead
            and not any(self.apart(r.via, end) for end in (node, peer))
            for r in self.machine.view.relays
        )

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            self.stages_before = self.stages
            for node in self.stages_before:
                if node in self.stages and node not in self.dead:
                    self.renew(node)
            self.after(self.machine.tick(self.now))
            validate_state(self.machine)

    def renew(self, node: str) -> None:
        complaints = []
        for peer in self.stages:
            if peer == node or not self.needs(node, peer) or not self.apart(node, peer):
                self.apart_since.pop((node, peer), None)
            elif self.now - self.apart_since.setdefault((node, peer), self.now) >= SILENCE:
                complaints.append(Complaint(peer=peer, relayed=self.relayed(node, peer)))
        if node in self.unheard:
            return
        self.renewed[node] = self.now
        stalled = 20.0 if node in self.stalled else 0.0
        seat = SeatReport(stage=self.stages[node], committed=9, phase="running")
        report = Report(seats=[seat], complaints=complaints, stalled_seconds=stalled)
        self.after(self.machine.lease_renewed(Renewal(node=node, report=report), self.now))


SWARMS = st.lists(st.integers(0, STAGES), min_size=0, max_size=4).map(
    lambda more: [*range(STAGES + 1), *more]
)


def block(world: World, chosen: Collection[int]) -> None:
    pairs = [frozenset(pair) for pair in combinations(sorted(world.stages), 2)]
    world.blocked = {pair for number, pair in enumerate(pairs) if number in chosen}


CUTS = st.sets(st.integers(0, 27))


@settings(phases=[Phase.generate], max_examples=40, deadline=None, derandomize=True)
@given(SWARMS, CUTS, st.booleans(), st.sets(st.integers(0, 7), max_size=2))
def test_whoever_is_cut_off_from_whom_nothing_is_lost_without_need_and_it_settles(
    stages: list[int], cuts: set[int], carrying: bool, stalled: set[int]
) -> None:
    world = World(stages, carrying)
    block(world, cuts)
    world.stalled = {f"n{number}" for number in stalled}
    world.wait(60)
    assert len(world.evicted) <= len(world.blocked)
    evicted = list(world.evicted)
    world.wait(60)
    assert world.evicted == evicted, "who could stay for a minute can stay"
    number = world.machine.view.number
    world.wait(60)
    again = len(world.blocked) * len(stages)  # failed relays may be tried once more
    assert world.machine.view.number - number <= 2 * again


@settings(phases=[Phase.generate], max_examples=40, deadline=None, derandomize=True)
@given(
    SWARMS, st.lists(st.tuples(CUTS, st.sampled_from([1.0, 2.0, 4.0, 9.0, 20.0, 45.0])), max_size=6)
)
def test_however_cuts_come_and_go_nothing_is_lost_without_need(
    stages: list[int], story: list[tuple[set[int], float]]
) -> None:
    world = World(stages)
    for cuts, seconds in story:
        block(world, cuts)
        world.wait(seconds)
    world.blocked = set()
    world.wait(3 * LEASE)
    assert not world.machine.view.relays


SOME = st.sets(st.integers(0, 7), max_size=3)


@settings(phases=[Phase.generate], max_examples=60, deadline=None, derandomize=True)
@given(
    SWARMS,
    CUTS,
    st.lists(st.tuples(SOME, st.sampled_from([1.0, 2.0, 4.0, 9.0, 20.0])), max_size=6),
    st.sets(st.integers(0, 7), max_size=2),
)
def test_whoever_is_not_heard_a_last_holder_stays_while_it_is_reached_and_the_dead_go(
    stages: list[int], cuts: set[int], story: list[tuple[set[int], float]], dying: set[int]
) -> None:
    world = World(stages)
    block(world, cuts)
    for unheard, seconds in story:
        world.unheard = {f"n{number}" for number in unheard}
        world.wait(seconds)
    world.dead = {f"n{number}" for number in dying}
    world.wait(LEASE + SILENCE)
    left = world.dead & world.stages.keys()
    assert not left or not any(map(world.hears, world.stages))


@settings(phases=[Phase.generate], max_examples=20, deadline=None, derandomize=True)
@given(SWARMS, CUTS, st.sampled_from([1.0, 2.0, 3.0]))
def test_blinks_change_nothing(stages: list[int], cuts: set[int], seconds: float) -> None:
    world = World(stages)
    view = world.machine.view
    for _ in range(20):
        block(world, cuts)
        world.wait(seconds)
        world.blocked = set()
        world.wait(1)
    assert world.machine.view == view


@pytest.mark.parametrize("hung", ["n1", "n2"])
def test_of_two_last_holders_the_one_whose_compute_hangs_is_not_spared(hung: str) -> None:
    """n3 could be their relay, but doesn't forward."""
    world = World([0, 1, 2, 3], carrying=False)
    world.blocked = {frozenset(("n1", "n2"))}
    world.wait(60)
    assert world.evicted == []
    world.stalled = {hung}
    world.wait(5)
    assert world.evicted == [hung]


def test_a_link_that_comes_and_goes_keeps_its_relay() -> None:
    world = World([0, 1, 2, 3])
    number = world.machine.view.number
    for _ in range(20):
        world.blocked = {frozenset(("n1", "n2"))}
        world.wait(12)
        world.blocked = set()
        world.wait(4)
    assert world.machine.view.number == number + 1


def test_time_in_which_somebody_carried_does_not_count_as_time_without_a_link() -> None:
    """Afterwards all nodes are cut off for a few seconds, as when a switch restarts."""
    world = World([0, 1, 2, 3, 0, 1, 2, 3])
    world.blocked = {frozenset(("n1", "n2"))}
    world.wait(40)
    block(world, range(28))
    world.wait(SILENCE + LEASE)
    world.blocked = {frozenset(("n1", "n2"))}
    world.wait(40)
    assert not world.evicted
    assert [{relay.a, relay.b} for relay in world.machine.view.relays] == [{"n1", "n2"}]


def test_relays_are_spread_over_those_who_can_carry() -> None:
    world = World([0, 0, 1, 2, 2, 2, 3])
    world.blocked = {frozenset(("n2", peer)) for peer in ("n3", "n4", "n5")}
    world.wait(20)
    via = sorted(relay.via for relay in world.machine.view.relays)
    assert via == ["n0", "n0", "n1"], "n6 has no link to n2 yet"


def test_a_relay_that_goes_is_replaced_at_once() -> None:
    world = World([0, 0, 1, 2, 3])
    world.blocked = {frozenset(("n2", "n3"))}
    world.wait(20)
    (relay,) = world.machine.view.relays
    assert relay.via == "n0"
    world.after(world.machine.leave("n0", "", world.now))
    world.wait(1)
    (relay,) = world.machine.view.relays
    assert relay.via == "n1"
    assert world.evicted == ["n0"]


def test_one_who_only_says_that_it_carries_is_replaced() -> None:
    """Neither end complains of the relay, but it forwards nothing."""
    world = World([0, 0, 1, 2, 3], carrying=False)
    world.blocked = {frozenset(("n2", "n3"))}
    seen: list[str] = []
    for _ in range(60):
        world.wait(1)
        seen += [r.via for r in world.machine.view.relays if r.via not in seen]
    assert {"n0", "n1"} <= set(seen)
    assert world.evicted == []


def test_of_two_halves_with_replicas_one_is_left_whole() -> None:
    world = World([0, 1, 2, 3, 0, 1, 2, 3])
    halves = ("n0", "n1", "n2", "n3"), ("n4", "n5", "n6", "n7")
    world.blocked = {frozenset((a, b)) for a in halves[0] for b in halves[1]}
    world.wait(60)
    assert sorted(world.stages) in map(list, halves)


def test_of_two_halves_without_replicas_both_stay_until_they_meet_again() -> None:
    world = World([0, 1, 2, 3])
    world.blocked = {frozenset((a, b)) for a in ("n0", "n1") for b in ("n2", "n3")}
    world.wait(120)
    assert not world.evicted
    world.blocked = set()
    world.wait(20)
    assert not world.machine.describe(world.now).cuts

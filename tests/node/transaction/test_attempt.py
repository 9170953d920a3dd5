"""An attempt without tensors: what it computes, sends and sends again, in any order of events."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from attempt_swarm import (
    BEGAN,
    MICROBATCHES,
    STAGES,
    Compute,
    Node,
    Swarm,
    VirtualWork,
    undisturbed,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planaria.bootstrap.registry_pb2 import CHECKSUM, NUMBERS
from planaria.node.driver.spot_checks import SpotChecks
from planaria.node.ports import Priority
from planaria.node.transaction.attempt import Attempt, NoRoomError, PassResult, Visit
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.transaction.in_flight_window import InFlightWindow
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import ComplaintError
from planaria.node.wire.frame_format import Frame
from tests.harness.network import Nodes


def same_gradients(swarm: Swarm, other: Swarm) -> bool:
    return all(map(np.array_equal, swarm.gradients(), other.gradients()))


def started(replicas: int = 2, seed: int = 0) -> Swarm:
    swarm = Swarm(replicas, random.Random(seed))
    swarm.starts()
    return swarm


def check_it_ends_well(swarm: Swarm) -> None:
    """Ends the attempt; checks that all is done once and gradients equal an undisturbed swarm's."""
    swarm.ends()
    swarm.check_everything_is_there_once()
    assert same_gradients(swarm, undisturbed())


LOSSES = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 2), st.booleans()),
    max_size=3,
)


@given(seed=st.integers(0, 2**32), replicas=st.integers(2, 3))
@settings(max_examples=50)
def test_what_two_nodes_make_of_the_same_is_compared_by_their_neighbours(
    seed: int, replicas: int
) -> None:
    chance = random.Random(seed)
    checks = SpotChecks(0.5, 0.05, chance)
    swarm = Swarm(replicas, chance)
    swarm.starts(checks=checks)
    swarm.ends()
    pairs = {(by, visit.microbatch, visit.position, visit.backward) for by, visit in swarm.compared}
    assert pairs == {
        (visit.before if backward else visit.behind, *key, backward)
        for key, visit in checks.checked.items()
        for backward in (False, True)
    }
    assert len(swarm.compared) == len(pairs)


def test_a_third_does_what_two_have_done_differently() -> None:
    chance = random.Random(0)
    checks = SpotChecks(1.0, 0.05, chance)
    swarm = Swarm(3, chance)
    swarm.starts(checks=checks)
    swarm.ends()
    key, visit = next(iter(checks.checked.items()))
    other = next(n for n in visit.replicas if n not in (visit.node, *visit.doubles))
    for neighbour in {visit.before, visit.behind}:
        third = pb.Check(microbatch=key[0], position=key[1], double=other)
        swarm.nodes[neighbour].attempt.check(third)
    before = len(swarm.compared)
    swarm.ends()
    pairs = {frozenset((c.node, c.other)) for _, c in swarm.compared[before:] if not c.difference}
    assert pairs == {frozenset((n, other)) for n in (visit.node, *visit.doubles)}
    assert same_gradients(swarm, undisturbed())


@given(
    seed=st.integers(0, 2**32),
    replicas=st.integers(2, 3),
    events=st.lists(
        st.tuples(st.integers(0, 100), st.sampled_from(["lost", "slow", "soon alone"])), max_size=3
    ),
)
@settings(max_examples=300)
def test_what_a_slow_node_has_not_begun_others_do_once(
    seed: int, replicas: int, events: list[tuple[int, str]]
) -> None:
    """The node is told at any moment to give up its work. Nodes are lost before it answers or
    afterwards."""
    chance = random.Random(seed)
    swarm = Swarm(replicas, chance)
    swarm.starts()
    slow: set[int] = set()  # stages; the driver relieves one node of each
    for after, event in events:
        for _ in range(after):
            swarm.moves()
        name = chance.choice(sorted(swarm.left()))
        stage = swarm.nodes[name].stage
        if event == "lost":
            swarm.loses({name}, mute=False)
        elif stage not in slow:
            slow.add(stage)
            swarm.relieves(name)
            if event == "soon alone":
                swarm.loses({n for n, o in swarm.left().items() if o.stage == stage} - {name}, True)
    swarm.ends()
    swarm.check_everything_is_there_once()
    expected = undisturbed()
    assert same_gradients(swarm, expected)
    swarm.check_homes_are_those_of(expected)


class Cramped(VirtualWork):
    """The work of a node that has room for `room` microbatches at a time."""

    def __init__(self, room: int, node: str, stage: int) -> None:
        super().__init__(node, stage)
        self.room, self.most = room, 0

    def embed(self, ballot: Ballot, visit: Visit) -> PassResult | None:
        self._look(visit)
        return super().embed(ballot, visit)

    def forward(self, ballot: Ballot, visit: Visit, peer: str, frame: Frame) -> PassResult | None:
        if not visit.at_head:
            self._look(visit)
        return super().forward(ballot, visit, peer, frame)

    def _look(self, visit: Visit) -> None:
        if visit.waits and len(self.saved) >= self.room:
            raise NoRoomError("full", waits=True)
        self.most = max(self.most, len(self.saved) + 1)


@given(
    seed=st.integers(0, 2**32),
    replicas=st.integers(1, 3),
    room=st.integers(0, 3),
    swapped=st.booleans(),
    losses=LOSSES,
    checked=st.sampled_from([0.0, 0.5]),
)
@example(  # microbatches of the lost source are at the head; its successor's window is full
    seed=346,
    replicas=3,
    room=1,
    swapped=True,
    losses=[(29, 1, False), (0, 1, False)],
    checked=0.0,
)
@settings(max_examples=500)
def test_whoever_is_lost_every_microbatch_is_in_each_gradient_once(
    seed: int,
    replicas: int,
    room: int,
    swapped: bool,
    losses: list[tuple[int, int, bool]],
    checked: float,
) -> None:
    """Gradients equal an undisturbed swarm's bit for bit. A gradient may be half summed before a
    loss. Visits may be computed twice, to be compared, or wait for `room` (0: no limit)."""
    chance = random.Random(seed)
    work: Any = partial(Cramped, room) if room else VirtualWork
    swarm = Swarm(replicas, chance, make_work=work, swapped=swapped)
    swarm.starts(checks=SpotChecks(checked, 0.05, chance) if checked else None)
    for after, count, mute in losses if replicas > 1 else ():
        for _ in range(after):
            swarm.moves()
        swarm.loses(set(chance.sample(sorted(swarm.left()), count)), mute)
    swarm.ends()
    swarm.check_everything_is_there_once()
    expected = undisturbed(swapped=swapped)
    assert same_gradients(swarm, expected)
    swarm.check_homes_are_those_of(expected)
    assert all(compared.difference == 0 for _, compared in swarm.compared)
    if room and not (swapped or swarm.lost or checked):
        assert all(node.work.most <= room for node in swarm.nodes.values())


def test_what_there_is_no_memory_for_is_no_peers_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt fails without blame if another one may need less memory; else the node ends."""

    def lacks(ends: bool, *_: object) -> None:
        raise NoRoomError("out of memory", ends=ends)

    monkeypatch.setattr(VirtualWork, "forward", partial(lacks, False))
    swarm = started(1)
    with pytest.raises(AssertionError, match="no memory for the activation of micro") as failure:
        swarm.ends()
    assert failure.value.args[1] == []
    monkeypatch.setattr(VirtualWork, "forward", partial(lacks, True))
    swarm = started(1)
    with pytest.raises(NoRoomError, match="out of memory"):
        swarm.ends()


def test_what_is_given_up_is_all_that_was_not_begun() -> None:
    swarm = started(2, seed=1)
    swarm.relieves("0.1")
    before = [key for key, name in swarm.served.items() if name == "0.1"]
    swarm.ends()
    assert len(before) == 2
    assert "0.1" not in swarm.served.values(), "it had begun nothing"
    swarm.check_everything_is_there_once()


@given(seed=st.integers(0, 2**32), masking=st.booleans())
@settings(max_examples=50)
def test_an_evaluation_brings_every_microbatch_home_and_leaves_no_gradient(
    seed: int, masking: bool
) -> None:
    swarm = Swarm(2, random.Random(seed), masking)
    swarm.starts(pb.Begin.EVALUATE)
    swarm.ends()
    homes = {m: home for node in swarm.nodes.values() for m, home in node.homes.items()}
    assert homes == undisturbed().nodes["0.0"].homes
    assert not any(gradient.any() for gradient in swarm.gradients())
    assert {node.workplace.computed for node in swarm.nodes.values()} == {0}


@pytest.mark.parametrize(
    ("replicas", "masking", "kept"),
    [
        (1, True, 0),
        (2, False, 0),
        (2, True, 2 * (STAGES + 1) * MICROBATCHES),
    ],
)
def test_only_what_may_have_to_be_sent_again_is_kept(
    replicas: int, masking: bool, kept: int
) -> None:
    swarm = Swarm(replicas, random.Random(0), masking)
    swarm.starts()
    swarm.ends()
    attempts = [node.attempt for node in swarm.nodes.values()]
    assert sum(len(attempt._sent) for attempt in attempts) == kept
    gradients = 16 if masking and replicas > 1 else 0
    assert sum(attempt.kept for attempt in attempts) == 16 * kept + gradients * len(attempts)
    for node in swarm.nodes.values():
        before = node.attempt.kept
        node.attempt.end()
        assert node.workplace.most_kept == before


def test_what_a_slow_node_sends_after_others_have_its_work_changes_nothing() -> None:
    swarm = started()
    swarm.moves()
    swarm.loses({"2.1"}, mute=False)
    while swarm.plans:
        swarm.goes_on(swarm.plans[0][0])
    late = Frame("gradient", BEGAN, {"microbatch": 1, "position": 0}, [], bytes(16))
    before = swarm.nodes["0.1"].compute.posted
    swarm.nodes["0.1"].attempt.take("2.1", late)
    assert swarm.nodes["0.1"].compute.posted == before
    check_it_ends_well(swarm)


# --- bad frames, failures and plans


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"position": 1}, "1.1 sent a bad frame: it lacks its microbatch"),
        ({"microbatch": 0, "position": math.inf}, "1.1 sent a bad frame: it lacks its microbatch"),
        ({"microbatch": 99, "position": 1}, "no microbatch 99"),
        ({"microbatch": 0, "position": 7}, "position 7 of a route of 4 visits"),
        ({"microbatch": 0, "position": 0}, "position 0 of a route of 4 visits"),
        ({"microbatch": 1, "position": 1}, "no microbatch 1"),
        ({"microbatch": 0, "position": 2}, "by the plan goes from 1.0 to 2.0"),
    ],
)
def test_of_a_bad_frame_it_is_said_why_and_whose_it_was(
    fields: dict[str, float], reason: str
) -> None:
    swarm = started()
    attempt = swarm.nodes["1.0"].attempt
    with pytest.raises(AssertionError, match=reason) as failure:
        attempt.take("1.1", Frame("activation", attempt.ballot, fields, [], b""))
    assert failure.value.args[1:] == (["1.1"], NUMBERS)


def test_of_a_damaged_frame_it_is_said_whose_it_was_and_another_may_take_its_place() -> None:
    swarm = started()
    node = swarm.nodes["1.0"]
    fields = {"microbatch": 0, "position": 1}
    node.attempt.take("0.0", Frame("activation", BEGAN, fields, [], b"too short"))
    with pytest.raises(AssertionError, match=r"activation from 0\.0 is damaged") as failure:
        while True:
            node.compute.moves[0]()
    assert failure.value.args[1:] == (["0.0"], CHECKSUM)
    check_it_ends_well(swarm)


def breaks(*_: object) -> None:
    raise RuntimeError("out of memory")


def test_what_breaks_on_what_a_peer_sent_is_its_failure_once_and_then_ends_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(VirtualWork, "forward", breaks)
    swarm = started(1)
    node = swarm.nodes["1.0"]

    def takes(microbatch: int) -> None:
        fields = {"microbatch": microbatch, "position": 1}
        node.attempt.take("0.0", Frame("activation", BEGAN, fields, [], bytes(16)))
        while node.compute.moves:
            node.compute.moves[0]()

    with pytest.raises(AssertionError, match="can't compute on the activation") as failure:
        takes(0)
    assert failure.value.args[1] == ["0.0"]
    with pytest.raises(RuntimeError, match="out of memory"):
        takes(2)


def test_what_breaks_on_nobodys_tensor_ends_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualWork, "embed", breaks)
    swarm = started(1)
    with pytest.raises(RuntimeError, match="out of memory"):
        swarm.ends()


def test_a_plan_that_cannot_be_is_refused_and_starts_nothing() -> None:
    swarm = Swarm(2, random.Random(0))
    begin = swarm.begin()
    begin.plan[2].places.reverse()
    node = swarm.nodes["0.0"]
    with pytest.raises(ValueError, match="microbatch 2 is sent to nodes off its order"):
        Attempt(node.workplace, BEGAN, begin)
    assert not node.compute.posted
    swarm.starts()
    begin = swarm.begin()
    del begin.plan[0]
    with pytest.raises(ValueError, match="has other microbatches"):
        swarm.nodes["1.1"].attempt.go_on(Ballot(1, 2), begin)


def test_who_lacks_a_microbatch_says_so_in_time() -> None:
    swarm, clock = Swarm(1, random.Random(0)), Nodes()
    swarm.starts()
    exchanges, attempt = clock.new(), swarm.nodes["1.0"].attempt
    completing = exchanges.start(attempt.complete(exchanges))
    clock.sleep(1000.0)
    assert not completing.done, "they may be on their way"
    attempt.hurry(1007.0)
    with pytest.raises(ComplaintError, match=r"\[0, 1, 2, 3, 4\], which are home, are not"):
        clock.outcome(completing)
    assert clock.now == 1007.0


def test_a_source_tells_of_its_losses_before_the_last_gradient_is_back() -> None:
    swarm = started()
    swarm.ends()
    for name in ("0.0", "0.1"):
        source = swarm.nodes[name]
        assert source.scored
        assert all(source.homes[home.microbatch] == home for home in source.scored)


# --- priorities and the in-flight window


def test_a_source_has_so_many_microbatches_out_and_the_next_when_one_is_home() -> None:
    swarm = started(1)
    source = swarm.nodes["0.0"]
    while swarm.moves():
        out = source.work.done["activation"] - len(source.homes)
        assert out <= source.workplace.filling.out
    assert source.work.done["activation"] == len(source.homes) == MICROBATCHES


@pytest.mark.parametrize("kind", [pb.Begin.TRAIN, pb.Begin.EVALUATE])
def test_a_source_finds_out_how_many_to_have_out_by_what_is_trained(kind: Any) -> None:
    swarm = Swarm(1, random.Random(0))
    source = swarm.nodes["0.0"]
    filling = source.workplace.filling = InFlightWindow(0, STAGES)
    swarm.starts(kind)
    while swarm.moves():
        source.compute.now += 0.1
        assert len(source.attempt._out) <= STAGES + 1
    assert len(source.homes) == MICROBATCHES
    swarm.starts(kind)
    assert (filling.out > STAGES + 1) == (kind == pb.Begin.TRAIN)
    assert len(source.attempt._out) == min(filling.out, MICROBATCHES)


def working(swarm: Swarm, name: str) -> tuple[Node, Compute]:
    """A node that has begun an attempt and received nothing yet, and its compute thread."""
    swarm.starts()
    node = swarm.nodes[name]
    exhaust(node.compute)
    return node, node.compute


def exhaust(compute: Compute) -> None:
    while compute.moves:
        compute.moves[0]()


def comes(node: Node, peer: str, kind: str, microbatch: int, position: int) -> None:
    fields = {"microbatch": microbatch, "position": position}
    node.attempt.take(peer, Frame(kind, node.attempt.ballot, fields, [], bytes(16)))


def test_backward_goes_before_forward() -> None:
    node, compute = working(Swarm(2, random.Random(0)), "1.0")
    comes(node, "0.0", "activation", 0, 1)
    exhaust(compute)
    comes(node, "0.0", "activation", 2, 1)
    comes(node, "2.0", "gradient", 0, 1)
    assert compute.posted == [Priority.BACKWARD, Priority.FORWARD]


def test_the_head_goes_before_the_embedding() -> None:
    node, compute = working(Swarm(1, random.Random(0)), "0.0")
    comes(node, "2.0", "activation", 0, 3)
    assert compute.posted == [Priority.BACKWARD]


def test_what_comes_before_what_it_needs_waits_for_that() -> None:
    swarm = Swarm(2, random.Random(0))
    node, compute = working(swarm, "1.0")
    for _ in range(100):
        comes(node, "2.0", "gradient", 0, 1)
    assert compute.posted == []
    assert [len(early) for early in node.attempt._early.values()] == [1]
    comes(node, "0.0", "activation", 0, 1)
    comes(node, "0.0", "activation", 0, 1)  # a repetition
    assert compute.posted == [Priority.FORWARD]
    exhaust(compute)
    assert node.attempt.applied == {0}
    sent = [(to, frame.kind) for peer, to, frame in swarm.under_way if peer == "1.0"]
    assert sent == [("2.0", "activation"), ("0.0", "gradient")]


# --- successive attempts


@given(seed=st.integers(0, 2**32), after=st.integers(0, 150), drops=st.booleans())
@settings(max_examples=100)
def test_what_an_older_attempt_has_left_in_the_compute_thread_has_no_effect(
    seed: int, after: int, drops: bool
) -> None:
    swarm = started(2, seed)
    for _ in range(after):
        swarm.moves()
    again = Ballot(2, 1)
    swarm.under_way = []
    for node in swarm.nodes.values():
        node.reducing.cancel()
        node.homes = {}
        if drops:
            node.attempt.drop()
        else:
            node.attempt.end()
    for node in swarm.nodes.values():
        node.starts(again, swarm.begin())
    check_it_ends_well(swarm)


def test_what_is_dropped_leaves_no_trace() -> None:
    swarm = started(2, seed=1)
    for _ in range(100):
        swarm.moves()
    for node in swarm.nodes.values():
        node.attempt.drop()
        exhaust(node.compute)
        comes(node, "0.0", "activation", 0, 1)
        assert not node.compute.posted
        assert (node.work.ballot, node.work.own) == (NEVER, None)
    assert not any(gradient.any() for gradient in swarm.gradients())


def test_seconds_per_microbatch_are_the_median_of_the_last() -> None:
    place = Swarm(1, random.Random(0)).nodes["1.0"].workplace
    assert place.seconds_per_microbatch == 0.0
    for seconds in (50.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 90.0):
        place.count(seconds)
    assert place.seconds_per_microbatch == 5.0
    assert place.computed == 10


def test_who_has_no_microbatch_forgets_how_long_one_took() -> None:
    swarm = Swarm(2, random.Random(0))
    idle = swarm.nodes["1.1"]
    idle.workplace.count(10.0)
    swarm.served = {m: "1.0" if name == "1.1" else name for m, name in swarm.served.items()}
    swarm.starts()
    assert idle.workplace.seconds_per_microbatch == 0.0

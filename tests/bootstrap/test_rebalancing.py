"""Tests of moves of seats towards shorter steps, and of which node becomes a standby."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from planaria.bootstrap.candidates import Candidate, SeatAssigned, SeatReleased
from planaria.bootstrap.placement import assign
from planaria.bootstrap.rebalancing import GAIN, SLOWER
from planaria.bootstrap.step_time import LinkSpeed, Load, Outlook, crossings, outlook

MBPS = 1e6 / 8
FREE = LinkSpeed(0.0, math.inf)
Links = Mapping[tuple[str, str], LinkSpeed]


def load(layers: tuple[int, ...] = (1, 1, 1, 1), microbatches: int = 8, size: int = 0) -> Load:
    return Load(layers, microbatches, size, size)


def node(name: str, *stages: int, layer: float = 1.0, room: int = 9, **known: Any) -> Candidate:
    """Return a node with the state of all its stages."""
    held = frozenset(stages)
    return replace(
        Candidate(name, held, held, frozenset(range(9)), room, 1 / layer, layer=layer, ends=1.0),
        **known,
    )


def joiner(name: str, stage: int, **known: Any) -> Candidate:
    """Return a node that has joined a stage beside another node."""
    return node(name, stage, since={stage: 0.5}, joined=frozenset([stage]), **known)


def links(nodes: list[Candidate], link: LinkSpeed) -> Links:
    return {(a.node, b.node): link for a in nodes for b in nodes if a is not b}


def outlook_of(nodes: list[Candidate], work: Load, known: Links | None = None) -> Outlook:
    weighed = outlook(work, nodes, links(nodes, FREE) if known is None else known)
    assert weighed is not None
    return weighed


Changes = list[SeatAssigned | SeatReleased]


def apply(nodes: list[Candidate], changes: Changes, now: float) -> list[Candidate]:
    """Apply the changes. A node that gets a seat copies its state at once."""
    after = {each.node: each for each in nodes}
    for change in changes:
        mover = after[change.node]
        stages, since = mover.stages, mover.since
        if isinstance(change, SeatAssigned):
            stages, since = stages | {change.stage}, {**since, change.stage: now}
        else:
            stages = stages - {change.stage}
        waits = mover.waits or not stages
        after[mover.node] = replace(mover, stages=stages, holds=stages, since=since, waits=waits)
    return list(after.values())


def settled(nodes: list[Candidate], work: Load, known: Links | None = None) -> list[Candidate]:
    """Return the nodes after all moves, each of which is checked."""
    for now in range(1, 100):
        changes = assign(nodes, len(work.layers), outlook=outlook_of(nodes, work, known))
        if not changes:
            return nodes
        assert len(changes) == 1, "one move at a time"
        assert changes[0].stage > 0, "stage 0 never moves"
        longer = re.search(r"too: .* \(\+(\d+)%\)", changes[0].why)
        assert longer is None or int(longer[1]) <= 2, "the reason of a move is that it pays"
        nodes = apply(nodes, changes, now)
        served = {stage for each in nodes for stage in each.stages}
        assert served == set(range(len(work.layers) + 1)), "no stage is vacant"
    raise AssertionError(f"seats still move: {[sorted(each.stages) for each in nodes]}")


def seats(nodes: list[Candidate]) -> dict[str, list[int]]:
    return {each.node: sorted(each.stages) for each in nodes}


# --- the expected time


def test_a_lone_node_computes_one_after_the_other_and_two_at_the_same_time() -> None:
    work = load((1, 3), microbatches=10)
    alone = [node("a", 0, 1, 2)]
    assert outlook_of(alone, work).step_seconds({"a": frozenset([0, 1, 2])}) == 10 * 5
    both = [node("a", 0, 1), node("b", 2)]
    seconds = outlook_of(both, work).step_seconds({"a": frozenset([0, 1]), "b": frozenset([2])})
    assert seconds == 5 + 9 * 3, "the first passes all stages, and each other the slowest node"


def test_links_delay_each_trip_and_carry_a_microbatch_after_the_other() -> None:
    both = [node("a", 0), node("b", 1)]
    seats = {each.node: each.stages for each in both}
    work = load((1,), microbatches=5, size=1000)
    delayed = outlook_of(both, work, links(both, LinkSpeed(0.25, 1e9))).step_seconds(seats)
    assert delayed == pytest.approx(2 + 4 * 0.25 + 4 + 2 * 0.5), "four hops and two round trips"
    narrow = outlook_of(both, work, links(both, LinkSpeed(0.0, 100.0))).step_seconds(seats)
    assert narrow == pytest.approx(2 + 4 * 10 + 4 * 20), "two tensors in each direction"


def test_replicas_share_a_stage_by_their_speed() -> None:
    nodes = [node("a", 0), node("b", 1, layer=3.0), node("c", 1, layer=1.5)]
    seats = {each.node: each.stages for each in nodes}
    assert outlook_of(nodes, load((2,), microbatches=1)).step_seconds(seats) == pytest.approx(
        1 + 2 / 3 * 3 + 1 / 3 * 6
    )


def test_who_has_computed_nothing_counts_by_its_speed_and_nothing_is_guessed_before() -> None:
    nodes = [node("a", 0, 1, speed=4.0, layer=2.0), node("b", speed=1.0, layer=1.0)]
    nodes[1] = replace(nodes[1], layer=0.0)
    assert outlook_of(nodes, load((1,))).layer == {"a": 2.0, "b": 8.0}
    assert outlook(load((1,)), [replace(nodes[0], layer=0.0), nodes[1]], {}) is None
    assert outlook(load((1,)), [replace(nodes[0], ends=0.0), nodes[1]], {}) is None


def test_who_asked_for_a_stage_keeps_its_seat_however_slow_it_is() -> None:
    asked = {"layer": 9.0, "requested": frozenset([1])}
    for nodes, loser in (
        ([node("a", 0, 1), joiner("b", 1, **asked)], "a"),
        ([node("a", 0, 1, **asked), joiner("b", 1)], "b"),
    ):
        (change,) = assign(nodes, 1, outlook=outlook_of(nodes, load((1,))))
        assert change == SeatReleased(loser, 1, change.why)
        assert change.why.endswith("has asked for stage 1")
    nodes = [node("a", 0), node("b", 1, 2, holds=frozenset([2])), joiner("c", 1, **asked)]
    (change,) = assign(nodes, 2, outlook=outlook_of(nodes, load((1, 1))))
    assert change == SeatReleased("b", 1, "c has asked for stage 1"), "it need not copy the state"
    nodes[2] = replace(nodes[2], holds=frozenset())
    assert assign(nodes, 2, outlook=outlook_of(nodes, load((1, 1)))) == []
    nodes = [node("a", 1, **asked), joiner("b", 1, **asked), node("c", 0)]
    assert settled(nodes, load((1,))) == nodes, "they are replicas"
    nodes = [node("a", 0, 1, 2, layer=9.0, requested=frozenset([1])), node("b")]
    assert seats(settled(nodes, load((1, 1)))) == {"a": [0, 1], "b": [2]}


# --- moves


def test_two_equal_machines_share_the_stages() -> None:
    nodes = [node("a", 0, 2, 3, 4), node("b", 1)]
    (move,) = assign(nodes, 4, outlook=outlook_of(nodes, load()))
    assert move == SeatAssigned(
        *("b", 2, "moves from a: a step is expected to take 26 s instead of 33 s (-21%)")
    )
    assert seats(settled(nodes, load())) == {"a": [0, 3, 4], "b": [1, 2]}


def test_nothing_moves_while_a_node_copies_or_leaves_or_a_stage_is_vacant() -> None:
    nodes = [node("a", 0, 2, 3, 4), node("b", 1), node("c")]
    known = outlook_of(nodes, load())
    assert assign(nodes, 4, outlook=known)
    for other in (replace(nodes[1], holds=frozenset()), replace(nodes[1], heard=False)):
        assert assign([nodes[0], other, nodes[2]], 4, outlook=known) == []
    assert assign(nodes, 4, begun=False, outlook=known) == []
    beside = [nodes[0], replace(node("b", 1, 2), holds=frozenset([1])), nodes[2]]
    assert assign(beside, 4, outlook=known) == [], "one move at a time"


def test_a_link_that_nobody_has_measured_is_awaited_for_a_while() -> None:
    nodes = [node("a", *range(5)), joiner("b", 1)]
    known = outlook_of(nodes, load(), {})
    assert assign(nodes, 4, outlook=replace(known, rested=False)) == []
    assert [change.node for change in assign(nodes, 4, outlook=known)] == ["a"]
    nodes = [node("a", 0, 2, 3, 4), node("b", 1)]
    assert assign(nodes, 4, outlook=outlook_of(nodes, load(), {})) == [], "seats do not move then"
    assert assign(nodes, 4, outlook=replace(outlook_of(nodes, load()), rested=False)) == []


def test_a_faster_machine_gets_more_though_it_has_more_already() -> None:
    nodes = [node("a", 0, 2, 3, 4), node("b", 1, layer=0.25)]
    assert seats(settled(nodes, load())) == {"a": [0], "b": [1, 2, 3, 4]}


def test_stages_with_more_layers_count_for_more() -> None:
    work = load((4, 1, 1, 1))
    nodes = [node("a", 0, 1, 2, 3, 4, ends=0.5), node("b")]
    assert seats(settled(nodes, work)) == {"a": [0, 2, 3, 4], "b": [1]}


def test_no_more_seats_than_there_is_room_for_and_only_what_fits() -> None:
    nodes = [node("a", 0, 2, 3, 4), node("b", 1, room=1)]
    assert settled(nodes, load()) == nodes
    nodes = [node("a", 0, 2, 3, 4), node("b", 1, fits=frozenset([1, 4]))]
    assert seats(settled(nodes, load())) == {"a": [0, 2, 3], "b": [1, 4]}


def test_neighbouring_stages_come_together_where_links_are_slow() -> None:
    nodes = [node("a", 0, 2, 4), node("b", 1, 3)]
    after = settled(nodes, load(microbatches=4), links(nodes, LinkSpeed(0.6, 1e9)))
    assert crossings({each.node: each.stages for each in after}, 4) == 2
    assert settled(nodes, load(microbatches=4), links(nodes, LinkSpeed(0.001, 1e9))) == nodes


def test_a_newcomer_whose_link_would_hold_all_up_becomes_a_standby() -> None:
    nodes = [node("a", *range(5)), joiner("b", 1)]
    work = load(size=1_000_000)
    known = outlook_of(nodes, work, links(nodes, LinkSpeed(0.02, 0.5 * MBPS)))
    (change,) = assign(nodes, 4, outlook=known)
    assert isinstance(change, SeatReleased)
    assert (change.node, change.stage) == ("b", 1)
    assert change.why.startswith("standby: without it at stage 1 a step is expected to take 40 s")
    after = settled(nodes, work, known.links)
    assert seats(after) == {"a": [0, 1, 2, 3, 4], "b": []}
    fast = outlook_of(nodes, work, links(nodes, LinkSpeed(0.02, 100 * MBPS)))
    (change,) = assign(nodes, 4, outlook=fast)
    assert (change.node, change.stage) == ("a", 1)


def test_a_newcomer_that_pays_only_with_several_stages_stays_and_gets_them() -> None:
    nodes = [node("a", *range(5)), joiner("b", 1)]
    delays = links(nodes, LinkSpeed(1.5, 1e9))
    alone = outlook_of(nodes, load(), delays)
    with_one = alone.step_seconds({"a": frozenset([0, 2, 3, 4]), "b": frozenset([1])})
    assert with_one > alone.step_seconds({"a": frozenset(range(5))}), "with one it does not"
    assert len(seats(settled(nodes, load(), delays))["b"]) == 2


def test_a_seat_comes_back_when_the_link_has_become_slow() -> None:
    nodes = [node("a", 0, 3, 4), node("b", 1, 2)]
    slow = links(nodes, LinkSpeed(5.0, 1e9))
    (move,) = assign(nodes, 4, outlook=outlook_of(nodes, load(), slow))
    assert isinstance(move, SeatAssigned)
    assert (move.node, "(of stages 1 to 2)" in move.why) == ("a", True)
    assert seats(settled(nodes, load(), slow)) == {"a": [0, 1, 2, 3, 4], "b": []}


def swarm(chance: random.Random, equal: bool) -> tuple[list[Candidate], Load, Links]:
    """Draw nodes that serve all stages or are standbys, the load, and known speeds of links."""
    stages = chance.randint(1, 7)
    names = [f"n{number}" for number in range(chance.randint(2, 5))]
    at = [0] + [chance.randrange(len(names)) for _ in range(stages)]
    nodes = []
    for number, name in enumerate(names):
        mine = [stage for stage, owner in enumerate(at) if owner == number]
        layer = 1.0 if equal else chance.choice([0.5, 1.0, 1.0, 3.0])
        room = 9 if equal else max(1, len(mine), chance.randint(1, 9))
        nodes.append(node(name, *mine, layer=layer, room=room))
    sizes = tuple(1 if equal else chance.randint(1, 3) for _ in range(stages))
    work = load(sizes, chance.randint(1, 16), chance.choice([0, 10**6]))
    known: dict[tuple[str, str], LinkSpeed] = {}
    if not equal:
        for a in names:
            for b in names:
                if a != b and chance.random() < 0.8:
                    rate = chance.choice([1e5, 1e6, 1e8])
                    known[a, b] = LinkSpeed(chance.choice([0.0, 0.1, 2.0]), rate)
    return nodes, work, known


@pytest.mark.parametrize("seed", range(150))
def test_moves_end_and_make_no_step_longer(seed: int) -> None:
    """This also holds after a newcomer has got a seat beside a node with several."""
    chance = random.Random(seed)
    nodes, work, known = swarm(chance, equal=False)
    seconds = outlook_of(nodes, work, known).step_seconds
    before = seconds({each.node: each.stages for each in nodes})
    newcomer, several = nodes[-1], [each for each in nodes[:-1] if len(each.stages) > 1]
    if not newcomer.stages and several:
        stage = chance.choice(sorted(several[0].stages - {0}))
        nodes[-1] = joiner(newcomer.node, stage, layer=newcomer.layer)
    after = settled(nodes, work, known)
    assert seconds({each.node: each.stages for each in after}) <= before * SLOWER / GAIN


@pytest.mark.parametrize("seed", range(150))
def test_of_equal_machines_none_has_two_seats_more_than_another(seed: int) -> None:
    nodes, work, _ = swarm(random.Random(seed), equal=True)
    after = settled(nodes, work)
    movable = [len(each.stages) for each in after]
    assert max(movable) - min(movable) <= 1

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap.neighbours import (
    ALL,
    DRIVERS,
    Neighbours,
    adjoining,
    partners,
    related,
    rows,
    stages_of,
    to_link,
)
from planaria.bootstrap.registry_pb2 import Member, Seat, View

SPEEDS: dict[str, Callable[[Random], float]] = {
    "all alike": lambda drawn: 1.0,
    "unknown": lambda drawn: 0.0,
    "some four times as fast": lambda drawn: drawn.choice([1.0, 1.0, 1.0, 4.0]),
}


def swarm(nodes: int, stages: int, speed: str = "all alike", seed: int = 1) -> list[Member]:
    """Return the members of a swarm, spread evenly over stage 0 and so many body stages."""
    drawn = Random(seed)
    return [
        Member(
            node=f"{drawn.getrandbits(48):012x}",
            address=f"there:{number + 1}",
            seats=[Seat(stage=number % (stages + 1))],
            speed=SPEEDS[speed](drawn),
        )
        for number in range(nodes)
    ]


def neighbours(members: list[Member], stages: int, swapped: bool = False) -> Neighbours:
    return Neighbours(members, members[0].node, stages, swapped)


@given(st.integers(1, 40), st.integers(1, 6), st.booleans())
def test_two_who_keep_a_link_both_do(nodes: int, stages: int, swapped: bool) -> None:
    members = swarm(nodes, stages)
    links = neighbours(members, stages, swapped)
    for member in members:
        assert member.node not in links.of(member.node)
        assert all(member.node in links.of(other) for other in links.of(member.node))


@given(st.integers(1, ALL), st.integers(1, 6), st.booleans())
def test_up_to_eight_nodes_a_stage_all_have_to_do_with_all(
    replicas: int, stages: int, swapped: bool
) -> None:
    members = swarm(replicas * (stages + 1), stages)
    links = neighbours(members, stages, swapped)
    for member in members:
        assert links.of(member.node) == {
            other.node
            for other in members
            if other is not member
            and related(member.seats[0].stage, other.seats[0].stage, stages, swapped)
        }


@pytest.mark.parametrize("speed", SPEEDS)
def test_of_a_thousand_nodes_none_but_who_may_drive_has_more_than_fifty_links(speed: str) -> None:
    members = swarm(1000, 9, speed)
    links = neighbours(members, 9)
    ends = [member.node for member in members if member.seats[0].stage == 0]
    for member in members:
        if member.node not in ends[:DRIVERS]:
            assert len(links.of(member.node)) <= 50
        assert set(ends[:DRIVERS]) - {member.node} <= links.of(member.node)


@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from(sorted(SPEEDS)))
def test_everybody_has_somebody_at_each_neighbouring_stage(
    at_first: int, at_next: int, speed: str
) -> None:
    drawn = swarm(at_first + at_next, 0, speed)
    for number, member in enumerate(drawn):
        member.seats[0].stage = 1 + (number >= at_first)
    links = neighbours(drawn, 2)
    stage = {member.node: member.seats[0].stage for member in drawn}
    for member in drawn:
        other = [node for node in links.of(member.node) if stage[node] != stage[member.node]]
        assert len(other) >= min(2, at_next if stage[member.node] == 1 else at_first)


def test_a_newcomer_changes_few_links_of_the_stages_beside_its_own() -> None:
    members = swarm(1000, 9)
    newcomer = Member(node="newcomer", address="new:1", seats=[Seat(stage=4)], speed=1.0)
    before, after = neighbours(members, 9), neighbours([*members, newcomer], 9)
    beside = [member.node for member in members if abs(member.seats[0].stage - 4) == 1]
    changed = [len(after.of(node) - before.of(node)) for node in beside]
    assert sum(changed) < len(beside) / 2


def test_with_swapped_orders_their_ends_adjoin_stage_0() -> None:
    ways = [(0, 1, 2, 3, 4, 5, 0), (0, 2, 1, 3, 5, 4, 0)]
    hops = {frozenset(hop) for way in ways for hop in pairwise(way)}
    related_stages = {
        frozenset((a, b)) for a in range(6) for b in range(a) if adjoining(a, b, 5, swapped=True)
    }
    assert related_stages == hops


def named(count: int) -> list[str]:
    return [f"n{number:04}" for number in range(count)]


@given(st.integers(1, 1000))
def test_rows_are_all_replicas_in_their_order_and_as_long_as_each_other(count: int) -> None:
    ids = named(count)
    all_rows = rows(ids[::-1])
    assert [node for row in all_rows for node in row] == ids
    assert max(map(len, all_rows)) - min(map(len, all_rows)) <= 1
    assert len(all_rows) <= max(map(len, all_rows))
    if count <= ALL:
        assert all_rows == [ids]
    else:
        assert min(map(len, all_rows)) >= 3


@given(st.integers(1, 1000), st.data())
def test_partners_are_few_and_each_others(count: int, data: st.DataObject) -> None:
    ids = named(count)
    node = data.draw(st.sampled_from(ids))
    its_partners = partners(node, ids)
    assert node not in its_partners
    assert all(node in partners(other, ids) for other in its_partners)
    if count <= ALL:
        assert its_partners == [other for other in ids if other != node]
    assert len(its_partners) <= max(ALL - 1, 2 * math.sqrt(count))


def test_a_hundred_have_eighteen_each() -> None:
    ids = named(100)
    assert {len(partners(node, ids)) for node in ids} == {18}
    assert partners("n0023", ids) == [
        *("n0003", "n0013", "n0020", "n0021", "n0022", "n0024", "n0025", "n0026", "n0027"),
        *("n0028", "n0029", "n0033", "n0043", "n0053", "n0063", "n0073", "n0083", "n0093"),
    ]


def test_the_last_ones_of_longer_rows_have_each_other() -> None:
    assert rows("abcdefghijk") == [[*"abc"], [*"defg"], [*"hijk"]]
    assert partners("k", "abcdefghijk") == [*"ghij"]
    assert rows("abcdefghij") == [[*"abc"], [*"def"], [*"ghij"]]
    assert partners("j", "abcdefghij") == [*"ghi"]
    assert partners("i", "abcdefghij") == [*"cfghj"]


@given(st.integers(1, 120), st.data())
def test_any_two_replicas_are_partners_or_have_one_in_common(
    count: int, data: st.DataObject
) -> None:
    """So if a driver sends different commits to two replicas that don't compare with each other, it
    is still detected: a third replica compares with both."""
    names = named(count)
    node, other = (data.draw(st.sampled_from(names)) for _ in range(2))
    of_node, of_other = set(partners(node, names)), set(partners(other, names))
    assert node == other or other in of_node or of_node & of_other
    assert (other in of_node) == (node in of_other)


def test_a_node_that_nobody_can_dial_links_to_all_who_serve() -> None:
    members = swarm(100, 3)
    own = members[7]
    own.address = ""
    linked = to_link(own, View(number=1, members=members), 3, swapped=False)
    assert linked == [member.node for member in members if member is not own]
    assert all(stages_of(member) for member in members)

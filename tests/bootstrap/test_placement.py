"""Tests of which node takes a seat, and which gives one back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.bootstrap.candidates import Candidate, SeatAssigned, SeatReleased
from planaria.bootstrap.failure_domains import Census, FailureDomain
from planaria.bootstrap.placement import assign
from planaria.recovery.policy import POLICIES

TWINS = POLICIES["redundant"]
STAGES = 3
ALL = frozenset(range(STAGES + 1))


def sitter(node: str, *stages: int, **known: object) -> Candidate:
    """Return a node with the state of all its stages, fit for any stage, with room for one seat."""
    kept = frozenset(stages)
    return replace(Candidate(node, kept, kept, ALL, room=1, speed=1.0), **known)


def after(sitters: list[Candidate], changes: list[SeatAssigned | SeatReleased]) -> list[Candidate]:
    """Apply the changes. A node that takes a seat doesn't have the stage's state yet."""
    nodes = {s.node: s for s in sitters}
    for change in changes:
        each = nodes[change.node]
        if isinstance(change, SeatAssigned):
            stages = (each.stages - {change.gives}) | {change.stage}
        else:
            stages = each.stages - {change.stage}
        nodes[each.node] = replace(each, stages=stages, holds=each.holds & stages - {change.stage})
    return list(nodes.values())


def test_a_standby_comes_before_a_surplus_replica_and_that_before_who_has_room() -> None:
    sitters = [sitter("a", 0), sitter("b", 1), sitter("c", 1), sitter("d", 3, room=2)]
    (taken,) = assign([*sitters, sitter("s")], STAGES)
    assert (taken.node, taken.why) == ("s", "was a standby: stage 2 is vacant")
    (taken,) = assign(sitters, STAGES)
    assert isinstance(taken, SeatAssigned)
    assert (taken.node, taken.stage, taken.gives) == ("c", 2, 1)
    assert taken.why == "moves from stage 1, which has other nodes: stage 2 is vacant"
    (taken,) = assign([each for each in sitters if each.node != "c"], STAGES)
    assert (taken.node, taken.why) == ("d", "has room for one more seat: stage 2 is vacant")
    assert assign([each for each in sitters if each.node in "ab"], STAGES) == []


def test_the_first_of_a_stage_by_name_stays_since_it_may_hold_the_snapshot_that_is_needed() -> None:
    sitters = [sitter("a", 0), sitter("c", 1), sitter("b", 1), sitter("d", 3)]
    (taken,) = assign(sitters, STAGES, policy=POLICIES["snapshot"])
    assert taken.node == "c", "though b is newer"


def test_of_those_with_room_one_that_keeps_what_a_rebuild_needs_takes_it_if_not_slow() -> None:
    sitters = [sitter("a", 0, room=4), sitter("b", 1, room=4), sitter("c", 3, room=4)]
    sitters[2] = replace(sitters[2], speed=1.5)
    assert [taken.node for taken in assign(sitters, STAGES)] == ["b"], "the neighbour before"
    (taken,) = assign(sitters, STAGES, policy=POLICIES["snapshot"])
    assert taken.node == "a", "stage 0 keeps the snapshot of stage 2"
    sitters[2] = replace(sitters[2], speed=3.0)
    assert [taken.node for taken in assign(sitters, STAGES)] == ["c"], "twice as fast as all others"
    sitters = [sitter("a", 0, room=4, speed=1.5), sitter("b", 2, room=4), sitter("c", 3, room=4)]
    assert [taken.node for taken in assign(sitters, STAGES)] == ["c"], "it has stage 1's snapshot"


def test_of_the_standbys_one_goes_of_whose_place_fewest_serve() -> None:
    near, far = FailureDomain("x", "a"), FailureDomain("y", "b")
    seated = [sitter("a", 0, place=near), sitter("b", 1, place=far), sitter("c", 2, place=near)]
    spares = [sitter("s", place=near, waits=True), sitter("t", place=far, waits=True)]
    assert [change.node for change in assign([*seated, *spares], STAGES)] == ["t"]
    (taken,) = assign([*seated[:2], sitter("c", 2, place=far), *spares], STAGES)
    assert taken.node == "s"


def test_a_stage_that_was_at_several_hosts_is_not_left_to_one() -> None:
    """A standby of another failure domain takes a seat there, unless it waits or isn't useful."""
    near, far = FailureDomain("x", "a"), FailureDomain("y", "b")
    others = [sitter(f"o{stage}", stage, place=far) for stage in (0, 2, 3)]
    left = [sitter("a", 1, place=near), sitter("b", 1, place=near)]
    spare = sitter("s", place=far)
    (taken,) = assign([*others, *left, spare], STAGES, useful=2)
    assert (taken.node, taken.stage, taken.why) == (
        *("s", 1),
        "was a standby: all nodes of stage 1 are in one failure domain",
    )
    assert assign([*others, *left, spare], STAGES, begun=False) == []
    assert assign([*others, *left, replace(spare, waits=True)], STAGES) == []
    assert assign([*others, *left, replace(spare, place=near)], STAGES, useful=1) == []
    assert assign([*others[:2], sitter("o3", 3), left[0], spare], STAGES, useful=1) == []


def test_who_moves_away_leaves_its_stage_in_two_places_if_it_can() -> None:
    places = [FailureDomain("x", "a"), FailureDomain("x", "a"), FailureDomain("y", "b")]
    sitters = [sitter(f"n{n}", 1, place=place) for n, place in enumerate(places)]
    (taken,) = assign([sitter("a", 0), *sitters, sitter("d", 3)], STAGES)
    assert (taken.node, taken.stage) == ("n1", 2)


def test_one_node_that_has_room_takes_all_that_is_left() -> None:
    (alone,) = after([only := sitter("a", 2, room=4)], assign([only], STAGES))
    assert alone.stages == ALL


def test_a_seat_is_given_back_to_who_has_fewer_once_that_one_has_the_state() -> None:
    crowded, newcomer = sitter("a", 0, 1, 2, 3, room=4), sitter("b", 2)
    fetches = replace(newcomer, holds=frozenset())
    assert assign([crowded, fetches], STAGES) == []
    (returned,) = assign([crowded, newcomer], STAGES)
    assert returned == SeatReleased("a", 2, "b serves stage 2, too, and has fewer seats")


def test_a_stage_whose_last_node_leaves_gets_another_one_and_keeps_it_meanwhile() -> None:
    sitters = [sitter("a", 0), sitter("b", 1, room=2), sitter("c", 2, leaving=True), sitter("d", 3)]
    (taken,) = assign(sitters, STAGES)
    assert (taken.node, taken.stage) == ("b", 2)
    assert "has only nodes that will leave soon" in taken.why


def test_at_the_start_only_standbys_take_what_is_vacant() -> None:
    sitters = [sitter("a", 0, room=4), sitter("b", 1), sitter("c", 1)]
    assert assign(sitters, STAGES, begun=False) == []
    assert [taken.node for taken in assign([*sitters, sitter("s")], STAGES, begun=False)] == ["s"]


def test_the_driver_does_not_move() -> None:
    sitters = [sitter("a", 0, drives=True), sitter("b", 0), sitter("c", 1), sitter("d", 2)]
    assert [taken.node for taken in assign(sitters, STAGES)] == ["b"]


def test_with_twins_who_has_the_vacant_stages_comes_before_all_others_if_it_has_room() -> None:
    sitters = [sitter("a", 0), sitter("b", 1, room=2), sitter("c", 3), sitter("d", 3), sitter("s")]
    taken, relief = assign(sitters, STAGES, policy=TWINS)
    assert isinstance(taken, SeatAssigned)
    assert (taken.node, taken.stage, taken.gives) == ("b", 2, None)
    assert taken.why == "has its twin, and room: stage 2 is vacant"
    assert (relief.node, relief.stage) == ("s", 2), "and the standby is to have the seat later"
    assert relief.why == "was a standby: stage 2 is served only by b, which has other stages"
    full = replace(sitters[1], room=1)
    (taken,) = assign([sitters[0], full, *sitters[2:]], STAGES, policy=TWINS)
    assert taken.node == "s"
    (taken,) = assign(
        [sitters[0], replace(sitters[1], holds=frozenset()), sitters[2]],
        STAGES,
        policy=TWINS,
    )
    assert taken.why.startswith("has room for one more seat"), "it has no state yet, so no twin"


def test_who_took_a_second_seat_in_a_hurry_is_relieved_of_one_by_a_surplus_replica() -> None:
    sitters = [sitter("a", 0), sitter("b", 1, 2, room=3), sitter("c", 3), sitter("d", 3)]
    (relief,) = changes = assign(sitters, STAGES, policy=TWINS)
    assert isinstance(relief, SeatAssigned)
    assert (relief.node, relief.stage, relief.gives) == ("d", 2, 3)
    sitters = after(sitters, changes)
    assert assign(sitters, STAGES, policy=TWINS) == [], "until it has the state"
    sitters[3] = replace(sitters[3], holds=frozenset([2]))
    (returned,) = assign(sitters, STAGES, policy=TWINS)
    assert returned == SeatReleased("b", 2, "d serves stage 2, too, and has fewer seats")


def test_who_relieves_another_one_stays_there_while_it_copies() -> None:
    sitters = [sitter("a", 0), sitter("b", 1, 2, 3, room=3)]
    copying = replace(sitter("c", 3), holds=frozenset())
    assert assign([*sitters, copying], STAGES, policy=TWINS) == []
    assert assign([*sitters, sitter("c", 3)], STAGES, policy=TWINS) == [
        SeatReleased("b", 3, "c serves stage 3, too, and has fewer seats")
    ]


PLACES = st.sampled_from([("x", "a"), ("x", "a"), ("x", "b"), ("y", "c")])


@st.composite
def swarms(draw: st.DrawFn) -> list[Candidate]:
    sitters = []
    for number in range(draw(st.integers(1, 7))):
        stages = draw(st.frozensets(st.sampled_from(sorted(ALL))))
        kept, fits = (draw(st.frozensets(st.sampled_from(sorted(ALL)))) for _ in "ab")
        sitters.append(
            Candidate(
                f"n{number}",
                stages,
                holds=kept & stages,
                fits=fits | stages,
                room=max(1, len(stages)) + draw(st.integers(0, 2)),
                speed=draw(st.sampled_from([1.0, 4.0])),
                heard=draw(st.integers(0, 5)) > 0,
                leaving=draw(st.integers(0, 5)) == 0,
                place=FailureDomain(*draw(PLACES)),
                waits=draw(st.booleans()),
            )
        )
    ends = [n for n, each in enumerate(sitters) if 0 in each.stages]
    if ends:
        sitters[ends[0]] = replace(sitters[ends[0]], drives=True)
    return sitters


@given(swarms(), st.sampled_from(["redundant", "snapshot"]))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_no_stage_stays_vacant_no_last_state_is_dropped_and_nobody_moves_twice(
    sitters: list[Candidate], policy: str
) -> None:
    now = sitters
    for change in assign(sitters, STAGES, policy=POLICIES[policy]):
        own = next(s for s in now if s.node == change.node)
        others = [s for s in now if s.node != change.node and s.stays]
        given = change.gives if isinstance(change, SeatAssigned) else change.stage
        if isinstance(change, SeatAssigned):
            at = [s for s in now if change.stage in s.stages]
            relieves = (
                [s for s in at if len(s.stages) > 1] == at
                and len(at) == 1
                and policy == "redundant"
            )
            mixes = Census(s.place for s in at if s.stays).is_apart(own.place) and not own.stages
            assert all(s.leaving for s in at) or relieves or mixes, "it was not vacant"
            assert own.stays
            assert change.stage in own.fits - own.stages
        if given is not None:
            assert any(given in s.holds for s in others), f"{change} drops the last state"
        now = after(now, [change])
    assert all(len(each.stages) <= each.room for each in now)
    for stage in ALL:
        if all(each.leaving for each in now if stage in each.stages):
            able = [each for each in now if each.stays and stage in each.fits - each.stages]
            assert not any(len(each.stages) < each.room for each in able), f"{stage} is vacant"
    again = assign(now, STAGES, policy=POLICIES[policy])
    freed = any(isinstance(change, SeatReleased) for change in again)  # a node has room, or leaves
    relief = "which has other stages"  # the reason given for a node with several seats
    assert freed or all(relief in change.why for change in again)


@pytest.mark.parametrize("copies", [True, False])
@given(sitters=swarms(), policy=st.sampled_from(["redundant", "snapshot"]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_it_settles(copies: bool, sitters: list[Candidate], policy: str) -> None:
    """`copies`: each node gets the state of its stages; otherwise none does."""
    for _ in range(12):
        sitters = after(sitters, assign(sitters, STAGES, policy=POLICIES[policy]))
        if copies:
            sitters = [replace(each, holds=each.stages) for each in sitters]
    assert assign(sitters, STAGES, policy=POLICIES[policy]) == []

"""How long a leaving node waits, and for which other node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from planaria.bootstrap import registry_pb2 as registry
from planaria.node.transaction.leaving import APPOINTMENT, Leaving, may_have_heir
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.seat_names import seated


def view(
    seats: Mapping[str, Iterable[int]], leaving: Iterable[str] = (), room: int = 1
) -> registry.View:
    """A view in which each node has seats at these stages."""
    members = [
        registry.Member(
            node=node,
            seats=[registry.Seat(stage=stage) for stage in held],
            room=room,
            leaving=node in leaving,
        )
        for node, held in seats.items()
    ]
    return registry.View(members=members)


def test_who_leaves_has_an_heir_where_somebody_has_room_or_a_stage_has_two() -> None:
    for heir, room, seats in (
        (False, 1, {"a": [0], "b": [1], "c": [2]}),
        (True, 2, {"a": [0], "b": [1], "c": [2]}),
        (False, 2, {"a": [0, 2], "b": [1]}),
        (True, 1, {"a": [0], "b": [1], "c": [2], "standby": []}),
        (True, 1, {"a": [0], "b": [1], "c": [2], "d": [2]}),
        (False, 1, {"a": [0], "b": [1, 2], "c": [2]}),
    ):
        known = view(seats, room=room)
        assert may_have_heir(known, "b") == heir, seats
        assert may_have_heir(seated(known), "b/1") == heir, seats


def test_who_leaves_too_is_nobodys_heir() -> None:
    for heir, leaving in (
        (True, ["b"]),
        (True, ["b", "a", "c"]),
        (False, ["b", "standby"]),
        (False, ["b", "standby", "a"]),
    ):
        known = view({"a": [0], "b": [1], "c": [2], "standby": []}, leaving)
        assert may_have_heir(known, "b") == heir, leaving
        assert may_have_heir(seated(known), "b/1") == heir, leaving
    assert not may_have_heir(view({"a": [0], "b": [1], "c": [2], "d": [2]}, ["c"]), "b")


def test_an_heir_is_waited_for_until_it_trains() -> None:
    before = {"a": [0], "b": [1]}
    leaving = Leaving("b", view(before, room=2), 0.0)
    noticed, appointed = view(before, "b", 2), view({"a": [0, 1], "b": [1]}, "b", 2)
    own = pb.Place(node="b/1", stage=1)
    assert leaving.waits(1, noticed, [own], 1.0)
    assert leaving.waits(1, appointed, [own], 20.0)
    assert not leaving.heir(1, appointed, [own])
    trains = [own, pb.Place(node="a/1.7", stage=1)]
    assert not leaving.waits(1, appointed, trains, 21.0)
    assert leaving.heir(1, appointed, trains) == "a/1.7"


def test_nobody_is_waited_for_who_leaves_too_or_longer_than_the_registry_needs() -> None:
    before = {"a": [0], "b": [1]}
    alone = Leaving("b", view(before, room=2), 5.0)
    noticed = view(before, "b", 2)
    assert alone.waits(1, noticed, [], 5.1)
    assert not alone.waits(1, noticed, [], 5.1 + APPOINTMENT)
    assert not alone.lives_on(1, noticed)
    all_leave = Leaving("b", view(before, room=2), 5.0)
    assert not all_leave.waits(1, view(before, "ab", 2), [], 5.1)
    assert not all_leave.waits(1, view({"a": [0, 1], "b": [1]}, "ab", 2), [], 5.1)


def test_of_two_replicas_that_leave_at_once_whose_mark_is_later_knows_that_it_is_the_last() -> None:
    before = {"a": [0], "b": [1], "c": [1]}
    b, c = (Leaving(node, view(before, room=2), 0.0) for node in "bc")
    places = [pb.Place(node="b/1", stage=1), pb.Place(node="c/1", stage=1)]
    unmarked, first, both = (view(before, leave, 2) for leave in ("", "b", "bc"))
    assert b.waits(1, unmarked, places, 0.1), "neither knows of the other"
    assert c.waits(1, unmarked, places, 0.1), "neither knows of the other"
    assert not b.waits(1, first, places, 0.2)
    assert b.lives_on(1, first)
    assert not b.heir(1, first, places), "it had the state before"
    assert c.waits(1, both, places, 0.3)
    assert not c.lives_on(1, both)


def test_a_registry_that_marks_nobody_delays_it_a_little() -> None:
    known = view({"a": [0], "b": [1], "c": [1]})
    leaving = Leaving("b", known, 0.0)
    assert leaving.waits(1, known, [], APPOINTMENT - 0.1)
    assert not leaving.waits(1, known, [], APPOINTMENT)
    assert leaving.lives_on(1, known)

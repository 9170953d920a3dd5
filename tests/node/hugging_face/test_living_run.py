"""By which nodes the stages of a living run are asked."""

from __future__ import annotations

from planaria.bootstrap.registry_pb2 import Member, Seat, View
from planaria.node.hugging_face.living_run import TRIED, Way, ways_to


def member(node: str, *stages: int, address: str = "10.0.0.1:7401") -> Member:
    seats = [Seat(stage=stage, since=7 if stage == 3 else 0) for stage in stages]
    return Member(node=node, seats=seats, address=address)


def test_a_node_that_can_be_dialled_is_asked_directly() -> None:
    view = View(members=[member("a", 0), member("b", 1, 3), member("c", 3, address="")])
    assert ways_to(1, view) == [Way("b/1", "b", "10.0.0.1:7401")]
    assert ways_to(3, view)[0] == Way("b/3.7", "b", "10.0.0.1:7401")
    assert ways_to(2, view) == []


def test_one_that_only_dials_out_is_asked_through_its_neighbours_first() -> None:
    hidden = member("x", 4, address="")
    view = View(members=[*(member(f"n{stage}", stage) for stage in range(7)), hidden])
    view.members[4].address = ""
    found = ways_to(4, view)
    assert [way.seat for way in found] == ["n4/4", "x/4"] * (TRIED // 2)
    assert [way.node for way in found] == ["n3", "n3", "n5", "n5"]


def test_a_standby_leads_nowhere_and_nobody_can_be_asked_without_an_address() -> None:
    assert ways_to(1, View(members=[member("a"), member("b", 1, address="")])) == []

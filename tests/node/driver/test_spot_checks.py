"""Spot checks: which visits are drawn, which nodes are told, and whose comparisons count."""

from __future__ import annotations

from random import Random

import pytest

from planaria.node.driver.attempt_state import planned
from planaria.node.driver.spot_checks import (
    UNDECIDED,
    WRONG,
    CheckedVisit,
    SpotChecks,
    UndecidedCheck,
    WrongResult,
)
from planaria.node.transaction.routing import routes
from planaria.node.wire import stage_pb2 as pb

ORDERS = [(1, 2), (2, 1)] * 4


def begin(replicas: int, kind: pb.Begin.Kind = pb.Begin.TRAIN, step: int = 7) -> pb.Begin:
    members = [
        pb.Place(node=f"{stage}{name}", stage=stage)
        for stage in range(3)
        for name in "abc"[:replicas]
    ]
    plan = planned({place.node: place.stage for place in members}, ORDERS, {})
    return pb.Begin(step=step, kind=kind, members=members, plan=plan)


def drawn(replicas: int, seed: int = 0) -> tuple[SpotChecks, CheckedVisit]:
    checks = SpotChecks(1.0, 0.05, Random(seed))
    checks.draw(begin(replicas))
    return checks, next(iter(checks.checked.values()))


def comparison(
    checked: CheckedVisit, node: str, other: str, off: float, backward: bool = False
) -> pb.Compared:
    return pb.Compared(
        microbatch=checked.microbatch,
        position=checked.position,
        backward=backward,
        node=node,
        other=other,
        difference=off,
    )


def test_the_neighbours_of_a_visit_are_told_and_nobody_else() -> None:
    checks = SpotChecks(1.0, 0.05, Random(1))
    opening = begin(2)
    private = checks.draw(opening)
    ways = routes(opening)
    assert len(checks.checked) == 2 * len(ORDERS)  # stage 0 is not checked
    assert not opening.checks
    for (microbatch, position), checked in checks.checked.items():
        nodes = ways[microbatch].nodes
        double = checked.doubles[0]
        assert double[0] == nodes[position][0]  # of the same stage
        assert double != nodes[position]
        for neighbour, messages in private.items():
            beside = neighbour in (nodes[position - 1], nodes[position + 1])
            assert (checked.message() in messages) == beside


def test_as_many_are_drawn_as_was_asked_for_and_others_each_time() -> None:
    checks = SpotChecks(0.1, 0.05, Random(2))
    draws = []
    for step in range(500):
        checks.draw(begin(3, step=step))
        draws.append(frozenset(checks.checked))
    visits = 500 * 2 * len(ORDERS)
    assert sum(map(len, draws)) == pytest.approx(0.1 * visits, rel=0.1)
    assert len(set(draws)) > 100


@pytest.mark.parametrize(
    ("share", "replicas", "kind"),
    [(0.0, 3, pb.Begin.TRAIN), (1.0, 1, pb.Begin.TRAIN), (1.0, 3, pb.Begin.EVALUATE)],
)
def test_nothing_is_checked_where_nobody_could_or_should(
    share: float, replicas: int, kind: pb.Begin.Kind
) -> None:
    checks = SpotChecks(share, 0.05, Random(0))
    assert not checks.draw(begin(replicas, kind))
    assert not checks.checked


def test_two_that_agree_were_right() -> None:
    checks, checked = drawn(3)
    node, other = checked.node, checked.doubles[0]
    assert checks.compared(checked.behind, comparison(checked, node, other, 0.04)) is None
    assert checks.right == {node: 7, other: 7}


def test_of_three_the_one_that_differs_is_wrong_once_a_visit_and_has_to_go_after_some() -> None:
    checks = SpotChecks(1.0, 0.05, Random(3))
    for times in range(1, WRONG + 1):
        checks.draw(begin(3, step=times))
        checked = next(visit for visit in checks.checked.values() if visit.node == "1a")
        other = checked.doubles[0]
        again = checks.compared(checked.behind, comparison(checked, "1a", other, 0.7))
        assert isinstance(again, CheckedVisit)
        third = again.message().double
        assert {"1a", other, third} == {"1a", "1b", "1c"}
        for backward, by in (False, checked.behind), (True, checked.before):
            pairs = {("1a", third): 0.7, (other, third): 0.01, ("1a", other): 0.7}
            *_, last = [
                checks.compared(by, comparison(checked, *pair, off, backward))
                for pair, off in pairs.items()
            ]
            assert last == WrongResult("1a", by, times, pytest.approx(0.7), times)
    assert checks.right.keys() == {other, third}
    assert checks.charge("1a", 1, 0.5)[0] in ("", "0a", "0b", "0c", "2a", "2b", "2c")
    assert checks.take_doubted() == [pb.Doubted(node="1a", stage=1, since=0)]
    assert not checks.take_doubted()


def test_a_machine_that_finds_a_node_wrong_again_is_no_more_evidence() -> None:
    """If each counted, the machine would accuse alone so often that it is taken for the liar."""
    checks = SpotChecks(1.0, 0.05, Random(0))
    news = []
    for step, finder in enumerate(("x/1", "x/1", "x/2", "y/1", "x/1", "z/1")):
        checks.wrong["1a"][step, 0, 1].add(finder)
        news.append(not checks.is_known("1a"))
    assert news == [True, False, False, True, False, True]
    checks.keep({"1b": 1})
    checks.wrong["1a"][9, 0, 1].add("x/1")
    assert not checks.is_known("1a"), "it has come again"


def test_three_that_all_differ_decide_nothing() -> None:
    checks, checked = drawn(3)
    node, other = checked.node, checked.doubles[0]
    again = checks.compared(checked.behind, comparison(checked, node, other, 1.0))
    assert isinstance(again, CheckedVisit)
    third = again.doubles[1]
    for pair in (node, third), (other, third):
        assert checks.compared(checked.behind, comparison(checked, *pair, 1.0)) is None
    assert not checks.wrong


def test_of_two_nobody_can_tell_which_and_it_is_said_after_some_times() -> None:
    checks = SpotChecks(1.0, 0.05, Random(4))
    outcomes = []
    for step in range(2 * UNDECIDED):
        checks.draw(begin(2, step=step))
        checked = next(visit for visit in checks.checked.values() if visit.node == "2b")
        outcomes.append(checks.compared(checked.behind, comparison(checked, "2b", "2a", 0.5)))
    undecided = [outcome for outcome in outcomes if outcome is not None]
    assert undecided == [
        UndecidedCheck(("2a", "2b"), step, 0.5) for step in (UNDECIDED - 1, 2 * UNDECIDED - 1)
    ]


def test_what_others_say_or_of_others_counts_for_nothing() -> None:
    checks, checked = drawn(3)
    node, double = checked.node, checked.doubles[0]
    others = {"1a", "1b", "1c", "2a", "2b", "2c"} - {node, double, checked.behind}
    other = min(others)
    assert checks.compared(other, comparison(checked, node, double, 1.0)) is None
    assert checks.compared(checked.behind, comparison(checked, node, other, 1.0)) is None
    assert checks.compared(checked.behind, comparison(checked, node, node, 1.0)) is None
    checks.over()
    assert checks.compared(checked.behind, comparison(checked, node, double, 1.0)) is None
    assert not checks.right

"""The driver when a stage loses its last node in a step and another node has the stage's twin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planaria.bootstrap import registry_pb2 as registry
from planaria.node.driver.gathering import QUERY_AGAIN
from planaria.node.driver.takeover import ASK_AGAIN, VACANT
from planaria.node.report.events import Aborted, RebuildFailed, SeatTaken
from planaria.node.transaction.effects import Ballot, DropAttempt, GoOn, StartAttempt
from planaria.node.transaction.member import MemberPhase, MemberSide
from planaria.node.transaction.routing import routes
from planaria.node.wire import stage_pb2 as pb
from planaria.recovery.policy import POLICIES
from tests.node.driver.test_driver import RULES, DrivenRun, begun, events, sent
from tests.node.transaction.test_member import view

TWINS = replace(RULES, stages=3, policy=POLICIES["redundant"])
ONE_EACH = {"a": 0, "b/1": 1, "c/2": 2, "d/3": 3}
TAKEN = {"a": 0, "b/1": 1, "b/2.3": 2, "d/3": 3}
"""The members without c, whose seat b has got."""


def in_second_step(members: dict[str, int] = ONE_EACH, **rules: object) -> DrivenRun:
    run = DrivenRun(replace(TWINS, **rules), members)  # type: ignore[arg-type]
    run.begins()
    run.commits()
    return run


def test_the_attempt_goes_on_by_a_plan_with_the_new_seat_once_that_has_the_state() -> None:
    run = in_second_step()
    since, before = run.driver.ballot, routes(run.attempt.begin)
    asked = run.views(TAKEN)
    assert sent(asked, "query").keys() == {"b/2.3"}
    assert Ballot.of(sent(asked, "query")["b/2.3"].ballot) == since, "it is part of this attempt"
    assert "waiting for b/2.3" in run.driver.explain()
    (sync,) = sent(run.hears("b/2.3", status=pb.Status()), "sync").values()
    assert (sync.sync.method, sync.sync.step) == ("redundant", 1)
    assert [(source.node, source.step) for source in sync.sync.sources] == [("b/1", 1)]
    run.now += 0.5
    effects = run.hears("b/2.3", synced=pb.Synced(step=1, method="redundant"))
    (taken,) = events(effects, SeatTaken)
    assert (taken.stage, taken.lost, taken.by, taken.seconds) == (2, "c/2", "b/2.3", 0.5)
    assert taken.microbatches == RULES.microbatches
    plans = sent(effects, "step")
    assert plans.keys() == TAKEN.keys()
    assert list(plans["a"].step.begin.left) == ["c/2"]
    assert not plans["b/2.3"].step.begin.HasField("members_of"), "it was never told who takes part"
    begin = run.attempt.begin
    assert Ballot.of(begin.since) == since
    assert list(begin.entering) == ["b/2.3"]
    for microbatch, route in routes(begin).items():
        moved = [node.replace("c/2", "b/2.3") for node in before[microbatch].nodes]
        assert list(route.nodes) == moved
    run.comes_home()
    assert run.votes(but="b/2.3") == [], "the new seat votes, too"
    (commit, *_) = sent(run.ready("b/2.3"), "step").values()
    assert commit.step.commit.step == 2
    assert events(effects, Aborted) == []


def test_nothing_is_reduced_while_the_stage_has_nobody_and_homes_count() -> None:
    run = in_second_step()
    run.views(TAKEN)
    assert sent(run.comes_home(), "reduce") == {}
    run.hears("b/2.3", status=pb.Status())
    effects = run.hears("b/2.3", synced=pb.Synced(step=1))
    assert sent(effects, "reduce").keys() == TAKEN.keys(), "all were home already"


def test_who_was_ready_reduces_again() -> None:
    run = in_second_step()
    run.comes_home()
    run.votes(but="c/2")
    run.views(TAKEN)
    assert run.ready("c/2") == [], "what it says counts no more"
    run.hears("b/2.3", status=pb.Status())
    run.hears("b/2.3", synced=pb.Synced(step=1))
    run.votes(but="d/3")
    assert run.driver.standing.committed == 1


def test_a_seat_that_does_not_answer_is_asked_again_and_told_once() -> None:
    run = in_second_step()
    run.views(TAKEN)
    assert sent(run.waits(ASK_AGAIN / 2), "query") == {}
    assert sent(run.waits(ASK_AGAIN), "query").keys() == {"b/2.3"}
    assert len(sent(run.hears("b/2.3", status=pb.Status()), "sync")) == 1
    assert run.hears("b/2.3", status=pb.Status()) == []
    assert sent(run.waits(QUERY_AGAIN), "query") == {}
    run.driver.link_lost("b/2.3", "reset", run.now)
    assert len(sent(run.hears("b/2.3", status=pb.Status()), "sync")) == 1, "it was lost on its way"


def test_in_the_first_step_it_has_the_weights_that_all_began_with() -> None:
    run = begun(TWINS, ONE_EACH)
    run.views(TAKEN)
    effects = run.hears("b/2.3", status=pb.Status())
    assert list(sent(effects, "step")["b/2.3"].step.begin.entering) == ["b/2.3"]


def test_a_lost_link_is_not_yet_a_lost_seat() -> None:
    run = in_second_step()
    assert events(run.driver.link_lost("c/2", "silent", run.now), Aborted) == []
    assert sent(run.waits(VACANT / 2), "query") == {}
    assert sent(run.views(TAKEN), "query").keys() == {"b/2.3"}


def test_who_is_reached_again_was_not_lost() -> None:
    run = in_second_step()
    run.driver.link_lost("c/2", "silent", run.now)
    effects = run.driver.link_up("c/2", run.now)
    assert "isn't lost" in events(effects, Aborted)[0].reason


def test_who_had_joined_the_stage_before_it_lost_its_last_node_waits_for_the_next_attempt() -> None:
    run = in_second_step()
    assert sent(run.views({**ONE_EACH, "e/2": 2}), "query").keys() == {"e/2"}
    effects = run.views({"a": 0, "b/1": 1, "d/3": 3, "e/2": 2})
    assert len(events(effects, Aborted)) == 1
    assert "e/2" in sent(effects, "query")


def test_a_seat_that_nobody_takes_is_waited_for_no_longer() -> None:
    run = in_second_step()
    run.driver.link_lost("c/2", "silent", run.now)
    assert events(run.waits(VACANT - 0.1), Aborted) == []
    (aborted,) = events(run.waits(0.2), Aborted)
    assert aborted.reason.startswith("no node has taken the seat of c/2 in 3 s")


def test_nor_is_one_when_all_had_voted_before() -> None:
    """The commit waited for a view without e."""
    run = in_second_step({**ONE_EACH, "e/1": 1})
    run.driver.link_lost("e/1", "silent", run.now)
    run.comes_home()
    run.votes(but="e/1")
    run.driver.link_lost("c/2", "silent", run.now)
    (aborted,) = events(run.waits(VACANT), Aborted)
    assert aborted.reason.startswith("no node has taken the seat of c/2")


@pytest.mark.parametrize(
    ("left", "rules"),
    [
        (TAKEN, {"policy": POLICIES["checkfree"]}),
        (TAKEN, {"masking": False}),
        ({"a": 0, "b/1": 1, "b/2.3": 2, "b/3.3": 3}, {}),  # two stages in a row are lost
        ({"a": 0, "d/1.3": 1, "d/2.3": 2, "d/3": 3}, {}),  # the node with the twin is lost, too
    ],
)
def test_else_the_step_begins_anew(left: dict[str, int], rules: dict[str, object]) -> None:
    run = in_second_step(**rules)
    effects = run.views(left)
    assert len(events(effects, Aborted)) == 1
    assert sent(effects, "query").keys() == left.keys()


def test_a_seat_that_cannot_have_the_state_gives_the_attempt_up() -> None:
    run = in_second_step()
    run.views(TAKEN)
    run.hears("b/2.3", status=pb.Status())
    effects = run.hears("b/2.3", failed=pb.Failed(reason="step 0 is held there"))
    assert [event.node for event in events(effects, RebuildFailed)] == ["b/2.3"]
    assert len(events(effects, Aborted)) == 1


def test_of_two_new_seats_the_one_beside_a_twin_is_chosen_and_the_other_one_joins() -> None:
    run = in_second_step()
    effects = run.views({"a": 0, "a/2.3": 2, **TAKEN})
    queries = sent(effects, "query")
    assert Ballot.of(queries["b/2.3"].ballot) == run.driver.ballot
    assert Ballot.of(queries["a/2.3"].ballot) == Ballot(run.number, 0), "as newcomers are"


# --- the member


def new_member() -> MemberSide:
    seat = MemberSide("b/2.3", 2)
    seat.viewed(driven_by("a", 1))
    return seat


def driven_by(driver: str, number: int) -> registry.View:
    return view(number, {driver: 0, "b/2.3": 2}, driver)


def member(committed: int) -> MemberSide:
    """A seat that has fetched the state of step `committed`."""
    seat = new_member()
    seat.received("a", pb.Message(ballot=Ballot(1, 4).message(), query=pb.Query()))
    sync = pb.Sync(step=committed, method="redundant")
    seat.received("a", pb.Message(ballot=Ballot(1, 4).message(), sync=sync))
    assert seat.arrived(Ballot(1, 4))
    seat.fetched(pb.Synced(step=committed, digest=b"twin's"), pb.Commit(step=committed), 0)
    return seat


def entering(step: int) -> pb.Message:
    begin = pb.Begin(step=step, since=Ballot(1, 3).message(), entering=["b/2.3"])
    return pb.Message(ballot=Ballot(1, 5).message(), step=pb.Step(begin=begin))


def test_a_seat_enters_an_attempt_as_if_it_had_begun_it() -> None:
    seat = member(committed=6)
    start, go_on = seat.received("a", entering(7))
    assert isinstance(start, StartAttempt)
    assert isinstance(go_on, GoOn)
    assert (start.ballot, go_on.ballot) == (Ballot(1, 3), Ballot(1, 5))
    assert seat.phase is MemberPhase.RUNNING
    assert (seat.began, seat.attempt, seat.step) == (Ballot(1, 3), Ballot(1, 5), 7)
    query = pb.Message(ballot=Ballot(2, 1).message(), query=pb.Query())
    seat.viewed(driven_by("z", 2))
    drop, answer = seat.received("z", query)
    assert isinstance(drop, DropAttempt)
    assert (answer.message.status.committed, answer.message.status.attempting) == (6, 7)


@pytest.mark.parametrize("step", [6, 8])
def test_a_seat_with_another_steps_state_does_not_enter(step: int) -> None:
    seat = member(committed=6)
    (failed,) = seat.received("a", entering(step))
    assert "but this node has step 6" in failed.message.failed.reason


def test_who_has_no_state_yet_does_not_enter() -> None:
    seat = new_member()
    sync = pb.Sync(step=6, method="redundant")
    seat.received("a", pb.Message(ballot=Ballot(1, 4).message(), sync=sync))
    (failed,) = seat.received("a", entering(7))
    assert failed.message.WhichOneof("body") == "failed"

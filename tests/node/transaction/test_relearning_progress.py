"""How many updates of a lesson enter with each commit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.node.transaction.commits import entering
from planaria.node.transaction.relearning_progress import RelearningProgress, other_holder
from planaria.node.wire import stage_pb2 as pb


def made(tally: RelearningProgress, most: int) -> int:
    """Makes up to `most` updates, as far as `tally` allows; returns how many."""
    before = tally.made
    while tally.may_update and tally.made < before + most:
        tally.made += 1
    return tally.made - before


def test_what_is_offered_enters_and_nothing_that_is_made_later() -> None:
    tally = RelearningProgress(updates=10, entered=3, each_step=0, within=100)
    assert made(tally, 4) == 4
    assert (tally.offer(), made(tally, 1)) == (4, 0)
    tally.commit(4)
    assert (tally.entered, tally.left, tally.made) == (7, 3, 0)
    assert made(tally, 100) == 3
    tally.commit(tally.offer())
    assert (tally.left, made(tally, 1)) == (0, 0)


def test_an_attempt_that_is_not_committed_keeps_what_was_made() -> None:
    tally = RelearningProgress(updates=10, entered=0, each_step=0, within=100)
    made(tally, 2)
    tally.offer()
    tally.goes_on()
    made(tally, 3)
    assert tally.offer() == 5


def test_what_a_skipped_step_leaves_out_is_made_again() -> None:
    tally = RelearningProgress(updates=10, entered=6, each_step=0, within=100)
    made(tally, 4)
    tally.offer()
    tally.commit(0)
    assert (tally.left, tally.made, tally.may_update) == (4, 0, True)


def test_a_step_has_as_many_as_it_is_to_have_and_the_last_one_the_rest() -> None:
    tally, offers = RelearningProgress(updates=8, entered=0, each_step=3, within=100), []
    while tally.left:
        assert tally.is_due
        made(tally, 100)
        assert not tally.is_due
        offers.append(tally.offer())
        tally.commit(offers[-1])
    assert offers == [3, 3, 2]
    assert not tally.is_due


def test_after_so_many_steps_it_is_over() -> None:
    tally = RelearningProgress(updates=10, entered=0, each_step=0, within=3)
    gone, then = [], []
    while tally.left:
        gone.append(round(3 * tally.gone))
        made(tally, 2)
        then.append(tally.left_then)
        tally.commit(tally.offer())
    assert (gone, then) == ([0, 1, 2], [8, 6, 0])
    assert (tally.entered, tally.left, tally.may_update) == (6, 0, False)


@given(st.integers(1, 20), st.integers(0, 5), st.data())
def test_no_update_is_lost_or_counted_twice(updates: int, each_step: int, data: st.DataObject):
    tally, entered = RelearningProgress(updates, 0, each_step, 100), 0
    for _ in range(data.draw(st.integers(0, 40))):
        made(tally, data.draw(st.integers(0, 4)))
        if data.draw(st.booleans()):
            offered = tally.offer()
            decided = data.draw(st.sampled_from([offered, 0, None]))
            if decided is None:
                tally.goes_on()
            else:
                tally.commit(decided)
                entered += decided
    assert tally.entered == entered <= updates
    assert tally.made <= tally.left


def test_who_has_the_stage_too_is_a_member_or_a_joiner_of_it() -> None:
    places = [pb.Place(node="a", stage=0), pb.Place(node="b", stage=1)]
    assert other_holder(pb.Begin(members=places), "b", 1) == ""
    another = pb.Begin(members=[*places, pb.Place(node="c", stage=1)])
    assert other_holder(another, "b", 1) == "c"
    elsewhere = pb.Begin(members=places, joining=[pb.Joiner(node="d", stage=0)])
    assert other_holder(elsewhere, "b", 1) == ""
    follows = pb.Begin(members=places, joining=[pb.Joiner(node="d", stage=1)])
    assert other_holder(follows, "b", 1) == "d"


def test_a_commit_says_what_enters_by_stage() -> None:
    assert [entering(pb.Commit(relearned=[0, 4]), stage) for stage in (0, 1, 2)] == [0, 4, 0]
    assert entering(pb.Commit(), 1) == 0

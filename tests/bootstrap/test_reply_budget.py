"""Tests of the order and number of answers under way, however many nodes ask at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap.reply_budget import ReplyBudget

ROOM = 100
EVENTS = st.lists(
    st.tuples(st.just("ask"), st.sampled_from("abcdef"))
    | st.tuples(st.just("end"), st.integers(0, 30))
    | st.tuples(st.just("go"), st.integers(0, 150)),
    max_size=60,
)


@given(EVENTS)
def test_no_more_is_on_its_way_than_there_is_room_for_and_each_is_answered_in_its_turn(
    events: list[tuple[str, object]],
) -> None:
    answers = ReplyBudget[int](ROOM)
    waiting, going = dict[int, str](), dict[int, int]()
    for number, (kind, value) in enumerate(events):
        if kind == "ask":
            answers.ask(number, str(value))
            waiting[number] = str(value)
        elif kind == "end":
            answers.end(call := int(str(value)))
            waiting.pop(call, None)
            going.pop(call, None)
        else:
            size = int(str(value))
            for call in answers.go(size):
                assert call == min(waiting), "it was not its turn"
                del waiting[call]
                going[call] = size
            assert sum(going.values()) <= ROOM or sum(map(bool, going.values())) == 1
            assert not waiting or sum(going.values()) + size > ROOM
        assert list(answers.waiting) == list(waiting.values())


def test_who_waits_hears_how_many_are_before_it() -> None:
    answers = ReplyBudget[str](ROOM)
    first, early, late = "1", "2", "3"
    answers.ask(first, "first")
    assert answers.go(ROOM) == [first]
    answers.ask(early, "early")
    answers.ask(late, "late")
    assert answers.go(ROOM) == []
    assert answers.before("late") == (
        "0.0 MB of replies to other nodes are in flight, the first to first, with 1 before late"
    )
    answers.end(early)
    answers.end(first)
    assert answers.go(ROOM) == [late]

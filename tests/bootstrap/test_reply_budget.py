"""Who is answered next, however many ask at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap import reply_budget as module
from planaria.bootstrap.reply_budget import ReplyBudget

ROOM = 100
EVENTS = st.lists(
    st.tuples(st.just("ask"), st.sampled_from("abcdef"))
    | st.tuples(st.just("end"), st.integers(0, 30))
    | st.tuples(st.just("go"), st.integers(0, 150)),
    max_size=60,
)


@given(EVENTS)
def test_no_more_is_on_its_way_than_there_is_room_for_and_nobody_loses_its_place(
    events: list[tuple[str, object]],
) -> None:
    answers = ReplyBudget(ROOM)
    first = dict[str, int]()  # calls of nodes that no answer has gone to
    waiting, going = dict[int, tuple[int, str]](), dict[int, int]()
    for kind, what in events:
        if kind == "ask":
            call = answers.ask(str(what))
            waiting[call] = first.setdefault(str(what), call), str(what)
        elif kind == "end":
            answers.end(call := int(str(what)))
            waiting.pop(call, None)
            going.pop(call, None)
        else:
            size = int(str(what))
            for call in answers.go(size):
                assert waiting[call] == min(waiting.values()), "it was not its turn"
                first.pop(waiting.pop(call)[1], None)
                going[call] = size
            assert sum(going.values()) <= ROOM or sum(map(bool, going.values())) == 1
            assert not waiting or sum(going.values()) + size > ROOM
        assert sorted(answers.waiting) == sorted(node for _, node in waiting.values())


def test_who_calls_again_is_answered_before_who_came_after_its_first_call() -> None:
    answers = ReplyBudget(ROOM)
    first = answers.ask("first")
    assert answers.go(ROOM) == [first]
    early, late = answers.ask("early"), answers.ask("late")
    assert answers.go(ROOM) == []
    answers.end(early)
    again = answers.ask("early")
    assert answers.before("late") == (
        "0.0 MB of replies to other nodes are in flight, the first to first, with 1 before late, "
        "which keeps its place"
    )
    answers.end(first)
    assert answers.go(ROOM) == [again]
    answers.end(again)
    assert answers.go(ROOM) == [late]


def test_who_has_given_up_is_forgotten_when_many_have(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ReplyBudget(ROOM)
    with monkeypatch.context() as patch:
        patch.setattr(module, "MOST_PLACES", 2)
        for node in "abc":
            answers.end(answers.ask(node))
    calls = [answers.ask(node) for node in "abc"]
    assert answers.go(1) == [calls[1], calls[2], calls[0]]

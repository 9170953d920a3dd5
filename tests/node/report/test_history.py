from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.node.report.events import Event, Severity
from planaria.node.report.history import (
    LONGEST_SENTENCE,
    MOST_NEWS,
    MOST_POINTS,
    Curve,
    History,
)
from tests.node.report.lines import entry as entry_of

NODE, NOW = "3fa2b18c0d11", 1000.0


def line(kind: str, **fields: Any) -> str:
    record = {"time": NOW, "node": f"{NODE}/0", "kind": kind, **fields}
    return json.dumps(record)


def history_of(*lines: str, steps: int = 100, stages: int = 4) -> History:
    history = History(steps)
    for text in lines:
        history.hear_from(NODE, text, stages, NOW, NODE)
    return history


REBUILT = {
    "stall_seconds": 5.0,
    "node": "88bb/2",
    "stage": 2,
    "method": "checkfree",
    "step": 3,
    "sources": [],
    "bytes": 5000,
    "fetch_seconds": 0.1,
    "rebuild_seconds": 5.0,
}


def test_losses_validations_and_what_was_rebuilt_are_on_the_curve() -> None:
    history = history_of(
        line("committed", step=2, loss=7.5),
        line("committed", step=3, loss=7.25),
        line("lost", node="77aa/2", stage=2, reason="it broke"),
        line("rebuilt", **REBUILT),
        line("validated", step=3, loss=7.0),
    )
    assert history.loss.points == [(2, 7.5), (3, 7.25)]
    assert history.validation.points == [(3, 7.0)]
    lost, rebuilt = history.marks
    assert [(mark.step, mark.kind) for mark in history.marks] == [(3, "lost"), (3, "rebuilt")]
    assert lost.sentence == "noticed: the link to 77aa/2 of stage 2 is broken"
    assert rebuilt.sentence.startswith("rebuilt: stage 2 by checkfree at step 3")
    assert history.rebuilt == {(2, "checkfree"): 1}


def test_what_a_node_says_for_another_one_is_left_out() -> None:
    history = history_of(json.dumps({"time": NOW, "node": "77aa", "kind": "committed", "step": 1}))
    assert not history.loss.points


def test_steps_losses_and_stages_that_are_none_are_left_out() -> None:
    history = history_of(
        line("committed", step=101, loss=1.0),
        line("committed", step=-1, loss=1.0),
        line("committed", step=2.5, loss=1.0),
        line("committed", step=True, loss=1.0),
        line("committed", step=1, loss="low"),
        line("committed", step=1, loss=None),
        line("waiting", stages="all", reason="?"),
    )
    assert not history.loss.points and not history.news


def test_only_the_driver_reports_what_the_whole_run_does() -> None:
    history = History(100)
    of_the_run = (
        line("committed", step=1, loss=1.0),
        line("validated", step=1, loss=1.0),
        line("sampled", step=1, prompt="Once", text=" upon"),
        line("stopped", reason="update now: pip install ..."),
        line("finished", step=1),
    )
    for text in of_the_run:
        history.hear_from(NODE, text, 4, NOW, "another")
    assert not (history.loss.points or history.validation.points or history.samples)
    assert not history.news
    history.hear_from(NODE, of_the_run[0], 4, NOW, NODE)
    assert history.loss.points == [(1, 1.0)]


def test_text_that_no_page_can_encode_is_left_out() -> None:
    history = history_of(line("rebuilt", **{**REBUILT, "method": "\ud83d"}))
    assert not history.rebuilt and not history.news


def test_where_all_stages_go_back_the_curve_has_a_gap() -> None:
    history = history_of(
        line("committed", step=8, loss=6.0),
        line("rolled back", **{"from": 8}, step=5, reason="as the policy has it"),
        line("committed", step=6, loss=6.5),
    )
    assert history.loss.points == [(8, 6.0), None, (6, 6.5)]
    assert [mark.kind for mark in history.marks] == ["back"]


def test_a_step_that_is_undone_and_repeated_is_on_the_curves_again() -> None:
    history = history_of(
        line("committed", step=8, loss=6.0),
        line("validated", step=8, loss=7.0),
        line("resuming", step=7, exact=True, reason="an operator went back"),
        line("committed", step=8, loss=6.5),
        line("committed", step=8, loss=6.5),
        line("validated", step=8, loss=7.5),
    )
    assert history.loss.points == [(8, 6.0), None, (8, 6.5)]
    assert history.validation.points == [(8, 7.0), None, (8, 7.5)]


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    curve = Curve()
    for step in range(1, 50_000):
        curve.add(step, 1 / step)
    assert MOST_POINTS / 3 < len(curve.points) <= MOST_POINTS
    assert curve.points[0] == (1, 1.0)
    assert curve.points[-1] == (49_999, 1 / 49_999)
    steps = [point[0] for point in curve.points if point]
    assert steps == sorted(steps)
    back = Curve()
    for step in (*range(1, MOST_POINTS + 1), 500):
        back.add(step, float(step))
    assert back.points[-2:] == [None, (500, 500.0)]


def test_a_clock_that_is_wrong_does_not_count() -> None:
    history = history_of(line("validated", step=1, loss=7.0, time=10.0))
    assert history.news[0].time == NOW


def hear(history: History, time: float, kind: str, **fields: Any) -> None:
    entry = entry_of({"time": time, "node": NODE, "kind": kind, **fields})
    assert entry is not None
    history.hear(entry)


def test_pace_is_that_of_the_last_commits() -> None:
    history = History(1000)
    for step in range(1, 200):
        hear(history, 3.0 * step, "committed", step=step)
    assert math.isclose(history.seconds_a_step, 3.0)


@pytest.mark.parametrize(
    "back",
    [
        {"kind": "rolled back", "from": 8, "step": 6, "reason": "as the policy has it"},
        {"kind": "resuming", "step": 6},
    ],
)
def test_after_a_rollback_the_pace_is_that_of_the_steps_since(back: dict[str, Any]) -> None:
    history = History(1000)
    for step in (7, 8):
        hear(history, 3.0 * step, "committed", step=step)
    hear(history, 100.0, **back)
    hear(history, 104.0, "committed", step=7)
    assert history.seconds_a_step == 0.0, "one commit has no pace"
    hear(history, 106.0, "committed", step=8)
    assert history.seconds_a_step == 2.0


def test_node_hours_are_counted_from_look_to_look() -> None:
    history = History(10)
    for nodes, now in ((5, 100.0), (5, 160.0), (4, 170.0), (4, 165.0)):
        history.count_node_seconds(nodes, now)
    assert history.node_seconds == 5 * 60 + 4 * 10


def test_who_says_much_fills_no_more_than_the_bounds() -> None:
    failed = (line("rebuild failed", reason=f"{n}" * 5000) for n in range(MOST_NEWS + 50))
    history = history_of(*failed)
    assert len(history.news) == MOST_NEWS
    assert max(len(news.sentence) for news in history.news) <= LONGEST_SENTENCE


def test_samples_are_kept_with_the_text_that_they_begin_with() -> None:
    sample = line("sampled", step=50, prompt="Once", text=" upon")
    [newest] = history_of(sample, line("sampled", step=50, prompt=3, text=None)).samples
    assert (newest.step, newest.prompt, newest.text) == (50, "Once", " upon")


KINDS = sorted(kind.kind for kind in Event.__subclasses__())
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.just(10**400)
    | st.just(f"{NODE}/2"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=3,
)
FIELDS = st.sampled_from(
    sorted({name for kind in Event.__subclasses__() for name in kind.__annotations__} - {"kind"})
)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.dictionaries(FIELDS, ANY)), max_size=8))
def test_whatever_a_node_says_does_no_harm(lines: list[tuple[str, dict[str, Any]]]) -> None:
    history = history_of(*(line(kind, **fields) for kind, fields in lines))
    history.hear_from(NODE, line("committed", step=7, loss=1.5), 4, NOW, NODE)
    assert 7 in {point[0] for point in history.loss.points if point}
    assert all(isinstance(news.severity, Severity) for news in history.news)


@given(st.text() | st.just("[" * 100_000) | st.just('{"node": "' + NODE + '", "kind": {}}'))
def test_a_line_that_is_no_event_does_no_harm(text: str) -> None:
    history = history_of(text)
    assert not history.loss.points

from __future__ import annotations

import json
from typing import Any

import pytest

from planaria.bootstrap.registry_pb2 import (
    PAUSE,
    STOP,
    STOPPED,
    Description,
    Member,
    MemberDescription,
    Report,
    Seat,
    SeatReport,
    View,
)
from planaria.node.report.history import History
from planaria.node.report.notifications import BETWEEN, VACANT, Notification, Notifier
from planaria.node.report.run_state import RunState
from planaria.node.run_file import RunFile, override

RUN = override(RunFile(), model__stages=2, model__vocabulary=300, steps=50)
NODES = "driver", "body", "last"
NOW = 10_000.0


def described(
    lost: tuple[str, ...] = (),
    trouble: dict[str, str] | None = None,
    reports: dict[str, dict[str, Any]] | None = None,
    **view: Any,
) -> Description:
    """Describe a run of three stages with a node each. The nodes in `lost` are missing."""
    members = [
        MemberDescription(
            member=Member(node=node, seats=[Seat(stage=stage)]),
            report=Report(
                seats=[SeatReport(stage=stage, committed=7, **(reports or {}).get(node, {}))],
                trouble=(trouble or {}).get(node, ""),
            ),
        )
        for stage, node in enumerate(NODES)
        if node not in lost
    ]
    view = {"driver": NODES[0], "members": [each.member for each in members], **view}
    return Description(run="prose-1", members=members, view=View(**view))


def notified(
    notifier: Notifier, now: float = NOW, history: History | None = None, **fields: Any
) -> list[tuple[str, str, str]]:
    history = history or History(RUN.steps)
    state = RunState(described(**fields), history.story)
    notifications = notifier.due(state, history, RUN, now)
    assert all((each.run, each.step, each.time) == ("prose-1", 7, now) for each in notifications)
    return [(each.kind, each.severity, each.sentence) for each in notifications]


def heard(*events: dict[str, Any], node: str = NODES[0]) -> History:
    """Return the history of a run whose member `node` has told these events."""
    history = History(RUN.steps)
    for event in events:
        text = json.dumps({"time": NOW, "node": f"{node}/0", **event})
        history.hear_from(node, text, 2, NOW, NODES[0])
    return history


def skipped(*steps: int) -> list[dict[str, Any]]:
    return [
        event
        for step in steps
        for event in (
            {"kind": "step skipped", "step": step, "reason": "not finite"},
            {"kind": "committed", "step": step, "loss": None},
        )
    ]


PAUSED = {"kind": "paused", "reason": "no space left on device"}


def test_of_a_run_that_trains_nobody_hears() -> None:
    assert notified(Notifier()) == []
    assert notified(Notifier(), order=STOP) == [], "it isn't stopped yet"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"order": PAUSE, "ordered": "lunch"},
            ("paused", "notice", "the run is paused by the run's operator: lunch"),
        ),
        (
            {"history": heard(PAUSED)},
            ("paused", "error", "the run pauses: no space left on device"),
        ),
        (
            {"history": heard(*skipped(4, 5, 6))},
            (
                "skipped",
                "warning",
                "the last 3 steps were skipped: nothing is learned from them",
            ),
        ),
        (
            {"trouble": {"body": "save failed: disk full"}},
            ("trouble", "error", "body (stage 1): save failed: disk full"),
        ),
        (
            {"reports": {"driver": {"stopped": True, "message": "no\x1bsource"}}},
            ("stopped", "error", "the run is stopped: no\\x1bsource"),
        ),
        (
            {"order": STOPPED},
            (
                "stopped",
                "notice",
                "the run was stopped by its operator; `planaria go` opens it again",
            ),
        ),
    ],
)
def test_what_somebody_hears_of(fields: dict[str, Any], expected: tuple[str, str, str]) -> None:
    assert notified(Notifier(), **fields) == [expected]


def test_a_finished_run_is_told_once_and_waits_for_nobody() -> None:
    notifier, done = Notifier(), {"driver": {"finished": True}}
    assert notified(notifier, reports=done) == [], "it was stopped at an earlier step"
    state = described(lost=("last",), reports=done)
    state.members[0].report.seats[0].committed = RUN.steps
    history, notifications = History(RUN.steps), []
    for now in (NOW, NOW + 2 * VACANT, NOW + 2 * BETWEEN):
        notifications += notifier.due(RunState(state, history.story), history, RUN, now)
    [only] = notifications
    assert only[1:] == ("finished", "info", "all 50 steps are committed", RUN.steps, NOW)


@pytest.mark.parametrize(
    ("event", "told_of"),
    [
        ({"kind": "finished", "step": 50}, ("finished", "all 50 steps are committed")),
        ({"kind": "stopped", "step": 7}, ("stopped", "the run is stopped at step 7: why")),
    ],
)
def test_the_end_is_told_when_the_nodes_have_left(event: dict[str, Any], told_of) -> None:
    """Nodes of `planaria up` have left when its registry looks for the last time."""
    history = heard({"reason": "why", "validation": 6.5, **event})
    state = RunState(described(lost=NODES, driver="", committed=50), history.story)
    [only] = Notifier().due(state, history, RUN, NOW)
    assert (only.kind, only.sentence) == told_of


def test_a_stage_without_a_node_is_told_after_a_minute() -> None:
    notifier = Notifier()
    assert notified(notifier, lost=("body",)) == []
    assert notified(notifier, NOW + VACANT - 1, lost=("body",)) == []
    assert notified(notifier, NOW + VACANT) == [], "somebody has joined"
    assert notified(notifier, NOW + VACANT + 1, lost=("body",)) == []
    [waiting] = notified(notifier, NOW + 2 * VACANT + 2, lost=("body",))
    assert waiting == ("waiting", "warning", "no node has served stage 1 for more than 60 s")
    assert notified(notifier, NOW + 2 * BETWEEN, lost=("body",)) == [], "it is known"


def test_a_skipped_step_between_others_is_none_of_a_row() -> None:
    good = {"kind": "committed", "step": 6, "loss": 2.0}
    assert notified(Notifier(), history=heard(*skipped(4, 5), good, *skipped(7))) == []
    again = heard(*skipped(4, 5), *skipped(5))
    assert notified(Notifier(), history=again) == [], "a step that is repeated is one"


def test_a_run_that_goes_on_is_not_paused_any_more() -> None:
    on = {"kind": "committed", "step": 6, "loss": 2.0}
    assert notified(Notifier(), history=heard(PAUSED, on)) == []


def test_of_the_whole_run_only_the_driver_is_believed() -> None:
    lies = heard(PAUSED, *skipped(4, 5, 6), node="body")
    claims = {"stopped": True, "finished": True, "message": "send money"}
    assert notified(Notifier(), history=lies, reports={"body": claims}) == []


def test_one_of_a_kind_is_told_in_ten_minutes_and_the_next_one_counts_the_others() -> None:
    notifier = Notifier()
    assert len(notified(notifier, order=PAUSE)) == 1
    for minute in (1, 3, 5):
        assert notified(notifier, NOW + 60 * minute) == []
        assert notified(notifier, NOW + 60 * minute + 1, order=PAUSE) == []
    [other] = notified(notifier, NOW + 400, trouble={"body": "disk full"})
    assert other[0] == "trouble"
    [(_, _, sentence)] = notified(notifier, NOW + BETWEEN, order=PAUSE)
    assert sentence.endswith("operator (3 more since the last notification of this kind)")
    assert notified(notifier, NOW + 3 * BETWEEN) == []
    [(_, _, sentence)] = notified(notifier, NOW + 3 * BETWEEN + 1, order=PAUSE)
    assert sentence.endswith("operator")


def test_what_was_left_out_and_lasts_is_told_later() -> None:
    notifier = Notifier()
    assert len(notified(notifier, order=PAUSE)) == 1
    assert notified(notifier, NOW + 60) == []
    for second in (61, 66, 71):
        assert notified(notifier, NOW + second, order=PAUSE) == []
    [(_, _, sentence)] = notified(notifier, NOW + BETWEEN, order=PAUSE)
    assert sentence.endswith("operator"), "no other one was left out"
    assert notified(notifier, NOW + 3 * BETWEEN, order=PAUSE) == []


def test_another_node_in_trouble_is_told() -> None:
    notifier, first = Notifier(), {"body": "disk full"}
    assert len(notified(notifier, trouble=first)) == 1
    assert notified(notifier, NOW + 2 * BETWEEN, trouble=first) == []
    [both] = notified(notifier, NOW + 2 * BETWEEN, trouble={**first, "last": "disk full"})
    assert both[2] == "body (stage 1): disk full; last (stage 2): disk full"


def test_the_command_gets_a_line_of_json() -> None:
    notification = Notification("prose-1", "paused", "error", "it's full", 7, NOW)
    text = notification.as_json()
    assert text.endswith(b"\n") and json.loads(text) == notification._asdict()

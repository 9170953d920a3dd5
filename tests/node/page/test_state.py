from __future__ import annotations

import json
import math
from typing import Any

import pytest

from planaria.bootstrap.registry_pb2 import (
    PAUSE,
    STOP,
    STOPPED,
    Cut,
    Description,
    Eviction,
    LinkReport,
    Member,
    MemberDescription,
    Quarantined,
    Report,
    Seat,
    SeatReport,
    View,
)
from planaria.node.model.learning_rate import rate_of
from planaria.node.page.app import as_json, join_parts
from planaria.node.page.state import NODES_SHOWN, Moment, page_state
from planaria.node.report.history import History
from planaria.node.run_file import RunFile, override
from tests.node.report.lines import entry as entry_of

NOW = 1000.0
RUN = override(RunFile(), model__stages=2, model__vocabulary=300, steps=50)
DRIVER = "00aa"


def member(node: str, stage: int | None, phase: str = "running", **more: Any) -> MemberDescription:
    seats = [] if stage is None else [Seat(stage=stage)]
    reports = [SeatReport(stage=seat.stage, phase=phase, **more) for seat in seats]
    return MemberDescription(
        member=Member(node=node, seats=seats, speed=45.25, host="vm", device="cpu"),
        report=Report(seats=reports, memory=8 * 10**9, bytes_in=10, bytes_out=20),
        since_renewal=0.25,
    )


def described(*members: MemberDescription, **fields: Any) -> Description:
    view = View(number=4, driver=DRIVER, reason="somebody joined", committed=3)
    return Description(run="prose-1", view=view, members=members, **fields)


def whole(**reported: Any) -> list[MemberDescription]:
    figures = {"committed": 7, "loss": 6.5, "tokens_per_second": 800.0, **reported}
    return [member(node, stage, **figures) for stage, node in enumerate((DRIVER, "11bb", "22cc"))]


def state(
    description: Description, history: History | None = None, **moment: Any
) -> dict[str, Any]:
    """Return the page's state as a browser gets it."""
    when = Moment(NOW, began=400.0, **moment)
    made = page_state(description, history or History(RUN.steps), RUN, when)
    parsed = json.loads(join_parts(as_json(made)))
    assert isinstance(parsed, dict)
    return parsed


def heard(*events: dict[str, Any]) -> History:
    history = History(RUN.steps)
    for event in events:
        history.hear(entry_of({"time": NOW, "node": f"{DRIVER}/0", **event}))
    return history


def test_stages_have_their_nodes_and_what_these_say() -> None:
    shown = state(described(*whole()))
    stages = [(stage["stage"], stage["state"], stage["count"]) for stage in shown["stages"]]
    assert stages == [(number, "running", 1) for number in range(3)]
    [node] = shown["stages"][0]["nodes"]
    assert node["driver"] and node["step"] == 7 and node["speed"] == 45.2
    assert (node["memory"], node["bytes_in"], node["bytes_out"]) == (8 * 10**9, 10, 20)
    assert shown["condition"]["word"] == "training"
    progress = shown["progress"]
    assert (progress["step"], progress["loss"], progress["tokens_per_second"]) == (7, 6.5, 800.0)
    assert progress["tokens"] == 7 * RUN.training.batch * RUN.model.config.context
    assert progress["learning_rate"] == rate_of(7, RUN)
    assert progress["spent"] is None


def test_an_order_is_the_condition_of_the_run() -> None:
    description = described(*whole())
    for order, word, sentence in (
        (PAUSE, "paused", "by the run's operator: dinner"),
        (STOP, "stopped", "by the run's operator: dinner; nodes end once each stage has saved"),
        (STOPPED, "stopped", "the run was stopped by its operator at step 3; `planaria go` opens"),
    ):
        description.view.order, description.view.ordered = order, "dinner"
        condition = state(description)["condition"]
        assert condition["word"] == word
        assert condition["sentence"].startswith(sentence)


@pytest.mark.parametrize(
    ("members", "last", "word", "sentence"),
    [
        (whole()[:2], "vacant", "waiting", "no node serves stage 2: somebody joined"),
        ([*whole()[:2], member("33dd", 2, "syncing")], "rebuilding", "rebuilding", ""),
        (whole(stopped=True, message="it can't serve"), "running", "stopped", "it can't serve"),
    ],
)
def test_what_a_run_waits_for_is_its_condition(
    members: list[MemberDescription], last: str, word: str, sentence: str
) -> None:
    shown = state(described(*members))
    assert (shown["stages"][2]["state"], shown["condition"]["word"]) == (last, word)
    assert shown["condition"]["sentence"].startswith(sentence)


def test_before_anybody_has_joined() -> None:
    shown = state(Description(run="prose-1", view=View(reason="waiting for nodes")))
    assert shown["condition"] == {"word": "waiting", "sentence": "waiting for nodes"}
    assert shown["progress"]["loss"] is None and shown["progress"]["step"] == 0


def test_figures_that_are_none_are_null() -> None:
    members = whole(loss=math.nan, tokens_per_second=math.inf)
    members[0].member.speed = math.nan
    shown = state(described(*members))
    assert shown["progress"]["loss"] is None
    assert shown["progress"]["tokens_per_second"] is None
    assert shown["stages"][0]["nodes"][0]["speed"] is None
    before_the_first_step = described(*whole(committed=0, loss=0.0))
    before_the_first_step.view.committed = 0
    assert state(before_the_first_step)["progress"]["loss"] is None


def test_when_all_have_left_a_finished_run_it_still_is_what_it_was() -> None:
    history = heard(
        {"kind": "committed", "step": 50, "loss": 5.5},
        {"kind": "finished", "step": 50, "reason": "all steps", "validation": 5.6},
    )
    gone = Description(run="prose-1", view=View(number=9, committed=49))
    shown = state(gone, history)
    assert shown["condition"]["word"] == "finished"
    assert (shown["progress"]["step"], shown["progress"]["loss"]) == (50, 5.5)


def test_a_run_that_has_gone_back_to_files_is_at_the_older_step() -> None:
    description = described(*whole(committed=5, lineage=1, loss=6.75))
    description.view.committed, description.view.lineage = 9, 0
    shown = state(description, heard({"kind": "committed", "step": 9, "loss": 6.0}))
    assert (shown["progress"]["step"], shown["progress"]["loss"]) == (5, 6.75)


def test_time_and_money() -> None:
    history = History(RUN.steps)
    for step in range(1, 11):
        entry = entry_of({"time": 6.0 * step, "node": DRIVER, "kind": "committed", "step": step})
        assert entry is not None
        history.hear(entry)
    history.count_node_seconds(4, 0.0)
    history.count_node_seconds(4, 1800.0)
    shown = state(described(*whole(committed=10)), history, price=0.5)
    assert shown["progress"]["seconds_left"] == 40 * 6
    assert shown["progress"]["node_hours"] == 2.0
    assert shown["progress"]["spent"] == 1.0


def test_links_that_were_measured_say_which_stages_they_join() -> None:
    members = whole()
    members[0].report.links.append(LinkReport(peer="11bb", rtt_ms=12.5, mbps=93.25))
    members[0].report.links.append(LinkReport(peer="gone", rtt_ms=1.0, mbps=1.0))
    members[1].report.links.append(LinkReport(peer="22cc", rtt_ms=math.inf, mbps=5.0))
    [link] = state(described(*members))["links"]
    assert (link["from"], link["to"], link["stages"]) == (DRIVER, "11bb", [0, 1])
    assert (link["mbps"], link["rtt_ms"]) == (93.2, 12.5)


def test_who_is_out_and_who_is_cut_off() -> None:
    shown = state(
        described(
            *whole(),
            cuts=[
                Cut(a=DRIVER, b="11bb", via="22cc", carried=True, seconds=3.0),
                Cut(a="11bb", b="22cc", state="nobody reaches both", seconds=3.0),
            ],
            quarantined=[
                Quarantined(node="99ff", why="it sent NaN", seconds=30.0, times=2),
                Quarantined(node="88ff", why="it diverged", seconds=math.inf, times=3),
                Quarantined(node="77ff", why="over", seconds=0.0, times=1),
            ],
            evictions=[Eviction(member=Member(node="99ff"), reason="it sent NaN", seconds=5.0)],
            trouble="the journal can't be written",
        )
    )
    assert [instance["until"] for instance in shown["quarantine"]] == [1030, None]
    assert "through 22cc (stage 2)" in shown["cuts"][0]["sentence"]
    assert shown["cuts"][1]["severity"] == "error"
    assert shown["evictions"] == [{"time": 995.0, "sentence": "99ff (standby): it sent NaN"}]
    assert shown["troubles"] == ["the registry: the journal can't be written"]


def test_of_many_nodes_some_are_shown_and_all_are_counted() -> None:
    crowd = [member(f"{n:04x}", 1) for n in range(3000)]
    shown = state(described(*whole(), *crowd, member("5555", None)))
    assert shown["stages"][1]["count"] == 3001
    assert len(shown["stages"][1]["nodes"]) == NODES_SHOWN
    assert [node["node"] for node in shown["standbys"]] == ["5555"]
    assert len(json.dumps(shown)) < 50_000

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from bootstrap.registry_pb2 import Description, Member, MemberDescription, Report, View
from node.live_view import Screen, Story, news, stage_table
from node.status_page import as_text, page

OLD, NEW = "3fa2b18c0d11", "77aa00bb12cd"


def event(kind: str, node: str | None = "up", **fields: Any) -> dict[str, Any]:
    return {"time": 0.0, "node": node, "kind": kind, **fields}


def member(node: str, stage: int, spare: bool = False, **report: Any) -> MemberDescription:
    return MemberDescription(
        member=Member(node=node, stage=stage, spare=spare, address=f"10.0.0.{stage}:7401"),
        report=Report(**report),
        since_renewal=0.4,
    )


def described(*members: MemberDescription, **fields: Any) -> Description:
    return Description(run="prose-1", members=members, view=View(number=5, driver=OLD), **fields)


def text_of(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(renderable)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (
            event("killed", OLD, slot="2.0", stage=2, step=15, left=0),
            "node-2.0 killed during step 15; stage 2 is lost",
        ),
        (
            event("killed", OLD, slot="3.1", stage=3, step=25, left=1),
            "node-3.1 killed during step 25; 1 node of stage 3 left",
        ),
        (
            event("exited", OLD, slot="0.0", stage=0, left=2, how="ended with status 1"),
            "node-0.0 ended with status 1; 2 nodes of stage 0 left",
        ),
        (
            event("rebuilding", NEW, stage=2, method="checkfree", sources=["a", "b"], reason="x"),
            "rebuilding stage 2 by checkfree from a, b",
        ),
        (
            event(
                *("rebuilt", NEW),
                **{"stage": 2, "method": "checkfree", "step": 14, "bytes": 1_200_000},
                **{"rebuild_seconds": 0.12, "stall_seconds": 2.31},
            ),
            "rebuilt: stage 2 by checkfree at step 14, 1.2 MB in 0.1 s, stalled 2.3 s",
        ),
        (event("validated", step=9, loss=None), "validation loss - at step 9"),
        (event("applied", OLD, step=3, digest="00"), None),
        (event("wall", OLD), None),
    ],
)
def test_news_are_sentences(told, sentence):
    assert news(told) == sentence


def test_the_registrys_end_is_no_drama():
    told = event("exited", None, slot="registry", how="was ended by SIGKILL")
    assert "training goes on" in (news(told) or "")


def test_nodes_that_the_swarm_started_have_names():
    story = Story(steps=10)
    story.hear(event("started", slot="1.0", pid=41))
    story.hear(event("joined", OLD, pid=41))
    told = event("aborted", step=3, reason=f"the link to {OLD} is lost")
    assert story.hear(told) == "an attempt at step 3 is aborted: the link to node-1.0 is lost"
    assert story.node_of(41) == OLD
    story.hear(event("joined", NEW, pid=41))
    assert story.node_of(41) == NEW


def test_a_story_keeps_the_newest_step_whoever_tells_first():
    story = Story(steps=10)
    story.hear(event("committed", step=4, loss=2.5))
    story.record({"step": 3, "time": 9.0, "seconds": 1.0, "tokens": 10})
    assert (story.committed, story.loss) == (4, 2.5)
    story.record({"step": 5, "time": 11.0, "seconds": 1.0, "tokens": 20})
    story.record({"step": 5, "time": 11.5, "seconds": 1.0, "tokens": 20})  # another stage-0 node
    assert story.committed == 5
    assert story.tokens_per_second == pytest.approx(30 / 3.0)


def test_the_first_reason_to_stop_is_told_once():
    story = Story(steps=10)
    told = event("stopped", OLD, step=5, reason="stage 1 is lost", validation=None)
    assert story.hear(told) == "the run is stopped at step 5: stage 1 is lost"
    assert story.hear(told) is None
    assert story.stopped == told


def test_the_stage_table_shows_vacant_stages_and_spares():
    description = described(
        member("a", 0, committed=4, phase="running", microbatches=1200, bytes_in=5_000_000),
        member("b", 0, committed=3, phase="syncing", microbatches=34),
        member("c", 0, spare=True),
    )
    rows = [line.split() for line in text_of(stage_table(description, 1)).splitlines()]
    assert " ".join(rows[1]) == "0 2 1 rebuilding, 1 running 3-4 1,234 5.0 MB 0 bytes"
    assert rows[2][:4] == ["1", "0", "vacant", "-"]
    assert rows[3][:3] == ["spare", "1", "joining"]


def test_without_a_terminal_progress_is_some_twenty_lines():
    console = Console(file=io.StringIO(), width=80)
    story = Story(steps=200)
    with Screen(console, 200) as screen:
        screen.say("node-2.0 killed")
        for step in range(1, 201):
            story.hear(event("committed", step=step, loss=1.0))
            screen.show(story, None, 4)
    lines = console.file.getvalue().splitlines()
    assert lines[0].endswith("node-2.0 killed")
    assert len(lines) == 1 + 20
    assert "step 200 of 200" in lines[-1]


def test_on_a_terminal_there_is_a_page():
    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True)
    story = Story(steps=20)
    story.hear(event("committed", step=7, loss=3.25))
    with Screen(console, 20) as screen:
        screen.say("stage 2 is lost")
        screen.show(story, described(member("a", 0, phase="running")), 2)
    output = console.file.getvalue()
    for part in ("step 7 of 20", "loss 3.2500", "stage 2 is lost", "vacant"):
        assert part in output


STATUS = described(
    member(OLD, 0, committed=4, loss=5.5, phase="running", tokens_per_second=900.0),
    member(NEW, 2, committed=4, phase="idle", message="step 5: 3 of 8 home"),
    decisions=["view 5: 77aa joined: stage 2 was vacant"],
    run_file="steps = 40\n[model]\nstages = 3",
    uptime=3725.0,
)


def test_the_status_page_tells_members_and_decisions():
    text = text_of(page(STATUS))
    for part in (
        *("prose-1", "1 h 2 min", "10.0.0.2:7401", "0.4 s"),
        *("step 4 of 40", "loss 5.5000", "900 tokens/s", "step 5: 3 of 8 home"),
        *("view 5: 77aa joined: stage 2 was vacant", "vacant"),
    ):
        assert part in text


def test_a_run_file_from_the_future_leaves_the_rest_of_the_page():
    future = Description()
    future.CopyFrom(STATUS)
    future.run_file = "[invention]\nkey = 1"
    assert "10.0.0.2:7401" in text_of(page(future))


def test_names_from_outside_are_no_markup():
    odd = described(member("[/bold][red]x", 1))
    assert "[/bold][red]x" in text_of(page(odd))


def test_the_json_has_the_names_of_the_proto():
    found = json.loads(as_text(STATUS))
    assert found["members"][0]["member"]["node"] == OLD
    assert found["members"][1]["report"]["bytes_in"] == "0"
    assert found["view"]["number"] == "5"

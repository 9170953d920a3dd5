from __future__ import annotations

import errno
import io
import json
import math
import re
from typing import Any, cast

import pytest
import virtual_time
from rich.console import Console

from planaria.bootstrap.client import RegistryClient, RegistryUnreachable
from planaria.bootstrap.registry_pb2 import (
    Description,
    Member,
    MemberDescription,
    Report,
    Sample,
    Seat,
    SeatReport,
    View,
)
from planaria.node.page.status_page import status, status_view
from planaria.node.report.events import Stopped
from planaria.node.report.live_view import (
    LiveScreen,
    News,
    RunStory,
    rebuild_lines,
    stage_table,
    styled,
)
from planaria.node.report.readable_console import ReadableConsole
from tests.node.report.lines import entry as entry_of

OLD, NEW = "3fa2b18c0d11", "77aa00bb12cd"


def event(kind: str, node: str | None = "up", time: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"time": time, "node": node, "kind": kind, **fields}


def killed(slot: str, node: str = OLD, left: int = 0, time: float = 0.0) -> dict[str, Any]:
    return event("killed", node, time, slot=slot, stage=int(slot[0]), step=15, left=left)


def news(story: RunStory, line: dict[str, Any]) -> News | None:
    return story.hear(entry_of(line))


def hear(story: RunStory, line: dict[str, Any]) -> str | None:
    """Return the sentence that the story tells about a line, or None."""
    item = news(story, line)
    return None if item is None else item.sentence


def member(node: str, stage: int, standby: bool = False, **reported: Any) -> MemberDescription:
    of_node = {
        name: reported.pop(name)
        for name in list(reported)
        if name in Report.DESCRIPTOR.fields_by_name
    }
    seats = [] if standby else [Seat(stage=stage)]
    return MemberDescription(
        member=Member(node=node, seats=seats, address=f"10.0.0.{stage}:7401"),
        report=Report(seats=[SeatReport(stage=stage, **reported) for _ in seats], **of_node),
        since_renewal=0.4,
    )


def described(*members: MemberDescription, **fields: Any) -> Description:
    return Description(run="prose-1", members=members, view=View(number=5, driver=OLD), **fields)


def console_of(width: int = 140, **how: Any) -> Console:
    return Console(file=io.StringIO(), width=width, **how)


def text_of(renderable: Any) -> str:
    console = console_of()
    console.print(renderable)
    return console.file.getvalue()


def coloured(description: Description) -> list[str]:
    """Return the lines of the status page, with codes for colours."""
    console = console_of(160, force_terminal=True, color_system="standard")
    console.print(status_view(description))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (killed("2.0"), "node-2.0 killed during step 15; stage 2 is lost"),
        (killed("3.1", left=1), "node-3.1 killed during step 15; 1 node of stage 3 left"),
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
        (
            event(
                *("rebuilding", NEW),
                **{"stage": 1, "method": "interpolate", "sources": ["b"], "fallback": True},
                reason="stage 1 is lost and this is an end stage",
            ),
            "fallback: rebuilding stage 1 by interpolate from b: stage 1 is lost and this is an "
            "end stage",
        ),
        (
            event("masked", step=7, nodes=[OLD], microbatches=4, reason="x"),
            f"step 7 continues without {OLD}: others recompute 4 microbatches (x)",
        ),
        (
            event("lost", OLD, stage=2, reason="x"),
            f"noticed: the link to {OLD} of stage 2 is broken",
        ),
        (
            event("rolled back", **{"from": 37}, step=30, reason="stage 2 has no replica left"),
            "rolled back from step 37 to 30: stage 2 has no replica left",
        ),
        (
            event("resuming", step=30, exact=True, reason="every stage has a save of step 30"),
            "resuming at step 30: every stage has a save of step 30",
        ),
        (
            event("resuming", step=30, exact=False, reason="no step was saved by every stage"),
            "fallback: resuming at step 30: no step was saved by every stage",
        ),
        (
            event("waiting", stages=[2, 3], reason="a node is awaited"),
            "no step begins: a node is awaited",
        ),
        (
            event("save failed", OLD, reason="No space left on device"),
            f"save failed at {OLD}: No space left on device",
        ),
        (
            event("preempted", OLD, grace=25.0),
            f"{OLD} has to end within 25 s: it saves and hands over its state",
        ),
        (event("handed over", OLD, to=NEW), f"{OLD} has handed its state over to {NEW}"),
        (event("validated", step=9, loss=None), "validation loss - at step 9"),
        (event("applied", OLD, step=3, digest="00"), None),
        (event("wall", OLD), None),
    ],
)
def test_news_are_sentences(line, sentence):
    assert hear(RunStory(steps=40), line) == sentence


def relearned(before: float | None, after: float | None, **figures: Any) -> dict[str, Any]:
    nothing = {"passes": 0, "seconds": 0.0, "bytes": 0, "pairs": 0, "left_out": 0, "undone": False}
    residuals = {"residual_before": before, "residual_after": after}
    return {"relearned": nothing | residuals | figures}


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"oldest_step": 9, "perturbation": 0.0123}, "oldest block of step 9; perturbation 0.0123"),
        ({"oldest_step": 9, "perturbation": None}, "oldest block of step 9"),
        (
            relearned(0.62, 0.11, passes=40, seconds=1.25),
            "relearned: residual 0.62 -> 0.11 in 40 passes, 1.2 s",
        ),
        (
            relearned(0.62, 0.11, seconds=0.5, updates=8, left=24),
            "relearned: residual 0.62 -> 0.11 in 0 passes, 0.5 s; 24 more updates in the "
            "background",
        ),
        (
            relearned(0.5, None, passes=3, seconds=0.5, undone=True),
            "relearned: residual 0.5 -> - in 3 passes, 0.5 s, undone because it is worse",
        ),
        (relearned(None, None), "not relearned: no pair of boundary tensors was complete"),
    ],
)
def test_a_rebuild_says_how_good_it_is(figures, says):
    sentence = hear(RunStory(steps=40), rebuilt(0.0, NEW) | figures)
    assert (sentence or "").endswith(f"stalled 2.0 s; {says}")


def at(time: float, kind: str, node: str | None = "up", **fields: Any) -> dict[str, Any]:
    return event(kind, node, time, **fields)


def rebuilt(time: float, node: str, stage: int = 2, method: str = "checkfree") -> dict[str, Any]:
    figures = {"step": 14, "bytes": 1_200_000, "rebuild_seconds": 0.1, "stall_seconds": 2.0}
    return at(time, "rebuilt", node, stage=stage, method=method, **figures)


def swarm_that_lost_stage_2() -> RunStory:
    """Return the story of a swarm that lost stage 2 at 100.0. Peers noticed it at 100.3, and a
    process for the stage joined at 103.0."""
    story = RunStory(steps=40)
    for line in (
        at(0.0, "started", slot="1.0", pid=1),
        at(1.0, "joined", "aaa1", pid=1),
        at(0.0, "started", slot="2.0", pid=2),
        at(1.0, "joined", OLD, pid=2),
        at(99.0, "committed", step=14, loss=2.0),
        killed("2.0", time=100.0),
        at(100.5, "started", slot="2.0", pid=3),
        at(100.3, "link lost", "aaa1", peer=OLD, reason="reset"),  # from another file
        at(103.0, "joined", NEW, pid=3),
    ):
        hear(story, line)
    return story


@pytest.mark.parametrize(
    ("method", "first"),
    [("checkfree", "step 15 committed 4.7 s after the loss was noticed"), ("replica", None)],
)
def test_the_first_commit_after_a_loss_was_made_good_is_told_once(method, first):
    story = swarm_that_lost_stage_2()
    hear(story, at(103.1, "rebuilding", NEW, stage=2, method=method, sources=["aaa1"]))
    hear(story, rebuilt(104.0, NEW, method=method))
    sentences = [
        hear(story, at(105.0 + step, "committed", step=15 + step, loss=2.0)) for step in (0, 1)
    ]
    assert sentences == [first, None]


def fetching(time: float, size: int, seconds: float) -> dict[str, Any]:
    sources = [{"node": "aaa1", "stage": 1}, {"node": "ccc3", "stage": 3}]
    fields = {"stage": 2, "method": "checkfree", "bytes": size, "seconds": seconds}
    return at(time, "fetching", NEW, **fields, sources=sources)


def test_fetching_is_told_when_it_takes_long_and_then_ever_more_seldom():
    story = swarm_that_lost_stage_2()
    sentences = [
        hear(story, fetching(103.0 + tenth / 5, tenth * 400_000, tenth / 5)) for tenth in range(30)
    ]
    assert [sentence for sentence in sentences if sentence] == [
        "stage 2 fetches from aaa1, ccc3: 2.0 MB in 1.0 s, 2.0 MB/s",
        "stage 2 fetches from aaa1, ccc3: 4.0 MB in 2.0 s, 2.0 MB/s",
        "stage 2 fetches from aaa1, ccc3: 8.0 MB in 4.0 s, 2.0 MB/s",
    ]


def relearning(time: float, round: int, residual: float) -> dict[str, Any]:
    return at(time, "relearning", NEW, stage=2, round=round, residual=residual)


def test_a_rebuild_under_way_is_a_line_until_it_is_over():
    story = swarm_that_lost_stage_2()
    hear(story, at(103.1, "rebuilding", NEW, stage=2, method="checkfree", sources=["aaa1"]))
    hear(story, fetching(103.4, 12_000_000, 0.3))
    shown = text_of(rebuild_lines(story, 103.6))
    assert "rebuilding stage 2 by checkfree from aaa1" in shown
    assert "0.5 s; 12.0 MB in 0.3 s, 40.0 MB/s" in shown
    assert hear(story, relearning(104.0, 1, 0.75)) == "stage 2 relearns, residual 0.75 at first"
    assert "0.9 s; relearning: residual 0.75 at first" in text_of(rebuild_lines(story, 104.0))
    assert hear(story, relearning(104.5, 8, 0.25)) is None
    shown = text_of(rebuild_lines(story, 104.5))
    assert "1.4 s; relearning: residual 0.75 -> 0.25 in round 8" in shown
    hear(story, rebuilt(105.0, NEW))
    hear(story, relearning(104.9, 9, 0.2))  # read late
    assert not story.rebuilds


@pytest.mark.parametrize(
    "line",
    [
        at(104.0, "lost", NEW, stage=2, reason="reset"),
        killed("2.0", NEW, time=104.0),
        at(104.0, "rebuild failed", NEW, reason="no answer"),
        at(104.0, "rolled back", **{"from": 14}, step=10, reason="x"),
    ],
)
def test_a_rebuild_that_comes_to_nothing_is_shown_no_longer(line):
    story = swarm_that_lost_stage_2()
    hear(story, fetching(103.4, 1, 0.3))
    hear(story, line)
    assert not story.rebuilds


def test_a_story_goes_back_with_the_run():
    story = swarm_that_lost_stage_2()
    story.record({"step": 14, "time": 99.0, "seconds": 1.0, "tokens": 10})
    hear(story, at(103.5, "rolled back", "aaa1", **{"from": 14}, step=10, reason="x"))
    story.record({"step": 14, "time": 99.0, "seconds": 1.0, "tokens": 10})  # another ledger
    hear(story, at(99.0, "committed", step=14, loss=2.0))
    assert (story.committed, story.tokens_per_second) == (10, 0.0)
    sentences = [
        hear(story, rebuilt(104.0, node, stage, "checkpoint"))
        for node, stage in (("aaa1", 1), (NEW, 2))
    ]
    assert sentences == ["all stages are at step 14, stalled 2.0 s", None]
    first = hear(story, at(106.3, "committed", step=11, loss=2.0))
    assert first == "step 11 committed 6.0 s after the loss was noticed"
    assert story.committed == 11


def test_a_full_disk_is_told_of_once_until_it_takes_a_save_again():
    story = swarm_that_lost_stage_2()
    failed = at(1.0, "save failed", "aaa1", reason="No space left on device")
    saved = at(2.0, "saved", "aaa1", holding="save", step=5)
    sentences = [hear(story, record) for record in (failed, failed, saved, failed)]
    assert [bool(sentence) for sentence in sentences] == [True, False, False, True]


def test_a_full_disk_for_saves_is_not_one_for_checkpoints():
    story = swarm_that_lost_stage_2()
    failed = at(1.0, "save failed", "aaa1", reason="No space left", holding="save")
    written = at(2.0, "saved", "aaa1", holding="checkpoint", step=5)
    read_only = at(3.0, "save failed", "aaa1", reason="read-only", holding="checkpoint")
    sentences = [hear(story, record) for record in (failed, written, failed, read_only)]
    assert [bool(sentence) for sentence in sentences] == [True, False, False, True]


def test_a_twin_that_is_fetched_is_no_rebuild():
    story = swarm_that_lost_stage_2()
    assert hear(story, fetching(103.4, 1, 3.0) | {"method": "twin"}) is None
    assert not story.rebuilds


def test_a_single_stages_save_is_a_rebuild_like_others():
    story = swarm_that_lost_stage_2()
    order = {"stage": 2, "method": "save", "sources": [NEW], "fallback": True, "reason": "no other"}
    assert (hear(story, at(103.1, "rebuilding", NEW, **order)) or "").startswith("fallback: ")
    assert (hear(story, rebuilt(104.0, NEW, method="save")) or "").startswith("rebuilt: stage 2 by")


@pytest.mark.parametrize(
    ("line", "style"),
    [
        (event("rebuilding", NEW, stage=1, fallback=True), "yellow"),
        (event("rebuilding", NEW, stage=1, fallback=False), ""),
        (killed("2.0"), "yellow"),
        (killed("2.0", left=1), ""),
        (event("exited", None, slot="registry"), ""),
        (event("save failed", OLD, reason="No space left"), "bold red"),
        (event("stopped", OLD, step=5, reason="stage 1 is lost"), "bold red"),
        (event("rebuilt", NEW, stage=1, method="checkfree+", step=9), "green"),
        (event("validated", OLD, loss=2.0, step=9), ""),
    ],
)
def test_grave_news_are_coloured_and_shown_whole(line, style):
    item = news(RunStory(steps=40), line)
    assert item is not None
    text = styled(*item)
    assert text.style == style
    assert bool(text.no_wrap) is not bool(style)


def test_a_loss_is_noticed_once_until_the_run_has_gone_on():
    story = swarm_that_lost_stage_2()
    lost = at(100.3, "lost", OLD, stage=2, reason="reset")
    noticed = f"noticed: the link to {OLD} of stage 2 is broken"
    assert [hear(story, lost), hear(story, lost)] == [noticed, None]
    other = "noticed: the link to aaa1 of stage 1 is broken"
    assert hear(story, at(100.4, "lost", "aaa1", stage=1, reason="reset")) == other
    hear(story, at(105.0, "committed", step=15, loss=2.0))
    assert hear(story, lost | {"time": 200.0}) == noticed, "it was back in between"


def test_the_registrys_end_is_no_drama():
    line = event("exited", None, slot="registry", how="was ended by SIGKILL")
    assert "training continues" in (hear(RunStory(steps=40), line) or "")


def test_a_process_is_the_node_that_joined_last():
    story = RunStory(steps=10)
    hear(story, event("joined", OLD, pid=41))
    assert story.node_of(41) == OLD
    hear(story, event("joined", NEW, pid=41))
    assert story.node_of(41) == NEW


def test_a_story_keeps_the_newest_step_whoever_tells_first():
    story = RunStory(steps=10)
    hear(story, event("committed", step=4, loss=2.5))
    story.record({"step": 3, "time": 9.0, "seconds": 1.0, "tokens": 10})
    assert (story.committed, story.loss) == (4, 2.5)
    story.record({"step": 5, "time": 11.0, "seconds": 1.0, "tokens": 20})
    story.record({"step": 5, "time": 11.5, "seconds": 1.0, "tokens": 20})  # another stage-0 node
    assert story.committed == 5
    assert story.tokens_per_second == pytest.approx(30 / 3.0)


def test_the_first_reason_to_stop_is_told_once():
    story = RunStory(steps=10)
    line = event("stopped", OLD, step=5, reason="stage 1 is lost", validation=None)
    assert hear(story, line) == "the run is stopped at step 5: stage 1 is lost"
    assert hear(story, line) is None
    assert isinstance(story.stopped, Stopped)
    assert (story.stopped.step, story.stopped.reason) == (5, "stage 1 is lost")


def test_a_run_that_goes_on_is_not_stopped_any_more():
    for goes_on in (
        event("committed", step=6, loss=2.5, time=2.0),
        event("resuming", step=4, exact=True, reason="its operator went back", time=2.0),
    ):
        story = RunStory(steps=10)
        hear(story, event("stopped", OLD, step=5, reason="overflow", validation=None, time=1.0))
        hear(story, event("committed", step=5, loss=2.5, time=1.1))  # from a file read later
        assert story.stopped is not None
        hear(story, goes_on)
        assert story.stopped is None


def test_the_stage_table_shows_vacant_stages_and_spares():
    description = described(
        member("a", 0, committed=4, phase="running", microbatches=1200, bytes_in=5_000_000),
        member("b", 0, committed=3, phase="syncing", microbatches=34),
        member("c", 0, standby=True),
    )
    rows = [line.split() for line in text_of(stage_table(description, 1)).splitlines()]
    assert " ".join(rows[1]) == "0 2 1 rebuilding, 1 running 3-4 1,234 5.0 MB 0 bytes"
    assert rows[2][:4] == ["1", "0", "vacant", "-"]
    assert rows[3][:3] == ["standby", "1", "waiting"]


def test_without_a_terminal_progress_is_some_twenty_lines():
    console = console_of(80)
    story = RunStory(steps=200)
    with LiveScreen(console, 200) as screen:
        screen.say("node-2.0 killed")
        for step in range(1, 201):
            hear(story, event("committed", step=step, loss=1.0))
            screen.show(story, None, 4)
    lines = console.file.getvalue().splitlines()
    assert lines[0].endswith("node-2.0 killed")
    assert len(lines) == 1 + 20
    assert "step 200 of 200" in lines[-1]


def test_progress_is_told_again_after_going_back():
    console = console_of(80)
    story = RunStory(steps=20)
    with LiveScreen(console, 20) as screen:
        for line in (
            at(1.0, "committed", step=9, loss=1.0),
            at(2.0, "rolled back", **{"from": 9}, step=5, reason="x"),
            at(3.0, "committed", step=6, loss=1.5),
        ):
            hear(story, line)
            screen.show(story, None, 4)
    assert [line.split("step ")[1] for line in console.file.getvalue().splitlines()] == [
        "9 of 20, loss 1.0000, 0 tokens/s",
        "6 of 20, loss 1.5000, 0 tokens/s",
    ]


def test_on_a_terminal_there_is_a_page():
    console = console_of(100, height=40, force_terminal=True)
    story = RunStory(steps=20)
    hear(story, event("rebuilding", NEW, stage=2, method="checkfree", sources=["aaa1"]))
    hear(story, event("committed", step=7, loss=3.25))
    with LiveScreen(console, 20) as screen:
        screen.say("stage 2 is lost")
        screen.show(story, described(member("a", 0, phase="running")), 2)
    output = console.file.getvalue()
    for part in (
        *("step 7 of 20", "loss 3.2500", "stage 2 is lost", "vacant"),
        "rebuilding stage 2 by checkfree from aaa1",
    ):
        assert part in output


def test_a_terminal_that_is_closed_ends_no_run():
    class Terminal(io.StringIO):
        writes, is_gone = 0, False

        def write(self, text: str) -> int:
            self.writes += 1
            if self.is_gone:
                raise OSError(errno.EIO, "Input/output error")
            return super().write(text)

    terminal = Terminal()
    console = ReadableConsole(file=terminal, force_terminal=True, width=100)
    with LiveScreen(console, 20) as screen:
        screen.show(RunStory(steps=20), None, 2)
        terminal.is_gone, screen._drawn = True, 0.0  # it is time to draw
        screen.show(RunStory(steps=20), None, 2)
        tried = terminal.writes
        screen.show(RunStory(steps=20), None, 2)
        assert terminal.writes == tried


STATUS = described(
    member(OLD, 0, committed=4, loss=5.5, phase="running", tokens_per_second=900.0),
    member(NEW, 2, committed=4, phase="idle", message="step 5: 3 of 8 microbatches computed"),
    decisions=["view 5: 77aa joined: stage 2 was vacant"],
    run_file="steps = 40\n[model]\nstages = 3\nlayers = 3",
    uptime=3725.0,
)


def reached_by(description: MemberDescription, node: str) -> MemberDescription:
    description.reached_by = node
    return description


@pytest.mark.parametrize(
    ("description", "parts"),
    [
        (
            STATUS,
            [
                *("prose-1", "1 h 2 min", "10.0.0.2:7401", "0.4 s", "step 4 of 40", "loss 5.5000"),
                *("900 tokens/s", "step 5: 3 of 8 microbatches computed", "vacant"),
                "view 5: 77aa joined: stage 2 was vacant",
            ],
        ),
        (
            described(member(OLD, 0), reached_by(member(NEW, 2), OLD)),
            [f"not heard except by {OLD}"],
        ),
        (
            described(member(OLD, 2), member(NEW, 2, phase="running", stalled_seconds=34.2)),
            ["1 hangs", "hangs 34 s"],
        ),
        (
            # The node at step 37 has not heard that the run has gone back.
            described(
                member(OLD, 0, committed=30, lineage=1),
                member(NEW, 2, committed=37),
                run_file="steps = 40\n[model]\nstages = 3\nlayers = 3",
            ),
            ["step 30 of 40"],
        ),
        (
            described(member(NEW, 2), run_file="[invention]\nkey = 1"),
            ["10.0.0.2:7401"],
        ),
        (described(member("[/bold][red]x", 1)), ["[/bold][red]x"]),
    ],
    ids=["all", "not heard", "hangs", "gone back", "run file of tomorrow", "markup"],
)
def test_the_status_page_tells_what_members_report(description, parts):
    text = text_of(status_view(description))
    assert [part for part in parts if part not in text] == []


def test_the_status_page_says_who_sits_where_and_why():
    first, other, standby = member(OLD, 0), member(NEW, 1), member("5f3a", 2)
    first.member.seats.add(stage=2)
    del standby.member.seats[:]
    first.why[:] = ["stage 0, as requested", "has room for one more seat: stage 2 is vacant"]
    other.why[:] = ["stage 1 was vacant"]
    standby.why[:] = ["standby, as requested"]
    lines = [
        line.strip() for line in text_of(status_view(described(first, other, standby))).splitlines()
    ]
    at = lines.index(f"stage 0, {OLD}: stage 0, as requested")
    assert lines[at : at + 4] == [
        f"stage 0, {OLD}: stage 0, as requested",
        f"stage 1, {NEW}: stage 1 was vacant",
        f"stage 2, {OLD}: has room for one more seat: stage 2 is vacant",
        "standby, 5f3a: standby, as requested",
    ]


def test_a_narrow_terminal_shows_all_of_an_address() -> None:
    console = console_of(80)
    figures = {"committed": 225, "bytes_in": 61_400_000, "bytes_out": 79_700_000}
    console.print(status_view(described(member("ea08ed645f5c-532602", 1, **figures))))
    assert "10.0.0.1:740\n" in console.file.getvalue()  # the last digit is in the next line


def test_the_status_says_how_many_microbatches_are_out():
    first, other = member(OLD, 0, in_flight=10), member(NEW, 0, in_flight=14)
    alone = text_of(status_view(described(first, member(NEW, 1))))
    assert "in flight  at most 10 microbatches " in alone and "sources" not in alone
    assert "10 to 14 microbatches of each of 2 sources" in text_of(
        status_view(described(first, other))
    )
    assert "in flight" not in text_of(status_view(described(member(OLD, 0))))


def test_who_has_trouble_or_can_not_write_is_named_in_red_whoever_drives():
    full = "can't write out/ledger-77aa.jsonl: No space left on device; 3 lines wait in memory"
    computed, failed = "step 5: 3 of 8 microbatches computed", "save failed: No space left"
    troubled = described(
        member(OLD, 0, committed=4, message=computed, trouble=full),
        member(NEW, 2, committed=4, message=failed),
    )
    troubled.trouble = "can't write view 6 to the journal"
    lines = coloured(troubled)
    assert any(f"\x1b[1;31m{NEW} of stage 2: {failed}" in line for line in lines)
    assert any(f"\x1b[1;31m{OLD} (stage 0): {full}" in line for line in lines)
    assert any("\x1b[1;31mthe registry: can't write view 6" in line for line in lines)
    assert any(computed in line and "\x1b[1;31m" not in line for line in lines)


@pytest.mark.parametrize(
    ("phase", "committed", "yellow"), [("idle", 4, True), ("running", 4, False), ("idle", 0, False)]
)
def test_a_driver_of_a_run_that_stands_still_speaks_in_yellow(phase, committed, yellow):
    waits = member(OLD, 0, committed=committed, phase=phase, message="waiting for stage 2")
    lines = coloured(described(waits))
    assert any("\x1b[33mwaiting for stage 2" in line for line in lines) is yellow


def test_a_stop_that_all_tell_of_is_told_once():
    lost = {"message": "stage 1 is lost", "stopped": True}
    text = text_of(status_view(described(member(OLD, 0, **lost), member(NEW, 2, **lost))))
    assert text.count("stage 1 is lost") == 1
    assert "of stage 2:" not in text


def test_the_status_page_tells_who_has_no_link_who_is_out_and_who_was_evicted():
    description = Description()
    description.CopyFrom(described(member("aa", 0), member("bb", 1), member("cc", 2)))
    a, b, c = "aa", "bb", "cc"
    description.cuts.add(a=a, b=b, seconds=60, via=c, carried=True)
    description.cuts.add(a=b, b=c, seconds=60, state="no member can relay for them")
    hang = "hang: no microbatch for 31 s"
    description.quarantined.add(node="bad", why=hang, times=2, seconds=43)
    description.quarantined.add(node="worse", why="divergence", times=3, seconds=math.inf)
    description.quarantined.add(node="free", why="nothing", times=1)
    description.evictions.add(
        member=Member(node="bad", seats=[Seat(stage=1)]), reason=hang, seconds=17
    )
    text = text_of(status_view(description))
    assert re.search(rf"{a} \(stage \d\) reaches {b} \(stage \d\) through {c}", text)
    assert re.search(rf"{b} .* and {c} .*, since [\d:]+: no member can relay for them", text)
    assert re.search(rf"bad, until [\d:]+, 2 times: {hang}", text)
    assert "worse, permanently, 3 times: divergence" in text
    assert "free" not in text
    assert re.search(rf"[\d:]+ bad \(stage 1\): {hang}", text)


def test_samples_are_in_the_live_view_in_plain_lines_and_in_status() -> None:
    story = RunStory(100)
    for step in (40, 80):
        assert (
            hear(story, event("sampled", OLD, step=step, prompt="It", text=f" was {step}")) is None
        )
    for interactive, times in ((True, 0), (False, 1)):
        console = console_of(100, force_terminal=interactive)
        screen = LiveScreen(console, 100)
        screen.show(story, None, 2)
        screen.show(story, None, 2)
        assert console.file.getvalue().count("step 80: It was 80") == times  # type: ignore[attr-defined]
        assert not interactive or "80  It was 80" in text_of(screen._page)
    made = [Sample(step=80, prompt="It", text=" was\x1b[1m"), Sample(step=8, prompt="", text="Oh")]
    before = [Sample(step=40, prompt="It", text=" is")]
    members = member(OLD, 0, samples=made), member(NEW, 0, samples=before)
    status = text_of(status_view(described(*members)))
    assert "80  It was\\x1b[1m" in status
    assert "8  Oh" in status
    assert "It is" not in status


def test_who_watches_without_a_terminal_hears_what_is_new_in_lines() -> None:
    class ScriptedRegistry:
        """A registry that gives these answers one after the other."""

        def __init__(self, *answers: Description | Exception) -> None:
            self._answers = iter(answers)

        async def describe(self, deadline: float) -> Description:
            answer = next(self._answers, None)
            if answer is None:
                raise LookupError("that was all")
            if isinstance(answer, Exception):
                raise answer
            return answer

    def at_step(step: int, *decisions: str) -> Description:
        view = View(number=5, driver="box-1a2b3c", committed=step)
        reporting = member("box-1a2b3c", 0, committed=step, loss=3.25, tokens_per_second=800.0)
        run = "steps = 40"
        return Description(
            run="r", members=[reporting], view=view, decisions=decisions, run_file=run
        )

    away = RegistryUnreachable("nobody answers")
    seen = [at_step(7, "one"), at_step(7, "one"), at_step(8, "one", "two\x1b[2J"), away, away]
    registry = ScriptedRegistry(*seen, at_step(9, "one", "two\x1b[2J"))
    console = console_of()
    with pytest.raises(LookupError):
        virtual_time.run(status(cast(RegistryClient, registry), console, watch=True, as_json=False))
    page, *lines = re.split(r"^\d\d:\d\d:\d\d  ", console.file.getvalue(), flags=re.MULTILINE)
    assert "step 7 of 40" in page and "one" in page
    assert lines == [
        "two\\x1b[2J\n",
        "step 8 of 40, loss 3.2500, 800 tokens/s\n",
        "nobody answers\n",
        "step 9 of 40, loss 3.2500, 800 tokens/s\n",
    ]
    as_json = console_of()
    with pytest.raises(LookupError):
        again = cast(RegistryClient, ScriptedRegistry(*seen))
        virtual_time.run(status(again, as_json, watch=True, as_json=True))
    objects = [json.loads(text) for text in as_json.file.getvalue().splitlines()]
    assert [item["view"]["committed"] for item in objects] == ["7", "7", "8"]

from __future__ import annotations

import json
from typing import Any

import pytest

from node.ledger import Audit, Line
from node.run_file import loads
from node.summary import draw_loss, marks, rebuilds, replicas_identical, summarize, wall

RUN = loads("steps = 4\nseed = 7\n[model]\nstages = 3\n[swarm]\nreplicas = 2")
AUDIT = Audit(expected=64, duplicates=0, missing=0, extra=0, steps=4, superseded=0)


def line(step: int, time: float, loss: float | None = 2.0, tokens: int = 100) -> Line:
    return Line(
        step=step,
        view=1,
        attempt=step,
        epoch=0,
        microbatches=[],
        samples=0,
        samples_hash="0" * 32,
        loss=loss,
        tokens=tokens,
        gradient_norm=1.0,
        skipped=loss is None,
        seconds=0.5,
        time=time,
    )


def event(time: float, kind: str, node: str | None = "up", **fields: Any) -> dict[str, Any]:
    return {"time": time, "node": node, "kind": kind, **fields}


def rebuilt(time: float, node: str, stage: int = 2, method: str = "checkfree") -> dict[str, Any]:
    return event(
        time,
        "rebuilt",
        node,
        stage=stage,
        method=method,
        step=2,
        sources=[{"node": "b", "stage": 1, "step": 2}],
        bytes=1000,
        fetch_seconds=0.1,
        rebuild_seconds=0.2,
        stall_seconds=1.5,
    )


def slot_events(time: float, slot: str, pid: int, node: str) -> list[dict[str, Any]]:
    return [
        event(time, "started", slot=slot, pid=pid),
        event(time + 1, "joined", node, pid=pid),
        event(time + 1, "serving", node, stage=int(slot[0])),
    ]


def killed(time: float, slot: str, pid: int, node: str | None, step: int = 3) -> dict[str, Any]:
    return event(time, "killed", node, slot=slot, pid=pid, stage=int(slot[0]), step=step, left=0)


KILLED_AND_REBUILT = [
    *slot_events(0.0, "2.0", 11, "old"),
    event(90.0, "link lost", "c", peer="somebody else"),
    killed(100.0, "2.0", 11, "old"),
    event(100.1, "started", slot="2.0", pid=12),
    event(100.25, "link lost", "b", peer="old"),
    event(100.5, "lost", "old", stage=2),
    event(103.0, "joined", "new", pid=12),
    rebuilt(104.0, "new"),
]


def test_the_keys_are_those_of_the_contract():
    summary = summarize(RUN, [line(1, 10.0)], AUDIT, KILLED_AND_REBUILT)
    assert list(summary) == [
        *("steps", "tokens", "tokens_per_second", "loss", "rebuilds", "attempts", "audit"),
        *("goodput", "wall", "replicas_identical", "policy", "seed"),
    ]
    assert list(summary["loss"]) == ["first", "last", "validation"]
    assert list(summary["rebuilds"][0]) == [
        *("stage", "method", "step", "sources", "bytes"),
        *("detect_seconds", "rebuild_seconds", "stall_seconds"),
    ]
    assert list(summary["wall"]) == ["compute", "average", "rebuild", "send", "idle", "total"]
    assert (summary["policy"], summary["seed"]) == ("checkfree", 7)
    json.dumps(summary, allow_nan=False)


def test_rates_are_over_the_time_from_the_first_begin_to_the_last_commit():
    summary = summarize(RUN, [line(1, 10.5), line(2, 11.0), line(3, 14.0)], AUDIT, [])
    assert summary["steps"] == 3
    assert summary["tokens"] == 300
    assert summary["tokens_per_second"] == pytest.approx(300 / 4.0)
    assert summary["goodput"] == pytest.approx(3 / 4.0)


def test_losses_of_skipped_steps_are_passed_over():
    lines = [line(1, 1.0, None), line(2, 2.0, 5.0), line(3, 3.0, 4.0), line(4, 4.0, None)]
    events = [event(2.5, "validated", step=2, loss=4.5), event(4.5, "validated", step=4, loss=3.5)]
    loss = summarize(RUN, lines, AUDIT, events)["loss"]
    assert loss == {"first": 5.0, "last": 4.0, "validation": 3.5}


def test_a_run_that_never_began_has_a_summary():
    nothing = Audit(expected=0, duplicates=0, missing=0, extra=0, steps=0, superseded=0)
    summary = summarize(RUN, [], nothing, [])
    assert (summary["steps"], summary["tokens_per_second"], summary["goodput"]) == (0, 0.0, 0.0)
    assert summary["loss"] == {"first": None, "last": None, "validation": None}
    assert summary["rebuilds"] == []
    json.dumps(summary, allow_nan=False)


def test_aborts_count_until_the_processes_are_ended():
    events = [
        event(1.0, "aborted", step=1),
        event(2.0, "aborted", step=2),
        event(3.0, "ending"),
        event(3.1, "aborted", step=3),
    ]
    attempts = summarize(RUN, [line(1, 1.5), line(2, 2.5)], AUDIT, events)["attempts"]
    assert attempts == {"started": 4, "committed": 2, "aborted": 2}


def test_detection_is_from_the_kill_to_the_first_who_names_the_victim():
    (row,) = rebuilds(KILLED_AND_REBUILT)
    assert row["detect_seconds"] == pytest.approx(0.25)
    assert row["rebuild_seconds"] == 0.2
    assert row["stall_seconds"] == 1.5
    assert row["sources"] == [{"node": "b", "stage": 1, "step": 2}]


def test_a_rebuild_belongs_to_the_newest_loss_in_its_place():
    events = [
        *KILLED_AND_REBUILT,
        killed(200.0, "2.0", 12, "new"),
        event(200.1, "started", slot="2.0", pid=13),
        event(200.75, "lost", "new", stage=2),
        event(203.0, "joined", "newest", pid=13),
        rebuilt(204.0, "newest"),
    ]
    assert [row["detect_seconds"] for row in rebuilds(events)] == pytest.approx([0.25, 0.75])


def test_a_replacement_that_died_before_it_joined_does_not_hide_the_kill():
    events = [
        *KILLED_AND_REBUILT[:-2],
        event(101.0, "exited", None, slot="2.0", pid=12, stage=2, left=0, how="ended"),
        event(101.1, "started", slot="2.0", pid=13),
        event(103.0, "joined", "new", pid=13),
        rebuilt(104.0, "new"),
    ]
    assert rebuilds(events)[0]["detect_seconds"] == pytest.approx(0.25)


def test_an_exit_noticed_by_a_peer_first_is_detected_at_once():
    events = [
        *slot_events(0.0, "2.0", 11, "old"),
        event(100.0, "link lost", "b", peer="old"),
        event(100.02, "exited", "old", slot="2.0", pid=11, stage=2, left=0, how="ended"),
        event(100.03, "started", slot="2.0", pid=12),
        event(103.0, "joined", "new", pid=12),
        event(103.5, "rebuilding", "new", stage=2),
        rebuilt(104.0, "new"),
    ]
    assert rebuilds(events)[0]["detect_seconds"] == 0.0


def test_who_comes_back_by_itself_replaces_nobody():
    events = [
        *slot_events(0.0, "2.0", 11, "old"),
        event(50.0, "link lost", "b", peer="old"),
        event(60.0, "joined", "again", pid=11),
        rebuilt(61.0, "again", method="replica"),
    ]
    assert rebuilds(events)[0]["detect_seconds"] == 0.0


def test_wall_is_the_average_over_places_of_each_nodes_last_report():
    def report(time: float, node: str, compute: float, idle: float) -> dict[str, Any]:
        parts = dict.fromkeys(["average", "rebuild", "send"], 0.0)
        total = compute + idle
        return event(time, "wall", node, **parts, compute=compute, idle=idle, total=total)

    events = [
        report(1.0, "a", 1.0, 1.0),
        report(2.0, "b", 1.0, 3.0),  # killed; c takes its place
        report(3.0, "c", 2.0, 4.0),
        report(3.0, "a", 6.0, 4.0),
    ]
    assert wall(events, places=2) == {
        "compute": 4.5,
        "average": 0.0,
        "rebuild": 0.0,
        "send": 0.0,
        "idle": 5.5,
        "total": 10.0,
    }


def applied(node: str, step: int, digest: str) -> dict[str, Any]:
    return event(float(step), "applied", node, lineage=0, step=step, digest=digest)


@pytest.mark.parametrize(
    ("told", "identical"),
    [
        ([], True),
        ([applied("a", 1, "x"), applied("b", 1, "x"), applied("c", 1, "y")], True),
        ([applied("a", 1, "x"), applied("b", 1, "y")], False),
        ([applied("a", 1, "x"), applied("a", 2, "y"), applied("b", 2, "y")], True),
        ([event(1.0, "diverged", stage=1, nodes=["a", "b"], step=1)], False),
    ],
)
def test_replicas_are_compared_by_stage_and_step(told, identical):
    serving = [event(0.0, "serving", n, stage=s) for n, s in (("a", 1), ("b", 1), ("c", 2))]
    assert replicas_identical([*serving, *told]) is identical


def test_marks_name_the_methods_by_step_and_stage():
    events = [
        killed(1.0, "2.0", 11, "a"),
        rebuilt(2.0, "b"),
        rebuilt(2.1, "c", method="replica"),
        rebuilt(2.2, "d", method="replica"),
        killed(3.0, "3.1", 12, "e", step=9),
    ]
    assert marks(events) == [
        (2, "stage 2: checkfree, replica x2"),
        (9, "stage 3: node killed"),
    ]


@pytest.mark.parametrize("lines", [[], [line(1, 1.0), line(2, 2.0, None), line(3, 3.0, 1.5)]])
def test_the_picture_is_drawn_whatever_there_is(tmp_path, lines):
    events = [*KILLED_AND_REBUILT, event(110.0, "validated", step=3, loss=1.7)]
    draw_loss(RUN, lines, events if lines else [], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

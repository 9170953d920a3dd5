from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any

import pytest

from planaria.node.report.events import Entry
from planaria.node.report.ledger import Audit, Line
from planaria.node.report.summary import (
    cost_of_policy,
    draw_loss,
    parts_of_run,
    plot_marks,
    rebuilds,
    replicas_identical,
    rollbacks,
    seconds_of_training,
    summarize,
    summary_sentences,
    wall_seconds,
)
from planaria.node.run_file import loads
from tests.node.report.lines import entry as entry_of

RUN = loads("steps = 4\nseed = 7\n[model]\nstages = 3\nlayers = 3\n[swarm]\nreplicas = 2")
AUDIT = Audit(expected=64, duplicates=0, missing=0, extra=0, steps=4, superseded=0)


def line(step: int, time: float, loss: float | None = 2.0, tokens: int = 100) -> Line:
    return Line(
        **{"step": step, "view": 1, "attempt": step, "epoch": 0, "microbatches": []},
        **{"samples": 0, "samples_hash": "0" * 32, "loss": loss, "tokens": tokens},
        **{"gradient_norm": 1.0, "skipped": loss is None, "seconds": 0.5, "time": time},
    )


def event(time: float, kind: str, node: str | None = "up", **fields: Any) -> Entry:
    return entry_of({"time": time, "node": node, "kind": kind, **fields})


def rebuilt(
    time: float, node: str, stage: int = 2, method: str = "checkfree", step: int = 2, **more: Any
) -> Entry:
    figures = {"bytes": 1000, "fetch_seconds": 0.1, "rebuild_seconds": 0.2, "stall_seconds": 1.5}
    sources = [{"node": "b", "stage": 1, "step": 2}]
    of = {"stage": stage, "method": method, "step": step, "sources": sources}
    return event(time, "rebuilt", node, **of, **figures, **more)


def slot_events(time: float, slot: str, pid: int, node: str) -> list[Entry]:
    return [
        event(time, "started", slot=slot, pid=pid),
        event(time + 1, "joined", node, pid=pid),
        event(time + 1, "serving", node, stage=int(slot[0])),
    ]


def killed(time: float, slot: str, pid: int, node: str | None, step: int = 3) -> Entry:
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
        *("steps", "tokens", "tokens_per_second", "loss", "rebuilds", "rolled_back_steps"),
        *("attempts", "audit", "goodput", "wall", "cost", "skipped_steps", "failed_saves"),
        *("replicas_identical", "stopped", "policy", "seed"),
    ]
    assert list(summary["loss"]) == ["first", "last", "validation"]
    assert list(summary["rebuilds"][0]) == [
        *("stage", "method", "step", "sources", "bytes"),
        *("detect_seconds", "rebuild_seconds", "stall_seconds"),
    ]
    assert list(summary["cost"]) == [
        *("policy", "extra_bytes", "memory_bytes", "critical_seconds", "parts"),
    ]
    assert list(summary["wall"]) == ["compute", "average", "rebuild", "send", "idle", "total"]
    assert (summary["policy"], summary["seed"]) == ("auto", 7)
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


def test_a_run_that_paused_after_skipped_steps_says_so():
    lines = [line(1, 1.0), *(line(step, float(step), None) for step in (2, 3, 4))]
    why = "paused: 3 steps in a row were skipped"
    summary = summarize(RUN, lines, AUDIT, [], why)
    assert (summary["stopped"], summary["skipped_steps"]) == (why, 3)
    assert "steps skipped for a gradient that was not finite, or far too long: 3" in list(
        summary_sentences(summary)
    )
    whole = summarize(RUN, lines[:1], AUDIT, [])
    assert (whole["stopped"], whole["skipped_steps"]) == (None, 0)
    assert not any("steps skipped" in sentence for sentence in summary_sentences(whole))


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
    assert attempts == {"started": 4, "committed": 2, "aborted": 2, "masked": 0}


def test_detection_is_from_the_kill_to_the_first_who_names_the_victim():
    (row,) = rebuilds(KILLED_AND_REBUILT)
    assert row["detect_seconds"] == pytest.approx(0.25)
    assert row["rebuild_seconds"] == 0.2
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


def test_a_seat_that_a_node_gets_later_is_none_that_was_lost_before_it_joined():
    """Otherwise the stage would seem to stall for 100 s, though another node served it then."""
    events = [*KILLED_AND_REBUILT, rebuilt(204.0, "new/2.17")]
    (_, row) = rebuilds(events)
    assert (row["detect_seconds"], row["stall_seconds"]) == (0.0, 1.5)


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


RELEARNED = {
    **{"residual_before": 0.6, "residual_after": 0.1, "passes": 9, "seconds": 1.5},
    **{"bytes": 10, "pairs": 4, "left_out": 0, "undone": False, "updates": 18, "left": 6},
}


def rebuilding(time: float, node: str, stage: int = 2, **fields: Any) -> Entry:
    return event(time, "rebuilding", node, stage=stage, method="checkfree", **fields)


def test_a_row_says_what_the_driver_and_the_node_said_of_the_rebuild():
    events = [
        *KILLED_AND_REBUILT[:-1],
        rebuilding(103.5, "new", exact=False, fallback=True),
        rebuilt(104.0, "new", relearned=RELEARNED),
        event(104.8, "committed", step=3, loss=2.0),
    ]
    (row,) = rebuilds(events)
    assert (row["exact"], row["fallback"], row["relearned"]) == (False, True, RELEARNED)
    assert row["first_commit_seconds"] == pytest.approx(104.8 - 100.25)
    assert "rolled_back" not in row


def test_what_is_relearned_beside_steps_is_told_apart_from_what_all_waited_for():
    beside = {"residual": None, "updates": 4, "left": 2, "steps": 3, "seconds": 0.5}
    events = [
        *KILLED_AND_REBUILT[:-1],
        rebuilding(103.5, "new", exact=False, fallback=False),
        rebuilt(104.0, "new", relearned=RELEARNED),
        event(106.0, "relearned", "new", stage=2, step=6, reason="b has it", **beside),
        event(107.0, "relearned", "other", stage=3, step=6, reason="", **beside),
    ]
    (row,) = rebuilds(events)
    assert row["relearned"] == {**RELEARNED, "beside": beside}


def test_a_new_driver_has_seen_only_the_end_of_the_stall():
    (row,) = rebuilds(KILLED_AND_REBUILT)
    assert row["stall_seconds"] == pytest.approx(104.0 - 100.25)
    (copied,) = rebuilds([*KILLED_AND_REBUILT[:-1], rebuilt(104.0, "new", method="replica")])
    assert copied["stall_seconds"] == 1.5  # the others trained on in the meantime


def test_who_was_there_before_has_the_seat_of_who_was_lost_last_at_its_stage():
    """A node takes the seat lost last at its stage, even if its owner joined for another stage."""
    taken = [
        *slot_events(0.0, "0.0", 11, "driver"),
        *slot_events(0.0, "1.0", 12, "left"),
        event(50.0, "serving", "driver/2.6", stage=2),
        event(51.0, "serving", "left/3.6", stage=3),
        event(52.0, "given back", "left/3.6", stage=3),
        killed(100.0, "0.0", 11, "driver"),
        event(100.4, "link lost", "left", peer="driver"),
        event(100.5, "serving", "left/2.8", stage=2),
    ]
    again = killed(200.0, "1.0", 12, "left")
    (row,) = rebuilds([*taken, rebuilt(101.0, "left/2.8"), again])
    assert row["detect_seconds"] == pytest.approx(0.4)
    (copied,) = rebuilds([*taken, rebuilt(101.0, "left/2.8", method="handover"), again])
    assert copied["detect_seconds"] == 0.0
    (other,) = rebuilds([*taken, rebuilt(201.0, "new/3.9", stage=3), again])
    assert other["detect_seconds"] == 0.0, "the seat there was given back"


def test_a_snapshot_that_is_known_in_part_is_told_in_part():
    (row,) = rebuilds([rebuilt(9.0, "n", method="snapshot", oldest_step=7, perturbation=None)])
    assert (row["oldest_step"], row["perturbation"]) == (7, None)
    assert row["detect_seconds"] == 0.0
    assert "first_commit_seconds" not in row  # no step was committed afterwards


def commits(*steps: int, at: float) -> list[Entry]:
    entries = []
    for number, step in enumerate(steps):
        entries.append(event(at + number, "committed", "d", step=step, loss=2.0))
        entries += [applied_at(at + number + 0.1, node, step) for node in ("d", "b")]
    return entries


def applied_at(
    time: float, node: str, step: int, digest: str = "", lineage: int = 0
) -> dict[str, Any]:
    digest = digest or f"{node}{step}"
    return event(time, "applied", node, lineage=lineage, step=step, digest=digest)


ROLLED_BACK = [
    *slot_events(0.0, "0.0", 9, "d"),
    *slot_events(0.0, "1.0", 10, "b"),
    *slot_events(0.0, "2.0", 11, "old"),
    *commits(1, 2, 3, 4, 5, at=10.0),
    killed(20.0, "2.0", 11, "old", step=6),
    event(20.1, "started", slot="2.0", pid=12),
    event(20.3, "lost", "old", stage=2),
    event(23.0, "joined", "new", pid=12),
    event(23.0, "serving", "new", stage=2),
    event(24.0, "rolled back", "d", **{"from": 5}, step=3, reason="no replica left"),
    *(
        rebuilt(25.0, node, stage, "checkpoint", step=3)
        for node, stage in (("d", 0), ("b", 1), ("new", 2))
    ),
    *commits(4, 5, 6, at=26.0),
]


def test_a_roll_back_is_a_row_for_the_lost_stage_alone():
    (row,) = rebuilds(ROLLED_BACK)
    assert (row["stage"], row["method"], row["step"]) == (2, "checkpoint", 3)
    assert row["rolled_back"] == {"from": 5, "to": 3}
    assert row["exact"] is True
    assert row["first_commit_seconds"] == pytest.approx(26.0 - 20.3)


def test_a_roll_back_that_is_tried_again_goes_back_once():
    again = event(24.5, "rolled back", "d", **{"from": 3}, step=3, reason="tried again")
    at = ROLLED_BACK.index(next(e for e in ROLLED_BACK if e.event.kind == "rebuilt"))
    events = [*ROLLED_BACK[:at], again, *ROLLED_BACK[at:]]
    assert [row["rolled_back"] for row in rebuilds(events)] == [{"from": 5, "to": 3}]
    assert sum(back.lost - back.to for back in rollbacks(events)) == 2


def test_steps_that_are_made_again_are_counted_as_such():
    lines = [line(step, 10.0 + step) for step in range(1, 7)]
    summary = summarize(RUN, lines, AUDIT, ROLLED_BACK)
    assert summary["rolled_back_steps"] == 2
    assert summary["attempts"] == {"started": 8, "committed": 6, "aborted": 0, "masked": 0}


RESUMED = [
    event(0.0, "started", slot="registry", pid=8),
    *slot_events(0.5, "0.0", 9, "d"),
    *slot_events(0.5, "1.0", 10, "b"),
    *slot_events(0.5, "2.0", 11, "old"),
    killed(3.0, "2.0", 11, "old", step=1),
    event(3.1, "started", slot="2.0", pid=12),
    *commits(1, 2, 3, at=10.0),  # until 12.1; everything is killed
    event(112.0, "started", slot="registry", pid=18),
    event(112.1, "started", slot="0.0", pid=12),  # an id that another process had
    event(113.0, "joined", "d2", pid=12),
    event(113.0, "serving", "d2", stage=0),
    event(115.0, "resuming", "d2", step=2, exact=True, reason="every stage has a save"),
    *(
        rebuilt(116.0, node, stage, "save")
        for node, stage in (("d2", 0), ("b2", 1), ("b3", 1), ("c2", 2))
    ),
    event(118.0, "committed", "d2", step=3, loss=2.0),
    event(119.0, "committed", "d2", step=4, loss=2.0),
    event(120.0, "ending"),
    event(121.0, "aborted", "d2", step=5),
]


def test_a_resume_is_a_row_a_stage_and_no_old_loss_is_blamed():
    rows = rebuilds(RESUMED)
    assert [(row["stage"], row["method"], row["exact"]) for row in rows] == [
        (stage, "save", True) for stage in (0, 1, 2)
    ]
    assert {row["detect_seconds"] for row in rows} == {0.0}
    assert {row["first_commit_seconds"] for row in rows} == {118.0 - (116.0 - 1.5)}
    assert rows[0]["rolled_back"] == {"from": 3, "to": 2}
    texts = list(summary_sentences(summarize(RUN, [line(1, 10.0)], AUDIT, RESUMED)))
    assert texts[1:3] == ["resumed at step 2", "committed steps repeated after rollbacks: 1"]


def test_the_time_between_two_parts_of_a_run_does_not_count():
    lines = [line(1, 10.0), line(2, 11.0), line(3, 118.0), line(4, 119.0)]
    assert seconds_of_training(lines, RESUMED) == pytest.approx(119.0 - 9.5 - (112.0 - 12.1))
    summary = summarize(RUN, lines, AUDIT, RESUMED)
    assert summary["goodput"] == pytest.approx(4 / 9.6)
    assert summary["attempts"]["aborted"] == 0  # the processes were being ended


def test_what_was_trained_in_vain_before_a_resume_takes_its_time():
    lines = [line(1, 117.0), line(2, 118.0)]  # all lines of the first part are superseded
    assert seconds_of_training(lines, RESUMED) == pytest.approx(118.0 - 10.0 - (112.0 - 12.1))


@pytest.mark.parametrize(
    ("events", "lengths"),
    [
        ([], [0]),
        ([event(1.0, "ending"), event(2.0, "aborted", step=1)], [1]),
        ([event(1.0, "ending"), event(1.1, "committed", step=2, loss=1.0)], [2]),
        (
            [
                event(0.0, "started", slot="registry", pid=1),
                event(1.0, "exited", None, slot="registry", pid=1, how="ended"),
                event(1.1, "started", slot="registry", pid=2),
                event(2.0, "ending"),
                event(2.5, "aborted", step=1),
                event(9.0, "started", slot="registry", pid=3),
                event(9.1, "started", slot="0.0", pid=4),
            ],
            [4, 2],
        ),
    ],
)
def test_a_part_begins_with_a_registry_that_replaces_none(events, lengths):
    assert [len(part) for part in parts_of_run(events)] == lengths


def cost_event(time: float, node: str, sent: int, held: int, **parts: Any) -> dict[str, Any]:
    figures = {"extra_bytes": sent, "memory_bytes": held, "critical_seconds": sent / 100}
    return event(time, "cost", node, **figures, parts=parts)


def test_cost_counts_what_the_dead_have_sent_but_not_what_they_held():
    held = {"extra_bytes": 5, "memory_bytes": 2, "critical_seconds": 0.5}
    events = [
        event(0.0, "started", slot="1.0", pid=1),
        event(0.0, "started", slot="2.0", pid=2),
        event(1.0, "joined", "a", pid=1),
        event(1.0, "joined", "b", pid=2),
        cost_event(2.0, "a", 10, 7),
        cost_event(2.0, "b", 100, 70, snapshot=held),
        event(3.0, "started", slot="2.0", pid=3),
        event(4.0, "joined", "c", pid=3),
        cost_event(5.0, "c", 1000, 700, snapshot=held),
        cost_event(6.0, "a", 20, 8),
    ]
    assert cost_of_policy(events, places=2) == {
        "extra_bytes": 20 + 100 + 1000,
        "memory_bytes": 8 + 700,
        "critical_seconds": pytest.approx(11.2 / 2),
        "parts": {"snapshot": {"extra_bytes": 10, "memory_bytes": 2, "critical_seconds": 0.5}},
    }


def test_the_essence_says_what_a_loss_and_the_policy_cost():
    events = [
        *ROLLED_BACK,
        rebuilding(40.0, "n", exact=False, fallback=True),
        rebuilt(41.0, "n", oldest_step=4),
        event(41.5, "save failed", "b", reason="No space left on device"),
        cost_event(42.0, "b", 2_000_000, 3_000_000),
    ]
    sentences = list(summary_sentences(summarize(RUN, [line(1, 10.0)], AUDIT, events)))
    assert [sentence.partition(" at step ")[0] for sentence in sentences[1:3]] == [
        "stage 2 rebuilt by checkpoint",
        "stage 2 rebuilt by checkfree (a fallback)",
    ]
    assert sentences[2].endswith("stalled 1.50 s; oldest block of step 4")
    assert sentences[3:6] == [
        "committed steps repeated after rollbacks: 2",
        "redundant state for auto: 2.0 MB sent or written, 3.0 MB of memory, 2500.00 s of "
        "computing time at each node",
        "saves that failed: 1; the nodes' logs say why",
    ]


def test_saves_that_failed_are_counted_to_the_last():
    failed = event(2.0, "save failed", "a", reason="No space left on device")
    events = [failed, event(3.0, "ending"), replace(failed, time=4.0)]
    assert summarize(RUN, [], AUDIT, events)["failed_saves"] == 2


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
    nothing = dict.fromkeys(["average", "rebuild", "send"], 0.0)
    assert wall_seconds(events, places=2) == nothing | {"compute": 4.5, "idle": 5.5, "total": 10.0}


def applied(node: str, step: int, digest: str, lineage: int = 0) -> dict[str, Any]:
    return applied_at(float(step), node, step, digest, lineage)


LOST = event(2.0, "rebuilt", "b", stage=1, method="snapshot")
LATE = event(2.0, "serving", "late", stage=1)
COPIED = event(2.0, "rebuilt", "b", stage=1, method="replica")


@pytest.mark.parametrize(
    ("events", "identical"),
    [
        ([], True),
        ([applied("a", 1, "x"), applied("b", 1, "x"), applied("c", 1, "y")], True),
        ([applied("a", 1, "x"), applied("b", 1, "y")], False),
        ([applied("a", 1, "x"), applied("a", 2, "y"), applied("b", 2, "y")], True),
        ([applied("a", 1, "x"), applied("a", 1, "y", 1), applied("b", 1, "y", 1)], True),
        ([applied("a", 1, "x"), applied("a", 1, "y", 1), applied("b", 1, "z", 1)], False),
        ([applied("a", 1, "x"), LOST, applied("b", 1, "y")], True),
        ([applied("a", 1, "x"), COPIED, applied("b", 1, "y")], False),
        ([event(1.0, "diverged", stage=1, nodes=["a", "b"], step=1)], False),
        ([applied("unknown", 1, "x"), applied("b", 1, "x")], True),
        ([applied("late", 1, "x"), LATE, applied("b", 1, "x")], True),
        ([applied("late", 1, "x"), LATE, applied("b", 1, "y")], False),
    ],
)
def test_replicas_are_compared_by_stage_and_step(events, identical):
    serving = [event(0.0, "serving", n, stage=s) for n, s in (("a", 1), ("b", 1), ("c", 2))]
    assert replicas_identical([*serving, *events]) is identical


def test_marks_name_the_methods_by_step_and_stage():
    events = [
        killed(1.0, "2.0", 11, "a"),
        rebuilt(2.0, "b"),
        rebuilt(2.1, "c", method="replica"),
        rebuilt(2.2, "d", method="replica"),
        killed(3.0, "3.1", 12, "e", step=9),
    ]
    assert plot_marks(events) == [
        (2, "stage 2: checkfree, replica x2"),
        (9, "stage 3: node killed"),
    ]


def test_marks_name_the_step_that_all_went_back_from():
    assert plot_marks(ROLLED_BACK) == [(5, "stage 2: checkpoint\nrolled back to 3")]
    assert plot_marks(RESUMED) == [(1, "stage 2: node killed"), (3, "resumed, rolled back to 2")]
    nothing_lost = [event(1.0, "committed", step=2), event(9.0, "resuming", step=2)]
    assert plot_marks(nothing_lost) == [(2, "resumed, at step 2")]


@pytest.mark.parametrize("lines", [[], [line(1, 1.0), line(2, 2.0, None), line(3, 3.0, 1.5)]])
def test_the_picture_is_drawn_whatever_there_is(tmp_path, lines):
    events = [*KILLED_AND_REBUILT, event(110.0, "validated", step=3, loss=1.7)]
    draw_loss(RUN, lines, events if lines else [], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_nothing_behind_the_steps_of_a_run_that_went_back(tmp_path):
    back = event(111.0, "resuming", "d", step=2, exact=True, reason="the operator's order")
    events = [*commits(*range(1, 1001), at=0.0), event(110.0, "validated", step=1000, loss=1.7)]
    with warnings.catch_warnings(action="error"):
        draw_loss(RUN, [line(1, 1.0), line(2, 2.0)], [*events, back], tmp_path / "loss.png")
        # matplotlib warns if marks there leave no room for the axes.

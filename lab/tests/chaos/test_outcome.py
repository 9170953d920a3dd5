"""Outcomes of runs, computed from their records."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from planaria.node.report.events import entries
from planaria_lab.chaos.outcome import (
    GONE,
    NOBODYS,
    SETTLED,
    WARM,
    Began,
    Change,
    RunRecord,
    appetites,
    broken,
    differing,
    evictions,
    exits,
    guesses,
    restored,
    skipped,
    steps_lost,
    tolls,
)
from planaria_lab.chaos.report import read_outcomes, table
from planaria_lab.chaos.schedule import EVERYBODY
from planaria_lab.chaos.swarm import Taken
from tests.node.report.lines import whole

ALICE, BOB, CAROL = "a1" * 6, "b2" * 6, "c3" * 6
WELL: dict[str, Any] = {
    "setting": {"seed": 3, "replicas": 2},
    "stuck": "",
    "steps": 10,
    "seconds": 60.0,
    "faults": {"kill": 2},
    "steps_lost": {"kill": 3.0, NOBODYS: 0.5},
    "tolls": [
        {"kind": "kill", "noticed": 0.25, "stop": 3.0},
        {"kind": "kill", "noticed": None, "stop": 5.0},
    ],
    "skipped": 0,
    "aborted": 1,
    "masked": 2,
    "evictions": [],
    "exits": [],
    "guesses": [],
    "rebuilds": {"replica": 2},
    "audit": {"expected": 80, "duplicates": 0, "missing": 0, "extra": 0, "steps": 10},
    "differing": {"at_last": [], "steps": 0},
    "appetites": [],
}


def event(time: float, kind: str, node: str = "", **fields: Any) -> dict[str, Any]:
    return whole({"time": time, "kind": kind, "node": node, **fields})


def record(*lines: dict[str, Any], **parts: Any) -> RunRecord:
    """Return the record of a run with alice at slot 1.0 and bob at 1.1, which both serve stage 1
    from the first seconds on."""
    lives = [
        event(1.0 + number, kind, name, **fields)
        for number, name in enumerate((ALICE, BOB))
        for kind, fields in (
            ("started", {"slot": f"1.{number}", "pid": number + 1}),
            ("joined", {"pid": number + 1}),
            ("serving", {"stage": 1}),
            ("applied", {"lineage": 0, "step": 1, "digest": "d"}),
        )
    ]
    parts = {"faults": [], "views": [], "taken": [], **parts}
    return RunRecord(events=entries([*lives, *lines, event(99.0, "committed", step=9)]), **parts)


def test_steps_are_lost_in_long_gaps_and_by_what_was_there():
    """A step takes a second; 4, 87 and 2 steps are lost in the three gaps."""
    commits = [0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0, 11.0, 12.0, 100.0, 101.0, 104.0, 105.0]
    kill, blink = Began("kill", "1.0", 3.5, 4.0, 1), Began("blink 9 s", EVERYBODY, 2.0, 9.0, None)
    assert steps_lost(commits, [kill, blink]) == {"kill": 45.5, "blink 9 s": 45.5, NOBODYS: 2.0}
    assert steps_lost(commits[:8], [kill]) == {"kill": 4.0}
    assert steps_lost(commits[:4], [kill]) == {}
    assert steps_lost([], [kill]) == {}


def test_a_fault_is_noticed_when_others_name_its_node():
    """Bob reports his own lost link first, which does not count; the view is without him later."""
    lines = [
        event(21.0, "link lost", BOB, peer=ALICE, reason="closed"),
        event(21.5, "link lost", ALICE, peer=BOB, reason="closed"),
        event(30.0, "committed", ALICE, step=2),
    ]
    views = [Change(10.0, 1, "", {ALICE: 1, BOB: 1}), Change(22.0, 2, "", {ALICE: 1})]
    faults = [Began("kill", "1.1", 20.0, 21.0, 2), Began("crawl", "1.0", 24.0, 25.0, 1)]
    measured = tolls(record(*lines, faults=faults, views=views), [5.0, 19.0, 26.0, 27.0, 31.0])
    assert measured == [("kill", 1.5, 7.0), ("crawl", None, 7.0)]


def test_who_is_evicted_and_why():
    """Bob is killed, and alice's connections are reset. Carol leaves by herself later."""
    views = [
        Change(20.0, 1, "", {ALICE: 1, BOB: 1}),
        Change(30.0, 2, "bob is gone", {ALICE: 1}),
        Change(40.0, 3, "", {CAROL: 1}),
        Change(50.0, 4, "", {}),
    ]
    faults = [Began("kill", "1.1", 28.0, 29.0, 2), Began("reset", "1.0", 35.0, 35.0, 1)]
    gone = {ALICE: "no link", CAROL: "left: stopped by its owner"}
    evicted = evictions(record(faults=faults, views=views, gone=gone))
    first, second = evicted
    assert (first.node, first.reason, second.node, second.reason) == (
        *(BOB, "bob is gone"),
        *(ALICE, "no link"),
    )
    assert (first.blame, first.fault, first.last) == ("kill", "kill", False)
    assert (second.blame, second.fault, second.last) == ("", "reset", True)
    assert (first.slot, second.slot) == ("1.1", "1.0")


def test_who_moves_or_gives_its_seat_back_is_not_evicted():
    views = [
        Change(20.0, 1, "", {ALICE: 1, BOB: 1}),
        Change(30.0, 2, f"{BOB} takes stage 2: moves from stage 1", {ALICE: 1, f"{BOB}/2.2": 2}),
        Change(40.0, 3, f"{ALICE} gives back stage 1: standby", {f"{BOB}/2.2": 2}),
    ]
    assert evictions(record(views=views)) == []


def test_who_ends_by_itself_is_blamed_when_it_was_sick():
    lines = [
        event(at, "exited", slot=slot, pid=number, log="x.log", how="ended with status 1", stage=1)
        for at, slot, number in ((30.0, "1.0", 1), (31.0, "1.1", 2))
    ]
    faults = [Began("nan", "1.0", 20.0, 21.0, 1), Began("reset", "1.1", 20.0, 21.0, 2)]
    ended = exits(record(*lines, faults=faults))
    assert [(process.slot, process.blame) for process in ended] == [("1.0", "nan"), ("1.1", "")]


def test_a_guess_without_a_death_is_reported():
    lines = [
        event(at, kind, node=ALICE, stage=1, method="checkfree", exact=False, step=1)
        for at, kind in ((40.0, "rebuilding"), (41.0, "rebuilt"))
    ]
    assert guesses(record(*lines)) == [(1, "checkfree", "")]
    loss = Began("lost neighbours", "2.0", 39.0, 39.0, 1, ("1.0",), (1, 2))
    assert guesses(record(*lines, faults=[loss])) == [(1, "checkfree", "lost neighbours")]
    elsewhere = Began("kill", "1.0", 39.0, 39.0, 1, (), (2,))
    assert guesses(record(*lines, faults=[elsewhere])) == [(1, "checkfree", "")]


def test_a_restored_stage_lacks_so_many_steps():
    """A copy of a replica, a snapshot, a save, a guess, the exact state at a peer, and a checkpoint
    to which all go back."""
    origin = {"node": BOB, "stage": 1, "step": 30}
    rebuilds: list[tuple[str, bool, dict[str, Any]]] = [
        ("replica", True, {"sources": [origin]}),
        ("snapshot", False, {"sources": [origin], "mean_step": 18.5}),
        ("save", False, {"sources": [{**origin, "step": 20}]}),
        ("checkfree", False, {"sources": [{**origin, "stage": 2}]}),
        ("deposit", True, {"sources": [origin]}),
    ]
    lines = [
        event(40.0 + number, kind, node=ALICE, stage=1, method=method, exact=exact, step=30, **more)
        for number, (method, exact, fields) in enumerate(rebuilds)
        for kind, more in (("rebuilding", {}), ("rebuilt", {**fields, "stall_seconds": 0.5}))
    ]
    lines += [
        event(45.0, "rolled back", step=24, reason="so", **{"from": 30}),
        event(
            45.5, "rebuilt", node=ALICE, stage=1, method="checkpoint", step=24, stall_seconds=0.5
        ),
    ]
    faults = [
        Began("lost stage", "1.0", 39.0, 39.0, 1, (), (1,)),
        Began("reset", "1.0", 39.5, 39.5, 1),
        Began("kill", "1.0", 43.5, 43.5, 1, (), (1,)),
    ]
    stages = restored(record(*lines, faults=faults))
    assert [(s.method, s.exact, s.late, s.fault, s.stall) for s in stages] == [
        ("snapshot", False, 11.5, "lost stage", 0.5),
        ("save", False, 10.0, "lost stage", 0.5),
        ("checkfree", False, None, "lost stage", 0.5),
        ("deposit", True, 0.0, "kill", 0.5),
        ("checkpoint", False, 6, "kill", 0.5),
    ]


def test_replicas_are_compared_after_their_newest_common_step():
    def applied(step: int, node: str, digest: str) -> dict[str, Any]:
        return event(50.0 + step, "applied", node, lineage=0, step=step, digest=digest)

    same = [applied(2, ALICE, "e"), applied(2, BOB, "e")]
    once = [applied(2, ALICE, "e"), applied(2, BOB, "f")]
    healed = [*once, applied(3, ALICE, "g"), applied(3, BOB, "g"), applied(4, ALICE, "h")]
    compared = [differing(record(*lines).events) for lines in (same, once, healed)]
    assert compared == [([], 0), ([1], 1), ([], 1)]


def test_a_process_grows_by_so_many_mib_a_minute():
    """The process grows fast in its first two minutes, then by 3 MiB a minute."""
    mib = 2**20
    taken = [
        Taken(1000.0 + s, "1.0", 7, mib * int(100 + min(s, WARM)) + mib * 3 * s // 60, 30, 9)
        for s in range(0, 601, 20)
    ]
    short = [Taken(1000.0, "1.1", 8, mib, 30, 9), Taken(1000.0 + SETTLED, "1.1", 8, mib, 31, 8)]
    brief = [Taken(1000.0, "2.0", 9, mib, 30, 9)]
    first, second = appetites([*taken, *short, *brief])
    assert first.slope == pytest.approx(3.0, rel=1e-6)
    assert first.rss == (121 * mib, 250 * mib)
    assert (second.slope, second.descriptors, second.threads) == (None, (31, 31), (8, 8))


def test_skipped_steps_count_once(tmp_path):
    for name in ("a", "b"):
        lines = [{"ledger": 1}, {"step": 1, "skipped": True}, {"step": 2, "skipped": False}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"ledger-{name}.jsonl").write_text(text)
    assert skipped(tmp_path) == {1}


def test_reasons_are_found_in_the_registrys_log():
    line = (
        f"INFO view 7: {ALICE} (stage 1) is gone: its stream broke, without a new one for 1 s; "
        f"suspected by {CAROL}: closed; {BOB} (standby) is gone: left: bye; {CAROL} joined"
    )
    assert dict(GONE.findall(line)) == {
        ALICE: f"its stream broke, without a new one for 1 s; suspected by {CAROL}: closed",
        BOB: f"left: bye; {CAROL} joined",
    }


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"stuck": "no steps"}, "the swarm stopped training: no steps"),
        ({"audit": {"error": "no ledger"}}, "the ledger can't be audited: no ledger"),
        ({"audit": {**WELL["audit"], "missing": 8}}, "samples were lost or trained twice: "),
        (
            {"differing": {"at_last": [2], "steps": 1}},
            "replicas differ at the end in stages",
        ),
        (
            {"evictions": [{"node": ALICE, "stage": 1, "last": True, "blame": "", "reason": "x"}]},
            f"{ALICE}, the last holder of stage 1, was evicted though it had done nothing wrong: x",
        ),
        (
            {"guesses": [{"stage": 1, "method": "checkfree", "blame": ""}]},
            "stage 1 was guessed by checkfree though none of its nodes had died",
        ),
        (
            {"exits": [{"slot": "1.0", "how": "ended with status 1", "blame": "", "log": "x"}]},
            "1.0 ended with status 1 though it had done nothing wrong; its log is x",
        ),
    ],
)
def test_every_broken_promise_is_a_sentence(wrong, says):
    assert broken(WELL) == []
    (sentence,) = broken({**WELL, **wrong})
    assert re.match(says, sentence)


def test_blame_excuses():
    excused = {
        "evictions": [{"node": ALICE, "stage": 1, "last": True, "blame": "kill", "reason": "x"}],
        "exits": [{"slot": "registry", "how": "ended", "blame": "", "log": "x"}],
        "guesses": [{"stage": 1, "method": "checkfree", "blame": "kill"}],
    }
    assert broken({**WELL, **excused}) == []


def test_a_table_sums_what_a_folder_has(tmp_path):
    evicted = {
        "blame": "kill",
        "fault": "kill",
        "last": False,
        "reason": f"suspected by {BOB}; twice",
    }
    process = {
        "slot": "1.0",
        "seconds": 300.0,
        "rss": [100 * 2**20, 110 * 2**20],
        "descriptors": [30, 31],
        "threads": [9, 9],
        "slope": 0.25,
    }
    for name in ("one", "two"):
        outcome = {**WELL, "evictions": [evicted], "appetites": [process]}
        (tmp_path / f"{name}.json").write_text(json.dumps(outcome))
    saved = {"stage": 1, "method": "save", "exact": False, "late": 8.0, "fault": "lost stage"}
    copied = {**saved, "method": "snapshot", "late": 2.5, "stall": 0.5}
    losses = {
        "setting": {"seed": 4, "policy": "auto", "replicas": 2},
        "faults": {"lost stage": 2, "lost driver": 1},
        "restored": [copied, {**saved, "stall": 1.5}],
    }
    (tmp_path / "lost.json").write_text(json.dumps({**WELL, **losses}))
    text = table(read_outcomes(tmp_path))
    assert "3 runs, 3 minutes, 30 steps committed." in text
    assert "| audit: expected | 240 |" in text
    by = "1 save, 1 snapshot | 5.2, at most 8.0 | 1.0, at most 1.5 |"
    assert f"| auto | 2 | lost stage | 2 | {by}" in text
    assert "| auto | 2 | lost driver | 1 | - | - | - |" in text
    assert "| kill | 4 | 0.2, at most 0.2 | 4.0, at most 5.0 | 9.0 | 2.2 | 2 | 0 |" in text
    assert "| kill |  |  | suspected by ... | 2 |" in text
    assert "| 1.0 of seed 3 | 5.0 | 100 to 110 | 15 | 30 to 31 | 9 to 9 |" in text


def test_a_file_that_is_no_outcome_is_named(tmp_path):
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match=r"other.json is not an outcome of `planaria lab chaos`"):
        read_outcomes(tmp_path)

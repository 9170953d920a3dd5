from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.report.events import (
    Committed,
    CostSoFar,
    Entry,
    Event,
    Killed,
    MessageRefused,
    RolledBack,
    Severity,
    StageRebuilt,
    entries,
    event_line,
    parse,
)

KINDS = sorted(Event.__subclasses__(), key=lambda kind: kind.kind)


def any_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    return st.builds(kind, **{field.name: ... for field in dataclasses.fields(kind)})


def written(event: Event, node: str = "abc", time: float = 1.5) -> dict[str, Any]:
    return json.loads(json.dumps(event_line(event, node, time), allow_nan=False))


@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_a_line_is_read_as_it_was_written(kind: type[Event], data: st.DataObject):
    line = written(data.draw(any_of(kind)))
    entry = parse(line)
    assert entry is not None
    assert type(entry.event) is kind
    assert entry.time == line["time"]
    assert entry.node == line["node"]
    assert written(entry.event) == line
    assert entry.sentence
    assert entry.event.severity in Severity


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"step": 1},
        {"step": "1", "loss": 1.0},
        {"step": True, "loss": 1.0},
        {"step": 2**63, "loss": 1.0},
        {"step": 1, "loss": "low"},
        {"step": 1, "loss": 10**400},
        {"step": 1, "loss": 1.0, "node": 7},
    ],
)
def test_a_line_that_is_not_what_its_kind_has_is_refused(fields: dict[str, Any]):
    with pytest.raises(ValueError, match="validation error"):
        parse({"time": 3, "node": "abc", "kind": "committed", **fields})


def test_what_this_version_does_not_know_is_passed_over():
    known = {"time": 3.0, "node": "a", "kind": "committed", "step": 4, "loss": 2.5, "more": [1]}
    lines = [{"time": 2.0, "node": "a", "kind": "invented"}, known, {"time": 3.0}]
    assert entries(lines) == [Entry(3.0, "a", Committed(step=4, loss=2.5))]


def test_the_names_in_a_log_stay():
    """Summaries of older runs and other readers of `events.jsonl` rely on the names."""
    assert [kind.kind for kind in KINDS] == [
        *("aborted", "accused", "applied", "committed", "computed wrong", "cost", "diverged"),
        *("ending", "exited", "fetching", "finished", "given back", "goes on"),
        *("gradient stands out", "handed over", "hangs", "held up", "joined", "killed"),
        *("link lost", "lost", "masked", "not finite", "paused", "preempted", "rebuild failed"),
        *("rebuilding", "rebuilt", "refused", "relayed", "relearned", "relearning", "relieved"),
        *("results differ", "resuming", "rolled back", "sampled", "save failed", "saved"),
        *("seat taken", "serving", "slow", "snapshot paced", "started", "step skipped", "stopped"),
        *("validated", "waiting", "wall", "weights changed", "write failed", "written again"),
    ]
    back = written(RolledBack(lost=37, step=30, reason="x"))
    assert list(back) == ["time", "node", "kind", "from", "step", "reason"]
    killed = Killed(slot="2.0", pid=7, step=15, node="gone", stage=2, left=0)
    assert written(killed, "up")["node"] == "gone", "whom it is about, not who wrote it"
    costs = CostSoFar(extra_bytes=1, memory_bytes=2, critical_seconds=0.5, parts={})
    assert list(written(costs))[3:] == [
        *("extra_bytes", "memory_bytes", "critical_seconds", "parts"),
    ]


def test_a_figure_that_is_not_known_is_null_and_one_that_does_not_apply_is_not_there():
    fields: dict[str, Any] = {
        **{"stall_seconds": 1.0, "node": "a", "stage": 2, "method": "snapshot", "step": 9},
        **{"sources": (), "bytes": 10, "fetch_seconds": 0.1, "rebuild_seconds": 0.2},
    }
    guessed = written(StageRebuilt(**fields))
    taken = written(StageRebuilt(**fields, oldest_step=7, perturbation=float("nan")))
    assert "perturbation" not in guessed
    assert taken["perturbation"] is None
    assert "mean_step" not in taken
    assert written(Committed(step=1, loss=float("nan")))["loss"] is None
    assert written(MessageRefused(peer="a", body=None, why="x"))["body"] is None

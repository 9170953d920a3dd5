from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planaria.bootstrap.errors import UserError
from planaria.node.page.replay import Replay, replay_of
from planaria.node.run_file import RunFile, dumps, override

RUN = override(RunFile(), model__stages=1, model__vocabulary=300, steps=3)


def event(time: float, node: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "node": node, "kind": kind, **fields}


EVENTS = [
    event(0.0, "up", "started", slot="registry", pid=1),
    event(0.1, "up", "started", slot="0.0", pid=10),
    event(0.2, "up", "started", slot="1.0", pid=11),
    event(1.0, "aaaa", "joined", reason="wanted", host="vm", pid=10),
    event(1.0, "bbbb", "joined", reason="wanted", host="vm", pid=11),
    event(2.0, "aaaa/0", "serving", stage=0, device="cpu"),
    event(2.0, "bbbb/1", "serving", stage=1, device="cpu"),
    event(3.0, "aaaa/0", "committed", step=1, loss=7.0),
    event(2.9, "aaaa/0", "applied", lineage=0, step=1, digest="y"),
    event(2.9, "bbbb/1", "applied", lineage=0, step=1, digest="x"),
    event(4.0, "bbbb", "killed", slot="1.0", pid=11, step=2, stage=1, left=0),
    event(4.1, "up", "started", slot="1.0", pid=12),
    event(5.0, "cccc", "joined", reason="needed", host="vm", pid=12),
    event(5.1, "cccc/1", "serving", stage=1, device="cpu"),
    event(
        *(5.2, "cccc/1", "rebuilding"),
        **{"stage": 1, "method": "checkfree", "sources": ["aaaa/0"], "exact": False},
        **{"fallback": False, "reason": "lost"},
    ),
    event(
        *(6.0, "cccc/1", "rebuilt"),
        **{"stall_seconds": 2.0, "stage": 1, "method": "checkfree", "step": 1, "sources": []},
        **{"bytes": 10, "fetch_seconds": 0.1, "rebuild_seconds": 0.5},
    ),
    event(7.0, "aaaa/0", "committed", step=2, loss=6.5),
    event(8.0, "aaaa/0", "committed", step=3, loss=6.0),
    event(8.0, "aaaa/0", "finished", step=3, reason="all", validation=6.25),
    event(9.0, "up", "ending"),
    event(9.5, "aaaa", "preempted", grace=25.0, reason="SIGTERM"),
    event(10.0, "up", "lost", stage=1, reason="it left") | {"node": "cccc/1"},
]


def replay() -> Replay:
    return Replay(RUN, EVENTS, [], "mine", price=3600.0)


def states(shown: dict[str, Any]) -> list[tuple[str, list[str]]]:
    return [(s["state"], [node["node"] for node in s["nodes"]]) for s in shown["stages"]]


def test_each_moment_has_the_nodes_of_then() -> None:
    run = replay()
    assert states(run.at(0.5)) == [("vacant", []), ("vacant", [])]
    assert states(run.at(3.5)) == [("running", ["aaaa"]), ("running", ["bbbb"])]
    assert states(run.at(4.5)) == [("running", ["aaaa"]), ("vacant", [])]
    assert run.at(4.5)["condition"]["word"] == "waiting"
    assert states(run.at(5.5))[1] == ("rebuilding", ["cccc"])
    assert run.at(5.5)["condition"]["word"] == "rebuilding"


def test_the_end_is_no_loss() -> None:
    shown = replay().at(10.0)
    assert shown["condition"]["word"] == "finished"
    assert [stage["count"] for stage in shown["stages"]] == [1, 1]
    marks = [(mark["step"], mark["kind"]) for mark in shown["loss"]["marks"]]
    assert marks == [(1, "lost"), (1, "rebuilt")]
    assert [*map(tuple, shown["loss"]["training"])] == [(1, 7.0), (2, 6.5), (3, 6.0)]
    assert "SIGTERM" not in json.dumps(shown["news"])
    assert shown["stages"][0]["nodes"][0]["driver"]


def test_back_is_as_good_as_forth() -> None:
    run, times = replay(), [8.5, 3.5, 5.5, 0.5, 9.9]
    forth = {time: replay().at(time) for time in times}
    assert {time: run.at(time) for time in times} == forth


def test_money_is_that_of_then() -> None:
    # A node costs 1 a second: there are 2 from 1.0 to 4.0, 1 until 5.0 and 2 until 6.0.
    assert replay().at(6.0)["progress"]["spent"] == pytest.approx(2 * 3.0 + 1 + 2 * 1.0, abs=0.01)
    run, moments = replay(), (6.1, 6.9, 6.2, 6.9)  # between two events
    spent = [run.at(moment)["progress"]["spent"] for moment in moments]
    assert spent == [replay().at(moment)["progress"]["spent"] for moment in moments]


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "power cut"])
def test_of_a_resumed_run_only_the_nodes_since_then_are_there(ended: bool) -> None:
    part = [each for each in EVENTS if each["time"] < 4.0 or (ended and each["kind"] == "ending")]
    later = [each | {"time": 1000.0 + each["time"]} for each in EVENTS if each["time"] < 4.0]
    names = {"aaaa": "dddd", "bbbb": "eeee"}
    for each in later:
        each["node"] = names.get(each["node"][:4], each["node"][:4]) + each["node"][4:]
    shown = Replay(RUN, [*part, *later], [], "mine", price=3600.0).now()
    assert states(shown) == [("running", ["dddd"]), ("running", ["eeee"])]
    # 2 nodes from second 1 to the last event of each part.
    assert shown["progress"]["spent"] == pytest.approx(2 * (8.0 if ended else 2.0) + 2 * 2.0)


def test_a_node_that_was_told_to_leave_is_there_until_its_last_event() -> None:
    """Nobody may report its loss, as it takes leave of the registry."""
    leaving = [
        event(3.1, "bbbb", "preempted", grace=25.0, reason="SIGTERM"),
        event(3.2, "bbbb", "handed over", to="cccc", stage=1),
    ]
    later = [each for each in EVENTS if each["time"] > 4.0]
    run = Replay(RUN, [*(e for e in EVENTS if e["time"] < 4.0), *leaving, *later], [], "mine")
    assert states(run.at(3.15))[1] == ("running", ["bbbb"])
    assert states(run.at(3.5))[1] == ("vacant", [])
    assert states(run.at(7.5))[1][1] == ["cccc"]


def test_processes_of_two_hosts_may_have_one_number() -> None:
    """In containers, each node's process has the same."""
    hosts = {"aaaa": "box", "bbbb": "vm"}
    part = [each for each in EVENTS if each["time"] < 4.0]
    part = [
        each | {"pid": 1, "host": hosts[each["node"]]} if "host" in each else each for each in part
    ]
    shown = Replay(RUN, part, [], "mine").now()
    assert states(shown) == [("running", ["aaaa"]), ("running", ["bbbb"])]


def test_a_registry_that_is_replaced_leaves_the_nodes() -> None:
    exited = event(3.1, "up", "exited", slot="registry", pid=1, log="l", how="died") | {
        "node": None
    }
    again = event(3.2, "up", "started", slot="registry", pid=13)
    shown = Replay(RUN, [*EVENTS, exited, again], [], "mine").at(3.5)
    assert states(shown) == [("running", ["aaaa"]), ("running", ["bbbb"])]


def test_a_folder_is_read_while_it_is_written_and_afterwards(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it has no run\.toml"):
        replay_of(tmp_path)
    (tmp_path / "run.toml").write_text(dumps(RUN))
    with pytest.raises(UserError, match="has no records"):
        replay_of(tmp_path)
    (tmp_path / "events.jsonl").write_text("{no\n")
    with pytest.raises(UserError, match="damaged"):
        replay_of(tmp_path)
    lines = [json.dumps(line) + "\n" for line in EVENTS]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    afterwards = replay_of(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events-aaaa.jsonl").write_text("".join(lines[::2]))
    (tmp_path / "logs" / "events-up.jsonl").write_text("".join(lines[1::2]) + '{"half')
    (tmp_path / "events.jsonl").unlink()
    assert replay_of(tmp_path).at(8.0) == afterwards.at(8.0)

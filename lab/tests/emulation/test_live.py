"""Tests of the live measurement: its arithmetic, and a swarm of three stages on emulated links."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planaria.node.cli import app
from planaria.node.report.events import entries
from planaria.node.run_file import loads
from planaria_lab.emulation.emulation import EmulationError, emulate
from planaria_lab.emulation.links import WAN_LINKS, LinkError, all_alike, read_links
from planaria_lab.emulation.live_study import (
    POLICIES,
    SAMPLE,
    Sample,
    Setting,
    at_sites,
    figures,
    open_samples,
    plan_run,
    quartiles,
    schedule,
    table,
)
from planaria_lab.emulation.live_swarm import (
    FIRST,
    Carried,
    KilledStage,
    LiveError,
    MeasuredSwarm,
    bytes_between,
    commit_times,
    losses,
    machines,
)
from tests.node.report.lines import whole

DEADLINE = 600.0  # seconds; reached only by a hang
SETTING = Setting(
    loads("steps = 16\n[model]\nstages = 2"), all_alike(["registry", "0.0"], 5, 100), ("1@12",)
)


def sample(block: int, policy: str, seconds: list[float], *lost: KilledStage) -> Sample:
    return Sample(block, policy, MeasuredSwarm(seconds, 1e6, list(lost), dropped=0, late=1e-4))


# --- arithmetic


def test_each_policy_has_its_turn_in_each_block_and_begins_one():
    turns = list(schedule(["a", "b", "c"], 4))
    assert Counter(turns) == {(block, policy): 1 for block in range(4) for policy in "abc"}
    assert [policy for _, policy in turns[::3]] == ["a", "b", "c", "a"]


def test_a_step_counts_when_it_was_first_committed():
    """The run goes back to step 1, and one stage-0 node writes step 2 later than the other."""
    times = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 2.1), (2, 7.0), (3, 8.0), (4, 9.0)]
    ledgers = [{"ledger": 1}, *({"step": step, "time": time} for step, time in times)]
    assert commit_times(ledgers) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 9.0}


def test_bytes_between_two_times():
    carried = [Carried(time, bytes=sent) for time, sent in ((10.0, 100), (11.0, 300), (13.0, 400))]
    assert bytes_between(carried, 10.5, 12.0) == pytest.approx(150)


def test_a_loss_ends_with_the_next_commit_and_is_made_good_by_the_next_new_step():
    """All stages go back two steps, one stage at a time."""
    lines = [
        {"kind": "committed", "time": 10.0, "step": 7},
        {"kind": "killed", "time": 10.5, "stage": 2, "step": 8},
        {"kind": "killed", "time": 10.6, "stage": 2, "step": 8},
        {"kind": "rebuilt", "time": 11.0, "stage": 1, "method": "checkpoint", "bytes": 1},
        {"kind": "rebuilt", "time": 12.0, "stage": 2, "method": "checkpoint", "bytes": 80},
        *({"kind": "committed", "time": 9.0 + step, "step": step} for step in (6, 7, 8)),
        {"kind": "killed", "time": 18.0, "stage": 0, "step": 9},
        {"kind": "rebuilt", "time": 19.0, "stage": 0, "method": "snapshot", "bytes": 9},
        {"kind": "committed", "time": 20.0, "step": 9},
    ]
    events = entries(map(whole, lines))
    assert losses(events) == [
        KilledStage(2, "checkpoint", 4.5, 6.5, 80),
        KilledStage(0, "snapshot", 2.0, 2.0, 9),
    ]
    assert losses(events[:1]) == []
    with pytest.raises(LiveError, match="stage 2, killed at step 8, was never rebuilt"):
        losses(events[:4])
    with pytest.raises(LiveError, match="no step was committed after stage 2"):
        losses(events[:6])


def test_quartiles():
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == {"low": 2.0, "median": 3.0, "high": 4.0}
    assert quartiles([7.0]) == {"low": 7.0, "median": 7.0, "high": 7.0}


def test_policies_are_compared_with_plain_in_their_own_block():
    """The machine is half as fast in the second block."""
    by_policy = figures(
        [
            sample(0, "plain", [1.0, 1.0, 5.0]),
            sample(0, "redundant", [1.2, 1.2, 1.2], KilledStage(2, "redundant", 3.0, 4.0, 5)),
            sample(1, "redundant", [2.4, 2.4, 2.4], KilledStage(2, "redundant", 5.0, 6.0, 5)),
            sample(1, "plain", [2.0, 2.0, 2.0]),
        ]
    )
    assert list(by_policy) == ["plain", "redundant"]
    assert by_policy["redundant"]["against_plain"] == pytest.approx(
        {"low": 1.2, "median": 1.2, "high": 1.2}
    )
    assert by_policy["redundant"]["step_seconds"]["median"] == pytest.approx(1.8)
    assert by_policy["redundant"]["stall_seconds"]["median"] == 4.0
    assert "stall_seconds" not in by_policy["plain"]
    header, rule, *rows = table(by_policy).splitlines()
    assert header.count("|") == rule.count("|")
    assert {row.count("|") for row in rows} == {header.count("|")}
    assert [row.split(" | ")[0] for row in rows] == ["| plain", "| redundant"]


def test_without_plain_there_is_nothing_to_compare_with():
    assert "against_plain" not in figures([sample(0, "redundant", [1.0])])["redundant"]


# --- samples on disk


def test_a_measurement_goes_on_where_it_was(tmp_path):
    path = tmp_path / "new" / "samples.jsonl"
    assert open_samples(path, SETTING) == []
    kept = sample(0, "plain", [1.0, 2.0], KilledStage(1, "interpolate", 1.0, 1.0, 3))
    with path.open("ab") as file:
        file.write(SAMPLE.dump_json(kept) + b"\n" + SAMPLE.dump_json(kept)[:20])  # was cut off
    assert open_samples(path, SETTING) == [kept]
    assert path.read_bytes().endswith(b"}\n")


def test_a_measurement_of_something_else_is_refused(tmp_path):
    path = tmp_path / "samples.jsonl"
    open_samples(path, SETTING)
    other = Setting(SETTING.run, SETTING.network, ("2@12",))
    with pytest.raises(LiveError, match=r"other settings \(kills\)"):
        open_samples(path, other)


@pytest.mark.parametrize("text", ["nonsense\n", "[1]\n"])
def test_a_file_that_holds_no_samples_is_refused(tmp_path, text):
    path = tmp_path / "samples.jsonl"
    path.write_text(text)
    with pytest.raises(LiveError, match="can't use"):
        open_samples(path, SETTING)


def test_what_is_written_down_names_no_path_of_the_machine(tmp_path):
    run = loads(f"[data]\npath = '{tmp_path}'")
    setting = Setting(run, SETTING.network, ())
    assert str(tmp_path) not in json.dumps(setting.header())


@pytest.mark.parametrize("policy", list(POLICIES))
def test_each_policy_makes_a_run_of_its_own(policy, tmp_path):
    elsewhere = f'[data]\npath = "{tmp_path / "none"}"\n'
    run = loads(elsewhere + "[model]\nstages = 4\nvocabulary = 512")
    recovery = plan_run(run, policy, tmp_path).recovery
    assert recovery.policy == ("checkpoint" if policy == "plain" else policy)
    assert bool(recovery.relearn.passes) == (policy != "plain")


# --- sites of nodes


def test_neighbouring_stages_are_at_different_sites():
    nodes = machines(loads("[model]\nstages = 3\nlayers = 3\n[swarm]\nreplicas = 2"))
    assert nodes == ["registry", "0.0", "1.0", "2.0", "3.0", "0.1", "1.1", "2.1", "3.1"]
    network = at_sites(nodes, ["Iowa", "LA", "Oregon"], read_links(WAN_LINKS), 50)
    assert [network.sites[node] for node in nodes[:5]] == ["Iowa", "Iowa", "LA", "Oregon", "Iowa"]
    assert network.uplinks == {"Iowa": 50, "LA": 50, "Oregon": 50}
    with pytest.raises(LinkError, match="Atlantis"):
        at_sites(nodes, ["Iowa", "Atlantis"], read_links(WAN_LINKS))


# --- the command


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--policy", "hope", "--kill", "1@12"], "--policy hope: unknown"),
        (["--kill", f"1@{FIRST}"], "to the first kill, so choose a step after"),
        (["--kill", "9@9"], "there is no stage 9"),
        (["--site", "Atlantis", "--site", "Iowa"], "no link between Atlantis and Iowa"),
        (["--delay", "-1"], "a delay of -1 ms"),
    ],
)
def test_what_is_asked_for_must_be_there(asked, words, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN.format(steps=20, data=data))
    command = ["lab", "live", "--run", "run.toml", "--out", "results"]
    refused = CliRunner().invoke(app, [*command, *asked])
    assert refused.exit_code == 1
    assert words in refused.stderr
    assert CliRunner().invoke(app, ["lab", "live", "--help"]).exit_code == 0


# --- a real swarm

RUN = """
steps = {steps}
[model]
preset = "tiny"
dim = 32
context = 32
stages = 2
[data]
path = "{data}"
[training]
batch = 4
microbatch = 1
validation_microbatches = 0
[recovery]
relearn.passes = 5
"""


@pytest.fixture(scope="module")
def possible() -> None:
    """Skip the test where links can't be emulated."""
    try:
        with emulate(all_alike(["a"], 1, 100)):
            pass
    except EmulationError as error:
        pytest.skip(str(error))


def start(folder: Path, data: Path, steps: int) -> subprocess.Popen[str]:
    (folder / "run.toml").write_text(RUN.format(steps=steps, data=data))
    arguments = ["--run", "run.toml", "--out", "results", "--blocks", "1", "--delay", "5"]
    policies = ["--policy", "plain", "--policy", "checkpoint", "--kill", f"1@{FIRST + 3}"]
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from planaria.node.cli import app; app()",
            "lab",
            "live",
            *arguments,
            *policies,
        ],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("possible")
def test_a_swarm_of_three_stages_behind_links_loses_one_and_goes_on(data, tmp_path):
    process = start(tmp_path, data, FIRST + 5)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, output
    header, *samples = lines(tmp_path / "results" / "samples.jsonl")
    assert header["kills"] == [f"1@{FIRST + 3}"]
    assert [sample["policy"] for sample in samples] == ["plain", "checkpoint"]
    for measured in (sample["measured"] for sample in samples):
        assert len(measured["step_seconds"]) == 3
        # Forward and back through three stages are six links of 5 ms, however fast the nodes are.
        assert min(measured["step_seconds"]) > 0.030
        assert (
            measured["step_bytes"] > 0.5 * 4 * 6 * 32 * 32 * 4
        )  # boundary tensors; some bytes may be counted late
        [loss] = measured["losses"]
        assert loss["stage"] == 1
        assert 0 < loss["stall"] <= loss["caught_up"]
    content = json.loads((tmp_path / "results" / "live.json").read_text())
    assert set(content["policies"]) == {"plain", "checkpoint"}
    assert content["policies"]["checkpoint"]["methods"] == ["checkpoint"]
    kept = (tmp_path / "results" / "samples.jsonl").read_bytes()
    again = start(tmp_path, data, FIRST + 5)
    output, _ = again.communicate(timeout=DEADLINE)
    assert again.returncode == 0, output
    assert (tmp_path / "results" / "samples.jsonl").read_bytes() == kept


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_measurement_that_is_ended_leaves_no_process_behind(data, tmp_path, number):
    process = start(tmp_path, data, 100_000)
    logs = tmp_path / "out" / "live" / "1-plain" / "logs"
    deadline = time.monotonic() + DEADLINE
    while not any(len(path.read_text().splitlines()) > 1 for path in logs.glob("ledger-*.jsonl")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [event["pid"] for event in lines(logs / "events-up.jsonl") if "pid" in event]
    assert len(pids) == 4
    handles = [os.pidfd_open(pid) for pid in pids]
    process.send_signal(number)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode != 0
    for handle in handles:
        gone, _, _ = select.select([handle], [], [], DEADLINE)
        os.close(handle)
        assert gone
    if number == signal.SIGINT:
        assert "continues from here" in output
        assert "Traceback" not in output

"""Tests of the commands that use the simulator: their pure functions and their output."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planaria.node import cli
from planaria.node.model.shape import ModelConfig
from planaria.node.report.events import entries
from planaria.node.run_file import RunFile
from planaria_lab.emulation.links import WAN_LINKS, read_links
from planaria_lab.emulation.live_study import machine
from planaria_lab.emulation.live_swarm import LiveError
from planaria_lab.simulator import check, table2
from planaria_lab.simulator.run import simulate_run
from planaria_lab.simulator.step import simulate_step
from planaria_lab.simulator.swarm import Seconds, Transport
from tests.node.report.lines import whole

VOCABULARY = 512
RESULTS = Path(__file__).parents[2] / "results"


def timed(run: RunFile, config: ModelConfig, stage: int) -> Seconds:
    return Seconds(0.003, 0.006, head=0.0 if stage else 0.005, norm=0.001, apply=0.003, add=0.001)


def live(case: check.LiveCase, transport: Transport, late: float = 1.0) -> check.Live:
    """Return figures of a swarm `late` times as slow as simulated, which takes 1 s to start and
    0.5 s to warm up."""
    swarm = check.swarm_of(case, VOCABULARY, transport, 2, timed)
    step = simulate_step(swarm, check.LOOKED_AT).seconds
    stall = check.predicted_stall(swarm, check.parse_kill(case.kill, swarm.run), 1.0, 0.5)
    steps = (step * late, step * late * 1.01, step * late * 0.99)
    return check.Live(case.name, steps, stall * late, 1.0, step * late + 0.5, late=0.0)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})


def test_what_a_frame_takes_is_found_again(two_cores: None) -> None:
    transport = Transport(0.002, 0.002)
    known = check.calibrate([live(check.PLAIN, transport)], VOCABULARY, timed)
    assert known.transport.frame == pytest.approx(0.002, rel=0.02)
    assert (known.start, known.cores) == ({"plain": 1.0}, 2)
    assert known.warm_up == {"plain": pytest.approx(0.5)}


def test_a_live_swarm_that_is_slower_is_an_error_of_as_much(two_cores: None) -> None:
    transport = Transport(0.002, 0.002)
    cases = check.CASES[:3]
    samples = [live(case, transport) for case in check.CALIBRATIONS.values()]
    samples += [live(case, transport, 1.2) for case in cases]
    known, compared = check.compare(samples, VOCABULARY, timed)
    assert [row.case for row in compared] == [*cases]
    for row in compared:
        assert row.step_error == pytest.approx(1 - 1 / 1.2, abs=0.01)
        assert row.stall_error == pytest.approx(1 - 1 / 1.2, abs=0.01)
    text = check.table(known, compared)
    assert "| one node a stage (plain) |" in text
    assert re.search(r"Median error of the step: 1[67]\.\d% \(goal 10%: missed\)\.", text)
    assert re.search(r"Median error of the stall: 16\.\d% \(goal 25%: met\)\.", text)


def test_nothing_is_predicted_without_a_calibration() -> None:
    with pytest.raises(LiveError, match="was not measured, so nothing"):
        check.compare([], VOCABULARY, timed)


def test_the_cases_are_swarms_of_several_kinds() -> None:
    assert len(check.CASES) >= 6
    assert len({case.name for case in check.CASES}) == len(check.CASES)
    for case in (*check.CALIBRATIONS.values(), *check.CASES):
        swarm = check.swarm_of(case, VOCABULARY, Transport(), 2, timed)
        assert list(swarm.nodes()) == sorted(swarm.nodes(), key=lambda name: name.split(".")[::-1])
        assert sum(swarm.counts) == (case.stages + 1) * case.replicas
        assert check.parse_kill(case.kill, swarm.run).step > 5
    for field in ("policy", "stages", "replicas", "delay", "preset"):
        assert len({getattr(case, field) for case in check.CASES}) > 1


def test_samples_are_kept_by_line(tmp_path: Path) -> None:
    path = tmp_path / "results" / check.SAMPLES
    assert check.read_samples(path) == []
    sample = check.Live("one node a stage", (1.0, 2.0, 3.0), 4.0, 1.0, 2.5, 0.0)
    check.append(path, sample)
    check.append(path, replace(sample, case=check.PLAIN.name))
    with path.open("a") as file:
        file.write('{"case": "thr')  # cut off by a crash
    samples = check.read_samples(path)
    assert [sample.case for sample in samples] == ["one node a stage", check.PLAIN.name]
    assert samples[0] == sample
    assert samples[0].step == 2.0
    left = check.missing(samples, blocks=2)
    assert left[0].name == "no delay, checkfree"
    assert left.count(check.PLAIN) == left.count(check.CASES[0]) == 1
    assert len(left) == 2 * (len(check.CALIBRATIONS) + len(check.CASES)) - 2
    other = json.dumps({"check": 1, "machine": f"not {machine()}", "steps": check.STEPS})
    path.write_text(other + "\n")
    with pytest.raises(LiveError, match="of another machine"):
        check.read_samples(path)


EVENTS = [
    whole(line)
    for line in (
        {"time": 9.0, "kind": "committed", "step": 15},
        {"time": 10.0, "kind": "killed", "step": 16, "stage": 2},
        {"time": 10.1, "kind": "started", "pid": 7, "slot": "2.0"},
        {"time": 11.5, "kind": "joined", "pid": 7},
        {"time": 12.0, "kind": "rebuilt", "stage": 2, "method": "checkfree"},
        {"time": 13.5, "kind": "committed", "step": 16},
    )
]


def test_stall_and_start_are_read_from_the_events() -> None:
    assert check.after_kill(entries(EVENTS)) == pytest.approx((3.5, 1.5, 1.5))
    replica = [e if e["kind"] != "rebuilt" else {**e, "method": "replica"} for e in EVENTS]
    assert check.after_kill(entries(replica)) == pytest.approx((3.5, 1.5, 0.0))
    with pytest.raises(LiveError, match="before a node was killed"):
        check.after_kill(entries(EVENTS[:1]))
    with pytest.raises(LiveError, match="no step was committed, or no node joined"):
        check.after_kill(entries(EVENTS[:3]))


def test_tasks_are_timed() -> None:
    swarm = check.swarm_of(check.PLAIN, VOCABULARY, Transport(), 0, timed)
    ends, body = (check.time_tasks(swarm.run, swarm.config, stage) for stage in (0, 1))
    assert 0 < ends.forward < ends.head
    assert body.head == 0
    assert min(body.forward, body.backward, body.norm, body.apply, body.add, body.relearn) > 0


# --- Table 2


def test_the_papers_iterations_follow_from_its_times() -> None:
    assert table2.iterations("redundant") == (10_004, 10_004, 10_004)
    assert table2.iterations("checkpoint")[0] == 21_986
    assert table2.iterations("checkfree+")[0] == 14_002


def test_the_swarm_is_the_published_rig() -> None:
    links = read_links(WAN_LINKS)
    rig = table2.swarm(links, "checkfree", "forward")
    assert [rig.replicas(stage) for stage in range(7)] == [3] * 7
    assert [group.site for group in rig.groups[:8]] == [*table2.PLACES, "Australia"]
    assert rig.groups[3].seconds.forward == pytest.approx(8 * 4 * 0.055)
    assert rig.run.training.microbatches == 3 * 6
    both = table2.swarm(links, "checkfree", "both").groups[3].seconds
    assert both.forward + both.backward == pytest.approx(8 * 4 * 0.055)
    redundant = table2.swarm(links, "redundant", "forward")
    assert redundant.run.training.microbatches == 2 * 3 * 6
    assert redundant.groups[3].seconds.forward == pytest.approx(4 * 4 * 0.055)


def test_the_table_has_each_policy_and_rate_beside_the_papers() -> None:
    seconds: list[tuple[table2.Passes, float]] = [("forward", 90.0), ("both", 45.0)]
    cells = [
        table2.Simulated(policy, rate, passes, each)
        for policy in table2.PAPER_ITERATION
        for rate in table2.RATES
        for passes, each in seconds
    ]
    text = table2.table(cells)
    assert "| checkfree, 5 % | 91.3 | 45.0 | 90.0 | 367.8 | 181 | 363 |" in text
    assert text.count("\n") == 2 + 4 * 3
    row = table2.rows(cells, {"machine": "m"})[0]
    assert row == {
        **{"machine": "m", "policy": "checkpoint", "rate": "5 %", "passes": "forward"},
        "seconds": 90.0,
    }


# --- the command

RUN = """
steps = 40
[model]
preset = "tiny"
[training]
batch = 8
[recovery]
policy = "snapshot"
"""


def invoke(tmp_path: Path, *arguments: str, run: str = RUN) -> tuple[int, str]:
    path = tmp_path / "run.toml"
    path.write_text(run)
    result = CliRunner().invoke(
        cli.app, ["lab", "simulate", "run", str(path), *arguments], env={"COLUMNS": "200"}
    )
    return result.exit_code, result.output


def test_a_run_file_is_simulated(tmp_path: Path) -> None:
    status, output = invoke(tmp_path, "--nodes", "2", "--kill", "2@10", "--flops", "1e11")
    assert status == 0, output
    assert "1 by snapshot" in output
    assert "10 (each node simulated)" in output


def test_muon_and_adapters_are_simulated(tmp_path: Path) -> None:
    def step(training: str) -> tuple[float, str]:
        """Return the seconds of a step, and the bytes on all links."""
        run = RUN.replace("batch = 8", f"batch = 8\n{training}")
        options = ("--nodes", "2", "--flops", "1e9", "--vocabulary", "512")
        status, output = invoke(tmp_path, *options, run=run)
        assert status == 0, output
        seconds = re.search(r"seconds +│ +([\d.]+)", output)
        size = re.search(r"on all links +│ +(.*B)", output)
        assert seconds and size
        return float(seconds[1]), size[1]

    adamw = step('optimizer = "adamw"')
    assert step("")[0] > adamw[0]  # Muon orthogonalizes
    assert step("[training.lora]\nrank = 2")[1] != adamw[1]  # adapters are averaged alone


def test_the_shape_of_the_model_to_begin_from_is_simulated(tmp_path: Path) -> None:
    run = RUN.replace('preset = "tiny"', f'from = "{tmp_path}/absent"')
    status, output = invoke(tmp_path, run=run)
    assert status != 0 and "there is no such folder" in output


def test_a_bad_kill_and_sites_without_links_are_refused(tmp_path: Path) -> None:
    status, output = invoke(tmp_path, "--kill", "9@10")
    assert status != 0 and "the swarm has no such stage or node" in output
    status, output = invoke(tmp_path, "--site", "Iowa", "--site", "Mars")
    assert status != 0 and "no link between" in output


def test_a_calibrated_swarm_can_be_run_to_its_end() -> None:
    swarm = check.swarm_of(check.CASES[0], VOCABULARY, Transport(0.001, 0.001), 2, timed)
    outcome = simulate_run(swarm, check.Churn())
    assert outcome.seconds == pytest.approx(check.STEPS * simulate_step(swarm).seconds)
    assert statistics.median([outcome.seconds_per_step]) > 0.8  # ten delays of 40 ms, twice

"""What a notice is good for, by the closed form; the figures are worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from planaria.lab.command import cli
from planaria.lab.emulation.links import Link
from planaria.lab.planning.handover import NOTICES, Handover, told

NEAR = Link("a", "b", 0.0, 1000.0)
BEST = ("exact", "weights", "part")


def handover(
    stage: int = 0, parameters: int = 10**9, step: float = 3.0, link: Link = NEAR
) -> Handover:
    return Handover(stage, 4 * parameters, 12 * parameters, step, link)


def test_seconds_are_those_of_the_formula() -> None:
    """A gigabit a second carries 4 GB in 32 s, and its headers in 1.15 s; no delay, no rounds. To
    hear of it, the step, to leave and to spare: 2 + 3 + 2 + 3 s."""
    one = handover()
    assert one.seconds(one.weights) == pytest.approx(10 + 32 * 1500 / 1448)
    assert one.seconds(one.state) == pytest.approx(10 + 96 * 1500 / 1448)
    far = handover(link=Link("a", "b", 50.0, 1000.0))
    rounds = 1 + math.log2(4e9 / 14_480 + 1)
    assert far.seconds(far.weights) == pytest.approx(
        one.seconds(one.weights) + 0.1 * rounds, rel=0.01
    )


def test_what_a_notice_is_good_for() -> None:
    small, middle, large = handover(1, 10**7), handover(2, 5 * 10**8), handover(3, 2 * 10**9)
    found = {n: [one.possible(n) for one in (small, middle, large)] for n in NOTICES}
    assert found == {
        120.0: ["exact", "exact", "weights"],
        30.0: ["exact", "weights", "part"],
        10.0: ["part", "part", "part"],
    }
    assert told([small, middle, large], 120.0) == (
        "exact: stages 1-2 (within 60 s); weights without moments: stage 3 (all takes 209 s)"
    )
    assert told([small, middle, large], 30.0) == (
        "exact: stage 1 (within 11 s); weights without moments: stage 2 (all takes 60 s); "
        "not all weights: stage 3 (they take 76 s)"
    )
    assert told([small, large], 300.0) == "exact: every stage (within 209 s)"
    assert told([small, handover(2, 10**7), large], 10.0).startswith(
        "not all weights: stages 1-3 ("
    )


@given(
    st.integers(1, 10**10),
    st.floats(0.0, 100.0),
    st.floats(0.0, 500.0),
    st.floats(1.0, 1e5),
    st.floats(0.0, 300.0),
    st.floats(1.0, 10.0),
)
def test_more_bandwidth_more_time_and_a_smaller_stage_are_never_worse(
    parameters: int, step: float, delay: float, mbps: float, notice: float, more: float
) -> None:
    one = handover(0, parameters, step, Link("a", "b", delay, mbps))
    rank = BEST.index(one.possible(notice))
    better = [
        (handover(0, parameters, step, Link("a", "b", delay, more * mbps)), notice),
        (handover(0, max(1, int(parameters / more)), step, Link("a", "b", delay, mbps)), notice),
        (handover(0, parameters, step / more, Link("a", "b", delay / more, mbps)), notice),
        (one, more * notice),
    ]
    assert all(BEST.index(of.possible(seconds)) <= rank for of, seconds in better)


def plan(tmp_path: Path, *arguments: str) -> str:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "small"\nvocabulary = 32000\n')
    command = ["plan", str(path), "--kind", "t4", "--policy", "snapshot", *arguments]
    result = CliRunner().invoke(cli.app, command, env={"COLUMNS": "220"})
    assert result.exit_code == 0, result.output
    return result.output


def test_a_plan_says_it(tmp_path: Path) -> None:
    said = plan(tmp_path, "--nodes", "3", "--mbps", "10000", "--delay", "1")
    assert "handover in 120 s" in said
    assert "exact: every stage (within " in said


def test_a_slow_uplink_counts(tmp_path: Path) -> None:
    def stages(*arguments: str) -> list[dict[str, Any]]:
        said = plan(tmp_path, "--site", "Iowa:2", "--site", "Oregon:2", *arguments, "--json")
        found: list[dict[str, Any]] = json.loads(said)["plan"]["handover"]
        return found

    slow = stages("--uplink", "10")
    for one in slow:
        assert one["state"]["bytes"] == 3 * one["weights"]["bytes"]
        assert one["state"]["seconds"] > one["state"]["bytes"] * 8 / 10e6
        assert "exact" not in one["possible"].values()
    assert any("exact" in one["possible"].values() for one in stages())

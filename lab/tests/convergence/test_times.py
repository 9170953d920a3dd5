"""Tests of CheckFree's Table 2 with measured figures: iterations times seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planaria_lab.convergence.study import StudyError, append_result
from planaria_lab.convergence.times import (
    RATES,
    ROWS,
    losses_per_iteration,
    read_live,
    read_runs,
    table,
    times,
)

STEPS = 100


def run(variant: str, late: int, losses: int) -> dict[str, object]:
    """Return a run whose loss falls by 0.01 per iteration, beginning `late` iterations late."""
    loss = [[i, i, 5 - 0.01 * max(0, i - late)] for i in range(0, STEPS + 1, 10)]
    rebuilds = [{"iteration": i, "stage": 1} for i in range(losses)]
    return {
        "key": f"{variant} {late}",
        "variant": variant,
        "seed": 0,
        "validation": loss,
        "rebuilds": rebuilds,
        "window": 1024,
        "share": 0.1,
    }


def live(stall: float = 5.0) -> dict[str, object]:
    figures = {"step_seconds": {"mean": 2.0}, "stall_seconds": {"median": stall}}
    return dict.fromkeys((*ROWS.values(), "plain"), figures)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs.jsonl"
    append_result(path, run("none", 0, 0))
    for variant in ROWS:
        for losses, rate in enumerate(RATES, 1):
            append_result(path, run(f"{variant}, {rate}", 20 * losses, 5 * losses))
    return path


def test_minutes_are_iterations_by_seconds_and_stalls(runs: Path) -> None:
    by_run = read_runs(runs)
    assert losses_per_iteration(by_run, "low") == pytest.approx(0.05)
    rows = times(by_run, live())
    assert rows["redundant"].more == (1.0, 1.0, 1.0)
    assert rows["checkfree"].more == pytest.approx((100 / 80, 100 / 60, 100 / 40))
    low, middle, high = rows["checkfree"].minutes
    assert low == pytest.approx(1000 * 100 / 80 * (2.0 + 0.05 * 3.0) / 60)
    assert low < middle < high
    assert rows["redundant"].minutes[0] == pytest.approx(1000 * (2.0 + 0.05 * 3.0) / 60)
    without = times(by_run, live(stall=1.0))["redundant"].minutes  # a stall below a step is free
    assert without == pytest.approx([1000 * 2.0 / 60] * 3)


def test_the_table_has_a_row_for_each(runs: Path) -> None:
    text = table(read_runs(runs), live())
    assert "| checkfree | 2.000 | 5.0 | x 1.25 | x 1.67 | x 2.50 | 44.8 |" in text
    assert "which take 33.3 minutes with no policy" in text
    assert "low 0.050, middle 0.100, high 0.150" in text


def test_missing_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="has no runs"):
        read_runs(tmp_path / "runs.jsonl")
    figures = tmp_path / "live.json"
    with pytest.raises(StudyError, match="make it with `planaria lab live`"):
        read_live(figures)
    figures.write_text(json.dumps({"policies": {"plain": {}}}))
    with pytest.raises(StudyError, match="lacks checkfree, checkfree"):
        read_live(figures)

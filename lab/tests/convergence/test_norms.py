from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from planaria.node.cli import app
from planaria_lab.convergence.norms import Norms, read, table
from planaria_lab.convergence.study import Study, load
from planaria_lab.origin import machine

STUDY = """
title = "norms"
seeds = [0, 1]
baseline = "none"
target = 30
[run]
steps = 10
[run.data]
path = "{data}"
[run.model]
stages = 3
layers = 3
[run.training]
batch = 4
[losses]
rate = 0.01
[[variants]]
name = "none"
losses = {{}}
[[variants]]
name = "other"
"""


@pytest.fixture
def path(data: Path, tmp_path: Path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(STUDY.format(data=data))
    return path


def test_a_run_is_measured_once_for_each_seed_and_machine(path: Path) -> None:
    for _ in range(2):
        result = CliRunner().invoke(app, ["lab", "norms", str(path), "--seeds", "1"])
        assert result.exit_code == 0, result.output
    (measured,) = read(path.with_name("norms.jsonl"))
    assert (measured.seed, measured.machine) == (0, machine("cpu"))
    ((*norms,),) = measured.squared
    assert len(norms) == len(measured.sizes) == 4
    assert all(norm > 0 for norm in norms)
    assert path.with_name("norms.md").read_text() == table(load(path), [measured])


def test_the_table_has_medians_and_shares(path: Path) -> None:
    study: Study = load(path)
    squared = [[9.0, 8.0, 2.0, 1.0], [9.0, 9.0, 3.0, 1.0], [9.0, 4.0, 4.0, 4.0]]
    line = table(
        study, [Norms(7, squared, [0.1, 0.2, 0.3, 0.4], "abacus", "2.13.0", "f00", 1)]
    ).splitlines()[-1]
    assert line == "| 7 | abacus | 3, 8 | 0.89 | 0.200, 0.300, 0.400 |"

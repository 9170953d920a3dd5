from __future__ import annotations

import json
from pathlib import Path

from planaria_lab.spare.endurance import endured, mean_stacks
from planaria_lab.spare.figures import ROWS, curves, figures


def test_the_papers_figures_are_drawn_from_rows_that_are_kept(tmp_path: Path) -> None:
    figures([200], trials=2, trails=1, deepest=3, seed=0, out=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / ROWS).read_text().splitlines()]
    figures_by_name = curves(rows)
    assert {path.stem for path in tmp_path.glob("*.png")} == figures_by_name.keys()
    _, failures = figures_by_name["figure-4"]
    assert failures[200, "closed form"][9] == endured(200, 9)
    assert abs(failures[200, "ours"][9] / failures[200, "the paper's Monte Carlo"][9] - 1) < 0.1
    _, stacks = figures_by_name["figure-5"]
    assert stacks[200, "replication"][12] == 12
    assert abs(stacks[200, "ours"][9] / mean_stacks(200, 9) - 1) < 0.1
    _, availability = figures_by_name["figure-7"]
    for line in ("closed form", "SPARe+CKPT", "Rep+CKPT"):
        assert 0 < availability[200, line][2] < availability[200, line][3] < 1, line
    _, events = figures_by_name["figure-8"]
    assert events[200, "SPARe+CKPT"].keys() == {2, 3}

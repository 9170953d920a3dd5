"""A live swarm under faults of a fixed seed: it trains on, and every sample counts once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

from typer.testing import CliRunner

from planaria_lab.chaos.command import RUN, app
from planaria_lab.chaos.schedule import Shape, schedule

SEED, MINUTES = 7, 0.5
SHAPE = Shape(
    2, 2, ("kill", "stop", "registry kill", "reset", "hang", "crawl", "slow disk"), rate=40.0
)


def test_a_sick_swarm_trains_on(data, tmp_path):
    run = tmp_path / "run.toml"
    run.write_text(f'{RUN}[data]\npath = "{data}"\n')
    arguments = ["--run", f"{run}", "--seed", f"{SEED}", "--minutes", f"{MINUTES}"]
    arguments += ["--stages", f"{SHAPE.stages}", "--replicas", f"{SHAPE.replicas}"]
    arguments += ["--rate", f"{SHAPE.rate}"]
    arguments += [word for kind in SHAPE.kinds for word in ("--kind", kind)]
    arguments += ["--out", f"{tmp_path / 'out'}", "--logs", f"{tmp_path / 'logs'}"]
    done = subprocess.run(
        [sys.executable, "-m", "planaria", "lab", "chaos", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads(
        (tmp_path / "out" / f"2x2-auto-seed-{SEED}.json").read_text()
    )
    planned = Counter(fault.kind for fault in schedule(SEED, MINUTES, SHAPE))
    assert outcome["faults"]["kill"] > 0
    assert Counter(outcome["faults"]) <= planned  # fewer on a busy machine
    assert outcome["audit"]["expected"] >= 8 * outcome["steps"] > 0
    assert "| kill | " in done.stdout

    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0
    assert f"2x2-auto-seed-{SEED}.json exists already" in again.output

    summed = CliRunner().invoke(app, ["report", str(tmp_path / "out")])
    assert summed.exit_code == 0, summed.output
    assert (tmp_path / "out" / "table.md").read_text().startswith("1 runs, ")

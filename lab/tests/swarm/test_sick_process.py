"""`planaria up` with a process that computes wrong values."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from planaria.node.launch.resolve import resolve
from planaria.node.local import swarm as local
from planaria.node.run_file import override
from planaria_lab.chaos.sick_node import run_sick, set_faults
from tests.swarm.small import small


async def test_planaria_up_ends_with_the_sentence_of_a_run_that_paused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`planaria up` runs real processes, one of which makes NaN from the start."""
    faults, out, terminal = tmp_path / "faults", tmp_path / "out", io.StringIO()
    set_faults(faults, {"nan": {}})
    command = local._Swarm._command

    def with_a_sick_one(swarm: local._Swarm, slot: str) -> list[str]:
        sick = ["--faults", str(faults)] if slot == "1.0" else []
        return [*sick, *command(swarm, slot)]

    monkeypatch.setattr(local._Swarm, "_command", with_a_sick_one)
    run = resolve(override(small(steps=1000, training__batch=4), data__path=str(data)))
    plan = local.SwarmPlan(run, out, None, "cpu", work=run_sick)
    ending = await local.up(plan, [], Console(file=terminal, width=300))
    summary = json.loads((out / "summary.json").read_text())
    why = "3 steps in a row were skipped, since the gradient of stage "
    assert ending.status == 1
    assert summary["skipped_steps"] == 3
    assert summary["stopped"].startswith(f"paused: {why}")
    assert f"error: paused: {why}" in terminal.getvalue()
    assert '"kind": "not finite"' in (out / "events.jsonl").read_text()

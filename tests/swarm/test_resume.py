"""Tests of runs that were ended as a whole and are resumed, also with other settings."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planaria.bootstrap.client import RegistryClient
from planaria.node.cli import app
from planaria.node.data.corpus import Corpus
from planaria.node.report.ledger import audit
from planaria.node.run_file import load, override
from planaria.node.state.saves import find_saves
from tests.reference import Reference
from tests.swarm.lines import Lines
from tests.swarm.small import small
from tests.swarm.test_supervised import DEADLINE, ByHand

RUN = small(2, steps=32, model__layers=4, saves__every=4, saves__milestones=8)
EQUAL = 1e-5
"""Relative difference of equal losses: squared norms are summed over stages, and gradients over
nodes, which rounds differently."""


def losses(lines: Lines, pattern: str) -> dict[int, list[float]]:
    """Return step -> the losses of each time that it was committed."""
    by_step: dict[int, list[float]] = {}
    for line in lines.of(pattern):
        if "step" in line:
            by_step.setdefault(line["step"], []).append(line["loss"])
    return by_step


def test_it_goes_on_with_other_settings_as_one_process_would(up, data, tmp_path):
    """The run goes from 2 stages to 4; then a copy goes from an earlier step to 1 stage and two
    replicas, another batch and rate, and more steps. A node's saves, folders and data are moved."""
    saves, first = tmp_path / "saves", tmp_path / "first"
    at_once = ["--seats", "1"]  # nodes told to end don't wait for an heir
    swarm = up(RUN, "--save-dir", str(saves), *at_once, at=shutil.copytree(data, first))
    swarm.wait_until("step 8", lambda: swarm.committed() >= 8)
    swarm.end(signal.SIGTERM)
    (saves / "1.0").rename(saves / "1.5")

    moved = tmp_path / "mnt"
    moved.mkdir()
    saves.rename(moved / "saves")
    out = swarm.out.rename(moved / swarm.out.name)
    first.rename(moved / "data")
    elsewhere = ["--data", str(moved / "data")]
    swarm = up(out, "--stages", "4", *elsewhere, *at_once)
    swarm.wait_until("step 24", lambda: swarm.committed() >= 16)
    swarm.end(signal.SIGTERM)

    changes = ["training.batch=6", "training.microbatch=3", "training.lr=4e-4", "training.rewarm=5"]
    settings = [word for change in changes for word in ("--set", change)]
    settings += ["--at", "8", "--stages", "1", "--replicas", "2", "--steps", "40"]
    listed = CliRunner().invoke(app, ["saves", str(out), str(moved / "saves"), "--verify"])
    assert listed.exit_code == 0, listed.output
    assert re.search(rf"│ {RUN.name}-\w+ │ +8 │ all ", listed.output)
    before, copy = (out / "run.toml").read_text(), tmp_path / "copy"
    swarm = up(out, *settings, *elsewhere, "--out", str(copy))
    swarm.out, swarm.lines = copy, Lines(copy)
    status, output = swarm.finish()
    assert status == 0, output
    assert (out / "run.toml").read_text() == before
    assert not (out / "saves").exists() and (copy / "saves").exists()
    out = copy
    assert "  model.stages = 1 (was 4)\n  steps = 40 (was 32)\n" in output
    run = load(out / "run.toml")
    assert run.changed_at == 8
    went = swarm.events("resuming")
    assert len({(event["step"], event["reason"]) for event in went}) == 2
    assert all(event["exact"] and event["step"] >= 4 for event in went)
    summary = swarm.summary()
    expected = 4 * run.changed_at + 6 * (40 - run.changed_at)
    assert summary["audit"] == {"expected": expected, "duplicates": 0, "missing": 0, "extra": 0}
    assert {row["method"] for row in summary["rebuilds"]} <= {"save", "replica"}

    golden = Reference(RUN, Corpus.open(data))
    seen = losses(Lines(out), "ledger.jsonl")
    assert list(seen) == list(range(1, 41))
    for step, loss in seen.items():
        if step == run.changed_at + 1:
            golden.change(override(run, model__stages=2))
        assert loss == [pytest.approx(golden.step(), rel=EQUAL)], step
    assert summary["loss"]["validation"] == pytest.approx(golden.validate(), rel=EQUAL)


@pytest.fixture
def by_hand(data: Path, tmp_path: Path):
    place = ByHand(tmp_path, override(RUN, data__path=str(data)))
    yield place
    place.end()


def soon_give_up() -> None:
    """Let a node in this process look for its run for 3 s, not 30."""
    RegistryClient.describe.__defaults__ = (3.0,)


def test_on_machines_of_ones_own_saves_are_written_anew_for_another_run_file(
    by_hand, data, tmp_path
):
    """Steps after the newest complete save are trained again, to the same losses."""
    disks = [tmp_path / f"disk-{stage}" for stage in range(3)]
    for stage, disk in enumerate(disks):
        by_hand.start_node(f"node-{stage}", stage, "--restart", "no", "--save-dir", str(disk))
    by_hand.until(lambda: len(by_hand.events("saved")) >= 9)
    by_hand.end()
    saved = find_saves(*disks)
    newest = min(max(s.state.id.step for s in saved if s.state.id.stage == n) for n in range(3))
    for save in saved:
        if save.state.id.step >= newest:
            save.path.unlink()

    run = override(RUN, model__stages=1, data__path=str(data))
    after = ["--after", str(tmp_path / "registry.journal")]
    by_hand.start_registry("another", run, *after)
    new = tmp_path / "new"
    asked = ["regroup", *map(str, disks), "--join", by_hand.address, "--out", str(new)]
    written = CliRunner().invoke(app, asked)
    assert written.exit_code == 0, written.output
    assert f"is in {new} for {run.name}-" in written.output
    of_before = ["--restart", "no", "--save-dir", str(disks[1])]
    refused = by_hand.start_node("wrong", 1, *of_before, before=soon_give_up)
    for stage in range(2):
        by_hand.start_node(f"new-{stage}", stage, "--restart", "no", "--save-dir", str(new))
    by_hand.until(lambda: by_hand.events("finished"))

    (resuming,) = by_hand.events("resuming")
    assert resuming["exact"]
    assert resuming["step"] == newest - RUN.saves.every
    seen = losses(by_hand.lines, "ledger-*.jsonl")
    assert seen.keys() == set(range(1, RUN.steps + 1))
    for step, committed in seen.items():
        assert committed == pytest.approx([committed[0]] * len(committed), rel=EQUAL), step
    assert len(seen[newest]) == 2
    assert audit(tmp_path).exact
    assert refused.wait(DEADLINE) == 75, "it keeps to the run of its saves"
    assert "planaria regroup" in (tmp_path / "wrong.log").read_text()

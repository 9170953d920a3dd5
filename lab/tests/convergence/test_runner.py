"""Tests of where a study's runs are computed, and of single runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
from typer.testing import CliRunner

import planaria.node.data.executors
from planaria.node.cli import app
from planaria.node.data.corpus import CorpusError
from planaria_lab.convergence import runner
from planaria_lab.convergence.runner import resolved, run_all_over_dask, run_one
from planaria_lab.convergence.study import RESULTS, Job, Study, jobs, load, read_results
from planaria_lab.convergence.training import TrainingSwarm
from planaria_lab.origin import origin


def todo(data: Path) -> list[tuple[str, Job]]:
    study = Study.model_validate(
        {
            "title": "Two seeds",
            "seeds": [0, 1],
            "run": {
                "steps": 4,
                "data": {"path": str(data)},
                "model": {"preset": "tiny", "dim": 32, "context": 32, "stages": 3, "layers": 3},
                "training": {"batch": 2, "microbatch": 2, "warmup": 2, "validate_every": 2},
            },
            "losses": {"at": ["2@2"]},
            "baseline": "relearned",
            "target": 2,
            "variants": [{"name": "relearned"}],
        }
    )
    return resolved(jobs(study))


def test_a_dask_cluster_has_the_same_results(data: Path, tmp_path: Path) -> None:
    own = tmp_path / "data"
    shutil.copytree(data, own)
    wanted, results, progress = todo(own), tmp_path / "runs.jsonl", []
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        address = cluster.scheduler_address
        run_all_over_dask(wanted, results, "cpu", address, lambda *done: progress.append(done))
        kept = read_results(results)
        assert kept.keys() == {key for key, _ in wanted}
        for key, job in wanted:
            alone = run_one(key, job, "cpu")
            for volatile in ("seconds", "at", "rebuilds"):  # "rebuilds" has JSON's lists
                del alone[volatile], kept[key][volatile]
            assert {**alone, "validation": [list(point) for point in alone["validation"]]} == kept[
                key
            ]
        assert progress == [(4, 1), (8, 2)]
        shutil.rmtree(own)
        with pytest.raises(CorpusError, match=str(own)):
            run_all_over_dask(wanted, results, "cpu", address, lambda *done: None)
    assert not list(tmp_path.glob("*.partial"))


def test_a_cluster_that_is_not_there_is_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planaria.node.data.executors, "WORKERS_COME", 0.5)
    nowhere = "tcp://127.0.0.1:9"
    with pytest.raises(CorpusError, match=f"no Dask scheduler answers at {nowhere}"):
        run_all_over_dask(todo(data), tmp_path / "runs.jsonl", "cpu", nowhere, lambda *done: None)


@pytest.mark.parametrize(("machine", "todo"), [({}, 0), ({"machine": "abacus, 2 cores"}, 1)])
def test_a_run_of_another_study_is_taken_over_if_this_processor_did_it(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: dict[str, str],
    todo: int,
) -> None:
    path = tmp_path / "mine/study.toml"
    (tmp_path / "other").mkdir()
    path.parent.mkdir()
    path.write_text(
        'title = "Mine"\nseeds = [0]\nbaseline = "none"\ntarget = 1\nvariants = [{name = "none"}]\n'
        f'[run]\nsteps = 2\ndata.path = "{data}"\nmodel = {{stages = 3, layers = 3}}\n'
    )
    ((key, _),) = resolved(jobs(load(path)))
    line = {"key": key, "variant": "its name there", **origin(), **machine}
    (tmp_path / "other" / RESULTS).write_text(json.dumps(line) + "\n")
    asked: list[str] = []
    monkeypatch.setattr(runner, "run_all", lambda jobs, *_: asked.extend(key for key, _ in jobs))
    result = CliRunner().invoke(app, ["lab", "run", str(path)])
    assert result.exit_code == 0, result.output
    assert asked == [key] * todo
    taken = read_results(path.with_name(RESULTS))
    assert [line["variant"] for line in taken.values()] == ["none"] * (1 - todo)


def test_data_of_a_study_without_a_text_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(
        'title = "Mine"\nseeds = [0]\nbaseline = "none"\ntarget = 1\nvariants = [{name = "none"}]\n'
        f'text = ""\n[run]\nsteps = 2\ndata.path = "{tmp_path / "absent"}"\n'
    )
    result = CliRunner().invoke(app, ["lab", "run", str(path)])
    assert result.exit_code == 1
    assert "and the study's text is empty" in " ".join(result.output.split())


def relearned(data: Path, **training: object) -> tuple[str, Job]:
    """Return a run with one loss, after iteration 6, which keeps the three steps before it."""
    study = Study.model_validate(
        {
            "title": "One loss",
            "seeds": [0],
            "run": {
                "steps": 9,
                "data": {"path": str(data)},
                "model": {"preset": "tiny", "dim": 32, "context": 32, "stages": 3, "layers": 3},
                "training": {"batch": 4, "microbatch": 2, "warmup": 2, **training},
                "recovery": {"relearn": {"steps": 3}},
            },
            "losses": {"at": ["2@6"]},
            "baseline": "relearned",
            "target": 2,
            "variants": [{"name": "relearned"}],
        }
    )
    ((key, job),) = resolved(jobs(study))
    return key, job


def test_boundary_tensors_are_kept_in_the_steps_before_a_loss_only(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[TrainingSwarm] = []

    def make(*args: Any) -> TrainingSwarm:
        made.append(TrainingSwarm(*args))
        return made[0]

    class AlwaysKeeping(TrainingSwarm):
        def step(self, loss_soon: bool = True) -> float:
            return super().step()

    key, job = relearned(data)
    kept: list[int] = []
    monkeypatch.setattr(runner, "TrainingSwarm", make)
    few = run_one(key, job, "cpu", trained=lambda: kept.append(len(made[0].boundary)))
    assert kept == [0, 0, 0, 1, 2, 3, 0, 0, 0]
    monkeypatch.setattr(runner, "TrainingSwarm", AlwaysKeeping)
    assert few["rebuilds"][0]["relearned"]["updates"] > 0
    assert {**few, "seconds": 0, "at": 0} == {**run_one(key, job, "cpu"), "seconds": 0, "at": 0}


def test_a_run_recomputes_and_computes_in_bf16_as_a_node_does(data: Path) -> None:
    losses = {}
    for name, training in {
        "plain": {},
        "recomputed": {"recompute": True},
        "bf16": {"precision": "bf16"},
    }.items():
        key, job = relearned(data, **training)
        losses[name] = run_one(key, job, "cpu")["validation"][-1][2]
    assert losses["recomputed"] == losses["plain"]
    assert losses["bf16"] != losses["plain"]
    assert losses["bf16"] == pytest.approx(losses["plain"], rel=1e-2)


def test_a_run_compiles_what_a_node_does(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compiling(passes: Any) -> Any:
        compiled.append(getattr(passes, "__name__", type(passes).__name__))
        return passes

    monkeypatch.setattr(torch, "compile", compiling)
    key, job = relearned(data, compile=True)
    run_one(key, job, "cpu")
    assert compiled == ["embed", "loss", *["LlamaBody"] * 3]

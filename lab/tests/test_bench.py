"""Tests of benches: each writes its figures as rows, and models are timed as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from planaria.node.data.corpus import Corpus
from planaria_lab import bench
from planaria_lab.bench import paper
from planaria_lab.bench.rows import keep
from planaria_lab.convergence.training import TrainingSwarm
from planaria_lab.origin import lacking, machine

BENCH = Path(bench.__file__).parent


def test_a_row_is_added_where_out_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUT", raising=False)
    keep("link", ratio=0.8)
    monkeypatch.setenv("OUT", str(tmp_path / "mine"))
    keep("link", ratio=0.9)
    keep("link", ratio=1.0)
    rows = {
        path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in (tmp_path / "out/bench/link.jsonl", tmp_path / "mine/link.jsonl")
    }
    assert [row["ratio"] for row in rows["bench"]] == [0.8]
    assert [row["ratio"] for row in rows["mine"]] == [0.9, 1.0]
    assert rows["mine"][0]["machine"] == machine("cpu")
    assert not lacking(rows["mine"][0])


def test_every_measurement_keeps_its_figures() -> None:
    titles = (BENCH / "__main__.py").read_text(encoding="utf-8")
    named = [path.stem for path in BENCH.glob("*.py") if f"{path.stem}.main" in titles]
    assert named
    for name in named:
        text = (BENCH / f"{name}.py").read_text(encoding="utf-8")
        assert re.search(rf'keep\(\s*"{name}",', text), name


def test_a_model_is_timed_by_stage_without_changing_what_it_learns(data: Path) -> None:
    (changes, lost), corpus = paper.MODELS["124M"], Corpus.open(data)
    run = paper.run_of({**changes, "model__preset": "tiny"})
    figures, losses = paper.measure(TrainingSwarm(run, corpus), lost)
    assert [figure.stage for figure in figures] == [0, 1, 2, 3, 4]
    for figure in figures:
        assert min(figure.forward, figure.backward, figure.update, figure.rss) > 0
    untimed = TrainingSwarm(run, corpus)
    expected = [untimed.step()]
    untimed.lose([2])
    assert losses == [*expected, untimed.step()]
    assert "| 4 | 65,664 |" in paper.table("tiny", figures, losses)


@pytest.mark.parametrize("model", paper.MODELS)
def test_the_models_that_are_timed_have_their_published_width(model: str) -> None:
    run = paper.run_of(paper.MODELS[model][0])
    config = run.config_for(2048)
    assert (config.vocabulary, config.hidden) == (32_000, 4 * config.dim)
    assert (run.training.batch, run.policy.guesses) in {(4, True), (1, False)}

"""What trackers of experiments keep of a run. Trackers that hang or fail hold no node up."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from planaria.node.daemon import DaemonMachine
from planaria.node.model.learning_rate import rate_of
from planaria.node.node import Node, NodePlace, SeatRecord
from planaria.node.report import experiment as experiments
from planaria.node.report.experiment import (
    ExperimentPipe,
    Opening,
    TrackedRun,
    parameters,
    track_lines,
)
from planaria.node.run_file import RunFile, dumps, override
from planaria.node.wire import stage_pb2 as pb
from tests.node.report.lines import whole

RUN = override(
    RunFile(),
    steps=40,
    model__stages=2,
    model__vocabulary=300,
    training__lr=0.5,
    training__warmup=10,
    training__prompts=["It was", "No"],
)
HANGS = [sys.executable, "-c", "import time; time.sleep(600)"]
FAILS = ["sh", "-c", "echo no such account; exit 3"]  # sooner than Python starts on a busy machine


def commit(step: int, time: float, loss: float | None = 3.0) -> dict[str, Any]:
    empty: dict[str, Any] = {"view": 1, "attempt": step, "epoch": 0, "microbatches": []}
    return {
        **{"step": step, "time": time, "loss": loss, "tokens": 1000, "gradient_norm": 0.25},
        **{"samples": 0, "samples_hash": "", "skipped": False, "seconds": 0.5, **empty},
    }


def event(time: float, kind: str, node: str = "box-aa/0", **fields: Any) -> dict[str, Any]:
    return whole({"time": time, "node": node, "kind": kind, **fields})


LINES = [
    commit(1, 100.0, loss=6.0),
    commit(1, 100.1, loss=6.0),  # as another node of stage 0 has it
    event(100.1, "committed", step=1, loss=6.0),
    commit(2, 102.0, loss=5.0),
    event(103.0, "lost", node="box-bb/1", stage=1, reason="reset"),
    event(104.0, "lost", node="box-bb/1", stage=1, reason="reset"),
    event(
        *(105.0, "rebuilt", "box-cc/1"),
        **{"stage": 1, "method": "checkfree", "step": 2, "sources": [], "bytes": 8},
    ),
    event(106.0, "validated", step=2, loss=5.5),
    event(107.0, "sampled", step=2, prompt="No", text=" \x1b[2J<b>more</b>"),
    event(108.0, "a kind of tomorrow's", step=2),
    commit(3, 110.0, loss=None),
    event(111.0, "rolled back", step=1, reason="all are lost", stages=[], lineage=1),
    commit(2, 112.0, loss=4.5),
    event(113.0, "finished", step=2, reason="all", validation=5.0),
    event(114.0, "lost", node="box-bb/1", stage=1, reason="it leaves, as all do"),
]


class Kept:
    """An experiment that notes its calls for the test."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.closed = False

    def figures(self, step: int, figures: Mapping[str, float], time: float) -> None:
        assert all(map(math.isfinite, figures.values()))
        self.calls.append((step, dict(figures), time))

    def text(self, about: str, step: int, text: str, time: float) -> None:
        self.calls.append((about, step, text, time))

    def close(self) -> None:
        self.closed = True


def test_steps_rates_losses_recoveries_and_samples_are_told_once() -> None:
    kept = Kept()
    telling = TrackedRun(kept, RUN)
    for line in LINES:
        telling.hear(line)
    rates = {"learning_rate": 0.05, "seconds_a_step": 0.5, "tokens_per_second": 2000.0}
    first, second, lost, count, rebuilt, validated, sample, third, back, again = kept.calls
    assert first == (1, {"loss/training": 6.0, "gradient_norm": 0.25, **rates}, 100.0)
    assert (second[1]["learning_rate"], second[1]["seconds_a_step"]) == (0.1, 2.0)
    assert second[1]["tokens_per_second"] == 500.0
    assert lost[:2] == ("recovery", 2) and "the link to box-bb/1" in lost[2]
    assert count == (2, {"rebuilds": 1.0}, 105.0)
    assert rebuilt[:2] == ("recovery", 2) and "rebuilt: stage 1 by checkfree" in rebuilt[2]
    assert validated == (2, {"loss/validation": 5.5}, 106.0)
    assert sample[:2] == ("samples/1", 2) and "\\x1b[2J<b>more" in sample[2]
    assert third[0] == 3 and "loss/training" not in third[1]
    assert back[:2] == ("recovery", 1)
    assert (again[0], again[1]["loss/training"]) == (2, 4.5)


def test_a_changed_rate_is_told_from_its_step_on() -> None:
    kept = Kept()
    telling = TrackedRun(kept, RUN)
    telling.hear(commit(20, 100.0))
    changed = override(RUN, training__lr=0.25, training__schedule="constant")
    telling.hear({"run_file": dumps(changed)})
    telling.hear(commit(21, 101.0))
    before, after = (figures["learning_rate"] for _, figures, _ in kept.calls)
    assert (before, after) == (rate_of(20, RUN), 0.25)


def test_the_page_has_a_row_for_all_that_is_told() -> None:
    kept, page = Kept(), (Path(__file__).parents[3] / "docs" / "watch.md").read_text()
    telling = TrackedRun(kept, RUN)
    for line in LINES:
        telling.hear(line)
    names = {about for item in kept.calls for about in ([item[0]] if len(item) == 4 else item[1])}
    assert [about for about in names if f"`{about.replace('/1', '/N')}`" not in page] == []


def test_the_run_file_is_one_table_of_parameters() -> None:
    table = parameters(dumps(RUN))
    assert (table["steps"], table["training.lr"], table["model.stages"]) == (40, 0.5, 2)
    assert table["training.prompts"] == "['It was', 'No']"


def opening(kind: str, folder: Path) -> Opening:
    return Opening(kind, "box", "run-1", dumps(RUN), str(folder))


def given(kind: str, folder: Path) -> Iterator[bytes]:
    for line in (opening(kind, folder)._asdict(), *LINES):
        yield json.dumps(line).encode() + b"\n"


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    why = "in the extra `dev`: make .venv/installed-dev"
    pytest.importorskip("tensorboardX", reason=why)
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason=why
    )
    track_lines(given("tensorboard", tmp_path))
    accumulator = reading.EventAccumulator(str(tmp_path / "tensorboard" / "box"))
    accumulator.Reload()
    losses = [(at.step, at.value, at.wall_time) for at in accumulator.Scalars("loss/training")]
    assert losses == [(1, 6.0, 100.0), (2, 5.0, 102.0), (2, 4.5, 112.0)]
    assert [(at.step, at.value) for at in accumulator.Scalars("loss/validation")] == [(2, 5.5)]
    assert [(at.step, at.value) for at in accumulator.Scalars("rebuilds")] == [(2, 1.0)]

    def texts(about: str) -> list[str]:
        tensors = accumulator.Tensors(f"{about}/text_summary")
        return [tensor.tensor_proto.string_val[0].decode() for tensor in tensors]

    assert ["the link" in text for text in texts("recovery")] == [True, False, False]
    (sample,) = texts("samples/1")
    assert "<b>more</b>" in sample and "\x1b" not in sample
    assert "lr = 0.5" in texts("run")[0]
    assert "_hparams_/experiment" in accumulator.summary_metadata


def test_wandb_keeps_it_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="too large to test with: pip install 'planaria[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    track_lines(given("wandb", tmp_path))
    (kept,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = kept.read_bytes()
    for name in (b"loss/training", b"loss/validation", b"rebuilds", b"training.lr"):
        assert name in content


def test_mlflow_keeps_it_in_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip(
        "mlflow", reason="too large to test with: pip install 'planaria[mlflow]'"
    )
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track_lines(given("mlflow", tmp_path))
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    known = client.get_experiment_by_name("planaria")
    (run,) = client.search_runs([known.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["training.lr"] == "0.5"
    losses = client.get_metric_history(run.info.run_id, "loss/training")
    assert sorted((at.step, at.value) for at in losses) == [(1, 6.0), (2, 4.5), (2, 5.0)]
    assert "the link to box-bb/1" in next(tmp_path.rglob("recovery.md")).read_text()


def test_who_tells_a_tracker_that_hangs_goes_on_and_it_is_killed_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments, "LAST_WORDS", 0.1)
    monkeypatch.setattr("planaria.node.report.line_file.LAST_WRITES", 0.1)
    monkeypatch.setattr("planaria.node.report.line_file.STALLED", 0.0)
    pipe = ExperimentPipe(opening("wandb", tmp_path), HANGS)
    while pipe._process is None:
        pipe.tell(commit(1, 1.0))
    for step in range(40_000):
        pipe.tell(commit(step, float(step)))
    assert pipe.waiting.bytes <= experiments.MOST_UNREAD + 1000
    assert pipe.waiting.dropped > 0
    assert "its process has accepted nothing" in pipe.trouble
    pipe.close()
    assert pipe._process is not None and pipe._process.returncode == -9


def test_a_tracker_that_fails_is_said_where_its_log_is_and_not_started_again(
    tmp_path: Path,
) -> None:
    pipe = ExperimentPipe(opening("wandb", tmp_path), FAILS)
    while not pipe.trouble:
        pipe.tell(commit(1, 1.0))
    first = pipe._process
    log = tmp_path / "wandb-box.log"
    assert pipe.trouble == f"can't write {tmp_path / 'wandb'}: its process has ended, see {log}"
    pipe.tell(commit(2, 2.0))
    pipe.close()
    assert pipe._process is first
    assert log.read_text() == "no such account\n"


def test_a_node_of_any_stage_knows_what_was_committed() -> None:
    records: list[Mapping[str, Any]] = []
    machine = DaemonMachine.__new__(DaemonMachine)
    pipe = SimpleNamespace(tell=records.append)
    machine._place, machine._ledgers = cast(NodePlace, SimpleNamespace(experiment=pipe)), {}
    node = SimpleNamespace(node="box-aa", machine=machine, committed=lambda step: None)
    record = SeatRecord(cast(Node[DaemonMachine], node), "2")
    record.committed(pb.Commit(step=0))
    record.committed(pb.Commit(step=7, loss=3.5, tokens=64, gradient_norm=0.5, seconds=0.25))
    kept = Kept()
    for line in records:
        TrackedRun(kept, RUN).hear(line)
    ((step, figures, _),) = kept.calls
    assert (step, figures["loss/training"], figures["tokens_per_second"]) == (7, 3.5, 256.0)

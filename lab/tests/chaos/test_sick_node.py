"""Each fault of a sick node, in the product's own classes."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planaria.node.machine.compute import ComputeThread, kind_of
from planaria.node.model.shape import model_config
from planaria.node.report.event_log import EventLog
from planaria.node.report.events import SwarmEnding
from planaria.node.run_file import ModelSection, RunFile, WireSection
from planaria.node.stage.initial import InitialStages
from planaria.node.stage.torch_stage import TorchStage
from planaria.node.transaction.attempt import Visit
from planaria.node.transaction.effects import Ballot
from planaria.node.transaction.routing import Route
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.tensors import decode, encode
from planaria_lab.chaos import sick_node
from planaria_lab.chaos.sick_node import KINDS, Faults, arm, set_faults

SECTION = ModelSection(dim=8, heads=2, stages=2, layers=2, context=4, hidden=8, vocabulary=16)
RUN = RunFile(model=SECTION, wire=WireSection(activations="none", gradients="none"))
BEGAN = Ballot(1, 1)
WRITER = """
import sys
from functools import partial
from pathlib import Path
from planaria_lab.chaos.sick_node import Faults

faults, target = Faults(Path(sys.argv[1])), Path(sys.argv[2]).open("w")
for line in sys.stdin:
    faults.active("full disk")
    try:
        target.write(line)
        target.flush()
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that this process obeys during the test."""
    file = tmp_path / "faults.json"
    arm(Faults(file), monkeypatch.setattr)
    return file


def stage() -> TorchStage:
    return TorchStage(1, InitialStages(RUN, model_config(SECTION, 16)), torch.device("cpu"))


def forward(trained: TorchStage) -> torch.Tensor:
    """Return the tensor that the stage sends for a microbatch [2, 4, 8] to the next stage."""
    trained.work.begin(BEGAN, pb.Begin(step=1))
    visit = Visit(3, 1, Route(("0.0", "1.0", "2.0", "0.0"), (0, 1, 2, 0)))
    descriptors, payload = encode([torch.ones(2, 4, 8)], "none")
    frame = Frame("activation", BEGAN, {"microbatch": 3, "position": 1}, descriptors, payload)
    done = trained.work.forward(BEGAN, visit, "0.0", frame)
    assert done is not None
    assert done.frame is not None
    (tensor,) = decode(done.frame.descriptors, done.frame.payload)
    return tensor


def test_without_a_file_a_node_is_well(control):
    assert forward(stage()).shape == (2, 4, 8)
    assert torch.isfinite(forward(stage())).all()


def test_a_fault_lasts_until_it_is_healed_or_has_occurred_so_often(tmp_path):
    file = tmp_path / "faults.json"
    faults = Faults(file)
    assert faults.take("nan") is None
    set_faults(file, {"nan": {"times": 2, "of": "gradient"}, "crawl": {}})
    assert faults.take("nan", "activation") is None
    taken = [faults.take("nan", "gradient") is not None for _ in range(3)]
    assert taken == [True, True, False]
    assert faults.active("crawl") == {"factor": 10.0}
    set_faults(file, {"nan": {}})
    assert faults.active("crawl") is None
    assert all(faults.take("nan", "gradient") is not None for _ in range(3))
    set_faults(file, {})
    assert not any(faults.active(kind) for kind in KINDS)


@pytest.mark.parametrize("wrong", [{"fever": {}}, {"crawl": {"seconds": 1.0}}])
def test_what_is_no_fault_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="is an unknown fault: choose from "):
        set_faults(tmp_path / "faults.json", wrong)


async def test_a_hung_thread_does_nothing_until_it_is_healed(control, monkeypatch):
    """A posted task keeps its kind, so that the node's watch can name it."""
    posted: list[str] = []
    post = ComputeThread.post

    def noting(thread: ComputeThread, work: Any, *arguments: Any, **named: Any) -> None:
        posted.append(kind_of(work))
        post(thread, work, *arguments, **named)

    monkeypatch.setattr(ComputeThread, "post", noting)
    arm(Faults(control), monkeypatch.setattr)
    thread = ComputeThread("compute", asyncio.get_running_loop())
    set_faults(control, {"hang": {}})
    waiting = thread.run(partial(str, "done"))
    done, _ = await asyncio.wait([waiting], timeout=0.1)
    assert not done
    assert posted == ["str"]  # from the fault's wrapper to the wrapped function
    set_faults(control, {})
    assert await waiting == "done"
    thread.stop()


async def test_a_crawling_thread_takes_so_many_times_as_long(control, monkeypatch):
    slept: list[float] = []
    clock = iter([100.0, 103.0])
    monkeypatch.setattr(
        sick_node, "time", SimpleNamespace(sleep=slept.append, perf_counter=lambda: next(clock))
    )
    thread = ComputeThread("compute", asyncio.get_running_loop())
    set_faults(control, {"crawl": {"factor": 5.0}})
    assert await thread.run(lambda: "done") == "done"
    assert slept == [12.0]
    thread.stop()


def test_numbers_that_go_out_are_wrong(control):
    trained = stage()
    set_faults(control, {"nan": {"times": 1, "of": "activation"}})
    assert torch.isfinite(forward(trained)).logical_not().sum() == 1
    assert torch.isfinite(forward(trained)).all()
    set_faults(control, {"nan": {"of": "gradient"}})
    assert torch.isfinite(forward(trained)).all()
    set_faults(control, {"wrong shape": {}})
    assert forward(trained).shape == (2, 4, 7)
    set_faults(control, {"wrong dtype": {}})
    assert forward(trained).dtype == torch.int32


def test_only_the_reported_norm_is_wild(control):
    trained = stage()
    set_faults(control, {"wild norm": {"value": -1e30, "times": 1}})
    assert [trained.reduced(), trained.reduced()] == [-1e30, 0.0]


async def test_one_weight_flips_once(control):
    trained = stage()
    before = trained.digest()
    thread = ComputeThread("compute", asyncio.get_running_loop())
    first = trained.tensors["weights"].clone()
    set_faults(control, {"flipped weight": {}})
    assert await thread.run(trained.digest) != before
    await thread.run(trained.digest)
    assert (trained.tensors["weights"] != first).sum() == 1
    thread.stop()


def test_a_slow_disk_takes_its_time(control, monkeypatch, tmp_path):
    slept: list[float] = []
    monkeypatch.setattr(sick_node, "time", SimpleNamespace(sleep=slept.append))
    log = EventLog(tmp_path, "1.0")
    set_faults(control, {"slow disk": {"seconds": 2.0}})
    log.write(SwarmEnding())
    set_faults(control, {})
    log.write(SwarmEnding())
    log.close()
    assert slept == [2.0]
    assert len((tmp_path / "events-1.0.jsonl").read_text().splitlines()) == 2


def test_a_stalled_disk_takes_nothing_until_it_is_healed(control, monkeypatch, tmp_path):
    waited = itertools.count()

    def sleep(_: float) -> None:
        if next(waited) == 3:
            set_faults(control, {})

    monkeypatch.setattr(sick_node, "time", SimpleNamespace(sleep=sleep))
    log = EventLog(tmp_path, "1.0")
    set_faults(control, {"stalled disk": {}})
    log.write(SwarmEnding())
    log.close()
    assert next(waited) == 4
    assert len((tmp_path / "events-1.0.jsonl").read_text().splitlines()) == 1


def test_a_full_disk_refuses_writes_until_there_is_room(tmp_path):
    """The writer is a process of its own, since the limit holds for a whole process."""
    file = tmp_path / "faults"
    command = [sys.executable, "-c", WRITER, str(file), str(tmp_path / "out")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        lines = []
        for wrong in ({}, {"full disk": {}}, {}):
            set_faults(file, wrong)
            writer.stdin.write("a line\n")
            writer.stdin.flush()
            lines.append(writer.stdout.readline().strip())
        writer.stdin.close()
    assert lines == ["written", "File too large", "written"]

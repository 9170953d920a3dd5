"""Tests of a swarm in one process on the device that DEVICE names, against the CPU.

test_any_device.py runs them in a separate process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from planaria.node.data.corpus import Corpus
from planaria.node.run_file import from_fields
from planaria_lab.convergence.partial import PartialRun, Progress
from planaria_lab.convergence.training import Ablation, TrainingSwarm
from tests.node.stage.on_other_device import CPU, EMULATED, FAR, OTHER, the_same_attention

__all__ = ["the_same_attention"]
SHAPE = {"preset": "tiny", "dim": 16, "heads": 2, "context": 8, "stages": 3, "layers": 3}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "checkpoints": ({"recovery": {"policy": "checkpoint"}}, {}),
    "averaged": ({"wire": {"averaging": "int8"}}, {"replicas": 2}),
    "a share is lost": ({"recovery": {"policy": "snapshot"}}, {"lost_share": 0.5}),
    "relearned from few bits": (
        {"recovery": {"policy": "checkfree"}, "wire": {"activations": "int8"}},
        {"relearn_codec": "int8"},
    ),
}


def swarm_on(
    device: torch.device, corpus: Corpus, settings: dict[str, Any], ablation: dict[str, Any]
) -> TrainingSwarm:
    training = {"batch": 2, "microbatch": 1, "warmup": 1, "validation_microbatches": 1}
    training |= settings.get("training", {})
    wire = {"activations": "none", "gradients": "none", **settings.get("wire", {})}
    recovery = {"snapshot": {"fraction": 1.0, "period": 1}, "checkpoint": {"every": 1, "dir": "x"}}
    recovery["relearn"] = {"passes": 1, "steps": 1, "enough": 0}
    recovery |= settings.get("recovery", {})
    run = from_fields(
        {"steps": 9, "model": SHAPE, "training": training, "wire": wire, "recovery": recovery}
    )
    return TrainingSwarm(run, corpus, Ablation(**ablation), device)


def trained(
    path: Path,
    corpus: Corpus,
    settings: dict[str, Any],
    ablation: dict[str, Any],
    device: torch.device,
) -> dict[str, Tensor]:
    """Return losses and weights of a run that loses stage 2. If torch writes files of the device's
    tensors, the run then ends and goes on from its file."""
    swarm = swarm_on(device, corpus, settings, ablation)
    losses = [swarm.step() for _ in range(2)]
    (line,) = swarm.lose([2])
    losses += [line.get("perturbation", 0.0), swarm.step()]
    if not EMULATED:
        kept = PartialRun(path / device.type, every=0)
        kept.keep(swarm, Progress())
        swarm = swarm_on(device, corpus, settings, ablation)
        assert kept.load(swarm) is not None
    results = {"losses": torch.tensor([*losses, swarm.step(), swarm.validate()])}
    for number, stage in enumerate(swarm.stages):
        assert stage.optimizer.weights.device == device
        results[f"weights {number}"] = stage.optimizer.weights.cpu()
    return results


@pytest.mark.parametrize(("settings", "ablation"), RUNS.values(), ids=RUNS)
def test_a_swarm_trains_loses_and_goes_on(
    settings: dict[str, Any], ablation: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    corpus = Corpus.open(data)
    results, wanted = (trained(tmp_path, corpus, settings, ablation, of) for of in (OTHER, CPU))
    for name, value in results.items():
        assert (value - wanted[name]).norm() <= FAR * wanted[name].norm(), name


def test_boundary_tensors_leave_the_device(data: Path) -> None:
    swarm = swarm_on(OTHER, Corpus.open(data), {}, {})
    swarm.step()
    ((_, microbatches),) = swarm.boundary
    tensors = [tensor for crossings in microbatches for tensor in crossings.tensors]
    assert [tensor.device.type for tensor in tensors] == ["cpu"] * 2 * 4


@pytest.mark.skipif(EMULATED, reason="the emulated device has neither a compiler nor autocast")
def test_compiled_blocks_in_bf16_learn_as_others(data: Path) -> None:
    corpus, losses = Corpus.open(data), []
    for training in ({}, {"precision": "bf16"}, {"precision": "bf16", "compile": True}):
        swarm = swarm_on(OTHER, corpus, {"training": training}, {})
        losses.append([swarm.step() for _ in range(4)])
    for narrow in losses[1:]:
        assert narrow == pytest.approx(losses[0], rel=1e-2)

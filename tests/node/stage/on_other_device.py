"""Tests that compare what a node computes on the device that DEVICE names with the CPU.

test_any_device.py runs them in a process of their own. The device `other` is neither CPU nor CUDA,
and its results are the CPU's bit for bit. A GPU sums in an order of its own.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

import pytest
import torch
from attempt_swarm import STAGES, Swarm
from other_device import CPU, register
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from planaria.node.data.corpus import Corpus
from planaria.node.hugging_face.whole_model import WholeModel
from planaria.node.launch.doctor import SEE_DEVICE
from planaria.node.launch.errors import NodeError
from planaria.node.machine.device import measure_speed, memory_of, why_no_bf16
from planaria.node.model.quantized import QuantizedLinear, pack
from planaria.node.model.shape import Base
from planaria.node.run_file import ModelSection, RunFile, TrainingSection, WireSection
from planaria.node.serve import pick_device
from planaria.node.stage.initial import InitialStages
from planaria.node.stage.memory_limit import DeviceRoom
from planaria.node.stage.torch_stage import TorchStage
from planaria.node.state.boundary import BoundaryPair, FetchedTensors
from planaria.node.state.copies import layout_of
from planaria.node.state.relearn import PairSlice
from planaria.node.state.save_file import Contents
from planaria.node.state.saves import Saves
from planaria.node.state.saves_on_disk import SavesOnDisk
from planaria.node.state.stage_state import StageState, StateId
from planaria.node.transaction.attempt import NoRoomError
from planaria.node.wire import stage_pb2 as pb
from planaria.recovery.identical_arithmetic import is_exact
from planaria.recovery.snapshot import SentSnapshot
from tests.harness.reducing import Network, gradients, reduce_all

LACKS: Final = os.environ.get("LACKS", "")
DEVICE: Final = os.environ.get("DEVICE", "other")
EMULATED: Final = DEVICE == "other"
OTHER: Final = register(LACKS) if EMULATED else torch.device(DEVICE)
FAR: Final = 0.05
"""Largest distance, relative to the norm, between tensors that GPU and CPU have summed. Adam's
first steps turn rounding errors of gradients near 0 into updates of full size."""
emulated = pytest.mark.skipif(not EMULATED, reason="of a device that is neither CPU nor CUDA")
rounds = pytest.mark.skipif(LACKS == "rounding", reason="passes and codecs divide")
SECTION: Final = {"dim": 8, "heads": 2, "stages": STAGES, "layers": 2, "context": 4, "hidden": 8}
RUNS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "few bits": {"wire": {"activations": "int8", "gradients": "int4"}},
    "recomputed": {"training": {"recompute": True, "weight_decay": 0.1}},
    "in a subspace": {"model": {"subspace": 4, "attn_mask_type": "block_causal"}},
    "with adapters": {"training": {"lora": {"rank": 2}}},
    "by muon": {"training": {"optimizer": "muon", "weight_decay": 0.1}},
}


@pytest.fixture(autouse=True)
def the_same_attention() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH), torch.autograd.set_multithreading_enabled(False):
        yield


def run_file(settings: dict[str, Any]) -> RunFile:
    return RunFile.model_construct(
        model=ModelSection(**SECTION, **settings.get("model", {})),
        training=TrainingSection(batch=10, **settings.get("training", {})),
        wire=WireSection(
            **{"activations": "none", "gradients": "none", **settings.get("wire", {})}
        ),
    )


def trained(settings: dict[str, Any], corpus: Corpus, device: torch.device) -> dict[str, Any]:
    """Train stages for two steps and evaluate them. Returns losses, norms, digests and tensors."""
    run = run_file(settings)
    config = run.config_for(corpus.vocabulary)
    stages: dict[str, TorchStage] = {}

    def make_work(node: str, stage: int) -> Any:
        if node not in stages:
            beginning = InitialStages(run, config)
            data = None if stage else corpus
            stages[node] = TorchStage(stage, beginning, device, data)
        return stages[node].work

    results: dict[str, Any] = {}
    for kind in (pb.Begin.TRAIN, pb.Begin.TRAIN, pb.Begin.EVALUATE):
        swarm = Swarm(1, random.Random(5), make_work=make_work)
        swarm.starts(kind)
        swarm.ends()
        for name, node in swarm.nodes.items():
            for number, home in node.homes.items():
                results[f"loss {kind} {number}"] = home.loss
            if kind == pb.Begin.TRAIN:
                commit = pb.Commit(lr_scale=[1.0] * 3, clip_scale=[0.5] * 3)
                results[f"norm {name} {len(results)}"] = stages[name].reduced()
                results[f"digest {name} {len(results)}"] = stages[name].apply(commit, 0.01).digest
    for name, stage in stages.items():
        for tensor, values in stage.tensors.items():
            assert values.device == device
            results[f"{name} {tensor}"] = values.cpu()
    return results


@rounds
@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_a_swarm_trains(settings: dict[str, Any], data: Path) -> None:
    corpus = Corpus.open(data)
    same(partial(trained, settings, corpus), sums=True)


def same(computed: Callable[[torch.device], dict[str, Any]], sums: bool = False) -> None:
    """Check that each value is the CPU's, bit for bit. On a GPU, floats may differ by rounding.
    With `sums`, tensors may differ by FAR, and digests, too."""
    results, wanted = computed(OTHER), computed(CPU)
    assert results.keys() == wanted.keys()
    for name, value in results.items():
        if isinstance(value, Tensor):
            assert value.device.type == "cpu", name
            assert torch.equal(value, wanted[name]) or near(value, wanted[name], sums), name
        else:
            assert repr(value) == repr(wanted[name]) or near(value, wanted[name], sums), name


def near(value: Any, wanted: Any, sums: bool) -> bool:
    if EMULATED:
        return False
    if isinstance(value, Tensor):
        return sums and bool((value - wanted).norm() <= FAR * wanted.norm())
    if isinstance(value, float):
        return bool(value == pytest.approx(wanted, rel=1e-2 if sums else 1e-9))
    return sums and isinstance(value, bytes)  # a digest


def stage_on(device: torch.device, corpus: Corpus, **settings: Any) -> TorchStage:
    run = run_file(settings)
    return TorchStage(1, InitialStages(run, run.config_for(corpus.vocabulary)), device)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def corpus(data: Path) -> Corpus:
    return Corpus.open(data)


def test_replicas_make_the_same_updates(corpus: Corpus) -> None:
    """The device may compute updates by itself or leave them to the CPU."""
    assert is_exact(OTHER) == (not LACKS)

    def updated(device: torch.device) -> dict[str, Any]:
        stage = stage_on(device, corpus, training={"weight_decay": 0.1})
        results: dict[str, Any] = {}
        for step in range(1, 10):
            of_step = drawn(len(stage.gradient), seed=step) * 10.0 ** (2 - 4 * step)
            results[f"norm {step}"] = stage.replace_gradient(of_step)
            learned = stage.apply(pb.Commit(lr_scale=[1.0] * 2, clip_scale=[0.3] * 2), 0.01)
            results[f"learned {step}"] = learned
        beside = drawn(len(stage.gradient)).to(device)
        results["beside"] = stage.apply(pb.Commit(skipped=True), 0.01, beside)
        return results | {name: tensor.cpu() for name, tensor in stage.tensors.items()}

    same(updated)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_snapshots_and_saves_are_taken(corpus: Corpus, tmp_path: Path, codec: Any) -> None:
    if codec == "int8" and LACKS == "rounding":
        pytest.skip("a codec divides")

    def taken(device: torch.device) -> dict[str, Any]:
        stage = stage_on(device, corpus)
        config, results = stage.config, {}
        sent = SentSnapshot(layout_of(config, 1), 0.25, codec, moments=True)
        commit = pb.Commit(step=3, lr_scale=[1.0] * 3, clip_scale=[1.0] * 3)
        for step in range(6):
            stage.replace_gradient(drawn(len(stage.gradient), seed=step).abs())
            stage.apply(commit, 0.01)
            tensors = [tensor.cpu() for tensor in stage.tensors.values()]
            stage.optimizer.load(zip(stage.tensors, tensors, strict=True), step + 1)
            update = sent.take(step, list(stage.tensors.values()))
            results[f"payload {step}"] = update.payload
            results[f"perturbation {step}"] = update.perturbation
        saves = Saves(tmp_path / device.type, "run", 1, 4, Contents.of(config, 1))
        writer = SavesOnDisk(saves, 1, lambda call, of: call(of), lambda age: None, pytest.fail)
        state = StageState(StateId.after(commit, 1, 1, 3), stage.tensors, 0.5, 0, commit, 6)
        writer.write(state)
        writer.finish(60.0)
        (save,) = saves.listed()
        return results | dict(saves.load(save).tensors)

    same(taken)


@rounds
@pytest.mark.parametrize("codec", ["none", "bf16", "fp16", "int8", "int4", "lowrank"])
def test_replicas_sum_their_gradients(codec: Any) -> None:
    def summed(device: torch.device) -> dict[str, Any]:
        nodes = ["a", "b", "c"]
        values = [of.to(device) for of in gradients(nodes, 101)]
        assert reduce_all(Network(nodes, codec), values) == [None] * len(nodes)
        return {node: of.cpu() for node, of in zip(nodes, values, strict=True)}

    same(summed, sums=codec in ("int4", "lowrank"))


@rounds
@pytest.mark.parametrize("settings", [{}, RUNS["with adapters"]], ids=["whole", "adapters"])
def test_a_stage_relearns(corpus: Corpus, settings: dict[str, Any]) -> None:
    def learned(device: torch.device) -> dict[str, Any]:
        stage = stage_on(device, corpus, **settings)
        stage.optimizer.weights.copy_(drawn(len(stage.gradient)) / 10)
        pair = BoundaryPair(1, 0, (1,))
        x, y = (drawn(2, 4, 8, seed=seed).bfloat16() for seed in (1, 2))
        lesson = stage.lesson(FetchedTensors((2, 4, 8), {pair: x}, {pair: y}), [1])
        piece = PairSlice(pair, 0, 2)
        results: dict[str, Any] = {}
        for round in range(3):
            inputs = [of.cpu() for of in lesson.start(piece, True)]
            result = lesson.end(piece, inputs, None, 0.05)
            results[f"gradient {round}"] = result.gradient[0].cpu()
            results[f"norm {round}"] = result.norm
        end = lesson.end(piece, [of.cpu() for of in lesson.start(piece, True)], None, None)
        results["error"] = end.error
        assert lesson.is_finite()
        lesson.finish(undo=False)
        return results | {"weights": stage.optimizer.weights.cpu(), "digest": stage.digest()}

    same(learned, sums=True)


@rounds
def test_a_stage_answers_what_it_is_shown(corpus: Corpus) -> None:
    def answered(device: torch.device) -> dict[str, Any]:
        first = InitialStages(run := run_file({}), run.config_for(corpus.vocabulary))
        ends = TorchStage(0, first, device, corpus)
        tokens = torch.arange(8).view(2, 4)
        x = ends.evaluate([tokens], head=False).cpu()
        y = stage_on(device, corpus).evaluate([x], head=False).cpu()
        other = drawn(ends.optimizer.weights.numel())
        return {
            "x": x,
            "y": y,
            "loss": ends.evaluate([y, tokens], head=True).cpu(),
            "logits": ends.evaluate([y], head=True).cpu(),
            "other": ends.evaluate([y], True, other).cpu(),
        }

    same(answered, sums=True)


@rounds
def test_frozen_weights_and_other_adapters_come_from_elsewhere(corpus: Corpus) -> None:
    def answered(device: torch.device) -> dict[str, Any]:
        stage = stage_on(device, corpus, **RUNS["with adapters"])
        assert stage._base is not None
        stage._base.put(drawn(stage._base.size).to(device))
        shown, other = [drawn(2, 4, 8)], drawn(len(stage.gradient))
        stage.rehearse()
        return {
            "before": stage.evaluate(shown, False).cpu(),
            "with others": stage.evaluate(shown, False, other).cpu(),
            "frozen": stage._base.words().between(0, stage._base.size),
        }

    same(answered, sums=True)


@rounds
@pytest.mark.parametrize("base", get_args(Base))
def test_packed_matrices_are_multiplied(base: Base) -> None:
    def multiplied(device: torch.device) -> dict[str, Any]:
        linear = nn.Linear(8, 6, bias=False)
        layer = QuantizedLinear(linear, base)
        layer.put(pack([drawn(6, 8)], (6, 8), base))
        x = drawn(3, 8).to(device).requires_grad_()
        y = layer.to(device)(x)
        y.backward(drawn(3, 6, seed=1).to(device))
        assert x.grad is not None
        return {"output": y.detach().cpu(), "gradient": x.grad.cpu()}

    same(multiplied, sums=True)


@rounds
def test_a_whole_model_scores(corpus: Corpus) -> None:
    config, tokens = run_file({}).config_for(corpus.vocabulary), torch.arange(8).view(2, 4)

    def scored(device: torch.device) -> dict[str, Any]:
        model = WholeModel(config, device)
        for part in (model._ends, model._body):
            for number, parameter in enumerate(part.parameters()):
                parameter.data.copy_(drawn(*parameter.shape, seed=number))
        return {"logits": model.logits(tokens).cpu(), "loss": model.loss(tokens, tokens)}

    same(scored, sums=True)


@emulated
def test_it_is_found_and_described(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert pick_device("auto") == pick_device("other") == pick_device("other:0") == OTHER
    assert pick_device("cpu") == CPU
    for name in ("other:1", "cuda", "mps"):
        with pytest.raises(NodeError, match=f"--device {name}: this machine shows 1 GPUs"):
            pick_device(name)
    assert memory_of(OTHER) == memory_of(CPU)
    assert measure_speed(OTHER) > 0
    assert why_no_bf16(OTHER) == "other has no autocast to it"
    monkeypatch.setattr(sys, "argv", ["-c", "auto"])
    exec(SEE_DEVICE, {})
    name, memory, _, gpus, _, computes = json.loads(capsys.readouterr().out)
    assert (name, memory, gpus) == ("other:0", memory_of(CPU), 1)
    assert computes == "float32 and no bf16" + ", updates on the CPU" * bool(LACKS)


def test_a_device_without_room_frees_what_it_can() -> None:
    room = DeviceRoom(OTHER)
    with pytest.raises(NoRoomError, match=f"{OTHER} has no room for one"), room.guarding(0, True):
        raise RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)")

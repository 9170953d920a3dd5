"""Tests of a node's planned memory, against torch's allocations and the daemon's own figures."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile

from planaria.node.data.corpus import Corpus
from planaria.node.machine.device import why_no_bf16
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.model.lora import Frozen, add_adapters, initial_adapters
from planaria.node.model.modules import (
    BodyStage,
    EmbeddingStage,
    Stage,
    build_stage,
    empty_stage,
)
from planaria.node.model.quantized import put_values, slots
from planaria.node.model.shape import PROJECTIONS, ModelConfig, Own
from planaria.node.run_file import RunFile, loads, override
from planaria.node.stage.initial import InitialStages
from planaria.node.stage.lesson import StageLesson
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.state.boundary import BoundaryPair, FetchedTensors
from planaria.node.state.feeding import gradient_frame
from planaria.node.state.relearn import PairSlice
from planaria.node.transaction.attempt import Workplace
from planaria.node.transaction.effects import NEVER
from planaria.node.wire import tensors
from planaria_lab.bench import loading
from planaria_lab.planning.memory import (
    FOLLOWED,
    Bytes,
    at_a_loss,
    needed,
    saved_bytes,
    under_way,
    whole,
    working_bytes,
)
from planaria_lab.simulator.swarm import parameters
from tests.swarm.in_process import LocalSwarm

RUN = """
steps = 6
[model]
preset = "tiny"
dim = 32
context = 32
stages = 4
layers = 4
[training]
batch = 12
microbatch = 1
validation_microbatches = 0
[recovery]
relearn.steps = 2
"""


def made(**changes: Any) -> tuple[RunFile, ModelConfig]:
    run = override(loads(RUN), **changes)
    return run, run.config_for(512)


# --- what torch allocates


def allocated(task: Callable[[], object]) -> int:
    """Return the most bytes that torch allocates during the task, beyond those at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        task()
    assert measured.profiler is not None
    now = most = 0
    for event in measured.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.fixture(params=["float32", "bf16"])
def precision(request: pytest.FixtureRequest) -> str:
    if request.param == "bf16" and (why := why_no_bf16(torch.device("cpu"))):
        pytest.skip(f"this processor, as torch may use it here, has no bf16: {why}")
    return str(request.param)


SHAPES = [(64, 4, 4, 2, 2, 128), (64, 8, 2, 3, 4, 64), (256, 4, 4, 1, 1, 16)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("dim", "heads", "kv", "layers", "microbatch", "context"), SHAPES)
def test_activations_of_a_body_stage_are_what_torch_allocates(
    dim: int, heads: int, kv: int, layers: int, microbatch: int, context: int,
    recompute: bool, precision: str,
) -> None:  # fmt: skip
    run, config = made(
        model__dim=dim, model__heads=heads, model__kv_heads=kv, model__stages=1,
        model__layers=layers, model__context=context, training__recompute=recompute,
        training__precision=precision, training__batch=microbatch * 12,
        training__microbatch=microbatch,
    )  # fmt: skip
    stage = build_stage(config, 1, seed=0)
    StageOptimizer(stage, torch.device("cpu"))  # allocates the gradient
    measured = allocated(lambda: train_some(stage, run))
    expected = 4 * saved_bytes(run, config, 1) + working_bytes(run, config, 1)
    assert 0.99 * measured <= expected <= 1.35 * measured


def test_what_is_cast_are_the_matrices_of_the_stages_own_layers() -> None:
    run, config = made(model__stages=2, model__layers=2, training__precision="bf16")
    wide = (("wide.weight", (64, 64)),)
    config = replace(config, own=Own("some:build", others=(wide,), kinds=(0, 1)))
    assert saved_bytes(run, config, 2) == saved_bytes(run, config, 1) + 2 * 64 * 64


def train_some(stage: torch.nn.Module, run: RunFile) -> None:
    """Run four microbatches forward, then the first of them backward."""
    assert isinstance(stage, BodyStage)
    stage.recompute = run.training.recompute
    bf16, config = run.training.precision == "bf16", run.config
    shape, kept = (run.training.microbatch, config.context, config.dim), []
    for _ in range(4):
        x = torch.randn(shape).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            kept.append((x, stage(x)))
    kept.pop(0)[1].backward(torch.ones(shape))  # type: ignore[no-untyped-call]


def adapted(run: RunFile, config: ModelConfig, number: int, narrow: bool) -> Stage:
    """Return a stage with adapters, built as by a node. `narrow`: its weights are exact in bf16."""
    stage = empty_stage(config, number)
    for values, slot in zip(build_stage(config, number, 0).parameters(), slots(stage), strict=True):
        put_values(slot, [values.detach().bfloat16().float() if narrow else values.detach()])
    stage = add_adapters(stage, config, number, initial_adapters(config, number, 0))
    Frozen(stage, run.training.precision == "bf16")
    StageOptimizer(stage, torch.device("cpu"))
    return stage


@pytest.mark.parametrize("targets", [PROJECTIONS, ("q_proj", "v_proj")])
@pytest.mark.parametrize("base", [None, "bf16", "int8", "nf4"])
@pytest.mark.parametrize("recompute", [False, True])
def test_activations_beside_adapters_are_what_torch_allocates(
    recompute: bool, base: str | None, targets: tuple[str, ...], precision: str
) -> None:
    if base == "nf4" and find_spec("bitsandbytes") is None:
        pytest.skip("nf4 is unpacked in plain torch here, which takes more")
    run, config = made(
        model__dim=64, model__heads=8, model__kv_heads=2, model__stages=1, model__layers=2,
        model__context=128, training__recompute=recompute, training__precision=precision,
        training__lora={"rank": 8, "targets": targets} | ({"base": base} if base else {}),
    )  # fmt: skip
    for narrow in (True, False):
        stage = adapted(run, config, 1, narrow)
        measured = allocated(lambda stage=stage: train_some(stage, run))  # type: ignore[misc]
        expected = 4 * saved_bytes(run, config, 1, narrow) + working_bytes(run, config, 1, narrow)
        assert 0.97 * measured <= expected <= 1.4 * measured


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("base", [None, "bf16", "int8", "nf4"])
def test_a_frozen_base_takes_what_it_is_kept_in(
    base: str | None, stage: int, narrow: bool, precision: str
) -> None:
    """The base takes no gradient and no moments; the adapters beside it do."""
    lora = {"rank": 4} | ({"base": base} if base else {})
    run, config = made(model__dim=64, training__lora=lora, training__precision=precision)
    module = adapted(run, config, stage, narrow)
    tensors = [*module.parameters(), *(of for name, of in module.named_buffers() if "." in name)]
    frozen = sum(tensor.nbytes for tensor in tensors if not tensor.requires_grad)
    parts = needed(run, config, stage, [1] * 5, narrow=narrow)
    assert parts["base"].device == pytest.approx(frozen, rel=0.06)  # int8 has scales
    trained = 16 * sum(of.numel() for of in module.parameters() if of.requires_grad)
    assert parts.get("model", Bytes()) == Bytes(trained)


def test_a_base_is_read_in_float32() -> None:
    """Stage 0 has four bytes per value, until its matrices shrink to two, the largest first."""
    lora = {"model__vocabulary": 4096, "training__lora": {}, "training__precision": "bf16"}
    run, config = made(**lora, model__context=2, wire__activations="bf16")
    parts = needed(run, config, 0, [1] * 5, narrow=True)
    values = 2 * 4096 * 32 + 32
    reading = 4 * values + 2 * 4096 * 32
    assert whole(parts).device == pytest.approx(reading, abs=1)
    assert "loading" not in needed(run, config, 1, [1] * 5, narrow=True)


@pytest.mark.parametrize("base", ["nf4", "int8", "bf16"])
@pytest.mark.parametrize("kind", ["bf16", "nf4"])
def test_a_base_is_loaded_some_values_at_a_time(
    kind: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's memory is measured; numpy's arrays are read in pieces of 4096 values at most."""
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    for module in ("quantized.AT_ONCE", "checkpoint.CHUNK", "dequantized.CHUNK"):
        monkeypatch.setattr(f"planaria.node.model.{module}", 4096)
    wide = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 64}
    loading.write({**loading.SMALL, **wide}, kind, tmp_path)
    run = loads(loading.taken_in(tmp_path, base))
    checkpoint, read = Checkpoint.open(tmp_path), []

    def pieces(self: Checkpoint, name: str) -> Iterator[NDArray[np.float32]]:
        for piece in self.places[name].pieces():
            assert len(piece) <= 4096
            read.append(weakref.ref(piece))
            assert sum(array() is not None for array in read) <= 2
            yield piece

    monkeypatch.setattr(Checkpoint, "pieces", pieces)
    measured = allocated(lambda: InitialStages(run, run.config, checkpoint).base(1))
    packed, largest = loading.sizes(run.config, checkpoint)
    assert read
    assert packed <= measured <= loading.GOAL * packed + largest


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("vocabulary", "dim", "tokens"), [(2048, 64, 128), (4096, 256, 64)])
def test_the_head_takes_what_torch_allocates(
    vocabulary: int, dim: int, tokens: int, frozen: bool, precision: str
) -> None:
    run, config = made(
        model__dim=dim, model__vocabulary=vocabulary, model__context=tokens,
        training__precision=precision, training__lora={} if frozen else None,
    )  # fmt: skip
    if frozen:
        stage = adapted(run, config, 0, narrow=True)
    else:
        stage = build_stage(config, 0, seed=0)
        StageOptimizer(stage, torch.device("cpu"))
    assert isinstance(stage, EmbeddingStage)
    targets = torch.zeros(1, tokens, dtype=torch.int64)

    def train() -> None:
        x = torch.randn(1, tokens, dim).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = stage.loss(x, targets)
        loss.backward()  # type: ignore[no-untyped-call]

    measured = allocated(train)
    assert 0.99 * measured <= working_bytes(run, config, 0, frozen) <= 1.45 * measured


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stages_state_is_weights_gradient_and_moments(stage: int) -> None:
    run, config = made()
    optimizer = StageOptimizer.of_run(build_stage(config, stage, 0), torch.device("cpu"), run)
    tensors = (optimizer.gradient, *(tensor for _, tensor in optimizer.state()))
    expected = needed(run, config, stage, [1] * 5)["model"]
    assert expected == Bytes(sum(tensor.nbytes for tensor in tensors))


@pytest.mark.parametrize("stage", [1, 2])
def test_a_lesson_takes_what_torch_allocates(stage: int) -> None:
    """Matrices are wide and tokens few. Orthogonalizing a matrix takes a few times its size."""
    run, config = made(model__dim=256, model__context=16, training__microbatch=1)
    module = build_stage(config, stage, seed=0)
    assert isinstance(module, BodyStage)
    optimizer = StageOptimizer(module, torch.device("cpu"))
    pair = BoundaryPair(1, 0, (stage,))
    shape = (1, 16, 256)
    crossed = {pair: torch.randn(shape, dtype=torch.bfloat16)}
    fetched = FetchedTensors(shape, crossed, {pair: torch.randn(shape, dtype=torch.bfloat16)})

    def learn() -> None:
        lesson = StageLesson(module, optimizer, fetched, {stage}, bf16=False)
        piece = PairSlice(pair, 0, 1)
        lesson.end(piece, lesson.start(piece, with_start=True), None, 0.01)

    expected = at_a_loss(run, config, stage)["relearning"].device
    passing = 8 * config.hidden * config.dim * torch.float32.itemsize
    assert expected <= allocated(learn) <= expected + passing


def test_who_is_copied_keeps_its_state_and_gradients() -> None:
    run, config = made()
    optimizer = StageOptimizer.of_run(build_stage(config, 2, 0), torch.device("cpu"), run)
    state = dict(optimizer.state())
    frame = gradient_frame(NEVER, torch.randn_like(optimizer.gradient), tensors)
    kept = sum(tensor.nbytes for tensor in state.values()) + FOLLOWED * frame.size
    expected = at_a_loss(run, config, 2)["a newcomer"]
    assert expected.device == 0
    assert 0.99 * kept <= expected.host <= kept


def test_only_who_guesses_relearns() -> None:
    for policy, guesses in (("checkfree", True), ("checkfree+", True), ("snapshot", False)):
        run, config = made(recovery__policy=policy)
        parts = [at_a_loss(run, config, stage) for stage in range(config.stages + 1)]
        assert ["relearning" in stage for stage in parts] == [False] + [guesses] * config.stages
        run, config = made(recovery__policy=policy, recovery__relearn__passes=0)
        assert "relearning" not in at_a_loss(run, config, 1)


def test_what_replicas_hold_back_takes_two_more_gradients() -> None:
    for codec, more in (("int8", 2), ("lowrank", 2), ("bf16", 0)):
        run, config = made(wire__averaging=codec)
        size = needed(run, config, 1, [2] * 5).get("held back", Bytes())
        assert size == Bytes(more * 4 * parameters(config, 1))
        assert "held back" not in needed(run, config, 1, [1] * 5)


# --- the daemon's own figures


async def kept(run: RunFile, corpus: Corpus, out: Path) -> dict[tuple[int, str], int]:
    """Run a swarm; return (stage, part) -> the most bytes at any time at any node."""
    sizes: defaultdict[tuple[int, str], int] = defaultdict(int)
    async with LocalSwarm(run, corpus, out) as swarm:

        def look() -> bool:
            for (stage, _), (node, _) in swarm.nodes.items():
                if node.seat is None:
                    continue
                for part, cost in node.seat.costs().items():
                    sizes[stage, part] = max(sizes[stage, part], cost.memory_bytes)
            return swarm.finished()

        await swarm.until(look)
    return {key: size for key, size in sizes.items() if size}


CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"wire__activations": "bf16"}),
    (2, {"recovery__relearn__passes": 0}),
    (1, {"recovery__policy": "snapshot", "recovery__snapshot__fraction": 1.0}),
    (1, {"recovery__policy": "redundant", "recovery__relearn__passes": 0}),
]


@pytest.mark.parametrize(("replicas", "changes"), CASES)
async def test_what_is_kept_for_a_loss_is_what_the_daemon_accounts(
    replicas: int,
    changes: dict[str, Any],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The patch gives equal replicas equal shares, however busy this machine is."""
    monkeypatch.setattr(Workplace, "seconds_per_microbatch", 1.0)
    corpus = Corpus.open(data)
    run = override(loads(RUN), swarm__replicas=replicas, **changes)
    config = run.config_for(corpus.vocabulary)
    sizes = await kept(run, corpus, tmp_path)
    assert sizes
    stages = range(config.stages + 1)
    expected = {s: needed(run, config, s, [replicas] * len(stages)) for s in stages}
    for (stage, part), size in sizes.items():
        assert size <= 1.01 * expected[stage][part].both, (stage, part)
    for stage, parts in expected.items():
        for part, bound in parts.items():
            if part in ("boundary", "masking"):  # at some time nearly all of it
                assert sizes[stage, part] >= 0.8 * bound.both, (stage, part)
            elif part in ("snapshot", "redundant"):  # the bound has data in transit, too
                assert sizes[stage, part] >= 0.3 * bound.both, (stage, part)


# --- microbatches under way


def test_microbatches_under_way_are_bounded_by_the_window_and_by_the_share() -> None:
    run, config = made()
    assert under_way(run, config, 1, [1, 1, 1, 1, 1]) == 12  # all microbatches of the step
    assert under_way(run, config, 1, [2, 4, 1, 1, 1]) == 3  # all microbatches of this node
    longer = override(run, training__batch=120)
    assert under_way(longer, config, 1, [1, 1, 1, 1, 1]) == 20  # 4 (stages + 1)
    assert under_way(longer, config, 1, [2, 3, 1, 1, 1]) == 14
    run, config = made(training__in_flight=5)
    assert under_way(run, config, 1, [1, 1, 1, 1, 1]) == 5
    assert under_way(run, config, 1, [2, 1, 1, 1, 1]) == 10
    assert under_way(run, config, 1, [2, 4, 1, 1, 1]) == 3
    run, config = made(training__in_flight=100)
    assert under_way(run, config, 1, [1, 1, 1, 1, 1]) == 12


POLICIES = ["checkfree", "checkfree+", "snapshot", "redundant", "checkpoint"]


@given(st.sampled_from(POLICIES), st.integers(0, 4), st.integers(1, 3), st.booleans())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_more_of_anything_needs_no_less(
    policy: str, stage: int, replicas: int, recompute: bool
) -> None:
    run, config = made(recovery__policy=policy, training__recompute=recompute)
    counts = [replicas] * 5
    least = whole(needed(run, config, stage, counts))
    assert least.device > 0
    larger = replace(config, dim=2 * config.dim, hidden=2 * config.hidden)
    assert whole(needed(run, larger, stage, counts)).both > least.both
    bigger = override(run, training__microbatch=2)
    assert whole(needed(bigger, config, stage, counts)).device > least.device
    assert whole(needed(run, config, stage, counts, saves=True)).host > least.host
    if policy != "checkpoint":
        longer = override(run, recovery__relearn__steps=8)
        assert whole(needed(longer, config, stage, counts)).host > least.host


def test_recomputing_saves_most_of_the_activations() -> None:
    run, config = made(model__layers=16)
    again = override(run, training__recompute=True)
    assert saved_bytes(again, config, 1) < 0.2 * saved_bytes(run, config, 1)
    assert saved_bytes(again, config, 0) == saved_bytes(run, config, 0)

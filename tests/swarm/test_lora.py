"""Tests of swarms that train adapters of a model, and lose adapters and frozen weights."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.bootstrap.credentials import PLAIN
from planaria.node.data.corpus import Corpus
from planaria.node.data.progress import untracked
from planaria.node.hugging_face.adapters import export_writer
from planaria.node.hugging_face.begin_from_model import with_model
from planaria.node.hugging_face.export import ModelParts
from planaria.node.hugging_face.from_swarm import LivingModel
from planaria.node.hugging_face.living_run import outside_access
from planaria.node.hugging_face.through_swarm import LivingStages
from planaria.node.hugging_face.whole_model import WholeModel
from planaria.node.model.checkpoint import Checkpoint
from planaria.node.model.shape import BYTES_OF_BASE
from planaria.node.report.ledger import audit
from planaria.node.run_file import RunFile, from_fields, override
from tests.node.hugging_face.test_folders import exported
from tests.node.stage.shapes import QWEN3
from tests.swarm.in_process import LocalSwarm
from tests.swarm.small import small
from tests.swarm.test_in_process import losses, undisturbed


@pytest.fixture
def model(corpus: Corpus, tmp_path: Path) -> Path:
    shape = replace(QWEN3, vocabulary=corpus.vocabulary + 3, tied=True, layers=3)
    exported(tmp_path / "model", shape)
    return tmp_path / "model"


def adapting(model: Path, **changes: Any) -> RunFile:
    """Return a run that trains adapters of the model in three stages."""
    others = small(steps=8).model_dump(exclude_none=True, exclude={"model"})
    run = from_fields({**others, "model": {"from": str(model), "stages": 3}})
    changes = {"training__lora": {"rank": 4}, "training__lr": 1e-2} | changes
    return with_model(override(run, **changes))


def methods(swarm: LocalSwarm) -> set[tuple[int, str]]:
    return {(e["stage"], e["method"]) for e in swarm.lines.events("rebuilt") if e["step"] > 0}


def joined(swarm: LocalSwarm) -> list[dict[str, Any]]:
    """Return the rebuilt events of newcomers to stage 0."""
    rebuilt = swarm.lines.events("rebuilt")
    return [event for event in rebuilt if event["step"] > 0 and event["stage"] == 0]


async def test_adapters_of_a_lost_stage_begin_anew_beside_weights_from_a_peer(
    corpus, model, tmp_path
):
    """Only stage 0 has the folder. Gradients and transfers are smaller than the model, and the
    merged export computes what the stages compute."""
    lora = {"rank": 4, "base": "nf4"}
    run = adapting(model, training__lora=lora, recovery__policy="checkfree")
    tokens = torch.from_numpy(corpus.sample("validation", 32, 0))[None, :20]
    async with LocalSwarm(run, corpus, tmp_path, checkpoint=Checkpoint.open(model)) as swarm:
        await swarm.until(lambda: swarm.committed() >= 4)
        await swarm.replace(2, 0)
        await swarm.until(swarm.finished)
        sizes = [node.seat.arithmetic.gradient.numel() for node, _ in swarm.nodes.values()]
        description = await outside_access(swarm.describe, PLAIN)
        async with LivingStages(description) as stages:
            at_the_moment = await stages.logits(tokens)
        async with LivingModel(description, 60.0) as living:
            loop = asyncio.get_running_loop()

            def read(*of: int) -> torch.Tensor:
                return asyncio.run_coroutine_threadsafe(living.read(*of), loop).result()

            write = export_writer(run, swarm.config, True, "")
            how = (ModelParts(swarm.config, read), "fp32", untracked)
            await asyncio.to_thread(write, tmp_path / "merged", *how)
    assert sorted(sizes) == [0, *[swarm.config.trained[1]] * 3]
    assert swarm.config.trained[1] < swarm.config.parameters[1] / 5
    assert methods(swarm) == {(2, "adapters-anew")}
    (rebuilt,) = (e for e in swarm.lines.events("rebuilt") if e["step"] > 0)
    assert rebuilt["relearned"] is not None
    assert rebuilt["bytes"] >= BYTES_OF_BASE["nf4"] * swarm.config.parameters[1]
    assert rebuilt["bytes"] < 4 * swarm.config.parameters[1]
    assert losses(tmp_path)[:4] == pytest.approx(undisturbed(run, corpus, 4), rel=1e-5)
    assert audit(tmp_path).exact
    whole = WholeModel.load(tmp_path / "merged", torch.device("cpu")).logits(tokens)[0, -1]
    torch.testing.assert_close(at_the_moment, whole)
    before = WholeModel.load(model, torch.device("cpu")).logits(tokens)[0, -1]
    assert (whole - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("policy", "stage", "method"),
    [
        ("checkfree", 0, "origin"),
        ("redundant", 2, "redundant"),
        ("checkpoint", 2, None),
    ],
)
async def test_each_policy_has_its_way_with_adapters(
    corpus, model, tmp_path, policy, stage, method
):
    run = adapting(
        model,
        recovery__policy=policy,
        recovery__checkpoint={"dir": str(tmp_path / "shared"), "every": 2},
    )
    async with LocalSwarm(run, corpus, tmp_path, checkpoint=Checkpoint.open(model)) as swarm:
        await swarm.until(lambda: swarm.committed() >= 4)
        await swarm.replace(stage, 0)
        await swarm.until(swarm.finished)
    if method is None:
        (back,) = swarm.lines.events("rolled back")
        assert back["step"] >= 2
    else:
        assert methods(swarm) == {(stage, method)}
    if method in ("origin", "redundant"):
        assert losses(tmp_path) == pytest.approx(undisturbed(run, corpus, 8), rel=1e-5)
    assert audit(tmp_path).exact


async def test_a_replica_copies_adapters_and_weights_of_its_stage(corpus, model, tmp_path):
    """When the replica comes, the nodes with the model's folder are gone."""
    run = override(adapting(model), swarm__replicas=2)
    async with LocalSwarm(run, corpus, tmp_path, checkpoint=Checkpoint.open(model)) as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        swarm.checkpoint = None
        for replica in (0, 1):
            await swarm.replace(0, replica)
            await swarm.until(lambda of=replica: len(joined(swarm)) > of)
        await swarm.replace(2, 0)
        await swarm.until(swarm.finished)
        digests = {(stage, node.member.digest) for (stage, _), (node, _) in swarm.nodes.items()}
    assert len(digests) == 4
    assert losses(tmp_path) == pytest.approx(undisturbed(run, corpus, 8), rel=1e-5)

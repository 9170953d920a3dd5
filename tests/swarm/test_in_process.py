"""Whole swarms in one process: quick, and a crash can be put anywhere."""

from __future__ import annotations

import pytest

from bench.one_process import train
from node.corpus import Corpus
from node.ledger import audit, merge
from node.run_file import loads
from tests.swarm.in_process import LocalSwarm

SMALL = """
steps = 8
[model]
preset = "tiny"
dim = 32
context = 32
stages = {stages}
[training]
batch = 8
microbatch = 1
warmup = 5
validation_microbatches = 2
[swarm]
replicas = {replicas}
"""


@pytest.fixture(scope="module")
def corpus(data) -> Corpus:
    return Corpus.open(data)


def losses(directory) -> list[float]:
    return [line["loss"] for line in merge(directory.glob("ledger-*.jsonl")).lines]


@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (3, 1), (2, 2)])
async def test_a_swarm_trains_as_one_process_does(corpus, tmp_path, stages, replicas):
    run = loads(SMALL.format(stages=stages, replicas=replicas))
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(swarm.finished)
        digests = {(stage, node.member.digest) for (stage, _), (node, _) in swarm.nodes.items()}
        assert len(digests) == stages + 1
    assert losses(tmp_path) == pytest.approx(list(train(run, corpus)), rel=1e-5)
    assert audit(tmp_path).exact


@pytest.mark.parametrize("victim", [(0, 0), (1, 1), (2, 0)])
async def test_a_killed_replica_costs_no_step(corpus, tmp_path, victim):
    run = loads(SMALL.format(stages=2, replicas=2))
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        await swarm.kill(*victim)
        swarm.start(*victim)
        await swarm.until(swarm.finished)
        digests = {(stage, node.member.digest) for (stage, _), (node, _) in swarm.nodes.items()}
        assert len(digests) == 3
    assert losses(tmp_path) == pytest.approx(list(train(run, corpus)), rel=1e-5)
    assert audit(tmp_path).exact


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_replica_joins_while_the_others_train(corpus, tmp_path, stage):
    """It enters at a step boundary, no attempt is lost, and its weights are those of the others."""
    run = loads(SMALL.format(stages=2, replicas=2).replace("steps = 8", "steps = 40"))
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        await swarm.kill(stage, 1)
        await swarm.until(lambda: swarm.committed() >= 6)
        joined = swarm.start(stage, 1)
        await swarm.until(lambda: joined.member is not None and joined.member.following)
        since = swarm.committed()
        await swarm.until(lambda: joined.member.phase.value == "running")
        assert swarm.committed() > since
        await swarm.until(swarm.finished)
        digests = {(stage, node.member.digest) for (stage, _), (node, _) in swarm.nodes.items()}
        assert len(digests) == 3
    assert losses(tmp_path) == pytest.approx(list(train(run, corpus)), rel=1e-5)
    assert audit(tmp_path).exact


@pytest.mark.parametrize("victim", ["joiner", "source", "driver"])
async def test_who_is_killed_while_a_joiner_follows_costs_no_step(corpus, tmp_path, victim):
    run = loads(SMALL.format(stages=2, replicas=3).replace("steps = 8", "steps = 40"))
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        await swarm.kill(1, 2)
        await swarm.until(lambda: swarm.committed() >= 6)
        joined = swarm.start(1, 2)
        await swarm.until(lambda: joined.member is not None and joined.member.following)
        slots = {node.node: slot for slot, (node, _) in swarm.nodes.items()}
        source = min(node for node, slot in slots.items() if slot in [(1, 0), (1, 1)])
        slot = {"joiner": (1, 2), "source": slots[source], "driver": slots[joined.member.driver]}
        await swarm.kill(*slot[victim])
        await swarm.until(swarm.finished)
        digests = {(stage, node.member.digest) for (stage, _), (node, _) in swarm.nodes.items()}
        assert len(digests) == 3
    assert losses(tmp_path) == pytest.approx(list(train(run, corpus)), rel=1e-5)
    assert audit(tmp_path).exact


async def test_a_joiner_that_cannot_keep_up_is_waited_for(corpus, tmp_path, monkeypatch):
    """Its gradients are all dropped; still it gets in, and the run goes on."""
    run = loads(SMALL.format(stages=2, replicas=2).replace("steps = 8", "steps = 40"))
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        await swarm.kill(1, 1)
        await swarm.until(lambda: swarm.committed() >= 6)
        monkeypatch.setattr("node.feeding.Gradients.put", lambda *_: False)
        joined = swarm.start(1, 1)
        await swarm.until(lambda: joined.member and joined.member.phase.value == "running")
        await swarm.until(swarm.finished)
        digests = {(stage, node.member.digest) for (stage, _), (node, _) in swarm.nodes.items()}
        assert len(digests) == 3
    said = "".join(path.read_text() for path in tmp_path.glob("events-*.jsonl"))
    assert "can't follow: the gradient of step" in said
    assert audit(tmp_path).exact


async def test_a_lost_body_stage_is_rebuilt(corpus, tmp_path):
    run = loads(SMALL.format(stages=3, replicas=1))
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        await swarm.kill(2, 0)
        node = swarm.start(2, 0)
        await swarm.until(swarm.finished)
        assert node.member.boosted_at >= 3
    assert audit(tmp_path).exact


async def test_a_node_that_only_dials_out_serves_like_the_others(corpus, tmp_path):
    run = loads(SMALL.format(stages=3, replicas=1))
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        await swarm.kill(2, 0)
        swarm.start(2, 0, advertise="")
        await swarm.until(swarm.finished)
    assert audit(tmp_path).exact


@pytest.mark.parametrize(
    ("extra", "tolerance"),
    [
        ('[wire]\nactivations = "bf16"\ngradients = "bf16"\naveraging = "bf16"', 1e-3),
        ('[wire]\nactivations = "int8"\ngradients = "int8"\naveraging = "int8"', 1e-2),
    ],
)
async def test_lossy_codecs_keep_replicas_identical(corpus, tmp_path, extra, tolerance):
    run = loads(SMALL.format(stages=2, replicas=2) + extra)
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(swarm.finished)
        digests = {(stage, node.member.digest) for (stage, _), (node, _) in swarm.nodes.items()}
        assert len(digests) == 3
    assert losses(tmp_path) == pytest.approx(list(train(run, corpus)), rel=tolerance)


async def test_bf16_and_recomputation(corpus, tmp_path):
    toml = SMALL.format(stages=2, replicas=1)
    run = loads(
        toml.replace("[swarm]", 'precision = "bf16"\nrecompute = true\n[swarm]').replace(
            "validation_microbatches = 2\n", "", 1
        )
    )
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(swarm.finished)
    assert losses(tmp_path) == pytest.approx(list(train(run, corpus)), rel=1e-2)
    assert audit(tmp_path).exact

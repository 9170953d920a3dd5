"""Live swarms that lose stages train as the lab's swarm that loses the same stages."""

from __future__ import annotations

import pytest

from planaria.node.data.corpus import Corpus
from planaria.node.data.mixture import Mixture
from planaria.node.report.ledger import audit
from planaria.recovery.relearning import pass_count
from planaria_lab.convergence.training import Ablation, State, TrainingSwarm
from tests.swarm.in_process import LocalSwarm
from tests.swarm.small import small
from tests.swarm.test_in_process import losses, undisturbed


@pytest.mark.parametrize(
    ("policy", "lost", "methods", "steps"),
    [
        ("checkfree", [2], {2: "checkfree"}, 1),
        ("checkfree", [2], {2: "checkfree"}, 4),
        ("checkfree", [1], {1: "interpolate"}, 4),
        ("checkfree", [1], {1: "snapshot"}, 1),
        ("checkfree", [0, 1], {0: "snapshot", 1: "snapshot"}, 1),
        ("checkfree", [2, 3], {2: "interpolate", 3: "interpolate"}, 4),
        ("checkfree+", [1], {1: "checkfree+"}, 1),
        ("checkfree+", [4], {4: "checkfree+"}, 4),
        ("checkfree+", [0], {0: "snapshot"}, 1),
        ("checkfree+", [0, 3], {0: "snapshot", 3: "checkfree+"}, 4),
        ("snapshot", [2, 3], {2: "snapshot", 3: "snapshot"}, 1),
        ("snapshot", [0], {0: "snapshot"}, 1),
        ("redundant", [0], {0: "redundant"}, 1),
        ("redundant", [2], {2: "redundant"}, 1),
        ("checkpoint", [2], {2: "checkpoint"}, 1),
    ],
)
async def test_every_loss_is_survived_by_its_policy(
    corpus, conversations, tmp_path, policy, lost, methods, steps
):
    """Stages relearn from boundary tensors of `steps` steps, to the same losses as in the lab. Some
    runs keep many short documents apart, and some models write into a subspace. With several lost
    stages, tensors cross in int8 and int4, too."""
    apart = len(lost) > 1 or policy == "redundant"
    if apart:
        corpus = Mixture([corpus, Corpus.open(conversations)], [1, 3])
    run = small(
        stages=4,
        model__attn_mask_type="block_causal" if apart else "causal",
        model__subspace=8 if len(lost) > 1 or lost == [0] else None,
        wire__activations="int8" if len(lost) > 1 else "none",
        wire__gradients="int4" if len(lost) > 1 else "none",
        recovery__policy=policy,
        recovery__checkpoint__dir="checkpoints",
        recovery__checkpoint__every=3,
        recovery__relearn__passes=2,
        recovery__relearn__enough=0.0,
        recovery__relearn__steps=steps,
        recovery__relearn__seconds=60.0,  # so that the rate falls by passes alone
        recovery__snapshot__fraction=1.0,
        recovery__snapshot__period=1,
        recovery__snapshot__first="snapshot" in methods.values(),
        steps=9,
    )
    out = tmp_path / "out"
    out.mkdir()
    async with LocalSwarm(run, corpus, out) as swarm:
        await swarm.until(lambda: swarm.committed() >= 5)
        for stage in lost:
            await swarm.kill(stage, 0)
        for stage in lost:
            swarm.start(stage, 0)
        await swarm.until(swarm.finished)
    assert audit(out).exact
    rebuilt = swarm.lines.events("rebuilt")
    assert {e["stage"]: e["method"] for e in rebuilt if e["stage"] in lost} == methods
    if "checkfree" in policy and lost != [0] and "snapshot" not in methods.values():
        relearned = [e["relearned"] for e in rebuilt if e["stage"] in lost and e["stage"]]
        pairs = steps * run.training.microbatches
        if policy == "checkfree":  # else two lost stages adjoin in half of the microbatches
            assert [event["pairs"] for event in relearned] == [pairs] * len(relearned)
        assert all(
            event["passes"] == pass_count(2, lost) and not event["undone"] for event in relearned
        )
        assert all(event["residual_after"] < event["residual_before"] for event in relearned)
    for event in swarm.lines.events("rebuilding"):
        assert event["fallback"] == (event["method"] == "interpolate")
    if policy == "snapshot":
        for event in rebuilt:
            assert event["oldest_step"] <= event["mean_step"] <= event["step"]
    if policy == "redundant":
        assert losses(out) == pytest.approx(undisturbed(run, corpus, run.steps), rel=1e-5)
    back = swarm.lines.events("rolled back")
    at = back[0]["from"] if back else rebuilt[0]["step"]
    assert losses(out) == pytest.approx(in_the_lab(run, corpus, at, lost, rebuilt), rel=1e-4)


@pytest.mark.parametrize(("lost", "each_step"), [(2, 5), (1, 20)])
async def test_what_is_relearned_beside_steps_is_what_the_lab_relearns(
    corpus, tmp_path, lost, each_step
):
    run = small(
        stages=4,
        recovery__policy="checkfree",
        recovery__snapshot__first=0,
        recovery__relearn__steps=4,
        recovery__relearn__passes=2,
        recovery__relearn__tokens=1,
        recovery__relearn__seconds=60.0,
        recovery__relearn__enough=0.55,
        recovery__relearn__each_step=each_step,
        steps=14,
    )
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 5)
        await swarm.replace(lost, 0)
        await swarm.until(swarm.finished)
    assert audit(tmp_path).exact
    rebuilt = [e for e in swarm.lines.events("rebuilt") if e["stage"] == lost]
    ((relearned_beside,), at) = [e["relearned"] for e in rebuilt], rebuilt[0]["step"]
    assert relearned_beside["updates"] > 0
    assert relearned_beside["left"] > 10, "steps relearn beside, and not all of them"
    (beside,) = swarm.lines.events("relearned")
    assert (beside["updates"], beside["left"]) == (relearned_beside["left"], 0)
    assert beside["steps"] == -(-relearned_beside["left"] // each_step)
    assert losses(tmp_path) == pytest.approx(in_the_lab(run, corpus, at, [lost], rebuilt), rel=1e-4)


async def test_a_stage_is_guessed_by_its_neighbours_gradient_norms(corpus, tmp_path):
    """Steps are so large that a plain average would change the losses."""
    recovery = {"recovery__policy": "checkfree", "recovery__relearn__passes": 0}
    run = small(stages=3, steps=10, training__lr=0.03, **recovery)
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 4)
        await swarm.replace(2, 0)
        await swarm.until(swarm.finished)
        machine = swarm.registry.membership
        await swarm.until(lambda: machine.describe(swarm.registry.now()).rebuilds)
    (rebuilt,) = [e for e in swarm.lines.events("rebuilt") if e["stage"] == 2]
    (rebuild,) = machine.describe(0.0).rebuilds
    assert (rebuild.stage, rebuild.step, rebuild.method) == (2, rebuilt["step"], rebuilt["method"])
    assert not rebuild.exact
    assert rebuilt["method"] == "checkfree"
    measured, at = losses(tmp_path), rebuilt["step"]
    weighted, plain = (
        in_the_lab(run, corpus, at, [2], [rebuilt], Ablation(omega=omega))
        for omega in ("squared", "uniform")
    )
    assert measured == pytest.approx(weighted, rel=1e-4)
    off = [max(abs(a - b) for a, b in zip(measured, lab, strict=True)) for lab in (weighted, plain)]
    assert off[1] > 10 * off[0]


def in_the_lab(run, corpus, at, lost, rebuilt, ablation=None):
    """Return the losses, by step, of a lab run that loses these stages after step `at`. As in the
    live swarm, snapshots that holders hadn't received yet come from an earlier step."""
    swarm, losses_at, earlier = TrainingSwarm(run, corpus, ablation or Ablation()), {}, {}
    while swarm.committed < run.steps:
        loss = swarm.step()
        losses_at[swarm.committed] = loss
        earlier[swarm.committed] = [State.of(stage) for stage in swarm.stages]
        if lost and swarm.committed == at:
            swarm.lose(lost)
            for event in rebuilt:
                held = min(source["step"] for source in event["sources"])
                if event["method"] == "snapshot" and held < at:
                    earlier[held][event["stage"]].put(swarm.stages[event["stage"]])
            lost = []
    return [losses_at[step] for step in sorted(losses_at)]

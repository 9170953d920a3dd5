"""Tests of whole swarms in one process, which are fast and can crash at any point."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import weakref
from collections.abc import Iterator
from functools import cache, reduce
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from planaria.bootstrap.client import RegistryUnreachable
from planaria.bootstrap.credentials import PLAIN
from planaria.bootstrap.registry_pb2 import Description
from planaria.node.data.corpus import UNSCORED, Corpus
from planaria.node.data.mixture import Data, Mixture
from planaria.node.hugging_face.export import ModelParts, export
from planaria.node.hugging_face.from_swarm import LivingModel
from planaria.node.hugging_face.generate import Sampling, Speaker, continuation
from planaria.node.hugging_face.living_run import outside_access
from planaria.node.hugging_face.through_swarm import LivingStages
from planaria.node.hugging_face.whole_model import WholeModel
from planaria.node.launch.errors import NodeError
from planaria.node.model.modules import copy_with, empty_stage
from planaria.node.report import line_file
from planaria.node.report.ledger import audit, merge
from planaria.node.report.line_file import LineFile
from planaria.node.run_file import (
    RunFile,
    SavesSection,
    SwarmSection,
    WireSection,
    override,
)
from planaria.node.serve import check_saved
from planaria.node.stage import initial
from planaria.node.stage.own_code import add_parts
from planaria.node.state import own_saves
from planaria.node.state.holdings import CLOSE, Holdings
from planaria.node.state.saves import Saves, find_saves
from planaria.node.state.stage_state import StageState
from planaria.node.wire.seat_names import node_of
from tests.reference import Reference, train
from tests.swarm.in_process import LocalSwarm
from tests.swarm.small import small


def undisturbed(run: RunFile, corpus: Data, steps: int) -> list[float]:
    """Return the first losses of one process, with default [saves] and [swarm] and exact codecs."""
    exact = WireSection(activations="none", gradients="none")
    alone = run.model_copy(update={"saves": SavesSection(), "swarm": SwarmSection(), "wire": exact})
    known, training = _begun(alone, corpus)
    known.extend(islice(training, max(0, steps - len(known))))
    return known[:steps]


@cache
def _begun(run: RunFile, corpus: Data) -> tuple[list[float], Iterator[float]]:
    return [], train(run, corpus)


def losses(directory) -> list[float]:
    return [line["loss"] for line in merge(directory.glob("ledger-*.jsonl")).lines]


OTHER_OPTIMIZER = {
    "training__betas": (0.8, 0.95),
    "training__weight_decay": 10.0,
    "training__schedule": "wsd",
    "training__warmup": 2,
}
MUON = {"training__optimizer": "muon", "training__weight_decay": 0.5}


@pytest.mark.parametrize(
    ("stages", "replicas", "changes"),
    [
        (1, 1, {}),
        ([2, 1, 3], 1, {}),
        (2, 1, OTHER_OPTIMIZER),
        ([2, 1], 2, MUON),
        ([1, 2], 3, {}),
        (5, 1, {"recovery__policy": "checkfree+"}),
    ],
)
async def test_a_swarm_trains_as_one_process_does(corpus, tmp_path, stages, replicas, changes):
    """With checkfree+, half of the microbatches visit the ends in swapped order; if a step has only
    one microbatch, those of every second step."""
    run = small(stages=stages, replicas=replicas, **changes)
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(swarm.finished)
        digests = {(stage, node.member.digest) for (stage, _), (node, _) in swarm.nodes.items()}
        assert len(digests) == swarm.config.stages + 1
        assert swarm.lines.events("gradient stands out") == []
    assert losses(tmp_path) == pytest.approx(undisturbed(run, corpus, run.steps), rel=1e-5)
    assert audit(tmp_path).exact


async def test_texts_and_conversations_are_trained_on_as_by_one_process(
    corpus, conversations, tmp_path
):
    """Each of two sources reads its part of a window, also when a step is repeated. The loss is the
    mean over scored tokens, whose number differs between microbatches."""
    run = small(replicas=2)
    mixture = Mixture([corpus, Corpus.open(conversations)], [1, 3])
    async with LocalSwarm(run, mixture, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        await swarm.kill(0, 1)
        await swarm.until(swarm.finished)
    alone = Reference(run, mixture)
    assert losses(tmp_path) == pytest.approx([alone.step() for _ in range(run.steps)], rel=1e-5)
    (validated,) = swarm.lines.events("validated")
    assert validated["loss"] == pytest.approx(alone.validate(), rel=1e-5)
    assert audit(tmp_path).exact


@pytest.mark.parametrize(("victim", "changes"), [((0, 0), {}), ((1, 1), MUON)])
async def test_a_killed_replica_costs_no_step(corpus, tmp_path, victim, changes):
    run = small(replicas=2, **changes)
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        await swarm.replace(*victim)
        await swarm.until(swarm.finished)
        digests = {(stage, node.member.digest) for (stage, _), (node, _) in swarm.nodes.items()}
        assert len(digests) == 3
    assert losses(tmp_path) == pytest.approx(undisturbed(run, corpus, run.steps), rel=1e-5)
    assert audit(tmp_path).exact


ENDLESS = 10_000
"""Steps of a run that the test ends."""


async def test_a_last_holder_that_only_the_registry_does_not_hear_trains_on(corpus, tmp_path):
    run = small(steps=ENDLESS, swarm__lease=1.0)
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 2)
        machine, (node, _) = swarm.registry.membership, swarm.nodes[1, 0]
        decisions = machine.history.decisions
        view = machine.view
        node.client.away = True
        who = f"{node.node} (stage 1)"
        await swarm.until(lambda: f"{who} is not heard, but " in " ".join(decisions))
        at = swarm.committed()
        await swarm.until(lambda: swarm.committed() >= at + 3)
        assert machine.view == view
        node.client.away = False
        await swarm.until(lambda: f"{who} is heard again" in " ".join(decisions))


def assert_replicas_applied_the_same(swarm: LocalSwarm) -> None:
    """Assert that replicas had the same digest in each committed step."""
    digests: dict[tuple[int, int], set[str]] = {}  # (stage, step) -> digests
    stage_of = {event["node"]: event["stage"] for event in swarm.lines.events("serving")}
    for event in swarm.lines.events("applied"):
        at = stage_of[event["node"]], event["step"]
        digests.setdefault(at, set()).add(event["digest"])
    assert all(len(of_step) == 1 for of_step in digests.values())


def assert_nothing_shows(swarm: LocalSwarm, directory: Path) -> None:
    """Assert that faults left no trace in any committed step: replicas are equal, and losses are
    those of one undisturbed process."""
    assert_replicas_applied_the_same(swarm)
    seen = losses(directory)
    assert seen == pytest.approx(undisturbed(swarm.run, swarm.corpus, len(seen)), rel=1e-5)
    assert audit(directory).exact


def all_running(swarm: LocalSwarm, since: int) -> bool:
    """Return whether all nodes have applied a few steps after that one."""
    members = [node.member for node, _ in swarm.nodes.values()]
    return all(
        member and member.phase.value == "running" and member.committed >= since + 3
        for member in members
    )


async def test_a_replica_joins_while_the_others_train(corpus, tmp_path):
    """It enters at a step boundary, no attempt is lost, and its weights equal those of others."""
    async with LocalSwarm(small(replicas=2, steps=ENDLESS), corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        await swarm.kill(1, 1)
        await swarm.until(lambda: swarm.committed() >= 6)
        joined = swarm.start(1, 1)
        await swarm.until(lambda: joined.member and joined.member.following, pause=0)
        since = swarm.committed()
        await swarm.until(lambda: joined.member.phase.value == "running")
        here = swarm.committed()
        assert here > since
        await swarm.until(lambda: all_running(swarm, here))
    assert_nothing_shows(swarm, tmp_path)


async def test_what_is_held_back_leaves_replicas_identical(corpus, tmp_path):
    """A replica is lost, an attempt goes on or is given up, and a successor joins."""
    wire = {"activations": "none", "gradients": "none", "averaging": "lowrank"}
    wire |= {"rank": 2, "rank_after": 2}
    run = small(replicas=2, steps=ENDLESS, wire=wire, training__batch=6)
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 4)
        held = [node.seat.averaging.feedback.row for node, _ in swarm.nodes.values()]
        assert all(row is not None and row.any() for row in held)
        await swarm.kill(1, 1)
        await swarm.until(lambda: swarm.committed() >= 7)
        joined = swarm.start(1, 1)
        await swarm.until(lambda: joined.member and joined.member.phase.value == "running")
        here = swarm.committed()
        await swarm.until(lambda: all_running(swarm, here + 12))
        assert joined.seat.averaging.feedback.row.any()
    assert_replicas_applied_the_same(swarm)
    seen = losses(tmp_path)
    assert sum(seen[-3:]) < sum(seen[:3])
    assert audit(tmp_path).exact


async def test_what_codecs_leave_of_tensors_is_trained_with_as_by_one_process(corpus, tmp_path):
    """The losses are near, not equal: values that differ in last digits may round differently."""
    run = small(stages=3, wire__activations="int8", wire__gradients="int4")
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(swarm.finished)
    seen = [line["loss"] for line in swarm.lines.of("ledger-*.jsonl") if "step" in line]
    alone = (train(run, corpus) for run in (swarm.run, small(stages=3)))
    off = [max(abs(a - b) for a, b in zip(seen, known, strict=True)) for known in alone]
    assert off[0] < off[1] / 2


async def test_a_node_that_must_go_saves_and_hands_over_to_a_standby(corpus, tmp_path, monkeypatch):
    run, finish, given = small(steps=ENDLESS), Holdings.finish_saves, []

    def noted(holdings: Holdings, seconds: float) -> None:
        given.append((holdings.stage, seconds))
        finish(holdings, seconds)

    monkeypatch.setattr(Holdings, "finish_saves", noted)
    async with LocalSwarm(run, corpus, tmp_path, tmp_path / "saves") as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        standby = swarm.start(None, 0)
        leaver, living = swarm.nodes.pop((2, 0))
        await swarm.until(lambda: any(not member.seats for member in leaver.view.members))
        await leaver.retire(grace=3000.0)
        leaver.stop("stopped by its owner")
        await living
        [(stage, seconds)] = given  # all time left, for saves being written
        assert stage == 2
        assert seconds > CLOSE
        assert standby.stage == 2
        here = swarm.committed()
        await swarm.until(lambda: swarm.committed() >= here + 3)
    assert [e["node"] for e in swarm.lines.events("handed over")] == [leaver.node]
    rebuilt = {(e["stage"], e["method"]) for e in swarm.lines.events("rebuilt")}
    assert rebuilt == {(2, "handover")}
    seen = losses(tmp_path)
    assert seen == pytest.approx(undisturbed(run, corpus, len(seen)), rel=1e-5)
    assert list((tmp_path / "saves/2.0/stage-2").glob("step-*"))
    assert not swarm.lines.events("save failed")
    assert audit(tmp_path).exact


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_disk_that_stalls_costs_nobody_its_seat(corpus, tmp_path, monkeypatch, stage):
    """If stage 0's only node can't write its ledger, the run pauses."""
    on_disk, goes_on = LineFile._write, threading.Event()
    stalled: set[Path] = set()

    def write(file: LineFile, descriptor: int, piece: bytes) -> int:
        if file.path in stalled:
            goes_on.wait(300)  # seconds; reached only if an event loop waits for the disk
        return on_disk(file, descriptor, piece)

    monkeypatch.setattr(LineFile, "_write", write)
    monkeypatch.setattr(line_file, "STALLED", 0.3)
    async with LocalSwarm(small(steps=ENDLESS), corpus, tmp_path) as swarm:
        try:
            await swarm.until(lambda: swarm.committed() >= 2)
            view, (node, _) = swarm.registry.membership.view, swarm.nodes[stage, 0]
            stalled.update(file.path for file in node.machine.files)
            at = swarm.committed()
            wanted = "its disk has accepted nothing"
            await swarm.until(lambda: wanted in node.client.reported.trouble)
            if stage == 0:
                driver = node.seat.driver
                await swarm.until(lambda: driver.explain().startswith("no node of stage 0 can"))
            else:
                await swarm.until(lambda: swarm.committed() >= at + 3)
        finally:
            goes_on.set()
        stalled.clear()
        at = swarm.committed()
        await swarm.until(lambda: swarm.committed() >= at + 3)
        assert swarm.registry.membership.view == view
    assert len(losses(tmp_path)) >= at + 2, "the last one may not have been applied"
    assert audit(tmp_path).exact
    applied = [e["step"] for e in swarm.lines.events("applied") if node_of(e["node"]) == node.node]
    assert applied == list(range(1, applied[-1] + 1)), "lines have waited, and none is lost"


async def test_a_living_model_is_that_of_one_step_wherever_its_stages_are(corpus, tmp_path):
    """A stage may be at a node that only dials out. The exported weights equal the saved ones."""
    run_file = small(stages=3, steps=ENDLESS, saves__every=1, saves__keep=1000)
    run_file = override(run_file, saves__in_flight=100)  # no save is left out on a slow disk
    run = override(run_file, model__vocabulary=corpus.vocabulary)
    async with LocalSwarm(run, corpus, tmp_path, tmp_path / "saves") as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        await swarm.kill(2, 0)
        hidden = swarm.start(2, 0, advertise="")
        await swarm.until(lambda: hidden.member and hidden.member.committed >= 5)
        aborted = len(swarm.lines.events("aborted"))
        access = await outside_access(swarm.describe, PLAIN)
        async with LivingStages(access, 60.0) as stages:
            await swarm.until(lambda: swarm.committed() >= stages.step + 2)
            shown = torch.from_numpy(corpus.sample("validation", 32, 0))[None]
            inputs, targets = shown[:, :-1], shown[:, 1:].clone()
            targets[:, 5:9] = UNSCORED
            loss = await stages.loss(inputs, targets)
        async with LivingModel(access, 60.0) as model:
            before = swarm.committed()
            await swarm.until(lambda: swarm.committed() >= before + 2)
            sizes = [run.model.config.parameters[min(stage, 1)] for stage in range(4)]
            whole = [await model.read(stage, 0, size) for stage, size in enumerate(sizes)]
            part = await model.read(2, 100, 50)
        assert len(swarm.lines.events("aborted")) == aborted
    assert part.tolist() == whole[2][100:150].tolist()
    assert before - 3 <= model.step <= before
    assert [part.tobytes() for part in saved_weights(tmp_path, run, model.step)] == [
        weights.numpy().tobytes() for weights in whole
    ]
    weights = [torch.from_numpy(values) for values in saved_weights(tmp_path, run, stages.step)]
    ends, *body = (
        copy_with(empty_stage(run.model.config, stage), w) for stage, w in enumerate(weights)
    )
    x = reduce(lambda x, stage: stage(x), body, ends.embed(inputs))
    assert loss == pytest.approx(float(ends.loss(x, targets).detach()), rel=1e-6)


def saved_weights(folder: Path, run: RunFile, step: int) -> list[np.ndarray]:
    """Return the weights of each stage in the saves of a step."""
    saves = {
        save.state.id.stage: save
        for save in find_saves(folder / "saves")
        if save.state.id.step == step
    }
    sizes = [run.model.config.parameters[min(stage, 1)] for stage in range(len(saves))]
    chunks = [saves[stage].values("weights", 0, size) for stage, size in enumerate(sizes)]
    return [np.concatenate(list(stage)).view(np.float32) for stage in chunks]


async def test_text_is_made_by_the_stages_as_by_the_model_that_is_exported(corpus, tmp_path):
    """Observers may request text, and the driver makes samples when they are due."""
    sampling = {"tokens": 6, "temperature": 0.0}
    run = override(
        small(stages=2, steps=4, training__sample_every=4, training__sampling=sampling),
        model__vocabulary=corpus.vocabulary,
        training__prompts=["once upon", ""],
    )
    tokens = torch.from_numpy(corpus.sample("validation", 32, 0))[None, :20]
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(swarm.finished)
        await swarm.until(lambda: len(swarm.lines.events("sampled")) == 2)
        description = await outside_access(swarm.describe, PLAIN)
        async with LivingStages(description) as stages:
            logits = await stages.logits(tokens)
        async with LivingModel(description, 60.0) as model:
            loop = asyncio.get_running_loop()

            def read(*of: int) -> torch.Tensor:
                return asyncio.run_coroutine_threadsafe(model.read(*of), loop).result()

            out = tmp_path / "model"
            await asyncio.to_thread(export, out, ModelParts(model.config, read))
    assert model.step == 4
    whole = WholeModel.load(tmp_path / "model", torch.device("cpu"))
    torch.testing.assert_close(logits, whole.logits(tokens)[0, -1])
    speaker = Speaker(
        lambda known: whole.logits(known)[0, -1],
        corpus.tokenizer(),
        corpus.index.end_of_document,
        corpus.vocabulary,
        whole.config.context,
    )
    made = {event["prompt"]: event for event in swarm.lines.events("sampled")}
    for prompt in run.training.prompts:
        text = "".join(continuation(speaker, prompt, 6, Sampling(temperature=0.0)))
        assert (made[prompt]["step"], made[prompt]["text"]) == (4, text)
    page = (tmp_path / "samples.md").read_text()
    assert "## Step 4, after `once upon`\n\n```text\n" in page


async def test_samples_go_on_when_who_makes_them_is_lost(corpus, tmp_path):
    run = override(
        small(replicas=2, steps=ENDLESS, training__sample_every=2),
        model__vocabulary=corpus.vocabulary,
        training__sampling__tokens=2,
    )
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.lines.events("sampled"))
        (driver,) = {event["node"] for event in swarm.lines.events("sampled")}
        (slot,) = (slot for slot, (node, _) in swarm.nodes.items() if node.node == driver)
        await swarm.kill(*slot)
        at = swarm.committed()
        await swarm.until(lambda: swarm.lines.events("sampled")[-1]["step"] > at)
        (node,) = (node for node, _ in swarm.nodes.values() if node.samples)
        assert node.node == swarm.registry.membership.view.driver
        (reported,) = node.client.reported.samples
        assert (reported.step, reported.text) == (node.samples[""].step, node.samples[""].text)


class Away:
    """A registry that doesn't answer."""

    async def describe(self, deadline: float) -> Description:
        raise RegistryUnreachable("it is away")


async def test_a_full_disk_is_said_and_training_goes_on(corpus, tmp_path, monkeypatch):
    def full(self: Saves, state: StageState) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(own_saves, "AGAIN", 0.0)
    run = small(saves__every=2)
    async with LocalSwarm(run, corpus, tmp_path, tmp_path / "saves") as swarm:
        with monkeypatch.context() as disk:
            disk.setattr(Saves, "write", full)
            await swarm.until(swarm.finished)
            reports = [client.reported for client in swarm.registry.nodes.values()]
            assert all("No space left" in report.trouble for report in reports)
            (node, _), *_ = swarm.nodes.values()
            with pytest.raises(NodeError, match="last step of stage 0 was in memory only"):
                await check_saved(node, Away())
        await swarm.until(lambda: not any(node.unsaved() for node, _ in swarm.nodes.values()))
        await check_saved(node, Away())
    assert "free space" in swarm.lines.events("save failed")[0]["reason"]
    assert audit(tmp_path).exact


async def test_nodes_measure_their_links_while_they_train(corpus, tmp_path):
    async with LocalSwarm(small(), corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 1)
        for node, _ in swarm.nodes.values():
            node.request_measurement(7)
        reports = [node.client for node, _ in swarm.nodes.values()]
        await swarm.until(lambda: all(c.reported and c.reported.measured == 7 for c in reports))
        await swarm.until(swarm.finished)
        for client in reports:
            assert client.reported.memory > 2**30
            assert {link.peer for link in client.reported.links} <= {c.node for c in reports}
            assert all(link.rtt_ms > 0 and link.mbps > 1 for link in client.reported.links)
        assert sum(len(client.reported.links) for client in reports) >= len(reports)


async def test_nothing_is_left_of_a_node_that_joins_anew(corpus, tmp_path):
    """A node that stays would take as much memory as its successor."""
    run = small(stages=1, replicas=2)
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 2)
        node = swarm.nodes[1, 1][0]
        parts = node, node.links, node.seat, node.seat.arithmetic, node.machine.compute
        left = [weakref.ref(part) for part in parts]
        client = node.client
        del node, parts
        await swarm.kill(1, 1)
        client.on_view = client.on_evicted = lambda _: None

        def gone() -> bool:
            gc.collect()
            return not any(ref() for ref in left)

        await swarm.until(gone)  # tasks that have begun may end first


async def test_an_architecture_of_the_run_s_own_is_trained_and_healed(corpus, tmp_path):
    """The architecture is GPT-2, from code of the run, in stages of unequal size."""
    run = small(
        stages=[2, 1, 2],
        recovery__policy="redundant",
        model__module="examples.gpt2:build",
        model__vocabulary=corpus.vocabulary,
        **MUON,
    )
    run = add_parts(run)
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 4)
        await swarm.replace(2, 0)
        await swarm.until(swarm.finished)
        methods = [e["method"] for e in swarm.lines.events("rebuilt") if e["stage"] == 2]
        assert methods == ["redundant"]
    # Sums in another order differ in their last bits, which Muon's rounded products make larger.
    assert losses(tmp_path) == pytest.approx(undisturbed(run, corpus, run.steps), rel=1e-4)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]
    assert audit(tmp_path).exact


async def test_a_standby_has_done_ahead_what_is_the_same_for_every_seat(
    corpus, tmp_path, monkeypatch, caplog
):
    """A node that comes once the run has begun draws no initial weights, which it wouldn't need."""
    run, verified, drawn = small(stages=3, steps=ENDLESS), list[Corpus](), list[int]()
    verify = Corpus.verify_in_background
    async with LocalSwarm(run, corpus, tmp_path) as swarm:
        await swarm.until(lambda: swarm.committed() >= 3)
        monkeypatch.setattr(
            Corpus, "verify_in_background", lambda data: (verified.append(data), verify(data))
        )
        monkeypatch.setattr(initial, "build_stage", lambda _, stage, *__: drawn.append(stage))
        with caplog.at_level("INFO", "planaria"):
            standby = swarm.start(None, 0)
            await swarm.until(lambda: standby.rehearsing and standby.rehearsing.done())
        assert "ready for a seat: rehearsed in" in caplog.text
        assert verified == [corpus]
        assert standby.seat is None
        await swarm.kill(2, 0)
        at = swarm.committed()
        await swarm.until(lambda: swarm.committed() >= at + 3)
        assert standby.stage == 2
    assert not drawn
    assert audit(tmp_path).exact

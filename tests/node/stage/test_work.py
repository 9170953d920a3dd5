"""A stage's arithmetic in torch, in attempts of a small swarm with real tensors."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress
from functools import partial, reduce
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attempt_swarm import BEGAN, MICROBATCHES, STAGES, Swarm, undisturbed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planaria.bootstrap.registry_pb2 import NONFINITE
from planaria.node.data.corpus import Corpus
from planaria.node.data.mixture import inputs_and_targets, training_windows
from planaria.node.driver.spot_checks import SpotChecks
from planaria.node.machine.compute import ComputeThread
from planaria.node.model.modules import build_stage
from planaria.node.model.shape import model_config
from planaria.node.run_file import ModelSection, RunFile, TrainingSection, WireSection
from planaria.node.stage import memory_limit
from planaria.node.stage.activations import saved_bytes, working_bytes
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.stage.work import TorchWork
from planaria.node.transaction.attempt import (
    Attempt,
    NoRoomError,
    StageWork,
    Visit,
    Workplace,
)
from planaria.node.transaction.bounds import UNLIKE
from planaria.node.transaction.effects import Ballot
from planaria.node.transaction.routing import Route
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import ComplaintError
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.tensors import decode, encode, finite

CPU = torch.device("cpu")
SECTION = ModelSection(dim=8, heads=2, stages=STAGES, layers=2, context=4, hidden=8)
RUN = RunFile(
    model=SECTION,
    training=TrainingSection(batch=10, microbatch=2),
    wire=WireSection(activations="none", gradients="none"),
)


@pytest.fixture(scope="module")
def corpus(data) -> Corpus:
    return Corpus.open(data)


def make_work(corpus: Corpus, node: str, stage: int, kind: type[TorchWork] = TorchWork) -> Any:
    config = model_config(SECTION, corpus.vocabulary)
    module = build_stage(config, stage, 0)
    optimizer = StageOptimizer(module, CPU)
    return kind(stage, module, optimizer, RUN, config, None if stage else corpus)


ROUTE = Route(("0.0", "1.0", "2.0", "0.0"), (0, 1, 2, 0))


def check_gradients(swarm: Swarm, other: Swarm) -> None:
    for gradient, wanted in zip(swarm.gradients(), other.gradients(), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-7)


def test_what_is_done_twice_is_the_same_and_leaves_no_gradient(corpus: Corpus) -> None:
    """Spot checks leave all gradients the same, bit for bit."""
    made = []
    for share in (0.0, 0.5):
        swarm = Swarm(2, random.Random(5), make_work=partial(make_work, corpus))
        checks = SpotChecks(share, 0.05, random.Random(6))
        swarm.starts(checks=checks)
        swarm.ends()
        swarm.check_everything_is_there_once()
        assert len(swarm.compared) == 2 * len(checks.checked)
        assert all(compared.difference == 0 for _, compared in swarm.compared)
        made.append([node.gradient.clone() for node in swarm.nodes.values()])
    assert all(map(torch.equal, *made))


def test_what_differs_is_measured_and_what_cannot_be_read_is_unlike_all(corpus: Corpus) -> None:
    work = make_work(corpus, "a", 1)
    shape = RUN.training.microbatch, SECTION.context, SECTION.dim

    def made(tensor: torch.Tensor) -> Frame:
        return Frame("activation", BEGAN, {}, *encode([tensor], "none"))

    ones = torch.ones(shape)
    assert work.difference(made(ones), made(0.5 * ones)) == pytest.approx(0.5)
    assert work.difference(made(ones), made(-ones)) == pytest.approx(2.0)
    assert work.difference(made(0 * ones), made(0 * ones)) == 0.0
    assert work.difference(made(ones), made(torch.nan * ones)) == UNLIKE
    assert work.difference(made(torch.ones(2, 3)), made(ones)) == UNLIKE


@given(
    seed=st.integers(0, 2**32),
    replicas=st.integers(2, 3),
    losses=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 2), st.booleans()), max_size=3),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_whoever_is_lost_every_microbatch_is_in_each_gradient_once(corpus, seed, replicas, losses):
    make: Any = partial(make_work, corpus)
    chance = random.Random(seed)
    swarm = Swarm(replicas, chance, make_work=make)
    swarm.starts()
    for after, count, mute in losses:
        for _ in range(after):
            swarm.moves()
        swarm.loses(set(chance.sample(sorted(swarm.left()), count)), mute)
    swarm.ends()
    swarm.check_everything_is_there_once()
    expected = undisturbed(make)
    check_gradients(swarm, expected)
    swarm.check_homes_are_those_of(expected)


def test_a_gradient_is_of_the_mean_over_all_that_is_scored_in_the_window(corpus, conversations):
    """Scored tokens may be in any microbatches and at any nodes. Some microbatches have none."""
    chat = Corpus.open(conversations)
    swarm = Swarm(2, random.Random(0), make_work=partial(make_work, chat))
    swarm.starts()
    swarm.ends()
    homes = [home for node in swarm.nodes.values() for home in node.homes.values()]
    assert 0 in {home.tokens for home in homes}
    ids = training_windows(chat, RUN.seed, SECTION.context, RUN.batches).ids(1)
    tokens = torch.from_numpy(np.stack([chat.sample("train", SECTION.context, at) for at in ids]))
    scored = np.stack([chat.scored("train", SECTION.context, int(index)) for index in ids])
    config = model_config(SECTION, chat.vocabulary)
    ends, *body = modules = [build_stage(config, stage, 0) for stage in range(STAGES + 1)]
    x = ends.embed(tokens[:, :-1]).split(RUN.training.microbatch)
    orders = [body[:: 1 if number % 2 == 0 else -1] for number in range(len(x))]  # as in attempts
    x = torch.cat(
        [
            reduce(lambda x, stage: stage(x), order, part)
            for part, order in zip(x, orders, strict=True)
        ]
    )
    each = F.cross_entropy(ends.logits(x)[scored], tokens[:, 1:][scored], reduction="none")
    each.mean().backward()
    assert sum(home.tokens for home in homes) == len(each) == scored.sum()
    assert sum(home.loss for home in homes) == pytest.approx(each.sum().item(), rel=1e-5)
    for gradient, module in zip(swarm.gradients(), modules, strict=True):
        wanted = torch.cat([weight.grad.flatten() for weight in module.parameters()])
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-7)


def test_where_documents_begin_is_said_and_checked(conversations):
    """Frames say exactly where documents begin, even in int4. Other values than 0 and 1 are the
    sender's fault."""
    section = SECTION.model_copy(update={"attn_mask_type": "block_causal"})
    run = RUN.model_copy(update={"wire": WireSection(activations="int4", gradients="int4")})
    chat = Corpus.open(conversations)
    config = model_config(section, chat.vocabulary)
    planned = training_windows(chat, RUN.seed, 4, RUN.batches)
    begin = {
        step: inputs_and_targets(chat, "train", 4, planned.ids(step), apart=True)[2]
        for step in range(1, 9)
    }
    step = next(step for step, begins in begin.items() if begins.any())
    works = []
    for stage in (0, 1):
        module = build_stage(config, stage, 0)
        data = None if stage else chat
        optimizer = StageOptimizer(module, CPU)
        works.append(TorchWork(stage, module, optimizer, run, config, corpus=data))
        works[-1].begin(BEGAN, pb.Begin(step=step))
    first, second = works
    sent_begins = []
    for microbatch in range(RUN.training.microbatches):
        frame = first.embed(BEGAN, Visit(microbatch, 0, ROUTE)).frame
        x, begins = decode(frame.descriptors, frame.payload)
        assert x.shape == (2, 4, section.dim)
        sent_begins.append(begins[..., 0])
    assert torch.equal(torch.cat(sent_begins), torch.from_numpy(begin[step]).byte())
    onward = second.forward(BEGAN, Visit(4, 1, ROUTE), "0.0", frame).frame
    _, passed_on = decode(onward.descriptors, onward.payload)
    assert torch.equal(passed_on, begins)
    back = Frame("gradient", BEGAN, {}, *encode([torch.ones_like(x)], "int4"))
    done = second.backward(BEGAN, Visit(4, 1, ROUTE), "0.0", back)
    assert [descriptor.form.shape for descriptor in done.frame.descriptors] == [x.shape]
    begins[0, 2] = 2
    wrong = Frame("activation", BEGAN, frame.fields, *encode([x, begins], "int4"))
    assert second.difference(wrong, wrong) == 0
    assert second.difference(frame, wrong) == UNLIKE
    with pytest.raises(ComplaintError, match="neither 0 nor 1") as failure:
        second.forward(BEGAN, Visit(4, 1, ROUTE), "0.0", wrong)
    assert failure.value.accused == ["0.0"]


def test_a_window_without_anything_scored_has_no_gradient_and_no_loss(corpus, conversations):
    class Mute(Corpus):
        def scored(self, split, context, index):
            return np.zeros(context, np.bool_)

    swarm = undisturbed(partial(make_work, Mute.open(conversations)))
    assert [gradient.abs().max() for gradient in swarm.gradients()] == [0] * (STAGES + 1)
    homes = [home for node in swarm.nodes.values() for home in node.homes.values()]
    assert {(home.loss, home.tokens) for home in homes} == {(0, 0)}


def test_a_gradient_that_was_reduced_in_vain_is_the_nodes_own_again(corpus):
    make: Any = partial(make_work, corpus)
    swarm = Swarm(2, random.Random(0), make_work=make)
    swarm.starts()
    swarm.ends()
    own = swarm.nodes["1.0"].gradient.clone()
    swarm.loses({"1.1"}, mute=True)  # averaging, which ends in vain, has changed the gradient
    swarm.ends()
    check_gradients(swarm, undisturbed(make))
    assert not torch.equal(swarm.nodes["1.0"].gradient, own)


class Small(TorchWork):
    """A stage on a device that has room for the activations of two microbatches."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        if self.corpus is None:
            blocks = self._blocks
            self._blocks = lambda x: blocks(x if len(self._attempt.saved) < 2 else _too_large())


def _too_large() -> torch.Tensor:
    return torch.empty(1 << 48)


def test_a_device_that_runs_out_of_memory_does_the_rest_when_it_has_some(corpus):
    swarm = Swarm(
        1, random.Random(3), make_work=partial(make_work, corpus, kind=Small), swapped=False
    )
    for node in swarm.nodes.values():
        node.workplace.filling.out = MICROBATCHES
    swarm.starts()
    swarm.ends()
    swarm.check_everything_is_there_once()
    check_gradients(swarm, undisturbed(partial(make_work, corpus), swapped=False))
    assert swarm.nodes["1.0"].work._room.most == 2


def test_a_backward_pass_that_runs_out_of_memory_leaves_less_for_the_next_attempt(corpus):
    work = make_work(corpus, "1.0", 1)
    blocks = work._blocks

    def runs_out_later(x: torch.Tensor) -> torch.Tensor:
        y = blocks(x)
        y.register_hook(lambda _: _too_large())
        return y

    work._blocks = runs_out_later
    work.begin(BEGAN, pb.Begin(step=1))
    descriptors, payload = encode([torch.ones(2, 4, 8)], "none")
    for microbatch in range(4):
        fields = {"microbatch": microbatch, "position": 1}
        frame = Frame("activation", BEGAN, fields, descriptors, payload)
        work.forward(BEGAN, Visit(microbatch, 1, ROUTE), "0.0", frame)
    frame = Frame("gradient", BEGAN, {"microbatch": 3, "position": 1}, descriptors, payload)
    with pytest.raises(NoRoomError, match="out of memory") as failure:
        work.backward(BEGAN, Visit(3, 1, ROUTE), "2.0", frame)
    assert not (failure.value.waits or failure.value.ends)
    assert work._room.most == 2


@pytest.mark.parametrize("stage", [1, 2])
def test_a_microbatch_needs_the_memory_of_its_own_stages_layers(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RUN.model_copy(
        update={"model": SECTION.model_copy(update={"stages": (1, 3), "layers": 4})}
    )
    config = model_config(run.model, 16)
    needs = [saved_bytes(run, config, at) + working_bytes(run, config, at) for at in (1, 2)]
    monkeypatch.setattr(memory_limit, "SMALL", 0)
    monkeypatch.setattr(memory_limit, "available_memory", lambda: sum(needs) / 2)
    module = build_stage(config, stage, 0)
    work = TorchWork(stage, module, StageOptimizer(module, CPU), run, config)
    work.begin(BEGAN, pb.Begin(step=1))
    descriptors, payload = encode([torch.ones(2, 4, 8)], "none")
    done = []
    with suppress(NoRoomError):
        for microbatch in range(2):
            fields = {"microbatch": microbatch, "position": stage}
            frame = Frame("activation", BEGAN, fields, descriptors, payload)
            done.append(work.forward(BEGAN, Visit(microbatch, stage, ROUTE), "0.0", frame))
    assert len(done) == {1: 2, 2: 1}[stage]


def test_bytes_that_are_kept_are_those_of_gradients(corpus):
    swarm = Swarm(2, random.Random(0), make_work=partial(make_work, corpus))
    swarm.starts()
    swarm.ends()
    for node in swarm.nodes.values():
        attempt = node.attempt
        sizes = sum(frame.size for frame in attempt._sent.values())
        assert attempt.kept == sizes + node.gradient.nbytes


def test_a_frame_that_cannot_be_decoded_is_a_complaint_about_its_sender(corpus):
    work = make_work(corpus, "1.0", 1)
    work.begin(BEGAN, pb.Begin(step=1))
    visit = Visit(3, 1, ROUTE)
    descriptors, payload = encode([torch.ones(2, 4, 8)], "none")
    damaged = bytearray().join(payload)
    damaged[5] ^= 1
    frame = Frame("activation", BEGAN, {"microbatch": 3, "position": 1}, descriptors, damaged)
    with pytest.raises(
        ComplaintError, match=r"activation of microbatch 3 from 0\.0: .*damaged"
    ) as failure:
        work.forward(BEGAN, visit, "0.0", frame)
    assert failure.value.accused == ["0.0"]
    two = Frame("activation", BEGAN, {}, [*descriptors, *descriptors], (*payload, *payload))
    with pytest.raises(ComplaintError, match=r"activation of microbatch 3 from 0\.0"):
        work.forward(BEGAN, visit, "0.0", two)


def test_a_pass_of_an_older_attempt_is_not_done(corpus):
    work = make_work(corpus, "0.0", 0)
    visit = Visit(0, 0, ROUTE)
    assert work.embed(BEGAN, visit) is None
    work.begin(BEGAN, pb.Begin(step=1))
    assert work.embed(BEGAN, visit) is not None
    work.begin(Ballot(1, 2), pb.Begin(step=1))
    assert work.embed(BEGAN, visit) is None
    work.drop()
    assert work.embed(Ballot(1, 2), visit) is None


async def test_a_disk_that_is_slow_to_give_samples_is_no_hanging_device(corpus, monkeypatch):
    compute = ComputeThread("test", asyncio.get_running_loop())
    waits, read = [], Corpus.sample

    def slowly(*arguments: Any) -> Any:
        waits.append(compute.watch.waits)
        return read(*arguments)

    monkeypatch.setattr(Corpus, "sample", slowly)
    work = make_work(corpus, "0.0", 0)
    work.begin(BEGAN, pb.Begin(step=1))
    visit = Visit(0, 0, ROUTE)
    assert await compute.run(partial(work.embed, BEGAN, visit)) is not None
    assert {*waits} == {True}
    assert not compute.watch.waits
    assert compute.stop(60.0)


# --- the two threads


def guarded(kind: type, thread: Any) -> type:
    """Return a class like `kind` that notes accesses to its fields from another thread than
    `thread()`, once that returns one."""

    class Guarded(kind):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in object.__getattribute__(self, "__dict__"):
                check(name)
            return super().__getattribute__(name)

        def __setattr__(self, name: str, value: Any) -> None:
            check(name)
            super().__setattr__(name, value)

    def check(name: str) -> None:
        owner, here = thread(), threading.current_thread()
        if owner is not None and here is not owner:
            trespasses.append(f"{kind.__name__}.{name} from {here.name}")

    return Guarded


trespasses: list[str] = []


async def test_no_field_is_touched_from_two_threads(corpus):
    """Each stage has two nodes with compute threads of their own. Node 1.1 is lost on the way."""
    trespasses.clear()
    loop, main = asyncio.get_running_loop(), threading.current_thread()
    threads: dict[str, threading.Thread] = {}
    swarm = Swarm(2, random.Random(0), make_work=partial(make_guarded, corpus, threads))
    computes = {}
    for name, node in swarm.nodes.items():
        computes[name] = compute = ComputeThread(name, loop)
        threads[name] = compute._thread
        node.compute = compute
        fields = vars(node.workplace) | {"compute": compute}
        node.workplace = guarded(Workplace, lambda: main)(
            **{name: value for name, value in fields.items() if name != "_seconds"}
        )

    def starts(node: Any) -> None:
        node.attempt = guarded(Attempt, lambda: main)(node.workplace, BEGAN, swarm.begin())
        node.attempt.start()

    async def until_all_is_applied() -> None:
        count = 0
        while count < 5 * (STAGES + 1):
            await asyncio.sleep(0.001)
            while swarm.under_way:
                swarm._arrives()
            count = sum(len(node.attempt.applied) for node in swarm.left().values())

    try:
        for node in swarm.nodes.values():
            starts(node)
        await until_all_is_applied()
        swarm.loses({"1.1"}, mute=True)
        for name in list(swarm.left()):
            _, ballot, begin = next(plan for plan in swarm.plans if plan[0] == name)
            swarm.nodes[name].attempt.go_on(ballot, begin)
        swarm.plans.clear()
        await until_all_is_applied()
    finally:
        for compute in computes.values():
            await asyncio.to_thread(compute.stop)
    assert trespasses == []


def make_guarded(corpus: Corpus, threads: dict[str, Any], node: str, stage: int) -> StageWork:
    return make_work(corpus, node, stage, guarded(TorchWork, lambda: threads.get(node)))


def test_what_is_not_finite_is_its_senders_unless_it_is_to_be_let_through(corpus):
    visit = Visit(3, 1, ROUTE)
    x = torch.ones(2, 4, 8)
    x[1, 2, 3] = torch.inf
    frame = Frame("activation", BEGAN, {"microbatch": 3, "position": 1}, *encode([x], "none"))
    work = make_work(corpus, "1.0", 1)
    work.begin(BEGAN, pb.Begin(step=1))
    with pytest.raises(ComplaintError, match="it is not finite") as failure:
        work.forward(BEGAN, visit, "0.0", frame)
    assert (failure.value.accused, failure.value.cause) == (["0.0"], NONFINITE)
    work.begin(BEGAN, pb.Begin(step=1, non_finite=True))
    assert work.forward(BEGAN, visit, "0.0", frame).frame is not None


def test_finite_values_whose_sum_is_not_are_finite():
    assert finite(torch.full((8,), 3e38))
    assert not finite(torch.tensor([1.0, torch.nan]))
    assert not finite(torch.tensor([torch.inf, -torch.inf]))

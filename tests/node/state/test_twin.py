from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planaria.node.model.modules import build_stage
from planaria.node.model.shape import ModelConfig, model_config
from planaria.node.run_file import loads, override
from planaria.node.stage.initial import InitialStages
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.state.stage_state import StageState, StateId
from planaria.node.state.twin import Twin, next_stage, senders_by_holder
from planaria.node.transaction.effects import NEVER, Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.exchange import ComplaintError, Exchange, Exchanges, PeerLostError
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.tensors import decode, encode
from tests.harness.network import Network, Nodes, Thread, copied, damaged, with_fields

CPU = torch.device("cpu")
BALLOT = Ballot(3, 1)
RUN = loads('[model]\npreset = "tiny"\ndim = 8\nheads = 2\nhidden = 8\ncontext = 8')


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planaria.node.state.twin.PIECE", 150)
        yield


def config_of(stages: int) -> ModelConfig:
    return model_config(
        override(RUN, model__stages=stages, model__layers=stages).model, vocabulary=16
    )


def places(*replicas: int) -> list[pb.Place]:
    """Return places for so many nodes at stages 0, 1, .."""
    return [
        pb.Place(node=f"{stage}.{replica}", stage=stage)
        for stage, nodes in enumerate(replicas)
        for replica in range(nodes)
    ]


def twin_of(
    node: str,
    stage: int,
    config: ModelConfig,
    exchanges: Exchanges,
    send: Callable[[str, Frame], bool] = lambda peer, frame: True,
) -> Twin:
    module = InitialStages(RUN, config).stage(next_stage(stage, config.stages))
    optimizer = StageOptimizer.of_run(module, CPU, RUN)
    return Twin(node, stage, config.stages, optimizer, exchanges, send, tensors)


def state_of(optimizer: StageOptimizer) -> tuple[int, list[torch.Tensor]]:
    return optimizer.steps, [tensor.clone() for _, tensor in optimizer.state()]


def same(a: StageOptimizer, b: StageOptimizer) -> bool:
    (steps, ours), (others_steps, theirs) = state_of(a), state_of(b)
    return steps == others_steps and all(map(torch.equal, ours, theirs))


# Who serves whom


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), unique_by=lambda p: p[1]),
    st.integers(0, 3),
    st.randoms(),
)
def test_each_holder_is_served_by_one_replica_and_each_replica_serves_its_share(
    nodes: list[tuple[int, int]], of: int, order: random.Random
) -> None:
    members = [pb.Place(node=f"{name:02}", stage=stage) for stage, name in nodes]
    replicas = {place.node for place in members if place.stage == of}
    assume(replicas)
    plan = senders_by_holder(of, 3, members)
    assert set(plan) == {place.node for place in members if place.stage == (of - 1) % 4}
    load = Counter(dict.fromkeys(replicas, 0)) + Counter()
    load.update(plan.values())
    loads_of_all = [load[replica] for replica in replicas]
    assert set(plan.values()) <= replicas
    assert max(loads_of_all) - min(loads_of_all) <= 1
    shuffled = order.sample(members, len(members))
    assert senders_by_holder(of, 3, shuffled) == plan


# Whole swarms, frames delivered in any order


class Swarm(Network):
    """A swarm of stages and twins. Frames arrive in any order."""

    def __init__(self, members: list[pb.Place], seed: int) -> None:
        super().__init__(seed)
        self.members = members
        self.stage_of = {place.node: place.stage for place in members}
        config = config_of(max(self.stage_of.values()))
        self.own = {
            place.node: StageOptimizer.of_run(build_stage(config, place.stage, RUN.seed), CPU, RUN)
            for place in members
        }
        self.exchanges = {place.node: self.new(self.slow()) for place in members}
        for node, stage in self.stage_of.items():
            send = partial(self.send, node)
            self.nodes[node] = twin_of(node, stage, config, self.exchanges[node], send)
        self.norms: dict[int, float] = {}
        self.ballot = BALLOT
        self.committed = 0

    def start(self) -> list[Exchange[None]]:
        """Start an attempt with averaged gradients. Returns the nodes' exchanges with twins."""
        self.ballot = Ballot(self.ballot.view, self.ballot.attempt + 1)
        for twin in self.nodes.values():
            twin.forget(self.ballot)
        generator = torch.Generator().manual_seed(self.ballot.attempt)
        gradients = {
            stage: torch.randn(len(self.own[f"{stage}.0"].weights), generator=generator)
            for stage in range(len(set(self.stage_of.values())))
        }
        nodes = list(self.own)
        self.random.shuffle(nodes)
        started = []
        for node in nodes:
            optimizer = self.own[node]
            optimizer.gradient.copy_(gradients[self.stage_of[node]])
            norm = optimizer.squared_norm()
            self.norms[self.stage_of[node]] = norm
            self.nodes[node].hurry(self.ballot)
            work = self.nodes[node].exchange(
                self.ballot, self.members, optimizer.gradient, norm, 60.0
            )
            started.append(self.exchanges[node].start(work))
        return started

    def commit(self, skipped: bool = False) -> None:
        for exchange in self.start():
            self.outcome(exchange)
        self.settle()
        self.committed += 1
        commit = self.record(skipped)
        for node, optimizer in self.own.items():
            stage = self.stage_of[node]
            if not skipped:
                optimizer.step(0.01 * commit.lr_scale[stage], commit.clip_scale[stage])
            self.nodes[node].apply(commit, 0.01)
            optimizer.zero_gradient()

    def record(self, skipped: bool = False) -> pb.Commit:
        stages = range(max(self.stage_of.values()) + 1)
        return pb.Commit(
            step=self.committed,
            ballot=self.ballot.message(),
            skipped=skipped,
            clip_scale=[1 / (stage + 1) for stage in stages],
            lr_scale=[1 + stage / 10 for stage in stages],
        )

    def abort(self) -> None:
        """Start an attempt, and cancel it after a random number of events."""
        exchanges = self.start()
        for _ in range(self.random.randrange(60)):
            self.step()
        for exchange in exchanges:
            exchange.cancel()
        for optimizer in self.own.values():
            optimizer.zero_gradient()

    def holders(self, stage: int) -> list[Twin]:
        return [twin for twin in self.nodes.values() if twin.stage == stage]


@given(
    st.lists(st.integers(1, 3), min_size=2, max_size=4),
    st.lists(st.sampled_from(["commit", "skip", "abort"]), min_size=1, max_size=6),
    st.integers(0, 2**32),
)
@settings(max_examples=30, deadline=None)
def test_after_each_commit_stage_and_twin_are_bit_identical(
    replicas: list[int], story: list[str], seed: int
) -> None:
    swarm = Swarm(places(*replicas), seed)
    applied, made = dict.fromkeys(range(len(replicas)), 0.0), NEVER
    for event in story:
        if event == "abort":
            swarm.abort()
        else:
            swarm.commit(skipped=event == "skip")
            made = swarm.ballot
            if event == "commit":
                applied = dict(swarm.norms)
        for node, optimizer in swarm.own.items():
            for twin in swarm.holders(stage := swarm.stage_of[node]):
                assert same(twin.optimizer, optimizer)
                assert twin.state.digest == (optimizer.digest() if made != NEVER else b"")
                assert twin.state.id == StateId(stage, 0, swarm.committed, made)
                assert twin.state.omega == applied[stage]


def test_each_gradient_is_sent_once_to_each_holder() -> None:
    swarm = Swarm(places(3, 1, 2), seed=0)
    swarm.commit()
    sent = {node: twin.bytes_sent for node, twin in swarm.nodes.items()}
    size = [swarm.own[f"{stage}.0"].gradient.nbytes for stage in range(3)]
    assert sent == {
        **{"0.0": size[0], "0.1": size[0], "0.2": 0},  # to both nodes of stage 2
        "1.0": 3 * size[1],
        **{"2.0": size[2], "2.1": 0},
    }


# One holder, alone

MEMBERS = places(1, 1, 1, 1)


class Holder:
    """Node 1.0 of a swarm with three body stages: it holds the twin of stage 2."""

    def __init__(
        self, send: Callable[[str, Frame], bool] = lambda peer, frame: True, compute: Any = None
    ) -> None:
        self.time = Nodes()
        self.exchanges = self.time.new(compute)
        self.twin = twin_of("1.0", 1, config_of(3), self.exchanges, send)
        self.optimizer = self.twin.optimizer

    def hears(self, frames: Iterable[Frame], peer: str = "2.0") -> None:
        for frame in frames:
            self.twin.on_frame(peer, frame)

    def exchange(self, *arguments: Any) -> None:
        self.twin.hurry(arguments[0])
        self.time.run(self.exchanges, self.twin.exchange(*arguments))

    def gather(self, ballot: Ballot = BALLOT, replicas: int = 1) -> None:
        """Run an exchange with a deadline of 0: only frames that have arrived count."""
        self.exchange(ballot, places(*[replicas] * 4), torch.zeros(200), 0.0, 0)


def frames_of(
    value: float, replica: int = 0, replicas: int = 1, ballot: Ballot = BALLOT
) -> list[Frame]:
    """Return what a node of stage 2 sends to 1.0 if each value of its gradient is `value`."""
    sent: list[tuple[str, Frame]] = []
    time = Nodes()
    exchanges = time.new()
    node = twin_of(
        *(f"2.{replica}", 2, config_of(3), exchanges),
        lambda peer, frame: not sent.append((peer, frame)),
    )
    gradient = torch.full_like(node.optimizer.gradient, value)
    norm = float(gradient.double().square().sum())
    node.hurry(ballot)
    with pytest.raises(ComplaintError):  # nobody sends to it
        time.run(exchanges, node.exchange(ballot, places(*[replicas] * 4), gradient, norm, 0))
    return [copied(frame) for peer, frame in sent if peer == "1.0"]


@pytest.mark.parametrize("lost", [0, 1, -1])
def test_the_deadline_names_who_did_not_send(lost: int) -> None:
    twin = Holder()
    frames = frames_of(1.0)
    frames.pop(lost)
    twin.hears(frames)
    complaint = f"1 of {len(frames) + 1} pieces of stage 2's gradient .* did not arrive from 2.0"
    with pytest.raises(ComplaintError, match=complaint) as caught:
        twin.gather()
    assert caught.value.accused == ["2.0"]


def with_tensors(*tensors: torch.Tensor) -> Callable[[Frame], Frame]:
    def change(frame: Frame) -> Frame:
        return Frame(frame.kind, frame.ballot, frame.fields, *encode(tensors, "none"))

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (damaged, "damaged"),
        (with_tensors(), "no tensor, where"),
        (with_tensors(torch.ones(149)), r"\[149\].*, where float32 \[150\]"),
        (with_tensors(torch.ones(150, dtype=torch.float16)), "float16"),
        (with_tensors(torch.ones(150), torch.ones(1)), "float32"),
        (with_fields(piece=-1), "piece -1"),
        (with_fields(piece=1000), "piece 1000"),
        (with_fields(piece=True), "piece True"),
        (with_fields(piece=[0]), "piece"),
        (with_fields(squared_norm=-1.0), "squared norm"),
        (with_fields(squared_norm="1"), "squared norm"),
    ],
)
def test_a_frame_that_cannot_be_right_accuses_its_sender(
    change: Callable[[Frame], Frame], complaint: str
) -> None:
    twin = Holder()
    twin.hears(change(frame) for frame in frames_of(1.0))
    with pytest.raises(ComplaintError, match=complaint) as caught:
        twin.gather()
    assert caught.value.accused == ["2.0"]


def test_after_a_failure_the_next_attempt_is_whole() -> None:
    twin = Holder()
    twin.hears(damaged(frame) for frame in frames_of(1.0))
    with pytest.raises(ComplaintError):
        twin.gather()
    again = Ballot(3, 2)
    twin.hears(frames_of(2.0, ballot=again))
    twin.gather(again)
    assert torch.equal(twin.optimizer.gradient, torch.full_like(twin.optimizer.gradient, 2.0))


def test_a_piece_may_come_twice() -> None:
    twin = Holder()
    first, *others = frames_of(3.0)
    twin.hears([first, first, *others])
    twin.gather()
    assert torch.equal(twin.optimizer.gradient, torch.full_like(twin.optimizer.gradient, 3.0))


def test_only_the_replica_that_serves_this_node_is_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    twin = Holder()
    for peer in ("2.1", "3.0", "stranger"):
        twin.hears(frames_of(1.0), peer)
    with pytest.raises(ComplaintError, match=r"did not arrive from 2\.0") as caught:
        twin.gather(replicas=2)
    assert caught.value.accused == ["2.0"]
    assert "dropped a gradient for the twin of stage 2 from stranger" in caplog.text
    assert not twin.optimizer.gradient.any()


def test_a_holder_without_a_link_is_accused() -> None:
    twin = Holder(send=lambda peer, frame: False)
    twin.hears(frames_of(1.0))
    with pytest.raises(PeerLostError, match=r"no link to 0\.0") as caught:
        twin.gather()
    assert caught.value.accused == ["0.0"]


def test_what_waits_to_be_sent_does_not_change_with_the_gradient() -> None:
    sent: list[Frame] = []
    twin = Holder(send=lambda peer, frame: not sent.append(frame))
    twin.hears(frames_of(1.0))
    gradient = torch.ones(200)
    twin.exchange(BALLOT, MEMBERS, gradient, 200.0, 0)
    gradient.zero_()
    values = [decode(copied(frame).descriptors, copied(frame).payload)[0] for frame in sent]
    assert torch.equal(torch.cat(values), torch.ones(200))


# Ballots


def test_frames_of_a_coming_exchange_are_kept_and_old_ones_dropped() -> None:
    twin = Holder()
    older, newer = Ballot(3, 0), Ballot(3, 2)
    for value, ballot in ((9.0, older), (1.0, BALLOT)):
        twin.hears(frames_of(value, ballot=ballot))
    twin.hears(frames_of(9.0, ballot=older))
    twin.gather()
    assert torch.equal(twin.optimizer.gradient, torch.full_like(twin.optimizer.gradient, 1.0))
    twin.hears(frames_of(9.0))  # of the exchange that is over
    twin.hears(frames_of(2.0, ballot=newer))
    twin.gather(newer)
    assert torch.equal(twin.optimizer.gradient, torch.full_like(twin.optimizer.gradient, 2.0))


def test_frames_of_the_next_exchange_outlive_this_one() -> None:
    twin = Holder()
    for peer, ballot in (("2.0", BALLOT), ("2.1", Ballot(3, 2))):
        twin.hears(frames_of(1.0, ballot=ballot), peer)
    twin.gather()
    members = [place for place in places(2, 2, 2, 2) if place.node != "2.0"]
    twin.exchange(Ballot(3, 2), members, torch.zeros(8), 0.0, 0)


def test_what_it_made_when_it_was_cancelled_is_not_sent() -> None:
    sent: list[str] = []
    time = Nodes()
    exchanges = time.new(Thread(time, lambda: 0.001))
    twin = twin_of("1.0", 1, config_of(3), exchanges, lambda peer, frame: not sent.append(peer))
    exchange = exchanges.start(twin.exchange(BALLOT, MEMBERS, torch.zeros(8), 0.0, 60.0))
    exchange.cancel()
    while time.step():
        pass
    assert sent == []


def test_a_peer_far_ahead_cannot_fill_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    twin = Holder()
    frames = frames_of(1.0)
    for _ in range(5):
        twin.hears(frames)
    assert caplog.text.count("bytes from 2.0: too many wait") >= 3 * len(frames)
    newest = frames_of(2.0, ballot=Ballot(3, 7))  # they replace the older ones
    twin.hears([*newest, *frames])
    twin.gather(Ballot(3, 7))
    assert torch.equal(twin.optimizer.gradient, torch.full_like(twin.optimizer.gradient, 2.0))


def test_a_commit_of_another_attempt_than_the_gradients_is_refused() -> None:
    twin = Holder()
    twin.hears(frames_of(1.0))
    twin.gather()
    before = state_of(twin.optimizer)
    commit = pb.Commit(step=1, ballot=Ballot(3, 0).message(), clip_scale=[1] * 4, lr_scale=[1] * 4)
    with pytest.raises(AssertionError):
        twin.twin.apply(commit, 0.1)
    assert twin.twin.state.id.step == 0
    assert all(map(torch.equal, before[1], state_of(twin.optimizer)[1]))


# The state


def fetched(state: StageState) -> StageState:
    return replace(state, tensors={name: t.clone() for name, t in state.tensors.items()})


def test_a_twin_that_comes_later_is_stale_until_it_has_the_stages_state() -> None:
    swarm = Swarm(places(2, 2, 2), seed=1)
    swarm.commit()
    late = swarm.nodes["1.0"]
    missed = replace(late.state.id, step=0)
    late.state = replace(late.state, id=missed)
    before = state_of(late.optimizer)
    swarm.commit()
    assert late.state.id.step == 0
    assert all(map(torch.equal, before[1], state_of(late.optimizer)[1]))
    values, last = dict(swarm.own["2.1"].state()), swarm.record()
    boosted = StageState(StateId.after(last, 2, 1, swarm.committed), values, 7.5, 1, last, 2)
    exchanges = swarm.start()  # the state is loaded while the next attempt runs
    late.load(replace(fetched(boosted), digest=b"of its source"))
    assert not late.state.digest, "it is known after the next update"
    for exchange in exchanges:
        swarm.outcome(exchange)
    assert late.state.id == StateId(2, 1, 2, Ballot.of(boosted.last.ballot))
    assert (late.state.omega, late.state.boosted_at) == (7.5, 1)
    swarm.commit()
    assert late.state.id == StateId(2, 1, 3, swarm.ballot)
    assert same(late.optimizer, swarm.own["2.0"])


def test_what_a_twin_serves_is_the_stages_state() -> None:
    swarm = Swarm(places(1, 1, 1, 1), seed=2)
    swarm.commit()
    swarm.commit(skipped=True)
    for stage in range(4):
        (twin,) = swarm.holders(stage)
        served = twin.state
        assert (served.id.step, served.optimizer_step) == (2, 1)
        assert served.last == swarm.record(skipped=True)
        fresh = StageOptimizer.of_run(build_stage(config_of(3), stage, seed=99), CPU, RUN)
        fresh.load(fetched(served).tensors.items(), served.optimizer_step)
        assert same(fresh, swarm.own[f"{stage}.0"])


def test_a_norm_that_is_not_finite_is_not_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = Swarm(places(1, 1, 1), seed=4)
    swarm.commit()
    (twin,) = swarm.holders(2)
    before = twin.state.omega
    monkeypatch.setattr(swarm.own["2.0"], "squared_norm", lambda: math.inf)
    swarm.commit()
    assert (twin.state.id.step, twin.state.omega) == (2, before)
    assert same(twin.optimizer, swarm.own["2.0"])


def test_a_state_of_another_stage_changes_nothing() -> None:
    swarm = Swarm(places(1, 1, 1), seed=3)
    swarm.commit()
    (of_embedding,) = swarm.holders(0)
    (of_body,) = swarm.holders(1)
    before = state_of(of_body.optimizer)
    kept = of_body.state
    with pytest.raises(ValueError, match="state of a stage has the tensors"):
        of_body.load(fetched(of_embedding.state))
    assert of_body.state is kept
    assert all(map(torch.equal, before[1], state_of(of_body.optimizer)[1]))

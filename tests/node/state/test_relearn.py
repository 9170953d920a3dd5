from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from planaria.node.model.modules import BodyStage, build_stage
from planaria.node.model.shape import ModelConfig, model_config
from planaria.node.run_file import ModelSection
from planaria.node.stage.lesson import StageLesson
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.state import relearn
from planaria.node.state.boundary import BoundaryPair, FetchedTensors
from planaria.node.state.relearn import Relearning, RelearningBlock, RelearningTerms, whole_pairs
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.exchange import ComplaintError, Exchange, Exchanges
from planaria.node.wire.frame_format import Frame
from planaria.recovery.learner import Learner, Muon, learn, residual_error
from planaria.recovery.orders import order, runs
from planaria.recovery.relearning import decayed_rate, pull, sample_parts, shuffled
from tests.harness import network
from tests.harness.network import AtOnce, Nodes, Thread

BALLOT = Ballot(3, 5)
CONFIG = model_config(
    ModelSection(dim=8, heads=2, stages=5, layers=5, context=4, hidden=16), vocabulary=16
)
SHAPE = (2, 4, 8)
MICROBATCHES = 4
STEPS = (6, 7)
PAIRS = len(STEPS) * MICROBATCHES
TERMS = RelearningTerms(samples=1, passes=3, seconds=math.inf, lr=1e-2, patience=60.0)


class Student(NamedTuple):
    module: BodyStage
    optimizer: StageOptimizer
    updates: list[str]  # an entry for each backward pass

    @property
    def adam_is_fresh(self) -> bool:
        moments = self.optimizer.first_moment, self.optimizer.second_moment
        return not (self.optimizer.steps or any(moment.any() for moment in moments))


def student(stage: int, seed: int = 1, config: ModelConfig = CONFIG) -> Student:
    module = build_stage(config, stage, seed)
    assert isinstance(module, BodyStage)
    updates: list[str] = []
    module.register_full_backward_hook(lambda *_: updates.append("backward"))
    return Student(module, StageOptimizer(module, torch.device("cpu")), updates)


Pairs = dict[BoundaryPair, tuple[torch.Tensor, torch.Tensor]]


def crossed(lost: Sequence[int], swapped: bool) -> Pairs:
    """Return inputs and outputs of the runs of lost stages, computed before these were lost."""
    teachers = {stage: build_stage(CONFIG, stage, seed=0) for stage in range(1, CONFIG.stages + 1)}
    for teacher in teachers.values():
        for parameter in teacher.parameters():
            parameter.data *= 4  # as if training had gone on for a while
    generator = torch.Generator().manual_seed(2)
    pairs = {}
    for step, microbatch in product(STEPS, range(MICROBATCHES)):
        visits = order(microbatch, CONFIG.stages, swapped)
        x = torch.randn(SHAPE, generator=generator)
        crossings = [x.to(torch.bfloat16)]
        for stage in visits:
            with torch.no_grad():
                x = teachers[stage](x)
            crossings.append(x.to(torch.bfloat16))
        for run in runs(visits, lost):
            pairs[BoundaryPair(step, microbatch, run.stages)] = (
                crossings[run.start],
                crossings[run.end],
            )
    return pairs


def fetched_by(stage: int, pairs: Pairs, shape: tuple[int, int, int] = SHAPE) -> FetchedTensors:
    return FetchedTensors(
        shape,
        inputs={pair: x for pair, (x, _) in pairs.items() if pair.stages[0] == stage},
        outputs={pair: y for pair, (_, y) in pairs.items() if pair.stages[-1] == stage},
        bytes=100 + stage,
    )


def lesson(
    at: Student, fetched: FetchedTensors, lost: Sequence[int], bf16: bool = False
) -> StageLesson:
    return StageLesson(at.module, at.optimizer, fetched, lost, bf16)


class Network(network.Network):
    """A network of joiners of `stages`. If it is `slow`, each task of a compute thread takes a
    second. Nothing else takes time."""

    def __init__(self, stages: Sequence[int], slow: bool = False) -> None:
        super().__init__(latency=0.0, ordered=True)
        self.exchanges: dict[str, Exchanges] = {}
        for name in (f"joiner-{stage}" for stage in stages):
            exchanges = self.new(Thread(self, lambda: 1.0) if slow else AtOnce())
            self.exchanges[name] = exchanges
            self.nodes[name] = Relearning(exchanges, tensors, partial(self.send, name))

    def begin(
        self,
        joiners: Mapping[int, str],
        stage: int,
        learner: Student,
        fetched: FetchedTensors,
        terms: RelearningTerms = TERMS,
        bf16: bool = False,
        made: StageLesson | None = None,
    ) -> Exchange[pb.Relearned]:
        name = joiners[stage]
        a_lesson = made or lesson(learner, fetched, list(joiners), bf16)
        block = RelearningBlock(BALLOT, stage, joiners)
        return self.exchanges[name].start(self.nodes[name].run(block, a_lesson, fetched, terms))

    def lose(self, node: str) -> None:
        """Tell all peers that their link to the node is lost."""
        for name, other in self.nodes.items():
            if name != node:
                other.on_peer_lost(node, "connection reset")


def together(
    network: Network,
    students: Mapping[int, Student],
    fetched: Mapping[int, FetchedTensors],
    terms: RelearningTerms = TERMS,
    bf16: bool = False,
) -> list[Exchange[pb.Relearned]]:
    joiners = {stage: f"joiner-{stage}" for stage in students}
    return [
        network.begin(joiners, stage, learner, fetched[stage], terms, bf16)
        for stage, learner in students.items()
    ]


def relearn_all(
    students: Mapping[int, Student],
    fetched: Mapping[int, FetchedTensors],
    terms: RelearningTerms = TERMS,
    slow: bool = False,
    bf16: bool = False,
) -> list[pb.Relearned]:
    network = Network(list(students), slow)
    running = together(network, students, fetched, terms, bf16)
    results = [network.outcome(exchange) for exchange in running]
    network.settle()
    return results


def alone(
    learner: Student,
    pairs: Pairs,
    terms: RelearningTerms = TERMS,
    slow: bool = False,
    bf16: bool = False,
    made: StageLesson | None = None,
) -> pb.Relearned:
    """Let a joiner of stage 2 relearn alone, by the lesson `made` if there is one."""
    network = Network([2], slow)
    joiners, fetched = {2: "joiner-2"}, fetched_by(2, pairs)
    return network.outcome(network.begin(joiners, 2, learner, fetched, terms, bf16, made))


def block(
    *lost: int, swapped: bool = False
) -> tuple[dict[int, Student], dict[int, FetchedTensors]]:
    """Return joiners of the stages `lost`, and what they have fetched."""
    pairs = crossed(lost, swapped)
    return {s: student(s) for s in lost}, {s: fetched_by(s, pairs) for s in lost}


def chain_of(pair: BoundaryPair, learners: Mapping[int, Learner]) -> list[Learner]:
    return [learners[stage] for stage in pair.stages]


@pytest.mark.parametrize(("swapped", "samples"), [(False, 8), (True, 1)])
@pytest.mark.parametrize("lost", [(3,), (1,), (4, 5), (1, 2, 3)])
def test_joiners_do_what_one_process_would_do(
    lost: tuple[int, ...], swapped: bool, samples: int
) -> None:
    pairs = crossed(lost, swapped)
    students = {stage: student(stage) for stage in lost}
    fetched = {stage: fetched_by(stage, pairs) for stage in lost}
    results = relearn_all(students, fetched, replace(TERMS, samples=samples))

    reference = {stage: student(stage) for stage in lost}
    learners = {
        s: Learner(learner.module, TERMS.lr, update=Muon(learner.module, pull(lost)))
        for s, learner in reference.items()
    }
    floats = {pair: (x.float(), y.float()) for pair, (x, y) in sorted(pairs.items())}
    a_pass = [
        (pair, x[part], y[part])
        for pair, (x, y) in floats.items()
        for part in sample_parts(SHAPE[0], samples)
    ]
    updates = TERMS.passes * len(a_pass)
    for done in range(updates):
        passes, place = divmod(done, len(a_pass))
        pair, x, y = a_pass[shuffled(len(a_pass), passes)[place]]
        for learner in learners.values():
            learner.lr = decayed_rate(TERMS.lr, done / updates)
        learn(chain_of(pair, learners), x, y)
    for stage in lost:
        ours, theirs = students[stage], reference[stage]
        assert torch.equal(ours.optimizer.weights, theirs.optimizer.weights)
        visited = sum(stage in pair.stages for pair, _, _ in a_pass)
        assert len(ours.updates) == len(theirs.updates) == TERMS.passes * visited
        assert ours.adam_is_fresh
        assert not ours.optimizer.gradient.any()
    for stage, result in zip(lost, results, strict=True):
        assert result.residual_after < result.residual_before
        assert (result.residual_before, result.residual_after) == (
            results[0].residual_before,
            results[0].residual_after,
        )
        assert (result.passes, result.pairs, result.left_out) == (TERMS.passes, len(pairs), 0)
        assert result.fetched_bytes == 100 + stage
        assert not result.undone
    if len({pair.stages for pair in pairs}) == 1:
        chain = chain_of(next(iter(pairs)), learners)
        newest = [ends for pair, ends in floats.items() if pair.step == max(STEPS)]
        assert results[0].residual_after == pytest.approx(residual_error(chain, newest))


def test_pairs_that_are_not_whole_are_left_out_by_everyone() -> None:
    students, fetched = block(2, 3)
    del fetched[2].inputs[BoundaryPair(7, 0, (2, 3))]
    del fetched[3].outputs[BoundaryPair(6, 2, (2, 3))]
    results = relearn_all(students, fetched)
    assert [(result.pairs, result.left_out) for result in results] == [(6, 2), (6, 2)]
    assert all(len(learner.updates) == 6 * SHAPE[0] * TERMS.passes for learner in students.values())


def test_nobody_runs_ahead_of_who_shares_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only pairs of single stages are whole, so no frame makes the leader wait."""
    monkeypatch.setattr(relearn, "TOGETHER", 1)
    pairs = {p: ends for p, ends in crossed([2, 3], swapped=True).items() if len(p.stages) == 1}
    students = {stage: student(stage) for stage in (2, 3)}
    terms = replace(TERMS, passes=20)
    results = relearn_all(students, {s: fetched_by(s, pairs) for s in students}, terms)
    assert [result.passes for result in results] == [20, 20]
    assert [len(learner.updates) for learner in students.values()] == [160, 160]


def test_without_a_whole_pair_the_weights_stay() -> None:
    learner = student(2)
    before = learner.optimizer.digest()
    result = alone(learner, {})
    assert (result.pairs, result.passes, result.undone) == (0, 0, False)
    assert math.isnan(result.residual_before)
    assert math.isnan(result.residual_after)
    assert learner.optimizer.digest() == before


def test_which_pairs_are_whole() -> None:
    def pair(microbatch: int, *stages: int, **sides: bool) -> pb.BoundaryPair:
        return pb.BoundaryPair(step=7, microbatch=microbatch, stages=stages, **sides)

    reports = {
        2: [pair(0, 2, 3, input=True), pair(1, 2, input=True, output=True), pair(3, 2, 3)],
        3: [pair(0, 2, 3, output=True), pair(1, 3, input=True), pair(2, 2, 3, input=True)],
    }
    assert whole_pairs(reports) == ([BoundaryPair(7, 0, (2, 3)), BoundaryPair(7, 1, (2,))], 1)
    assert whole_pairs({2: [pair(0, 2, 3, input=True)]}) == ([], 0)  # nobody joins for stage 3


# When it is over


def test_the_time_is_over_between_two_pieces() -> None:
    learner = student(2)
    terms = replace(TERMS, passes=1000, seconds=81.0)
    result = alone(learner, crossed([2], swapped=False), terms, slow=True)
    # Measuring takes 8 seconds, which are reserved for the end, too; each piece takes 2.
    assert len(learner.updates) == 33
    assert result.passes == 2
    assert result.residual_after < result.residual_before
    assert result.seconds > terms.seconds


@pytest.mark.parametrize(
    ("lost", "at_a_time", "measuring", "update"), [((2,), 1, 8, 2), ((2, 3), 8, 28, 8)]
)
def test_the_rate_falls_to_0_when_passes_or_time_are_over(
    lost: tuple[int, ...],
    at_a_time: int,
    measuring: int,
    update: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two looks at the clock, only the passes lower the rate."""
    students, fetched = block(*lost)
    rates: dict[int, list[float]] = {}
    backward = Learner.backward

    def noted(self: Learner, gradient: torch.Tensor) -> torch.Tensor:
        rates.setdefault(id(self), []).append(self.lr)
        return backward(self, gradient)

    monkeypatch.setattr(Learner, "backward", noted)
    pieces = PAIRS * SHAPE[0]
    relearn_all(students, fetched)
    updates = TERMS.passes * pieces
    expected = [TERMS.lr * (1 - done / updates) for done in range(updates)]
    assert [*rates.values()] == [pytest.approx(expected)] * len(lost)

    rates.clear()
    # Ten looks at the clock, one before each round of training.
    terms = replace(TERMS, passes=1000, seconds=2.0 * measuring + 10 * at_a_time * update)
    relearn_all({stage: student(stage) for stage in lost}, fetched, terms, slow=True)
    first, *others = rates.values()
    assert first[::at_a_time] == pytest.approx([TERMS.lr * (1 - look / 10) for look in range(10)])
    assert all(other == first for other in others)


def test_no_time_is_no_training() -> None:
    learner = student(2)
    before = learner.optimizer.digest()
    terms = replace(TERMS, passes=5, seconds=0.0)
    result = alone(learner, crossed([2], swapped=False), terms)
    assert learner.optimizer.digest() == before
    assert result.residual_after == result.residual_before > 0
    assert (result.passes, result.undone) == (0, False)


@pytest.mark.parametrize("lr", [100.0, math.inf])
@pytest.mark.parametrize("lost", [(2,), (2, 3)])
def test_what_makes_it_worse_is_undone(lost: tuple[int, ...], lr: float) -> None:
    students, fetched = block(*lost)
    before = [learner.optimizer.digest() for learner in students.values()]
    results = relearn_all(students, fetched, replace(TERMS, passes=2, lr=lr))
    assert all(result.undone for result in results)
    assert not results[0].residual_after <= results[0].residual_before
    assert [learner.optimizer.digest() for learner in students.values()] == before
    assert all(learner.adam_is_fresh for learner in students.values())


def test_bf16_relearns_too() -> None:
    learner = student(2)
    terms = replace(TERMS, passes=10)
    result = alone(learner, crossed([2], swapped=False), terms, bf16=True)
    assert result.residual_after < result.residual_before
    assert learner.optimizer.weights.dtype == torch.float32


# When it can't go on


def failures(network: Network, running: Sequence[Exchange[pb.Relearned]]) -> list[Exception]:
    """Run until an exchange fails, and return the errors. The others are cancelled, as a newer
    ballot does."""
    while not any(exchange.done for exchange in running):
        assert network.step()
    errors = [error for exchange in running if exchange.done and (error := network.error(exchange))]
    assert errors, "nobody noticed"
    for exchange in running:
        exchange.cancel()
    return errors


@pytest.mark.parametrize("dead", [2, 3, 4])
@pytest.mark.parametrize("after", [0, 1, 7, 16])
def test_a_joiner_lost_in_the_middle(dead: int, after: int) -> None:
    students, fetched = block(2, 3, 4)
    network = Network(list(students))
    name, sent = f"joiner-{dead}", 0

    def passes(sender: str, to: str, item: pb.Message | Frame) -> bool:
        nonlocal sent
        sent += sender == name
        if sender == name and sent == after + 1:
            network.lose(name)
        return name not in (sender, to) or sent <= after

    network.passes = passes
    errors = failures(network, together(network, students, fetched))
    for error in errors:
        assert error.accused == [name]
        assert "connection reset" in str(error)


def test_who_is_late_is_named() -> None:
    students, fetched = block(2, 3, 4)
    network = Network(list(students))
    network.passes = lambda sender, to, item: not (sender == "joiner-3" and to == "joiner-2")
    leader, *_ = together(network, students, fetched, replace(TERMS, passes=1))
    with pytest.raises(ComplaintError) as caught:
        network.outcome(leader)
    assert caught.value.accused == ["joiner-3"]
    assert network.now == TERMS.patience
    assert str(caught.value) == (
        "waited 60 s for joiner-3 to send its message in round 0 of relearning"
    )


def test_without_a_link_it_fails_at_once() -> None:
    students, fetched = block(2, 3, 4)
    network = Network([2, 3])
    joiners = {stage: f"joiner-{stage}" for stage in (1, 3, 4)}
    exchange = network.begin(joiners, 3, students[3], fetched[3])
    with pytest.raises(ComplaintError, match="no link to joiner-1") as caught:
        exchange.result()
    assert caught.value.accused == ["joiner-1"]


@pytest.mark.parametrize("fault", ["bit", "shape", "fields", "flood"])
def test_a_bad_frame_fails_it(fault: str) -> None:
    students, fetched = block(2, 3, 4)
    network = Network(list(students))

    def passes(sender: str, to: str, item: pb.Message | Frame) -> bool:
        if sender != "joiner-3" or not isinstance(item, Frame) or item.fields["round"] != 2:
            return True
        payload = bytearray().join(item.payload)
        head, fields = item.descriptors, item.fields
        match fault:
            case "bit":
                payload[0] ^= 1
            case "shape":
                head = [d._replace(shape=(4, 2, 8)) for d in head]
            case "fields":
                fields = {"round": [2]}
        for place in range(20 if fault == "flood" else 1):
            changed = {**fields, "piece": 100 + place} if fault == "flood" else fields
            network.nodes[to].on_frame(
                sender, Frame(item.kind, item.ballot, changed, head, payload)
            )
        return False

    network.passes = passes
    for error in failures(network, together(network, students, fetched)):
        assert error.accused == ["joiner-3"]


@pytest.mark.parametrize(
    ("work", "asked", "complaint"),
    [
        (pb.Relearn.MEASURE, {"pairs": [pb.BoundaryPair(stages=stages)]}, "joiner-2 requested")
        for stages in ([], [2, 3], [3], [3, 4])
    ]
    + [
        (pb.Relearn.TRAIN, {"first": first, "count": count}, f"{count} updates after {first}")
        for first, count in [(0, 1), (1, 1), (0, 1000)]
    ],
)
def test_a_leader_is_refused_pairs_that_are_not_here_and_updates_out_of_turn(
    work: pb.Relearn.Work, asked: dict[str, Any], complaint: str
) -> None:
    """Updates are out of turn before pairs are named, or after updates that were never made.
    More updates than all passes have are refused, too."""
    students, fetched = block(2, 3, 4)
    network = Network([2, 3, 4])
    exchange = network.begin({2: "joiner-2", 3: "joiner-3"}, 3, students[3], fetched[3])
    message = pb.Message(ballot=BALLOT.message(), relearn=pb.Relearn(round=1, work=work, **asked))
    network.nodes["joiner-3"].on_message("joiner-2", message)
    with pytest.raises(ComplaintError, match=complaint):
        network.outcome(exchange)


def test_what_comes_early_waits_and_what_is_old_has_no_effect() -> None:
    """Reports of the followers, and one of an older ballot, arrive before the leader begins."""
    students, fetched = block(2, 3, 4)
    network = Network(list(students))
    joiners = {stage: f"joiner-{stage}" for stage in students}
    begin = {
        stage: partial(network.begin, joiners, stage, students[stage], fetched[stage])
        for stage in students
    }
    followers = [begin[3](), begin[4]()]
    while network.in_flight:
        network.step()
    old = pb.Message(ballot=pb.Ballot(view=3, attempt=4), relearn=pb.Relearn(round=0))
    network.nodes["joiner-2"].on_message("joiner-3", old)
    results = [network.outcome(exchange) for exchange in (begin[2](), *followers)]
    assert all(result.residual_after < result.residual_before for result in results)


def test_who_is_given_up_goes_no_further() -> None:
    learner, time = student(2), Nodes()
    thread = Thread(time)
    thread.held = True
    exchanges = time.new(thread)
    node = Relearning(exchanges, tensors, lambda *_: False)
    fetched = fetched_by(2, crossed([2], swapped=False))
    block = RelearningBlock(BALLOT, 2, {2: "me"})
    relearning = exchanges.start(node.run(block, lesson(learner, fetched, [2]), fetched, TERMS))

    def work() -> None:
        assert len(thread.posted) == 1, "one piece at a time, so that other work gets in between"
        thread.work()
        time.catch_up()

    while len(learner.updates) < 6:
        work()
    work()  # what the next update needs
    digest = learner.optimizer.digest()
    relearning.cancel()
    work()  # posted before it was given up
    assert learner.optimizer.digest() == digest
    assert len(learner.updates) == 6
    assert not thread.posted

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.bootstrap.registry_pb2 import CHECKSUM, NUMBERS, SILENT, Cause
from planaria.bootstrap.registry_pb2 import SHAPE as WRONG_SHAPE
from planaria.node.model.modules import build_stage
from planaria.node.model.shape import model_config
from planaria.node.ports import Priority
from planaria.node.run_file import ModelSection, RunFile, WireSection
from planaria.node.stage.lesson import boundary_tensor
from planaria.node.stage.optimizer import StageOptimizer
from planaria.node.stage.work import TorchWork
from planaria.node.state import boundary
from planaria.node.state.boundary import (
    BoundaryClient,
    BoundaryKeeper,
    BoundaryPair,
    BoundaryServer,
    FetchedTensors,
    KeptTensor,
    Side,
    WantedTensors,
)
from planaria.node.transaction.attempt import Attempt, Workplace
from planaria.node.transaction.effects import Ballot
from planaria.node.transaction.in_flight_window import InFlightWindow
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.exchange import Exchange
from planaria.node.wire.frame_format import Codec, Frame
from planaria.node.wire.tensors import decode, encode
from planaria.recovery.orders import adjoining, order, runs
from tests.harness.network import AtOnce, Item, Network, Nodes, damaged, with_fields

BALLOT = Ballot(3, 5)
STEP = 8
STEPS = 2
SHAPE = (2, 3, 4)
ELEMENTS = 2 * 3 * 4
MICROBATCHES = 6


def keeper_of(steps: int) -> BoundaryKeeper:
    return BoundaryKeeper(Nodes().new(), tensors, steps)


def bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16)


def values(microbatch: int, position: int, version: int = 0) -> torch.Tensor:
    """Return the tensor that a microbatch carries to the visit at `position`."""
    generator = torch.Generator().manual_seed(1000 * microbatch + 10 * position + version)
    return torch.randn(SHAPE, generator=generator)


def bytes_beside(microbatch: int, features: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    shape = *SHAPE[:-1], features
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8)


def crossing(
    microbatch: int,
    position: int,
    stages: Sequence[int] = (0, 1, 2, 3, 0),
    codec: Codec = "none",
    ballot: Ballot = BALLOT,
    version: int = 0,
    beside: int = 0,
) -> Frame:
    parts = [values(microbatch, position, version)]
    parts += [bytes_beside(microbatch, beside)] if beside else []
    descriptors, payload = encode(parts, codec)
    fields = {"microbatch": microbatch, "position": position, "stages": list(stages)}
    return Frame("activation", ballot, fields, descriptors, payload)


def keep(keeper: BoundaryKeeper, side: Side, frame: Frame) -> None:
    keeper.keep(side, frame, frame.ballot, frame.fields["stages"])


def route(microbatch: int, stages: int, swapped: bool) -> tuple[int, ...]:
    return (0, *order(microbatch, stages, swapped), 0)


def keepers(stages: int, swapped: bool, codec: Codec = "none") -> dict[str, BoundaryKeeper]:
    """Return keepers of two replicas of each stage, by node, after STEPS steps. The replicas have
    computed the microbatches in turn, two at a time."""
    keepers = {
        f"{stage}.{replica}": keeper_of(STEPS) for stage in range(stages + 1) for replica in "ab"
    }
    for step in range(STEP - STEPS + 1, STEP + 1):
        for keeper in keepers.values():
            keeper.start(BALLOT, step)
        for microbatch in range(MICROBATCHES):
            visits = route(microbatch, stages, swapped)
            replica = "ab"[(microbatch // 2 + step) % 2]
            for position in range(1, len(visits)):
                frame = crossing(microbatch, position, visits, codec, version=step)
                keep(keepers[f"{visits[position - 1]}.{replica}"], "sent", frame)
                keep(keepers[f"{visits[position]}.{replica}"], "received", frame)
        for keeper in keepers.values():
            keeper.commit(step, 0)
    return keepers


class Neighbours(Network):
    """A network of a joiner, which fetches boundary tensors, and its neighbours."""

    def __init__(self, keepers: dict[str, BoundaryKeeper], beside: int = 0) -> None:
        """`beside`: how many features of a wanted tensor are sent as bytes."""
        super().__init__(latency=0.0, ordered=True)
        self.beside = beside
        self.accused: list[tuple[str, Cause]] = []
        accuse = lambda node, why, cause: self.accused.append((node, cause))  # noqa: E731
        self.exchanges, send = self.new(), partial(self.send, "joiner")
        self.client = BoundaryClient(self.exchanges, send, boundary_tensor, accuse)
        self.nodes["joiner"] = self.client
        for node, keeper in keepers.items():
            self.nodes[node] = BoundaryServer(keeper, tensors, partial(self.send, node))

    def fetch(self, stage: int, lost: set[int], neighbours: Sequence[str]) -> FetchedTensors:
        """Fetch the boundary tensors of `stage` from `neighbours`, with a patience of 1 s."""
        shape = *SHAPE[:-1], SHAPE[-1] + self.beside
        wanted = WantedTensors(
            STEP, STEPS, stage, frozenset(lost), MICROBATCHES, shape, self.beside
        )
        fetching = self.client.fetch(BALLOT, wanted, neighbours, 1.0)
        fetched = self.run(self.exchanges, fetching)
        self.settle()
        return fetched


def check_values(fetched: FetchedTensors, stages: int, swapped: bool) -> None:
    """Check that each tensor is what crossed that end of its run of lost stages, in bfloat16."""
    for at_end, end in ((fetched.inputs, 0), (fetched.outputs, 1)):
        for pair, tensor in at_end.items():
            visits = route(pair.microbatch, stages, swapped)
            (run,) = [run for run in runs(visits, set(pair.stages)) if run.stages == pair.stages]
            crossed = values(pair.microbatch, (run.start, run.end)[end], pair.step)
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, bf16(crossed))


def decoded(kept: KeptTensor) -> torch.Tensor:
    (tensor,) = decode(kept.descriptors, kept.payload)
    return tensor


# Keeping


def test_what_is_kept_is_of_the_last_committed_step() -> None:
    keeper = keeper_of(1)
    keeper.start(BALLOT, STEP)
    for position in (1, 2):
        keep(keeper, "received" if position == 1 else "sent", crossing(0, position))
    with pytest.raises(ValueError, match="of step 8 are requested, those of step 0 are kept"):
        keeper.tensors_for(STEP, 2, frozenset([2]))
    keeper.commit(STEP, 0)
    assert keeper.memory_bytes == 2 * ELEMENTS * 4
    ((pair, side, _),) = keeper.tensors_for(STEP, 2, frozenset([2]))
    assert (pair, side) == (BoundaryPair(STEP, 0, (2,)), "input")
    keeper.start(Ballot(3, 6), STEP + 1)
    keep(keeper, "sent", crossing(0, 2, ballot=Ballot(3, 6)))
    assert keeper.memory_bytes == 3 * ELEMENTS * 4
    keeper.drop()
    assert keeper.tensors_for(STEP, 2, frozenset([2]))  # the failed attempt has left no trace
    assert keeper.memory_bytes == 2 * ELEMENTS * 4
    keeper.start(Ballot(3, 7), STEP + 1)
    keeper.commit(STEP + 1, 0)
    assert keeper.tensors_for(STEP + 1, 2, frozenset([2])) == []
    assert keeper.memory_bytes == 0


def test_a_commit_of_a_step_that_was_not_attempted_here_leaves_nothing() -> None:
    keeper = keeper_of(1)
    keeper.start(BALLOT, STEP)
    keep(keeper, "sent", crossing(0, 2))
    keeper.commit(STEP + 1, 0)
    assert keeper.tensors_for(STEP + 1, 2, frozenset([2])) == []
    assert keeper.memory_bytes == 0


class Beforehand(AtOnce):
    """A compute thread that calls `first` with the priority before each task."""

    def __init__(self, first: Callable[[Priority], object]) -> None:
        self._first = first

    def post(self, work: Any, then: Any, priority: Priority) -> None:
        self._first(priority)
        super().post(work, then, priority)


@pytest.mark.parametrize("codec", ["none", "bf16", "fp16", "int8"])
def test_once_committed_it_is_narrowed_to_two_bytes_a_value(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary, "PIECE", 2 * ELEMENTS * 4)
    pieces: list[Priority] = []
    nodes = Nodes()
    exchanges = nodes.new(Beforehand(pieces.append))
    keeper = BoundaryKeeper(exchanges, tensors, 1)
    keeper.start(BALLOT, STEP)
    frames = [crossing(microbatch, 2, codec=codec) for microbatch in range(5)]
    for frame in frames:
        keep(keeper, "sent", frame)
    keeper.commit(STEP, 0)
    nodes.run(exchanges, keeper.narrow())
    assert pieces == [Priority.BACKGROUND] * (3 if codec == "none" else 0)
    assert keeper.memory_bytes <= 5 * ELEMENTS * 2
    for frame, (_, _, kept) in zip(
        frames, keeper.tensors_for(STEP, 2, frozenset([2])), strict=True
    ):
        if codec == "none":
            assert torch.equal(bf16(decoded(kept)), bf16(values(frame.fields["microbatch"], 2)))
        else:
            assert kept.payload is frame.payload  # not encoded again


def test_the_next_commit_ends_the_narrowing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "PIECE", 1)
    nodes = Nodes()
    exchanges = nodes.new(Beforehand(lambda _: keeper.commit(STEP + 1, 0)))
    keeper = BoundaryKeeper(exchanges, tensors, 1)
    keeper.start(BALLOT, STEP)
    for microbatch in range(3):
        keep(keeper, "sent", crossing(microbatch, 2))
    keeper.commit(STEP, 0)
    nodes.run(exchanges, keeper.narrow())
    assert keeper.memory_bytes == 0


def test_frames_of_other_attempts_and_evaluations_are_not_kept() -> None:
    keeper = keeper_of(1)
    keep(keeper, "sent", crossing(0, 2))  # nothing has begun
    keeper.start(BALLOT, STEP)
    keep(keeper, "sent", crossing(0, 2, ballot=Ballot(3, 4)))
    assert keeper.memory_bytes == 0
    keep(keeper, "sent", crossing(0, 2))
    keeper.commit(STEP, 0)
    keep(keeper, "sent", crossing(1, 2))  # an evaluation under the same ballot
    assert len(keeper.tensors_for(STEP, 2, frozenset([2]))) == 1


def test_a_second_visit_replaces_the_first() -> None:
    keeper = keeper_of(1)
    keeper.start(BALLOT, STEP)
    keep(keeper, "sent", crossing(0, 2))
    keep(keeper, "sent", crossing(0, 2, version=1))
    keeper.commit(STEP, 0)
    assert keeper.memory_bytes == ELEMENTS * 4
    fetched = Neighbours({"1": keeper}).fetch(2, {2}, ["1"])
    assert torch.equal(fetched.inputs[BoundaryPair(STEP, 0, (2,))], bf16(values(0, 2, version=1)))


@given(st.integers(1, 4), st.data())
def test_attempts_that_come_and_go(steps: int, data: st.DataObject) -> None:
    """A keeper holds the tensors of the last committed attempts, up to `steps` of them: those of
    consecutive steps that end at the current one. Attempts may fail, be missed or be undone."""
    keeper = keeper_of(steps)
    step, lineage = 0, 0
    history: list[dict[BoundaryPair, torch.Tensor]] = []  # of consecutive steps, up to `step`
    for attempt in range(1, data.draw(st.integers(1, 9)) + 1):
        ballot = Ballot(1, attempt)
        keeper.start(ballot, step + 1)
        given_now = {}
        for microbatch in data.draw(st.lists(st.integers(0, 3), max_size=5)):
            keep(keeper, "sent", crossing(microbatch, 2, ballot=ballot, version=attempt))
            given_now[BoundaryPair(step + 1, microbatch, (2,))] = values(microbatch, 2, attempt)
        match data.draw(st.sampled_from(["commit", "commit", "drop", "again", "miss", "back"])):
            case "commit":
                step, history = step + 1, [*history, given_now]
                keeper.commit(step, lineage)
                keeper.set_state_step(step, lineage)
            case "drop":
                keeper.drop()
            case "miss":  # the state of a later step comes from elsewhere
                step, history = step + 2, []
                keeper.drop()
                keeper.set_state_step(step, lineage)
            case "back":  # to files, perhaps of the current step
                step, lineage, history = data.draw(st.integers(0, step)), lineage + 1, []
                keeper.drop()
                keeper.set_state_step(step, lineage)
    kept = {pair: tensor for last in history[-steps:] for pair, tensor in last.items()}
    sides = keeper.tensors_for(step, 2, frozenset([2]))
    assert [p.step for p, _, _ in sides] == sorted((p.step for p in kept), reverse=True)
    assert {pair for pair, _, _ in sides} == kept.keys()
    for pair, _, tensor in sides:
        assert torch.equal(decoded(tensor), kept[pair])


def test_what_the_next_commit_finds_wide_it_has_narrowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A commit comes before each piece that is narrowed, until three steps are committed."""
    monkeypatch.setattr(boundary, "PIECE", 1)
    narrowing: list[Exchange[None]] = []
    trained = pieces = 0

    def before_a_piece(_: Priority) -> None:
        nonlocal pieces
        pieces += 1
        if trained < 3:
            train(STEP + trained)

    def train(step: int) -> None:
        nonlocal trained
        trained += 1
        keeper.start(BALLOT, step)
        for microbatch in range(3):
            keep(keeper, "sent", crossing(microbatch, 2, version=step))
        keeper.commit(step, 0)
        narrowing.append(exchanges.start(keeper.narrow()))

    nodes = Nodes()
    exchanges = nodes.new(Beforehand(before_a_piece))
    keeper = BoundaryKeeper(exchanges, tensors, 3)
    train(STEP)
    for exchange in narrowing:
        nodes.outcome(exchange)
    assert len(narrowing) == 3
    assert keeper.memory_bytes == 3 * 3 * ELEMENTS * 2
    assert pieces <= 3 * 3 + 2  # the piece under way at a commit is narrowed again
    for pair, _, kept in keeper.tensors_for(STEP + 2, 2, frozenset([2])):
        assert torch.equal(bf16(decoded(kept)), bf16(values(pair.microbatch, 2, pair.step)))


# Fetching


@given(
    st.integers(2, 6),
    st.booleans(),
    st.sampled_from(["none", "bf16", "fp16", "int8"]),
    st.data(),
)
@settings(max_examples=30, deadline=None)
def test_a_joiner_gets_the_ends_of_the_runs_that_are_its_own(
    stages: int, swapped: bool, codec: Codec, data: st.DataObject
) -> None:
    swapped = swapped and stages >= 4
    lost = data.draw(st.sets(st.integers(1, stages), min_size=1))
    stage = data.draw(st.sampled_from(sorted(lost)))
    orders = [order(microbatch, stages, swapped) for microbatch in range(MICROBATCHES)]
    network = Neighbours(keepers(stages, swapped, codec))
    neighbours = [f"{s}.{r}" for s in adjoining(orders, lost) if s not in lost for r in "ab"]
    fetched = network.fetch(stage, lost, neighbours)
    assert fetched.complaints == []
    inputs, outputs = set(), set()
    for microbatch, visits in enumerate(orders):
        for run in runs(visits, lost):
            pairs = {BoundaryPair(step, microbatch, run.stages) for step in (STEP - 1, STEP)}
            if run.stages[0] == stage:
                inputs |= pairs
            if run.stages[-1] == stage:
                outputs |= pairs
    assert fetched.inputs.keys() == inputs
    assert fetched.outputs.keys() == outputs
    if codec in ("none", "bf16"):
        check_values(fetched, stages, swapped)
    assert fetched.bytes <= 2 * ELEMENTS * (len(inputs) + len(outputs))


def test_few_frames_are_under_way_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "BATCH", 2)
    nodes = keepers(3, swapped=False)
    network = Neighbours(nodes)
    fetched = network.fetch(2, {2}, ["1.a", "1.b", "3.a", "3.b"])
    assert len(fetched.inputs) == len(fetched.outputs) == STEPS * MICROBATCHES
    asked = [sent.item for sent in network.sent if sent[1:3] == ("joiner", "1.a")]
    offsets = [message.boundary_request.offset for message in asked]
    assert offsets == [0, 2, 4]  # 1.a keeps 6 tensors, and is asked once for each batch
    check_values(fetched, 3, swapped=False)


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4"])
def test_whole_numbers_beside_the_figures_come_as_they_are(codec: Codec) -> None:
    """Bytes beside the figures come unchanged in codecs of four bytes a value and of fewer. A frame
    without the bytes that are due is refused."""
    keeper = keeper_of(1)
    keeper.start(BALLOT, STEP)
    for microbatch, beside in enumerate([3, 3, 0]):
        keep(keeper, "sent", crossing(microbatch, 2, codec=codec, beside=beside))
    keeper.commit(STEP, 0)
    network = Neighbours({"1.a": keeper}, beside=3)
    fetched = network.fetch(2, {2}, ["1.a"])
    assert [pair.microbatch for pair in fetched.inputs] == [0, 1]
    for pair, tensor in fetched.inputs.items():
        assert torch.equal(tensor[..., 4:].byte(), bytes_beside(pair.microbatch, 3))
        if codec in ("none", "bf16"):
            assert torch.equal(tensor[..., :4], bf16(values(pair.microbatch, 2)))
    (refused,) = fetched.complaints
    assert "uint8 [2, 3, 3] in codec none is due" in refused
    assert network.accused == [("1.a", WRONG_SHAPE)]


def part(replica: str) -> list[tuple[int, int]]:
    """Return (step, microbatch) of all that went through the replicas of this name."""
    return [
        (step, microbatch)
        for step in (STEP - 1, STEP)
        for microbatch in range(MICROBATCHES)
        if "ab"[(microbatch // 2 + step) % 2] == replica
    ]


def test_who_is_missing_costs_only_its_own_tensors() -> None:
    """0.a is silent, 3.a has no link, 1.b has another step, and 0.b is lost meanwhile."""
    nodes = keepers(3, swapped=False)
    nodes["1.b"].start(BALLOT, STEP + 1)
    nodes["1.b"].commit(STEP + 1, 0)
    del nodes["3.a"]
    network = Neighbours(nodes)
    network.faults["0.a"] = lambda answer: None

    def lose(answer: Item) -> None:
        network.client.on_peer_lost("0.b", "connection reset")

    network.faults["0.b"] = lose
    fetched = network.fetch(2, {2}, ["1.a", "1.b", "3.a", "3.b", "0.a", "0.b"])
    assert {pair[:2] for pair in fetched.inputs} == {*part("a")}
    assert {pair[:2] for pair in fetched.outputs} == {*part("b")}
    assert sorted(fetched.complaints) == [
        "0.a did not send any boundary tensors: no answer in 1 s",
        "0.b did not send any boundary tensors: lost: connection reset",
        "1.b did not send any boundary tensors: boundary tensors of step 8 are requested, "
        "those of step 9 are kept",
        "3.a did not send any boundary tensors: there is no link to it",
    ]


def content(
    tensor: torch.Tensor, codec: Codec = "bf16", beside: int = 0
) -> Callable[[Frame], Frame]:
    def change(frame: Frame) -> Frame:
        parts = [tensor, *([bytes_beside(0, beside)] if beside else [])]
        return Frame(frame.kind, frame.ballot, frame.fields, *encode(parts, codec))

    return change


@pytest.mark.parametrize(
    ("change", "cause", "complaint"),
    [
        (damaged, CHECKSUM, "arrived damaged"),
        (with_fields(microbatch=MICROBATCHES), NUMBERS, "microbatch 6 is not among 6"),
        (with_fields(microbatch="0"), NUMBERS, "don't describe a pair"),
        (with_fields(stages=[]), NUMBERS, "'input' is not a side of"),
        (with_fields(stages=[[2]]), NUMBERS, "'input' is not a side of"),
        (with_fields(stages=[3]), NUMBERS, r"the input of stages \[3\] was not requested"),
        (with_fields(stages=[2, 2]), NUMBERS, "was not requested"),
        (with_fields(stages=[2, 3]), NUMBERS, "was not requested"),
        (with_fields(side="middle"), NUMBERS, "'middle' is not a side of"),
        (with_fields(microbatch=1), SILENT, "sent the input of microbatch 1 in step 8 again"),
        (with_fields(step=STEP + 1), NUMBERS, "step 9 is not among the 2 up to 8"),
        (with_fields(step=STEP - STEPS), NUMBERS, "step 6 is not among the 2 up to 8"),
        (with_fields(step="8"), NUMBERS, "don't describe a pair"),
        (content(torch.zeros(SHAPE), "none"), WRONG_SHAPE, "not one tensor of at most two bytes"),
        (content(torch.zeros(1, 3, 4)), WRONG_SHAPE, r"\[1, 3, 4\].* where .*\[2, 3, 4\].* is due"),
        (content(torch.zeros(SHAPE), "bf16", 2), WRONG_SHAPE, r"\[2, 3, 2\].*, where .* is due"),
        (content(torch.full(SHAPE, torch.nan)), SILENT, "it is not finite"),
    ],
)
def test_a_bad_frame_costs_only_itself_and_names_who_sent_it(
    change: Callable[[Frame], Frame], cause: Cause, complaint: str
) -> None:
    network = Neighbours(keepers(3, swapped=False))
    later: list[Frame] = []  # changed frames, which 1.a sends after all its others

    def fault(answer: Item) -> Item | None:
        fields = answer.fields if isinstance(answer, Frame) else {}
        if isinstance(answer, Frame) and (fields["step"], fields["microbatch"]) == (STEP, 0):
            later.append(change(answer))
            return None
        if isinstance(answer, pb.Message):
            for frame in later:
                network.after(0.0, partial(network.arrive, "1.a", "joiner", frame))
        return answer

    network.faults["1.a"] = fault
    fetched = network.fetch(2, {2}, ["1.a", "1.b", "3.a", "3.b"])
    everything = {*part("a"), *part("b")}
    assert {pair[:2] for pair in fetched.inputs} == everything - {(STEP, 0)}
    assert {pair[:2] for pair in fetched.outputs} == everything
    (refused,) = fetched.complaints
    assert re.search(complaint, refused)
    assert network.accused == ([("1.a", cause)] if cause != SILENT else [])
    check_values(fetched, 3, swapped=False)


def test_more_frames_than_were_asked_for_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "BATCH", 2)
    network = Neighbours(keepers(3, swapped=False))
    server = network.nodes["1.a"]
    network.faults["1.a"] = lambda answer: answer if isinstance(answer, Frame) else None

    def twice(peer: str, message: pb.Message) -> None:
        for offset in (0, 2):
            message.boundary_request.offset = offset
            BoundaryServer.on_message(server, peer, message)

    monkeypatch.setattr(server, "on_message", twice)
    fetched = network.fetch(2, {2}, ["1.a"])
    assert len(fetched.inputs) == 2
    assert "more than requested" in fetched.complaints[0]
    assert network.accused == [("1.a", NUMBERS)]


def test_a_request_that_makes_no_sense_is_refused() -> None:
    fetched = Neighbours(keepers(3, swapped=False)).fetch(2, {1}, ["1.a"])
    assert "stage 2 is not among the 1 lost stages" in fetched.complaints[0]


# In an attempt


@pytest.mark.parametrize("codec", ["none", "bf16", "int8"])
@pytest.mark.parametrize("kind", [pb.Begin.TRAIN, pb.Begin.EVALUATE])
def test_a_stage_keeps_what_comes_in_and_goes_out(codec: Codec, kind: Any) -> None:
    section = ModelSection(dim=8, heads=2, stages=3, layers=3, context=4, hidden=8)
    config = model_config(section, 16)
    run = RunFile(model=section, wire=WireSection(activations=codec))
    module = build_stage(config, 2, 0)
    keeper, sent = keeper_of(1), list[Frame]()
    seat: Any = SimpleNamespace(
        send=lambda peer, frame: not sent.append(frame), tell_driver=lambda *_, **__: None
    )
    cpu = torch.device("cpu")
    work = TorchWork(2, module, StageOptimizer(module, cpu), run, config)
    place = Workplace("c", "reassign", InFlightWindow(4, 3), work, AtOnce(), seat, boundary=keeper)
    members = [pb.Place(node="abcd"[stage], stage=stage) for stage in range(4)]
    plan = [pb.Microbatch(id=4, source="a", order=[1, 2, 3], places=[1, 2, 3])]
    begin = pb.Begin(step=STEP, kind=kind, members=members, plan=plan)
    attempt = Attempt(place, BALLOT, begin)
    attempt.start()
    if kind == pb.Begin.TRAIN:
        keeper.start(BALLOT, STEP)
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    descriptors, buffers = encode([x], codec)
    fields = {"microbatch": 4, "position": 2}
    frame = Frame("activation", BALLOT, fields, descriptors, bytearray().join(buffers))
    attempt.take("b", frame)
    (onward,) = sent
    keeper.commit(STEP, 0)
    if kind == pb.Begin.EVALUATE:
        assert keeper.memory_bytes == 0
        return
    ((before, _, out),) = keeper.tensors_for(STEP, 1, frozenset([1]))
    ((behind, _, into),) = keeper.tensors_for(STEP, 3, frozenset([3]))
    assert (before, behind) == (BoundaryPair(STEP, 4, (1,)), BoundaryPair(STEP, 4, (3,)))
    assert (out.payload, into.payload) == (frame.payload, onward.payload)

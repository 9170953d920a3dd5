from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.bootstrap.neighbours import partners, rows
from planaria.bootstrap.registry_pb2 import CHECKSUM, DIVERGENCE, NONFINITE, NUMBERS
from planaria.node.averaging import coding
from planaria.node.averaging.averaging import Averaging
from planaria.node.averaging.coding import Averaged, Coding, ReductionRound, gradient_bytes
from planaria.node.averaging.error_feedback import ErrorFeedback
from planaria.node.averaging.reduction import Reduction, check_ids
from planaria.node.run_file import WireSection
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import tensors
from planaria.node.wire.exchange import ComplaintError, Exchange, PeerLostError
from planaria.node.wire.frame_format import Codec, Frame
from planaria.node.wire.tensors import decode
from tests.harness.network import Nodes, Thread, copied, damaged, with_fields, without_tensors
from tests.harness.reducing import (
    BALLOT,
    SHAPES,
    Network,
    first_failure,
    gradients,
    nodes_of,
    reduce_all,
    reduced,
    shares,
    start_all,
)

NODES = ["a", "b", "c", "d", "e"]
CODECS: tuple[Averaged, ...] = (*get_args(Codec), "lowrank")


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coding, "PIECE", 7)
        yield


@pytest.mark.parametrize(
    ("ids", "accused", "named"),
    [
        ([[0, 1], [2, 3], [3, 4, 5]], ["b", "c"], "more than once: 3 (b, c)"),
        ([[0, 1], [2, 2], [3, 4, 5]], ["b"], "more than once: 2 (b, b)"),
        ([[0, 1], [], [3, 5]], [], "in nobody's gradient: 2, 4"),
        ([[0, 1, 6], [2], [3, 4, 5]], ["a"], "not of this window: 6 (a)"),
        ([[0, 1, -1], [2], [3, 4, 5]], ["a"], "not of this window: -1 (a)"),
    ],
)
def test_every_replica_finds_microbatches_that_are_not_the_window(
    ids: list[list[int]], accused: list[str], named: str
) -> None:
    network = Network(NODES[:3])
    for outcome in reduce_all(network, gradients(NODES[:3], 20), ids):
        assert isinstance(outcome, ComplaintError)
        assert named in str(outcome)
        assert outcome.accused == accused


def test_a_single_replica_checks_its_ids_and_leaves_the_gradient() -> None:
    alone = Network(["a"], "int8")
    (gradient,) = gradients(["a"], 50)
    before = gradient.clone()
    assert reduce_all(alone, [gradient]) == [None]
    assert torch.equal(gradient, before)
    with pytest.raises(ComplaintError, match="nobody's gradient: 1"):
        alone.reduce("a", Ballot(3, 2), ["a"], gradient, [0, 2], 3, 60.0)


@given(st.dictionaries(st.sampled_from(NODES), st.lists(st.integers(-1, 6), max_size=6)))
def test_ids_pass_only_when_each_is_there_once(ids_by_node: dict[str, list[int]]) -> None:
    exact = sorted(i for ids in ids_by_node.values() for i in ids) == list(range(5))
    try:
        check_ids(ids_by_node, 5)
    except ComplaintError:
        assert not exact
    else:
        assert exact


@given(st.integers(1, 5), st.integers(0, 150))
def test_pieces_are_the_gradient_and_cut_no_row_in_two(replicas: int, size: int) -> None:
    for matrices in ((), SHAPES):
        pieces = [piece for part in coding.piece_spans(size, replicas, matrices) for piece in part]
        places = [place for start, stop in pieces for place in range(start, stop)]
        assert places == [*range(size)]
        assert len(coding.piece_spans(size, replicas, matrices)) == replicas
        if matrices:
            firsts = {0, 1, 2, *range(3, 63, 2), 63, *range(64, 145, 2), *range(144, size)}
            assert all(start in firsts for start, stop in pieces if start < stop)


# Error feedback

LOSSY: list[Averaged] = ["int8", "int4", "lowrank"]


def held_by(network: Network) -> torch.Tensor | float:
    """The sum of the error feedback of all nodes."""
    rows = [node.feedback.row for node in network.nodes.values()]
    return sum((row.double() for row in rows if row is not None), torch.zeros(1).double())


def one_step(network: Network, values: Sequence[torch.Tensor], step: int) -> torch.Tensor:
    """All nodes of the network sum these values; returns the sum."""
    nodes = list(network.nodes)
    exchanges = [
        network.start(node, Ballot(3, step), nodes, gradient, share, 6, 60.0)
        for node, gradient, share in zip(nodes, values, shares(nodes, 6), strict=True)
    ]
    assert [network.error(exchange) for exchange in exchanges] == [None] * len(nodes)
    for other in values[1:]:
        assert torch.equal(other, values[0])
    return values[0]


def commit(network: Network, step: int) -> None:
    for node in network.nodes.values():
        node.feedback.commit(Ballot(3, step))


@given(
    st.integers(2, 17),
    st.integers(1, 90),
    st.sampled_from(LOSSY),
    st.lists(st.booleans(), min_size=1, max_size=4),
)
@settings(max_examples=8, deadline=None)
def test_what_was_left_out_of_committed_sums_is_held_back(
    replicas: int, length: int, codec: Averaged, committed: list[bool]
) -> None:
    """Also with replicas in rows. Sums that weren't committed leave no error feedback."""
    nodes = nodes_of(replicas)
    network = Network(nodes, codec)
    wanted, applied = torch.zeros(length).double(), torch.zeros(length).double()
    for step, commits in enumerate(committed, start=1):
        values = of_many(nodes, length, seed=step)
        whole = reduce(torch.add, [value.double() for value in values])
        before = held_by(network)
        summed = one_step(network, values, step)
        if commits:
            commit(network, step)
            wanted, applied = wanted + whole, applied + summed
        else:
            assert torch.equal(torch.as_tensor(held_by(network)), torch.as_tensor(before))
    assert torch.allclose(applied + held_by(network), wanted, atol=0.1)


def test_what_is_small_comes_in_time_and_without_feedback_never_would() -> None:
    """The mean of the applied sums of constant gradients approaches the exact sum."""
    network = Network(NODES[:3], "lowrank")
    once = [10.0 ** torch.linspace(0, -1, 40) * (i + 1) for i in range(3)]
    total = torch.zeros(40)
    for step in range(1, 101):
        total += one_step(network, [row.clone() for row in once], step)
        commit(network, step)
    assert torch.allclose(total / 100, reduce(torch.add, once), rtol=0.15)


def test_of_one_ballot_only_that_commit_counts() -> None:
    network = Network(NODES[:2], "lowrank")
    one_step(network, gradients("ab", 40), 1)
    commit(network, 1)
    before = [node.feedback.row for node in network.nodes.values()]
    kept = [row.clone() for row in before if row is not None]
    one_step(network, gradients("ab", 40, seed=2), 2)  # not committed
    commit(network, 1)
    commit(network, 3)
    for node, row in zip(network.nodes.values(), kept, strict=True):
        assert node.feedback.row is not None
        assert torch.equal(node.feedback.row, row)


@pytest.mark.parametrize(
    ("codec", "first", "left", "joined"),
    [
        *((codec, ["a", "b", "c"], ["a", "c"], ["a", "c", "d"]) for codec in LOSSY),
        ("lowrank", nodes_of(9), nodes_of(8), nodes_of(10)),
    ],
    ids=[*LOSSY, "rows"],
)
def test_a_joiner_begins_with_nothing_and_whoever_is_left_keeps_what_it_holds(
    codec: Averaged, first: list[str], left: list[str], joined: list[str]
) -> None:
    """Parts change owners then, and no error feedback of the nodes that stay is lost."""
    network = Network(first, codec)
    for step, nodes in enumerate((first, first, left, joined), start=1):
        for gone in network.nodes.keys() - set(nodes):
            assert network.nodes.pop(gone).feedback.row is not None
        for node in nodes:
            if node not in network.nodes:
                network.add(node, codec)
        before, values = held_by(network), of_many(nodes, 150, seed=step)
        whole = reduce(torch.add, [value.double() for value in values])
        summed = one_step(network, values, step)
        commit(network, step)
        assert torch.allclose(summed + held_by(network), before + whole, atol=0.1)


def test_who_is_alone_sends_nothing_and_drops_what_it_held_back() -> None:
    network = Network(NODES[:2], "lowrank")
    one_step(network, gradients("ab", 50), 1)
    commit(network, 1)
    del network.nodes["b"]
    (gradient,) = gradients("a", 50, seed=2)
    assert torch.equal(one_step(network, [gradient], 2), gradients("a", 50, seed=2)[0])
    assert network.nodes["a"].feedback.row is not None
    commit(network, 2)
    assert network.nodes["a"].feedback.row is None


def test_what_is_dropped_before_its_commit_never_counts() -> None:
    feedback = ErrorFeedback()
    feedback.begin(BALLOT, torch.zeros(3)).fill_(1.0)
    feedback.drop()
    feedback.commit(BALLOT)
    assert feedback.row is None


# Faults


def test_a_peer_without_a_link_is_accused() -> None:
    network = Network(["a", "b"])
    with pytest.raises(ComplaintError, match="no link to c") as caught:
        network.reduce("a", BALLOT, ["a", "b", "c"], torch.ones(9), [0], 3, 60.0)
    assert caught.value.accused == ["c"]


@pytest.mark.parametrize("seed", range(4))
def test_a_peer_lost_after_its_part_does_no_harm(seed: int) -> None:
    network = Network(["a", "b", "c"], seed=seed)
    sent = 0

    def passes(source: str, target: str, frame: Frame) -> bool:
        nonlocal sent
        if (source, target) == ("c", "a") and (sent := sent + 1) == 6:
            lost = network.nodes["a"].on_peer_lost
            network.after(0.0, partial(lost, "c", "connection reset"))
        return True

    network.passes = passes
    assert first_failure(network, start_all(network, gradients("abc", 63))) is None
    assert sent == 6


def replica(node: str, nodes: Sequence[str], gradient: torch.Tensor, ids: list[int]) -> Reduction:
    terms = ReductionRound(node, BALLOT, nodes, window=4)
    return Reduction(terms, gradient, ids, Coding(tensors))


def test_replicas_that_have_applied_different_commits_do_not_sum() -> None:
    network, nodes = Network(["a", "b"]), ["a", "b"]
    exchanges = [
        network.start(node, BALLOT, nodes, torch.ones(8), [i], 2, 60.0, last=node.encode())
        for i, node in enumerate(nodes)
    ]
    with pytest.raises(ComplaintError, match="b has applied another last commit") as caught:
        network.outcome(exchanges[0])
    assert (caught.value.accused, caught.value.cause) == (["b"], DIVERGENCE)


class Alone:
    """One replica of a stage; the test plays the others."""

    def __init__(self, send: Callable[[str, Frame], bool] = lambda peer, frame: True) -> None:
        self.time = Nodes()
        self.exchanges = self.time.new()
        self.averaging = Averaging(self.exchanges, send, Coding(tensors))
        self.on_frame = self.averaging.on_frame

    def start(self, *arguments: Any) -> Exchange[None]:
        return self.exchanges.start(reduced(self.averaging, "a", *arguments))

    def reduce(self, *arguments: Any) -> None:
        self.averaging.hurry(arguments[0])
        self.time.outcome(self.start(*arguments))

    def of_two(self, patience: float = 60.0, ballot: Ballot = BALLOT) -> None:
        """Sums a gradient with that of `b`."""
        self.reduce(ballot, ["a", "b"], torch.ones(8), [0, 1], 4, patience)


def of_b(size: int = 8) -> Frame:
    """The first frame of b's contribution."""
    return replica("b", ["a", "b"], torch.ones(size), [2, 3]).contribute(0)[0][1]


def test_others_are_waited_for_as_long_as_they_may_be_at_their_microbatches() -> None:
    member = Alone()
    reducing = member.start(BALLOT, ["a", "b"], torch.ones(8), [0, 1], 4, 60.0)
    member.averaging.hurry(Ballot(BALLOT.view, BALLOT.attempt - 1))
    member.time.sleep(1000.0)
    assert not reducing.done
    member.averaging.hurry(BALLOT)
    member.time.sleep(59.0)
    assert not reducing.done
    with pytest.raises(ComplaintError, match="waited 60 s in vain for the contribution of b"):
        member.time.outcome(reducing)


def test_the_deadline_names_who_did_not_contribute() -> None:
    with pytest.raises(
        ComplaintError, match="waited 0 s in vain for the contribution of b, c"
    ) as caught:
        Alone().reduce(BALLOT, ["a", "b", "c"], torch.ones(9), [0], 4, 0)
    assert caught.value.accused == ["b", "c"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (damaged, "damaged"),
        (without_tensors, "no tensor, where float32"),
        (with_fields(phase="gather"), "not expected"),
        (with_fields(phase=["sum"]), "not expected"),
        (with_fields(piece=1), "not expected"),
        (with_fields(piece=True), "not expected"),
        (with_fields(piece=[0]), "not expected"),
        (with_fields(ids="23"), "names its microbatches"),
        (with_fields(ids=[2, "3"]), "names its microbatches"),
        (lambda frame: of_b(10), r"\[5\] in codec none, where float32 \[4\]"),
    ],
)
def test_a_frame_that_cannot_be_right_accuses_its_sender(
    change: Callable[[Frame], Frame], complaint: str
) -> None:
    frame = of_b()
    member = Alone()
    member.on_frame("b", change(frame))
    with pytest.raises(ComplaintError, match=complaint) as caught:
        member.of_two()
    assert caught.value.accused == ["b"]


@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_where_it_is_the_models_doing_it_is_summed_all_the_same(codec: Averaged) -> None:
    nodes = NODES[:3]
    values = gradients(nodes, 101)
    values[1][50] = torch.nan
    network = Network(nodes, codec)
    assert reduce_all(network, values, non_finite=True) == [None] * 3
    for value in values:
        assert value.isnan().nonzero().flatten().tolist() == [50]


def test_others_than_replicas_are_not_heard() -> None:
    frame = of_b()
    member = Alone()
    member.on_frame("stranger", frame)
    member.averaging.on_peer_lost("stranger", "gone")
    with pytest.raises(ComplaintError, match="the contribution of b"):
        member.of_two(0)


# Ballots


def test_frames_of_a_coming_reduction_are_kept_and_old_ones_dropped() -> None:
    mine, theirs = gradients("ab", 33)
    expected = mine + theirs
    peer = replica("b", ["a", "b"], theirs, [2, 3])

    def answer(_: str, frame: Frame) -> bool:
        for _, reply in peer.absorb("a", copied(frame)):
            member.on_frame("b", copied(reply))
        return True

    member = Alone(answer)
    member.averaging.forget(BALLOT)
    old = replica("b", ["a", "b"], torch.full((33,), 9.0), [2, 3])
    old.ballot = Ballot(3, 0)
    for reduction in (old, peer):
        for piece in range(reduction.pieces):
            for _, frame in reduction.contribute(piece):
                member.on_frame("b", copied(frame))
    member.reduce(BALLOT, ["a", "b"], mine, [0, 1], 4, 60.0)
    assert peer.awaited() is None
    assert torch.equal(mine, expected)
    assert torch.equal(theirs, expected)


def test_a_reduction_that_is_over_leaves_no_frames_behind() -> None:
    member = Alone()
    member.reduce(BALLOT, ["a"], torch.ones(8), [0], 1, 60.0)
    member.on_frame("b", of_b())
    for ballot in (BALLOT, Ballot(3, 2)):
        with pytest.raises(ComplaintError, match="the contribution of b"):
            member.of_two(0, ballot)


@pytest.mark.parametrize("steps", range(12))
def test_a_cancelled_reduction_ends_at_once_and_the_next_one_works(steps: int) -> None:
    network = Network(["a", "b"])
    older = start_all(network, gradients("ab", 33))
    for _ in range(steps):
        network.step()
    values = gradients("ab", 33)
    expected = values[0] + values[1]
    for member, exchange in zip(network.nodes.values(), older, strict=True):
        exchange.cancel()
        member.forget(Ballot(3, 2))
    newer = [
        network.start(node, Ballot(3, 2), ["a", "b"], gradient, [i], 2, 60.0)
        for i, (node, gradient) in enumerate(zip("ab", values, strict=True))
    ]
    assert [network.error(exchange) for exchange in newer] == [None, None]
    assert torch.equal(values[0], expected)
    assert torch.equal(values[1], expected)


def test_what_it_computed_when_it_was_cancelled_is_not_sent() -> None:
    sent: list[str] = []
    time = Nodes()
    exchanges = time.new(Thread(time, lambda: 0.001))
    member = Averaging(exchanges, lambda peer, frame: not sent.append(peer), Coding(tensors))
    gradient = torch.ones(9)
    exchange = exchanges.start(reduced(member, "a", BALLOT, ["a", "b"], gradient, [0], 2, 60.0))
    exchange.cancel()
    while time.step():
        pass
    assert sent == []


def test_what_waits_to_be_sent_does_not_change_with_the_gradient() -> None:
    gradient = torch.ones(8)
    reduction = replica("a", ["a", "b"], gradient, [0, 1])
    ((_, contribution),) = reduction.contribute(0)
    ((_, total),) = reduction.absorb("b", copied(of_b()))
    gradient.zero_()
    for frame, value in ((contribution, 1.0), (total, 2.0)):
        (values,) = decode(copied(frame).descriptors, copied(frame).payload)
        assert torch.equal(values, torch.full((4,), value))


# More than eight replicas: rows


def of_many(nodes: Sequence[str], length: int, seed: int = 0) -> list[torch.Tensor]:
    """Gradients whose sum shows the order of additions."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator) * 10.0 ** (i % 4) for i, _ in enumerate(nodes)]


def in_rows(nodes: Sequence[str], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the values: each row in the order of its nodes, then the rows in theirs."""
    by_node = dict(zip(nodes, values, strict=True))
    return reduce(torch.add, [reduce(torch.add, [by_node[n] for n in row]) for row in rows(nodes)])


@given(
    st.one_of(st.integers(1, 8), st.integers(9, 20), st.sampled_from([30, 31, 42])),
    st.integers(0, 400),
    st.integers(0, 2**32),
)
@settings(max_examples=12, deadline=None)
def test_the_sum_in_the_order_of_nodes_and_rows(count: int, length: int, seed: int) -> None:
    """Only partners send each other frames."""
    nodes = nodes_of(count)
    network, talks = Network(nodes, seed=seed), {node: partners(node, nodes) for node in nodes}

    def passes(source: str, target: str, frame: Frame) -> bool:
        assert target in talks[source]
        return True

    network.passes = passes
    values = of_many(nodes, length)
    expected = in_rows(nodes, values)
    assert reduce_all(network, values) == [None] * count
    for value in values:
        assert torch.equal(value, expected)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [3, 10])
def test_replicas_are_bit_identical_whatever_comes_when(count: int, codec: Averaged) -> None:
    nodes = nodes_of(count)
    expected = in_rows(nodes, of_many(nodes, 144))
    first: torch.Tensor | None = None
    for seed in range(2):
        values = of_many(nodes, 144)
        assert reduce_all(Network(nodes, codec, seed), values) == [None] * count
        first = values[0] if first is None else first
        for value in values:
            assert torch.equal(value, first)
    assert first is not None
    left = torch.linalg.vector_norm(first - expected)
    rounded = {"none": 0.0, "bf16": 0.01, "fp16": 0.003, "int8": 0.03, "int4": 0.5}
    assert left <= rounded.get(codec, 1.0) * torch.linalg.vector_norm(expected)
    assert (left > 0) == (codec != "none")


@pytest.mark.parametrize("codec", ["none", "bf16", "lowrank"])
@pytest.mark.parametrize("count", [2, 9, 16])
def test_as_many_bytes_travel_as_are_planned_with(
    count: int, codec: Literal["none", "bf16", "lowrank"]
) -> None:
    """In rows, no node sends or receives many more bytes than the mean."""
    nodes, sent, came = nodes_of(count), Counter[str](), Counter[str]()
    network = Network(nodes, codec)

    def passes(source: str, target: str, frame: Frame) -> bool:
        sent[source] += frame.size
        came[target] += frame.size
        return True

    network.passes = passes
    size = sum(map(math.prod, SHAPES))
    assert reduce_all(network, of_many(nodes, size)) == [None] * count
    wire = WireSection(averaging=codec, rank=1)
    whole = gradient_bytes(wire, SHAPES, count)
    assert sent.total() == 2 * (count - 1) * whole
    if count > 8:
        assert max((sent | came).values()) <= (2.3 if codec != "lowrank" else 2.6) * whole


def ids_of(nodes: Sequence[str], other: dict[str, list[int]]) -> list[list[int]]:
    """The microbatches of each node: those in `other`, else one of six while they last."""
    return [other.get(node, [i] if i < 6 else []) for i, node in enumerate(nodes)]


@pytest.mark.parametrize(
    ("ids", "accused", "named"),
    [
        ({"n01": [1, 2]}, ["n01", "n02"], "more than once: 2 (n01, n02)"),  # in one row
        ({"n05": [5, 6]}, ["n05"], "not of this window: 6 (n05)"),
        ({"n00": [0, 3]}, None, "more than once: 3 (n00, n03)"),  # in two rows
        ({"n04": []}, [], "in nobody's gradient: 4"),
    ],
)
def test_no_replica_in_rows_is_done_with_microbatches_that_are_not_the_window(
    ids: dict[str, list[int]], accused: list[str] | None, named: str
) -> None:
    """A microbatch in two rows accuses its reporters; in one row, the nodes that have it."""
    nodes, complaints = nodes_of(10), 0
    for outcome in reduce_all(Network(nodes), of_many(nodes, 200), ids_of(nodes, ids)):
        assert isinstance(outcome, ComplaintError)
        if outcome.cause == NUMBERS:
            complaints += 1
            assert named in str(outcome)
            assert outcome.accused == accused or (accused is None and len(outcome.accused) == 2)
    assert complaints


def test_who_tells_of_its_row_what_is_not_so_is_found_by_its_row() -> None:
    """n04 reports the microbatches of its row's nodes: n03, n04 and n05."""
    nodes, teller = nodes_of(9), "n04"
    network = Network(nodes)

    def passes(source: str, target: str, frame: Frame) -> bool:
        if source == teller and isinstance(ids := frame.fields.get("ids"), dict):
            frame.fields["ids"] = ids | {"n05": []}
        return True

    network.passes = passes
    outcomes = reduce_all(network, of_many(nodes, 200), ids_of(nodes, {}))
    for node, outcome in zip(nodes, outcomes, strict=True):
        if node in ("n03", "n05"):
            assert isinstance(outcome, ComplaintError)
            assert "other microbatches of n05" in str(outcome)
            assert outcome.accused == (["n04", "n05"] if node == "n03" else ["n04"])
        else:
            assert node == teller or isinstance(outcome, ComplaintError)


@pytest.mark.parametrize("claim", [None, [], {"n03": [3]}, {"n03": [], "n04": [], "n05": ["5"]}])
def test_a_row_that_is_named_by_something_else_accuses_who_names_it(claim: object) -> None:
    nodes = nodes_of(9)
    network = Network(nodes)

    def passes(source: str, target: str, frame: Frame) -> bool:
        ids = frame.fields.get("ids")
        if isinstance(ids, dict) and "n03" in ids and target == "n00":
            frame.fields["ids"] = claim
            liars.add(source)
        return True

    liars: set[str] = set()
    network.passes = passes
    outcome = reduce_all(network, of_many(nodes, 200), ids_of(nodes, {}))[0]
    assert isinstance(outcome, ComplaintError)
    assert "names a row's microbatches by" in str(outcome)
    assert outcome.accused == [*liars]


@pytest.mark.parametrize("phase", ["contribution", "row sum", "sum"])
@pytest.mark.parametrize("change", ["damaged", "twice", "by a stranger"])
def test_in_rows_a_frame_that_cannot_be_right_accuses_its_sender(phase: str, change: str) -> None:
    nodes, liars = nodes_of(10), list[str]()
    network = Network(nodes, seed=3)

    def passes(source: str, target: str, frame: Frame) -> bool:
        if frame.fields["phase"] != phase or liars:
            return True
        liars.append(source)
        if change == "damaged":
            frame.payload = (bytearray(frame.size),)
        elif change == "twice":
            network.nodes[target].on_frame(source, copied(frame))
        else:
            others = {*nodes} - {*partners(target, nodes), target}
            liars[:] = [min(others)]
            network.nodes[target].on_frame(liars[0], copied(frame))
        return True

    network.passes = passes
    error = first_failure(network, start_all(network, of_many(nodes, 700)))
    assert isinstance(error, ComplaintError)
    assert (error.accused, error.cause) == (liars, CHECKSUM if change == "damaged" else NUMBERS)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("count", "who", "bad"),
    [
        (3, 1, torch.nan),
        (10, 3, torch.inf),
    ],
)
def test_who_contributes_what_is_not_finite_is_named(
    count: int, who: int, codec: Averaged, bad: float
) -> None:
    """The owner of the part names the node; if that is itself, all that receive the sum do."""
    nodes = nodes_of(count)
    for at in (0, 70, 143):
        values = of_many(nodes, 144)
        values[who][at] = bad
        network = Network(nodes, codec)
        error = first_failure(network, start_all(network, values))
        assert isinstance(error, ComplaintError)
        assert (error.accused, error.cause) == ([nodes[who]], NONFINITE)
        assert str(error) == f"{nodes[who]} sent a bad gradient: it is not finite"


@pytest.mark.parametrize("phase", ["contribution", "row sum", "sum"])
def test_in_rows_who_is_stuck_is_named_first_and_who_waits_behind_it_later(phase: str) -> None:
    nodes, silent = nodes_of(9), "n04"
    network = Network(nodes)
    network.passes = lambda source, _, frame: source != silent or frame.fields["phase"] != phase
    outcomes = dict(zip(nodes, reduce_all(network, of_many(nodes, 200)), strict=True))
    of_partners = {}
    for node, outcome in outcomes.items():
        assert node == silent or isinstance(outcome, ComplaintError)
        if isinstance(outcome, ComplaintError) and outcome.accused == [silent]:
            of_partners[node] = str(outcome)
    seconds = {"contribution": 60, "row sum": 62, "sum": 64}[phase]
    column, row = ["n01", "n07"], ["n03", "n05"]
    for node in row if phase == "contribution" else column:
        assert of_partners[node] == f"waited {seconds} s in vain for the {phase} of n04"


@pytest.mark.parametrize(
    ("count", "peer", "node"),
    [(3, "n02", "n00"), (9, "n01", "n04"), (9, "n03", "n04")],
    ids=["one row", "column", "row"],
)
def test_a_lost_peer_is_missed_while_something_of_it_is(count: int, peer: str, node: str) -> None:
    nodes = nodes_of(count)
    for through in range(100):
        network, came = Network(nodes), list[Frame]()
        network.passes = partial(_passes_until, network, (peer, node), through, came)
        error = first_failure(network, start_all(network, of_many(nodes, 200)))
        if len(came) <= through:
            break
        assert isinstance(error, PeerLostError)
        assert error.accused == [peer]
        assert f"lost {peer}" in str(error) and "connection reset" in str(error)
    assert error is None
    assert through > 2


def _passes_until(
    network: Network,
    link: tuple[str, str],
    through: int,
    came: list[Frame],
    source: str,
    target: str,
    frame: Frame,
) -> bool:
    """Loses the link after `through` frames have come over it; returns whether this frame comes."""
    if (source, target) == link:
        came.append(frame)
        if len(came) == through + 1:
            network.nodes[target].on_peer_lost(source, "connection reset")
    return (source, target) != link or len(came) <= through


def test_in_rows_who_is_no_partner_may_get_lost() -> None:
    nodes = nodes_of(9)
    network = Network(nodes)
    exchanges = start_all(network, of_many(nodes, 200))
    network.nodes["n04"].on_peer_lost("n08", "connection reset")
    assert [network.error(exchange) for exchange in exchanges] == [None] * 9

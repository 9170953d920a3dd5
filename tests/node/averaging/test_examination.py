"""Audits of sums: a liar is named, and no other replica, whatever the liar says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from planaria.bootstrap.registry_pb2 import CHECKSUM, NUMBERS
from planaria.node.averaging import coding, evidence, reduction
from planaria.node.averaging.coding import Averaged, Coding, GradientPiece, ReductionRound
from planaria.node.averaging.evidence import Evidence, block_length, drawn_blocks
from planaria.node.averaging.examination import AuditResult, examine_answers
from planaria.node.averaging.outliers import SILENT
from planaria.node.run_file import AUDITED
from planaria.node.transaction.effects import AuditSum, Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire import tensors
from planaria.node.wire.exchange import ComplaintError
from planaria.node.wire.frame_format import Frame
from planaria.node.wire.tensors import decode
from tests.harness.reducing import (
    BALLOT,
    Network,
    first_failure,
    gradients,
    nodes_of,
    reduce_all,
    start_all,
)

SIZE, PIECE, BLOCK = 9000, 1000, 256
ALL = range(40)
"""Numbers that draw each of the 36 blocks of a gradient at least once."""
Alter = Callable[[str, pb.AuditAnswer], None]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "PIECE", PIECE)


def values_of(nodes: list[str], seed: int = 0) -> list[torch.Tensor]:
    """Noisy estimates of one gradient, one for each node."""
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(SIZE, generator=generator)
    return [gradient + torch.randn(SIZE, generator=generator) for _ in nodes]


def audited(
    nodes: list[str],
    codec: Averaged = "none",
    alter: Alter = lambda node, answer: None,
    away: str = "",
    left: str = "",
) -> AuditResult:
    """The result of an audit of all blocks. `alter` changes answers, that of `away` is missing, and
    `left` is no member any more."""
    network = Network(nodes, codec, signed=True)
    assert set(reduce_all(network, values_of(nodes))) == {None}
    answers = {}
    for node, packed in answers_in(network).items():
        answer = pb.AuditAnswer.FromString(packed)
        alter(node, answer)
        answers[node] = answer.SerializeToString()
    answers.pop(away, None)
    signing = Network([node for node in nodes if node != left]).signing("driver")
    coding = Coding(tensors, codec)
    return examine_answers(
        audit_of(nodes), answers, {away} - {""}, coding, lambda stage: SIZE, signing
    )


def answers_in(network: Network) -> dict[str, bytes]:
    kept = {name: node.take_evidence(BALLOT) for name, node in network.nodes.items()}
    return {name: bytes(own.answer(ALL).payload) for name, own in kept.items() if own}


def audit_of(nodes: list[str]) -> AuditSum:
    return AuditSum(BALLOT, 7, ALL, {1: dict.fromkeys(nodes, 100)})


def standing_out(result: AuditResult) -> dict[str, list[str]]:
    return {
        node: failed
        for node, tests in result.outcomes.items()
        if (failed := [test for test, stands_out in tests.items() if stands_out])
    }


@pytest.mark.parametrize("codec", AUDITED)
@pytest.mark.parametrize("count", [3, 4, 9, 10])
def test_honest_replicas_pass(codec: Averaged, count: int) -> None:
    result = audited(nodes_of(count), codec)
    assert result.wrong == {}
    assert standing_out(result) == {}
    tests = {test for outcomes in result.outcomes.values() for test in outcomes}
    assert {SILENT, "contributor against", "adder long"} <= tests


def test_numbers_draw_every_block_and_no_other() -> None:
    layout = coding.PieceLayout(nodes_of(4), SIZE, Coding(tensors))
    blocks = drawn_blocks(ALL, layout)
    spans = [(b.piece.start + BLOCK * b.number, b.values) for b in blocks]
    covered = sorted({*spans})
    assert sum(values for _, values in covered) == SIZE
    assert all(a + length == b for (a, length), (b, _) in pairwise(covered))


@pytest.mark.parametrize(
    ("size", "length"),
    [(1, 256), (40_000, 512), (10**6, 15_616), (4 << 20, 65_536), (10**9, 65_536)],
)
def test_the_blocks_of_an_audit_are_a_small_part_of_a_stage(size: int, length: int) -> None:
    assert block_length(size) == length


def adds_up(
    monkeypatch: pytest.MonkeyPatch,
    liar: str,
    factor: float,
    phase: str = "_send_sum",
    fits: bool = True,
) -> None:
    """`liar` multiplies its sums by `factor`. `fits`: it also claims a contribution that fits."""
    honest = getattr(reduction.Reduction, phase)
    step = {"_send_sum": 1, "_coded": 3}[phase]

    def lies(self: reduction.Reduction, *arguments: Any) -> Any:
        given = list(arguments)
        is_sum = phase == "_send_sum" or given[0] == "row sum"
        if self.node == liar and is_sum:
            piece = self.own[given[0]] if phase == "_send_sum" else given[2]
            total = given[step]
            given[step] = factor * total
            if fits:
                assert self.evidence is not None
                own = self._own_values(piece) + given[step] - total
                self.evidence.keep_contribution(piece, own)
        return honest(self, *given)

    monkeypatch.setattr(reduction.Reduction, phase, lies)


@pytest.mark.parametrize("codec", AUDITED)
@pytest.mark.parametrize("factor", [0.9, -0.3, 1000.0])
def test_a_sum_that_is_not_that_of_the_contributions_names_its_adder(
    monkeypatch: pytest.MonkeyPatch, codec: Averaged, factor: float
) -> None:
    nodes = nodes_of(3)
    adds_up(monkeypatch, "n01", factor, fits=False)
    result = audited(nodes, codec)
    assert {*result.wrong} == {"n01"}
    assert "isn't that of the contributions" in result.wrong["n01"]


@pytest.mark.parametrize("factor", [-0.3, -1000.0])
def test_an_adder_whose_own_part_makes_its_sum_fit_stands_out(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    adds_up(monkeypatch, "n01", factor)
    result = audited(nodes_of(3))
    assert result.wrong.keys() <= {"n01"}  # the contribution that it claims is rounded
    assert {*standing_out(result)} == {"n01"}
    assert {"adder against", "adder long"} <= {*standing_out(result)["n01"]}


@pytest.mark.parametrize("phase", ["_send_sum", "_coded"])
def test_in_rows_a_wrong_sum_names_its_adder(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    adds_up(monkeypatch, "n04", 3.0, phase, fits=False)
    result = audited(nodes_of(9))
    assert {*result.wrong} == {"n04"}
    made = "row sum" if phase == "_coded" else "sum"
    assert result.wrong["n04"].startswith(f"a {made} that it made")


def forged(signed: pb.SignedBlocks, node: str, digests: bytes) -> pb.SignedBlocks:
    copy = pb.SignedBlocks()
    copy.CopyFrom(signed)
    copy.digests = digests
    Network([node]).signing(node).sign(copy)
    return copy


def other_bytes(node: str, answer: pb.AuditAnswer) -> None:
    """n01 shows another contribution than the one that it sent, of zeros."""
    for block in answer.blocks if node == "n01" else ():
        block.contribution = bytes(len(block.contribution))


def two_digests(node: str, answer: pb.AuditAnswer) -> None:
    """n01 signs another contribution afterwards, so that the adder's sum doesn't fit it."""
    for block in answer.blocks if node == "n01" else ():
        for signed in block.signed:
            if (signed.node, signed.phase) == ("n01", "contribution"):
                signed.CopyFrom(forged(signed, "n01", bytes(len(signed.digests))))


def frames_contributor(node: str, answer: pb.AuditAnswer) -> None:
    """As adder, n01 says that n00 has signed something else, and that n02 has sent nothing."""
    for block in answer.blocks if node == "n01" and answer.blocks else ():
        signed = [s for s in block.signed if s.node != "n02"]
        for each in signed:
            if each.node == "n00":
                each.CopyFrom(forged(each, "n01", bytes(len(each.digests))))
        del block.signed[:]
        block.signed.extend(signed)


def unreadable(node: str, answer: pb.AuditAnswer) -> None:
    if node == "n01":
        del answer.blocks[3:]


def no_gradient(node: str, answer: pb.AuditAnswer) -> None:
    """n01 shows less than a block."""
    for block in answer.blocks if node == "n01" else ():
        block.contribution = block.contribution[:-4]


@pytest.mark.parametrize(
    ("alter", "why"),
    [
        (other_bytes, "isn't the one that it signed"),
        (two_digests, "it has signed two digests for one block"),
        (unreadable, "can't be read"),
        (no_gradient, "isn't the one that it signed"),
    ],
)
def test_who_answers_otherwise_than_it_has_signed_is_named(alter: Alter, why: str) -> None:
    result = audited(nodes_of(3), "int8", alter)
    assert {*result.wrong} == {"n01"}
    assert why in result.wrong["n01"]


def test_nobody_is_named_for_what_another_says_of_it() -> None:
    result = audited(nodes_of(3), "int8", frames_contributor)
    assert result.wrong == {}
    assert standing_out(result) == {}


@pytest.mark.parametrize("count", [3, 9])
@pytest.mark.parametrize("away", ["", "n02"])
def test_nobody_is_named_when_a_replica_has_left_before_the_audit_began(
    count: int, away: str
) -> None:
    """The signatures of n02 can't be verified any more, whoever shows them."""
    result = audited(nodes_of(count), left="n02", away=away)
    assert result.wrong == {}


def test_an_adder_that_hides_what_a_silent_replica_has_signed_is_named() -> None:
    """The contributor n02 doesn't answer. Its adder n01 must have had its signature."""

    def hides(node: str, answer: pb.AuditAnswer) -> None:
        for block in answer.blocks if node == "n01" else ():
            kept = [s for s in block.signed if s.node != "n02"]
            del block.signed[:]
            block.signed.extend(kept)

    result = audited(nodes_of(3), alter=hides, away="n02")
    assert result.wrong == {}  # n02's bytes aren't here, so they prove nothing
    assert standing_out(result) == {"n02": [SILENT]}


def test_who_sends_unlike_sums_to_two_replicas_has_signed_both() -> None:
    nodes = nodes_of(3)
    network = Network(nodes, signed=True)

    def passes(source: str, target: str, frame: Frame) -> bool:
        if (source, target, frame.fields["phase"]) == ("n00", "n02", "sum"):
            (row,) = decode(frame.descriptors, frame.payload, torch.device("cpu"))
            frame.descriptors, frame.payload = tensors.encode([2 * row], "none")
            signed = pb.SignedBlocks.FromString(frame.fields["signed"])
            piece = GradientPiece(signed.start, signed.stop, 0)
            digests = network.nodes["n00"]._evidence._digests(frame.payload, piece, "none")
            frame.fields["signed"] = forged(signed, "n00", digests).SerializeToString()
        return True

    network.passes = passes
    assert set(reduce_all(network, values_of(nodes))) == {None}
    answers, signing = answers_in(network), network.signing("driver")
    result = examine_answers(
        audit_of(nodes), answers, (), Coding(tensors), lambda stage: SIZE, signing
    )
    assert result.wrong == {"n00": "it has signed two digests for one block"}


@pytest.mark.parametrize("count", [3, 10])
@pytest.mark.parametrize("change", ["unsigned", "by another", "other bytes", "other ballot"])
@pytest.mark.parametrize("phase", ["contribution", "row sum", "sum"])
def test_who_sends_without_a_valid_signature_is_accused(
    count: int, change: str, phase: str
) -> None:
    nodes, liars = nodes_of(count), list[str]()
    network = Network(nodes, signed=True)

    def passes(source: str, target: str, frame: Frame) -> bool:
        if frame.fields["phase"] != phase or liars:
            return True
        liars.append(source)
        signed = pb.SignedBlocks.FromString(frame.fields["signed"])
        if change == "unsigned":
            signed.signature = bytes(64)
        elif change == "by another":
            Network([source]).signing("stranger").sign(signed)
        elif change == "other ballot":
            signed.ballot.CopyFrom(Ballot(1, 1).message())
            Network([source]).signing(source).sign(signed)
        else:
            signed = forged(signed, source, bytes(len(signed.digests)))
        frame.fields["signed"] = signed.SerializeToString()
        return True

    network.passes = passes
    error = first_failure(network, start_all(network, values_of(nodes)))
    if phase == "row sum" and count == 3:  # all replicas are in one row
        assert (error, liars) == (None, [])
        return
    assert isinstance(error, ComplaintError)
    assert (error.accused, error.cause) == (liars, CHECKSUM if change == "other bytes" else NUMBERS)


def test_evidence_is_kept_for_its_own_ballot_and_given_once() -> None:
    nodes = nodes_of(3)
    network = Network(nodes, signed=True)
    reduce_all(network, gradients(nodes, 50))
    node = network.nodes["n00"]
    assert node.take_evidence(BALLOT) is not None
    assert node.take_evidence(BALLOT) is None
    reduce_all(Network(nodes, signed=False), gradients(nodes, 50))


@pytest.mark.parametrize(("codec", "count"), [("none", 2), ("int4", 3), ("lowrank", 3)])
def test_what_cannot_be_audited_is_not_signed(codec: Averaged, count: int) -> None:
    nodes = nodes_of(count)
    network = Network(nodes, codec, signed=True)
    signed = []
    network.passes = lambda source, target, frame: signed.append("signed" in frame.fields) or True
    assert set(reduce_all(network, gradients(nodes, 144))) == {None}
    assert signed and not any(signed)
    assert network.nodes["n00"].take_evidence(BALLOT) is None


def test_a_block_in_evidence_has_its_own_scales() -> None:
    """int8: all scales of a piece come first, so a block's bytes are in two places."""
    row = torch.randn(SIZE)
    piece = GradientPiece(0, 700, 0)
    signing = Network(["a"]).signing("a")
    kept = Evidence(ReductionRound("a", BALLOT, "abc", 3), SIZE, Coding(tensors, "int8"), signing)
    payload = Coding(tensors, "int8").encode(piece.of(row), 0)[1]
    kept.sign("contribution", piece, payload)
    for number, values in enumerate([256, 256, 188]):
        data = evidence.PieceBlock(piece, 0, number, 256).of(payload, "int8")
        alone = tensors.encode([row[256 * number : 256 * number + values]], "int8")[1]
        assert data == bytes(alone[0])

"""An audit: what replicas show of a committed sum is examined. Runs in the compute thread.

A drawn block is summed once more from the contributions. Only signed bytes count, so nobody can
blame another replica by its word: a replica is wrong if its bytes don't fit its own digest, if it
signed two digests for one block, if it shows no signed contribution where it must have had it, or
if its sum isn't that of the signed contributions. Beside that, the contributions are compared
(outliers.py): a replica's contribution to its own piece can be anything that makes its sum fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from google.protobuf.message import DecodeError
from xxhash import xxh3_64_intdigest

from planaria.node.averaging.coding import Coding, PieceLayout
from planaria.node.averaging.evidence import PieceBlock, Signing, drawn_blocks
from planaria.node.averaging.outliers import SILENT, compare_gradients
from planaria.node.transaction.effects import AuditSum, Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.frame_format import BLOCK, Codec, Descriptor, WireError

if TYPE_CHECKING:
    from torch import Tensor

STEPS: Final = 2
"""Quantizing steps by which a sum may differ from the honest one."""
ROUNDING: Final = 2.0**-20
"""Relative error of a sum in float32, by the sum of all absolute values."""


class AuditResult(NamedTuple):
    step: int
    wrong: dict[str, str]  # by node, why
    outcomes: dict[str, dict[str, bool]]  # by node and test, whether it stands out


def examine_answers(
    audit: AuditSum,
    answers: Mapping[str, bytes],
    silent: Collection[str],
    coding: Coding,
    size_of: Callable[[int], int],
    signing: Signing,
) -> AuditResult:
    """The result of an audit. `answers`: `AuditAnswer` by node, serialized. `silent`: nodes that
    owe one. `size_of`: the number of values of a stage's gradient."""
    outcomes = {node: {SILENT: node in silent} for node in {*answers, *silent}}
    result = AuditResult(audit.step, {}, outcomes)
    for stage, replicas in audit.stages.items():
        examination = _Examination(audit, replicas, coding, size_of(stage), signing, result.wrong)
        examination.read({node: answers[node] for node in sorted(replicas) if node in answers})
        for node, tests in examination.compare().items():
            outcomes.setdefault(node, {}).update(tests)
    return result


class _Examined(NamedTuple):
    """A block's contributions, as inner products, and who added them up."""

    products: dict[tuple[str, str], float]
    adders: list[str]


class _Examination:
    """The audit of one stage."""

    def __init__(
        self,
        audit: AuditSum,
        tokens: Mapping[str, int],
        coding: Coding,
        size: int,
        signing: Signing,
        wrong: dict[str, str],
    ) -> None:
        assert coding.codec != "lowrank"
        self.codec: Codec = coding.codec
        self._ballot, self._tokens, self._wrong = audit.ballot, tokens, wrong
        self._coding, self._signing = coding, signing
        layout = PieceLayout(sorted(tokens), size, coding)
        self.rows, self._blocks = layout.rows, drawn_blocks(audit.numbers, layout)
        self.most_signed = 2 * len(tokens)  # pieces that a replica has for a block: two phases
        self._examined: list[_Examined] = []

    def read(self, answers: Mapping[str, bytes]) -> None:
        parsed = {}
        for node, data in answers.items():
            try:
                answer = pb.AuditAnswer.FromString(data)
            except DecodeError:
                answer = pb.AuditAnswer()
            if len(answer.blocks) == len(self._blocks):
                parsed[node] = answer
            else:
                self._wrong[node] = "its answer to an audit can't be read"
        for number, block in enumerate(self._blocks):
            shown = {node: answer.blocks[number] for node, answer in parsed.items()}
            self._examined.append(_BlockExamination(self, block, shown).examine())

    def compare(self) -> dict[str, dict[str, bool]]:
        """Whether each replica stands out, by test."""
        outcomes: dict[str, dict[str, bool]] = {}
        for node in sorted(self._tokens):
            outcomes[node] = {}
            for role in ("contributor", "adder"):
                chosen = [e.products for e in self._examined if _role(node, e) == role]
                pairs = set.intersection(*map(set, chosen)) if chosen else set()
                products = {pair: sum(each[pair] for each in chosen) for pair in pairs}
                for test, stands_out in compare_gradients(node, products, self._tokens).items():
                    outcomes[node][f"{role} {test}"] = stands_out
        return outcomes

    def accuse(self, node: str, why: str) -> None:
        self._wrong.setdefault(node, why)

    def has_key(self, node: str) -> bool:
        """Whether signatures of the node can be verified: it was a member when the audit began."""
        return self._signing.key(node) != b""

    def is_valid(self, signed: pb.SignedBlocks, block: PieceBlock) -> bool:
        piece = block.piece
        return (
            signed.node in self._tokens
            and (signed.start, signed.stop) == (piece.start, piece.stop)
            and Ballot.of(signed.ballot) == self._ballot
            and self._signing.is_signed(signed)
        )

    def decode(self, data: bytes, block: PieceBlock, codec: Codec) -> Tensor:
        """A block's values, of the bytes that a replica shows. Raises WireError."""
        checksum = xxh3_64_intdigest(data)
        descriptor = Descriptor.parse(["float32", [block.values], codec, checksum, len(data)])
        (values,) = self._coding.tensors.decode([descriptor], data)
        return values


class _BlockExamination:
    """The examination of one drawn block of a stage's gradient."""

    def __init__(
        self, stage: _Examination, block: PieceBlock, shown: Mapping[str, pb.AuditedBlock]
    ) -> None:
        self._stage, self._block, self._shown = stage, block, shown
        self._adders = [row[block.place] for row in stage.rows]  # one a row
        self._maker = self._adders[block.piece.home]
        self._signed: dict[tuple[str, str], pb.SignedBlocks] = {}  # by phase and signer
        for node in sorted(shown):
            for signed in shown[node].signed[: stage.most_signed]:
                if stage.is_valid(signed, block):
                    self._note(signed)

    def examine(self) -> _Examined:
        rows = [
            {node: self._shown_contribution(node, adder) for node in row}
            for row, adder in zip(self._stage.rows, self._adders, strict=True)
        ]
        sums = {}
        for adder, row in zip(self._adders, rows, strict=True):
            if adder != self._maker:
                sums[adder] = self._sum(adder, "row sum", [*row.values()])
        home = [*rows[self._block.piece.home].values()]
        self._sum(self._maker, "sum", [*home, *sums.values()])
        gradients = {n: values for row in rows for n, values in row.items() if values is not None}
        pairs = combinations_with_replacement(sorted(gradients), 2)
        products = {(a, b): float(gradients[a] @ gradients[b]) for a, b in pairs}
        return _Examined(products, self._adders)

    def _note(self, signed: pb.SignedBlocks) -> None:
        known = self._signed.setdefault((signed.phase, signed.node), signed)
        digest = self._block.digest
        if digest(known.digests) != digest(signed.digests) or digest(known.own) != digest(
            signed.own
        ):
            self._stage.accuse(signed.node, "it has signed two digests for one block")

    def _shown_contribution(self, node: str, adder: str) -> Tensor | None:
        """The contribution that a replica shows; None: it shows none, or not what it signed."""
        if node not in self._shown:
            return None
        phase = "contribution" if node != adder else self._phase(adder)
        signed = self._signed_by(node, phase, adder)
        if signed is None:
            return None
        digests = signed.own if node == adder else signed.digests
        codec = "none" if node == adder else self._stage.codec
        return self._shown_by(node, self._shown[node].contribution, digests, codec, "contribution")

    def _sum(self, adder: str, phase: str, terms: Sequence[Tensor | None]) -> Tensor | None:
        """The sum that an adder shows, which is compared with that of all terms, if they are known.
        None: it isn't known, or not valid."""
        if adder not in self._shown:
            return None
        signed = self._signed_by(adder, phase, adder)
        if signed is None:
            return None
        data, codec = self._shown[adder].sum, self._stage.codec
        claimed = self._shown_by(adder, data, signed.digests, codec, phase)
        values = [term for term in terms if term is not None]
        if claimed is None or len(values) < len(terms):
            return claimed
        honest, absolute = sum(values[1:], values[0]), sum(abs(value) for value in values)
        allowed = STEPS * rounding_error(honest, codec) + ROUNDING * absolute
        off = abs(claimed - honest)
        if not bool((off <= allowed).all()):  # not for NaN
            largest = float(off.max())
            why = f"a {phase} that it made isn't that of the contributions: off by {largest:.2g}"
            self._stage.accuse(adder, why)
        return claimed

    def _phase(self, adder: str) -> str:
        return "sum" if adder == self._maker else "row sum"

    def _signed_by(self, node: str, phase: str, adder: str) -> pb.SignedBlocks | None:
        signed = self._signed.get((phase, node))
        if signed is None and adder in self._shown and self._stage.has_key(node):
            self._stage.accuse(adder, f"it shows no signed {phase} of {node}")
        return signed

    def _shown_by(
        self, node: str, data: bytes, digests: bytes, codec: Codec, phase: str
    ) -> Tensor | None:
        if hashlib.sha256(data).digest() != self._block.digest(digests):
            self._stage.accuse(node, f"the {phase} that it shows isn't the one that it signed")
            return None
        try:
            return self._stage.decode(data, self._block, codec)
        except WireError as error:
            self._stage.accuse(node, f"the {phase} that it signed is no gradient: {error}")
            return None


def rounding_error(values: Tensor, codec: Codec) -> Any:
    """The largest rounding error, or more, of each value in this codec."""
    match codec:
        case "bf16":
            return abs(values) * 2.0**-8
        case "fp16":
            return abs(values) * 2.0**-11 + 2.0**-24
        case "int8":
            quanta = values.new_empty(values.shape)
            for start in range(0, len(values), BLOCK):
                quanta[start : start + BLOCK] = abs(values[start : start + BLOCK]).max() / 127
            return quanta
    return 0.0


def _role(node: str, examined: _Examined) -> str:
    return "adder" if node in examined.adders else "contributor"

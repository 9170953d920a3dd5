"""Evidence of a sum: signed digests of what a replica sends, and its answer to an audit.

A piece of a gradient has blocks of up to 65,536 values. A replica signs the SHA-256 of each block
of each piece that it sends, as encoded, with the ballot. Who adds up a piece signs the digests of
its sum, and of its own contribution, which it sends to nobody. Receivers check digests and
signatures before they add. So everybody is bound to its bytes before the driver draws the blocks
of an audit, and nobody can be blamed for bytes that it has not signed.

Everything stays here until the commit, which names the drawn blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from google.protobuf.message import DecodeError

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.identity import Identity, is_message_signed
from planaria.bootstrap.registry_pb2 import CHECKSUM, NUMBERS
from planaria.node.averaging.coding import (
    Averaged,
    Coding,
    GradientPiece,
    PieceLayout,
    ReductionRound,
)
from planaria.node.run_file import AUDITED
from planaria.node.transaction.effects import Ballot
from planaria.node.wire import stage_pb2 as pb
from planaria.node.wire.exchange import ComplaintError
from planaria.node.wire.frame_format import BLOCK, Codec, Frame, buffers_of

if TYPE_CHECKING:
    from torch import Tensor

VALUES: Final = 65_536
"""Values of a block, at most."""
FEWEST: Final = 64
"""Blocks of a gradient, at least: an audit's four take few of a small stage's bytes."""
DIGEST: Final = 32  # bytes
REPLICAS: Final = 3
"""Replicas of a stage without which there is no audit: of two, the wrong one can't be told."""


def is_audited(codec: Averaged, replicas: int) -> bool:
    return replicas >= REPLICAS and codec in AUDITED


@dataclass(frozen=True)
class Signing:
    """Signs for a node, and verifies signatures by the keys of one view: that in which a sum or an
    audit began, since a signature stays valid when its signer leaves."""

    identity: Identity
    view: registry.View

    def sign(self, blocks: pb.SignedBlocks) -> None:
        self.identity.sign_message(blocks, self.view.run)

    def key(self, node: str) -> bytes:
        """A node's public key; empty: it is no member."""
        return next((member.key for member in self.view.members if member.node == node), b"")

    def is_signed(self, blocks: pb.SignedBlocks) -> bool:
        return is_message_signed(self.key(blocks.node), blocks, self.view.run)


def block_length(size: int) -> int:
    """Values of a block, for a gradient of `size` values. Values that share a scale are in one."""
    return min(VALUES, max(1, size // FEWEST // BLOCK) * BLOCK)


class PieceBlock(NamedTuple):
    """A block of values in a piece of a gradient: what an audit draws."""

    piece: GradientPiece
    place: int  # of those who add it up, in their rows
    number: int  # in the piece
    length: int  # of the piece's blocks; its last may be shorter

    @property
    def values(self) -> int:
        return min(self.length, self.piece.values - self.number * self.length)

    def digest(self, digests: bytes) -> bytes:
        """The block's digest, of the digests of its piece."""
        return digests[self.number * DIGEST : (self.number + 1) * DIGEST]

    def of(self, payload: Sequence[memoryview], codec: Codec) -> bytes:
        """The block's bytes, of the encoded bytes of its piece."""
        count = self.piece.values
        return b"".join(_bytes_of_block(payload, self.number, self.length, count, codec))


def drawn_blocks(numbers: Sequence[int], layout: PieceLayout) -> list[PieceBlock]:
    """The blocks that these numbers mean: each modulo the number of blocks of the gradient."""
    pieces = [(piece, at) for at in range(layout.places) for piece in layout.owned(0, at)]
    length = block_length(layout.size)
    counts = [-(-piece.values // length) for piece, _ in pieces]
    blocks = []
    for number in numbers:
        left = number % sum(counts)
        for (piece, place), count in zip(pieces, counts, strict=True):
            if left < count:
                blocks.append(PieceBlock(piece, place, left, length))
                break
            left -= count
    return blocks


class Evidence:
    """What a replica keeps of a sum: signed digests, by phase, and the bytes that they are of."""

    def __init__(self, round: ReductionRound, size: int, coding: Coding, signing: Signing) -> None:
        """`size`: values of the gradient."""
        assert coding.codec != "lowrank"
        self.node, self.ballot, self.codec = round.node, round.ballot, coding.codec
        self._replicas, self._size = round.replicas, size
        self._coding, self._signing = coding, signing
        self._signed: dict[int, list[pb.SignedBlocks]] = {}  # by start of the piece
        self._contributions: dict[int, Sequence[memoryview]] = {}
        self._own: dict[int, Sequence[memoryview]] = {}  # to pieces that this node adds up
        self._sums: dict[int, Sequence[memoryview]] = {}

    def keep_contribution(self, piece: GradientPiece, values: Tensor) -> None:
        """Keeps this node's contribution to a piece that it adds up."""
        self._own[piece.start] = self._coding.tensors.encode([values.clone()], "none")[1]

    def sign(self, phase: str, piece: GradientPiece, payload: Sequence[memoryview]) -> bytes:
        """Signs digests of what is sent, and keeps both; returns `SignedBlocks`, serialized."""
        blocks = pb.SignedBlocks(
            node=self.node,
            ballot=self.ballot.message(),
            phase=phase,
            start=piece.start,
            stop=piece.stop,
            digests=self._digests(payload, piece, self.codec),
        )
        if phase == "contribution":
            self._contributions[piece.start] = payload
        else:
            blocks.own = self._digests(self._own[piece.start], piece, "none")
            self._sums[piece.start] = payload
        self._signing.sign(blocks)
        self._signed.setdefault(piece.start, []).append(blocks)
        return blocks.SerializeToString()

    def receive(
        self, peer: str, signer: str, phase: str, piece: GradientPiece, frame: Frame
    ) -> None:
        """Checks that a frame from `peer` is signed by `signer`, and keeps the digests. Raises
        ComplaintError, which accuses `peer`."""
        try:
            blocks = pb.SignedBlocks.FromString(frame.fields.get("signed", b""))
        except (DecodeError, TypeError):
            blocks = pb.SignedBlocks()
        signed_for = blocks.node, blocks.phase, blocks.start, blocks.stop
        if (
            signed_for != (signer, phase, piece.start, piece.stop)
            or Ballot.of(blocks.ballot) != self.ballot
            or not self._signing.is_signed(blocks)
        ):
            reason = f"{peer} sent a {phase} without the signature of {signer}"
            raise ComplaintError(reason, [peer], NUMBERS)
        if blocks.digests != self._digests(buffers_of(frame.payload), piece, self.codec):
            reason = f"{peer} sent a {phase} that differs from the digests that {signer} signed"
            raise ComplaintError(reason, [peer], CHECKSUM)
        self._signed.setdefault(piece.start, []).append(blocks)

    def answer(self, numbers: Sequence[int]) -> Frame:
        """The answer to the audit of the blocks that these numbers mean."""
        layout = PieceLayout(self._replicas, self._size, self._coding)
        answer = pb.AuditAnswer(blocks=map(self._show, drawn_blocks(numbers, layout)))
        return Frame("audit", self.ballot, {}, [], answer.SerializeToString())

    def _show(self, block: PieceBlock) -> pb.AuditedBlock:
        start = block.piece.start
        shown = pb.AuditedBlock(signed=self._signed.get(start, ()))
        if start in self._own:
            shown.contribution = block.of(self._own[start], "none")
            shown.sum = block.of(self._sums[start], self.codec)
        elif start in self._contributions:
            shown.contribution = block.of(self._contributions[start], self.codec)
        return shown

    def _digests(self, payload: Sequence[memoryview], piece: GradientPiece, codec: Codec) -> bytes:
        length, count, digests = block_length(self._size), piece.values, b""
        for index in range(-(-count // length)):
            digest = hashlib.sha256()
            for part in _bytes_of_block(payload, index, length, count, codec):
                digest.update(part)
            digests += digest.digest()
        return digests


def _bytes_of_block(
    payload: Sequence[memoryview], index: int, length: int, count: int, codec: Codec
) -> Iterator[memoryview]:
    """The bytes of a block of `length` values in the encoded piece of `count` values; no bytes, if
    they are missing: the sizes were not as they should be."""
    (whole,) = payload if len(payload) == 1 else (memoryview(b"".join(payload)),)
    start, stop = index * length, min((index + 1) * length, count)
    if codec == "int8":
        scales = 4 * -(-count // BLOCK)
        yield whole[4 * (start // BLOCK) : 4 * -(-stop // BLOCK)]
        yield whole[scales + start : scales + stop]
    else:
        size = 4 if codec == "none" else 2
        yield whole[size * start : size * stop]

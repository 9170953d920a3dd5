"""How parts of a gradient travel between replicas, and how a gradient is cut into parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from planaria.bootstrap.neighbours import lengths, places, rows
from planaria.node.ports import Tensors
from planaria.node.transaction.effects import Ballot
from planaria.node.wire.frame_format import (
    Codec,
    Descriptor,
    Form,
    Frame,
    check_forms,
    encoded_size,
)
from planaria.node.wire.lowrank import Shape, SlicePart, cuts, encoded_bytes, row_start

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.node.run_file import WireSection

LATE: Final = 1 << 62
"""A step later than a run's first ones."""
PIECE: Final = 2 << 20  # values of a part in one frame: 8 MiB of float32

Coded: TypeAlias = tuple[list[Descriptor], tuple[memoryview, ...]]
Averaged: TypeAlias = Codec | Literal["lowrank"]


def has_error_feedback(codec: Averaged) -> bool:
    """Whether error feedback adds what the codec leaves out to the next step."""
    return codec in ("int8", "int4", "lowrank")


@dataclass(frozen=True)
class Coding:
    """How parts of a gradient travel: in a codec, or as factors of its matrices."""

    tensors: Tensors
    codec: Averaged = "none"
    after: int = 0  # number of first steps that use int8 instead of lowrank
    rank: int = 1  # of lowrank
    shapes: tuple[Shape, ...] = ()  # of the parameters whose flat gradients are concatenated

    @classmethod
    def of_run(cls, tensors: Tensors, wire: WireSection, shapes: Iterable[Shape]) -> Coding:
        """The coding that the run file asks for."""
        return cls(tensors, wire.averaging, wire.averaging_after, wire.rank, tuple(shapes))

    def at(self, step: int) -> Coding:
        """The coding of that step. A run's gradients change fastest in its first steps, so little
        of them would come in time (Lin et al., ICLR 2018, section 3.3)."""
        early = self.codec == "lowrank" and step <= self.after
        return replace(self, codec="int8") if early else self

    def encode(self, row: Tensor, start: int) -> Coded:
        """Encodes a row of the gradient, whose first value is at `start`."""
        if self.codec == "lowrank":
            return self.tensors.encode_low_rank(row, self._cuts(row, start), self.rank)
        return self.tensors.encode([row], self.codec)

    def decode(self, frame: Frame, like: Tensor, start: int) -> Tensor:
        """Decodes a frame's part of a gradient, to the length and device of `like`. Raises
        WireError."""
        descriptors, payload = frame.descriptors, frame.payload
        size, device = like.numel(), like.device
        if self.codec == "lowrank":
            some = self._cuts(like, start)
            return self.tensors.decode_low_rank(descriptors, payload, size, some, self.rank, device)
        check_forms(descriptors, [Form("float32", tuple(like.shape), self.codec)])
        (row,) = self.tensors.decode(descriptors, payload, device)
        return row

    def _cuts(self, row: Tensor, start: int) -> list[SlicePart]:
        return cuts(self.shapes, self.rank, start, row.numel())


def piece_spans(size: int, parts: int, matrices: Sequence[Shape]) -> list[list[tuple[int, int]]]:
    """Begin and end of each piece, for so many parts of a gradient; rows of `matrices` stay whole.
    An empty part is one empty piece, because ids travel with a piece."""
    bounds = [*(row_start(matrices, size * i // parts) for i in range(parts)), size]
    firsts = [
        [row_start(matrices, first) for first in range(start, max(start + 1, stop), PIECE)]
        for start, stop in pairwise(bounds)
    ]
    return [list(pairwise((*of, stop))) for of, stop in zip(firsts, bounds[1:], strict=True)]


def gradient_bytes(wire: WireSection, shapes: Iterable[Shape], replicas: int) -> int:
    """Bytes of the gradient of parameters of these shapes, sent once, in the parts for so many
    replicas."""
    if wire.averaging == "lowrank":
        return _factor_bytes(tuple(shapes), wire.rank, replicas)
    return encoded_size(sum(map(math.prod, shapes)), "float32", wire.averaging)


@lru_cache(maxsize=64)  # a plan search calls it repeatedly
def _factor_bytes(shapes: tuple[Shape, ...], rank: int, replicas: int) -> int:
    of = piece_spans(sum(map(math.prod, shapes)), part_count(replicas), shapes)
    return encoded_bytes(shapes, rank, chain.from_iterable(of))


def part_count(replicas: int) -> int:
    """Number of parts of a gradient: owners in a row, times the number of rows."""
    some = lengths(replicas)
    return len(some) * min(some)


class GradientPiece(NamedTuple):
    """The values of a gradient from `start` to before `stop`."""

    start: int
    stop: int
    home: int  # the row whose owner makes the sum
    names: bool = False  # whether its sum carries the names of that row's microbatches

    @property
    def values(self) -> int:
        return self.stop - self.start

    def of(self, row: Tensor) -> Tensor:
        return row[self.start : self.stop]


class PieceLayout:
    """The rows of the replicas, and the pieces of the gradient that each of them adds up."""

    def __init__(self, replicas: Sequence[str], size: int, coding: Coding) -> None:
        """`size`: number of values of the gradient."""
        self.size = size
        self.rows = rows(replicas)
        self.places = places(self.rows)
        matrices = coding.shapes if coding.codec == "lowrank" else ()
        self._shares = piece_spans(size, self.places * len(self.rows), matrices)

    def owned(self, row: int, place: int) -> list[GradientPiece]:
        """The pieces of the owner at this place of a row; those whose sums it makes come first."""
        count, places = len(self.rows), self.places
        return [
            GradientPiece(start, stop, home, count > 1 and first == 0 and home % places == place)
            for home in (*range(row, count), *range(row))
            for first, (start, stop) in enumerate(self._shares[place * count + home])
        ]


@dataclass(frozen=True)
class ReductionRound:
    """One reduction, on whose terms all replicas agree."""

    node: str  # this one
    ballot: Ballot
    replicas: Sequence[str]  # of the stage, including this node
    window: int  # microbatches of the step, over all replicas
    step: int = LATE  # of the run
    non_finite: bool = False  # gradients need not be finite, since the model causes that
    last: bytes = b""  # hash of the commit that the replicas applied last

"""Low-rank factors of gradient matrices (PowerSGD, Vogels et al., NeurIPS 2019, section 3): which
values of a slice of a stage's gradient are encoded by how many values of factors.

A matrix G of rows x columns is sent as P and Q, of `rank` columns each, with G near P Qᵀ: rank x
(rows + columns) values. The whole rows of a matrix that lie in a slice form a matrix of their own.
Sent value by value: norms and biases, a matrix that factors would not shorten, and rows that a
slice cuts in two. Slices that begin at a `row_start` avoid the last case.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from planaria.node.wire.frame_format import Form, encoded_size

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class SlicePart:
    """The values from `start` to `stop` of a slice of a gradient: a matrix, if it has `rows`."""

    start: int
    stop: int
    rows: int = 0
    columns: int = 0


def row_start(shapes: Iterable[Shape], place: int) -> int:
    """Where the matrix row begins that contains this value of a gradient; or the place itself."""
    first = 0
    for shape in shapes:
        size = math.prod(shape)
        if first <= place < first + size:
            return place - (place - first) % math.prod(shape[1:])
        first += size
    return place


def cuts(shapes: Iterable[Shape], rank: int, start: int, size: int) -> list[SlicePart]:
    """Cuts a gradient's values start..start + size into matrices and other values. `shapes`: of its
    parameters; values behind all of them count as no matrix."""
    pieces: list[SlicePart] = []
    end, first = start + size, 0
    for shape in shapes:
        last = first + math.prod(shape)
        low, high = max(first, start), min(last, end)
        if low < high:
            columns = math.prod(shape[1:])
            top, bottom = -(-(low - first) // columns), (high - first) // columns
            rows = bottom - top
            matrix_start = matrix_end = low
            if len(shape) > 1 and rank * (rows + columns) < rows * columns:
                matrix_start, matrix_end = first + top * columns, first + bottom * columns
                pieces.append(SlicePart(matrix_start - start, matrix_end - start, rows, columns))
            pieces += [
                SlicePart(begin - start, stop - start)
                for begin, stop in ((low, matrix_start), (matrix_end, high))
                if begin < stop
            ]
        first = last
    if (behind := max(first, start)) < end:
        pieces.append(SlicePart(behind - start, end - start))
    return sorted(pieces, key=lambda cut: cut.start)


def counts(some: Iterable[SlicePart], rank: int) -> tuple[int, int]:
    """How many values of a slice are sent in factors, and how many one by one."""
    some = list(some)
    factors = sum(rank * (cut.rows + cut.columns) for cut in some if cut.rows)
    return factors, sum(cut.stop - cut.start for cut in some if not cut.rows)


def forms(some: Iterable[SlicePart], rank: int) -> list[Form]:
    """The forms of the two tensors in which a slice is sent: factors, and values. Each has blocks
    of its own, so that neither is rounded by the other's scale."""
    return [Form("float32", (count,), "int8") for count in counts(some, rank)]


def encoded_bytes(shapes: Sequence[Shape], rank: int, rows: Iterable[tuple[int, int]]) -> int:
    """The encoded size in bytes of these slices of a gradient, each given as (start, stop)."""
    return sum(
        encoded_size(count, "float32", "int8")
        for start, stop in rows
        for count in counts(cuts(shapes, rank, start, stop - start), rank)
    )

"""Matrices by two factors of low rank (PowerSGD, Vogels et al., NeurIPS 2019, section 3): which
values of a row that is cut out of a stage's gradient are told by how many of factors.

A matrix G of rows x columns goes as P and Q, of `rank` columns each, with G near P Qᵀ: rank x (rows
+ columns) values. What a row of values has of a matrix is a matrix of its own, of as many rows as
are there whole. What isn't a matrix (norms, biases), or would be no shorter by factors, goes value
by value, and so do rows that are cut in two. Who cuts a gradient does it at a `row_start`, so that
there are none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from planaria.node.wire.frames import Form, encoded_size

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """Values from `start` to `stop`: with `rows`, a matrix."""

    start: int
    stop: int
    rows: int = 0
    columns: int = 0


def row_start(shapes: Iterable[Shape], place: int) -> int:
    """Where the row of a matrix begins that this value of a gradient is in, or the place itself."""
    first = 0
    for shape in shapes:
        size = math.prod(shape)
        if first <= place < first + size:
            return place - (place - first) % math.prod(shape[1:])
        first += size
    return place


def cuts(shapes: Iterable[Shape], rank: int, start: int, size: int) -> list[Cut]:
    """Of the values start..start + size of a gradient of parameters of these shapes; what lies
    behind all of them counts as no matrix."""
    found: list[Cut] = []
    end, first = start + size, 0
    for shape in shapes:
        last = first + math.prod(shape)
        low, high = max(first, start), min(last, end)
        if low < high:
            columns = math.prod(shape[1:])
            top, bottom = -(-(low - first) // columns), (high - first) // columns
            rows = bottom - top
            here, there = low, low  # of the matrix
            if len(shape) > 1 and rank * (rows + columns) < rows * columns:
                here, there = first + top * columns, first + bottom * columns
                found.append(Cut(here - start, there - start, rows, columns))
            found += [
                Cut(one - start, other - start)
                for one, other in ((low, here), (there, high))
                if one < other
            ]
        first = last
    if (behind := max(first, start)) < end:
        found.append(Cut(behind - start, end - start))
    return sorted(found, key=lambda cut: cut.start)


def counts(some: Iterable[Cut], rank: int) -> tuple[int, int]:
    """Values in factors, and those that go one by one."""
    some = list(some)
    factors = sum(rank * (cut.rows + cut.columns) for cut in some if cut.rows)
    return factors, sum(cut.stop - cut.start for cut in some if not cut.rows)


def forms(some: Iterable[Cut], rank: int) -> list[Form]:
    """What they travel as: factors, and values. Each has blocks of its own, so that neither is
    rounded by the other's scale."""
    return [Form("float32", (count,), "int8") for count in counts(some, rank)]


def encoded_bytes(shapes: Sequence[Shape], rank: int, rows: Iterable[tuple[int, int]]) -> int:
    """Of these parts of a gradient, each from its first value to behind its last one."""
    return sum(
        encoded_size(count, "float32", "int8")
        for start, stop in rows
        for count in counts(cuts(shapes, rank, start, stop - start), rank)
    )

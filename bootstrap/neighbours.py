"""Who of a stage's replicas has anything to do with whom. Pure.

Up to `ALL` replicas everybody has with everybody. More are laid out in rows of a square, and each
has with those of its row, and with those at its place in the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import islice, pairwise
from typing import Final

ALL: Final = 8
"""Replicas of a stage up to which they are one row."""


def lengths(count: int) -> list[int]:
    """Of the rows that so many replicas make; they differ by one at most."""
    number = 1
    if count > ALL:
        width = math.isqrt(count - 1) + 1
        number = -(-count // width)
    bounds = [count * row // number for row in range(number + 1)]
    return [stop - start for start, stop in pairwise(bounds)]


def rows(replicas: Collection[str]) -> list[list[str]]:
    """In the order of their ids."""
    ids = iter(sorted(replicas))
    return [list(islice(ids, length)) for length in lengths(len(replicas))]


def places(some: Collection[Collection[str]]) -> int:
    """That each of these rows has; who is behind them in a longer one has none in others."""
    return min(map(len, some))


def row_of(node: str, some: Collection[list[str]]) -> list[str]:
    (own,) = (row for row in some if node in row)
    return own


def partners(node: str, replicas: Collection[str]) -> list[str]:
    """Of this one of the replicas: those of its row, and those at its place in other rows."""
    some = rows(replicas)
    own = row_of(node, some)
    place = own.index(node)
    column = [row[place] for row in some] if place < places(some) else []
    return sorted({*own, *column} - {node})

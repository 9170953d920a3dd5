from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.wire.budget import ITEM
from planaria.node.wire.chunks import HEADS, Ordering
from planaria.node.wire.frames import Chunk, WireError

WINDOW = 1 << 16


def chunk(order: int, size: int = 0) -> Chunk:
    return Chunk(1, 0, size, b"", memoryview(bytes(size)), 0, order=order)


@given(st.integers(0, 100), st.randoms(use_true_random=False))
def test_in_whatever_order_they_come_they_leave_in_theirs(
    count: int, timing: random.Random
) -> None:
    ordering, orders = Ordering(WINDOW), list(range(1, count + 1))
    timing.shuffle(orders)
    came: set[int] = set()
    left: list[int] = []
    for order in orders:
        came.add(order)
        left += [found.order for found in ordering.take(chunk(order))]
        due = next(one for one in range(1, count + 2) if one not in came)
        assert left == list(range(1, due))


@pytest.mark.parametrize("order", [0, 1, 2, 4])
def test_what_comes_twice_is_refused(order: int) -> None:
    ordering = Ordering(WINDOW)
    for came in (1, 2, 4):
        list(ordering.take(chunk(came)))
    with pytest.raises(WireError, match=f"in place {order}, which is taken; the next one is 3"):
        list(ordering.take(chunk(order)))


def test_no_more_waits_than_may_be_under_way() -> None:
    ordering, size = Ordering(WINDOW), WINDOW // 4
    fit = 2 * (WINDOW + HEADS) // (size + ITEM)
    for order in range(2, 2 + fit):
        assert not list(ordering.take(chunk(order, size)))
    with pytest.raises(WireError, match="before the chunk in place 1; at most"):
        list(ordering.take(chunk(2 + fit, size)))
    assert len(list(ordering.take(chunk(1, size)))) == 2 + fit, "none is lost"


def test_a_new_connection_begins_with_the_first_place() -> None:
    ordering = Ordering(WINDOW)
    for order in (1, 3):
        list(ordering.take(chunk(order)))
    ordering.begin_anew()
    assert [found.order for one in (2, 1) for found in ordering.take(chunk(one))] == [1, 2]

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.wire.frame_format import WireError
from planaria.node.wire.lowrank import Shape, counts, cuts, encoded_bytes, forms, row_start
from planaria.node.wire.tensors import decode, decode_low_rank, encode_low_rank

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 30)),
        st.tuples(st.integers(1, 30), st.integers(1, 30)),
        st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 5)),
    ),
    max_size=5,
)
RANKS = st.integers(1, 4)
MODEL: tuple[Shape, ...] = (40, 24), (24,), (24, 60), (7, 3)
WHOLE = sum(map(math.prod, MODEL))


def drawn(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def of_rank(rank: int, seed: int = 0) -> torch.Tensor:
    """A gradient of MODEL whose matrices have this rank."""
    rows = []
    for number, shape in enumerate(MODEL):
        if len(shape) == 2 and rank < min(shape):
            sides = [drawn(side * rank, seed + number + side) for side in shape]
            rows.append((sides[0].view(-1, rank) @ sides[1].view(rank, -1)).flatten())
        else:
            rows.append(drawn(math.prod(shape), seed))
    return torch.cat(rows)


def arrived(row: torch.Tensor, start: int, rank: int) -> torch.Tensor:
    some = cuts(MODEL, rank, start, len(row))
    descriptors, payload = encode_low_rank(row, some, rank)
    return decode_low_rank(descriptors, bytearray().join(payload), len(row), some, rank)


@given(SHAPES, RANKS, st.integers(0, 500), st.integers(0, 900))
def test_each_value_goes_once_and_none_in_more_bytes_than_int8_takes(
    shapes: list[Shape], rank: int, start: int, size: int
) -> None:
    pieces = cuts(shapes, rank, start, size)
    assert [place for cut in pieces for place in range(cut.start, cut.stop)] == [*range(size)]
    assert sum(counts(pieces, rank)) <= size
    row = drawn(size)
    descriptors, payload = encode_low_rank(row, pieces, rank)
    sent = sum(part.nbytes for part in payload)
    assert sent == encoded_bytes(tuple(shapes), rank, ((start, start + size),))
    assert [form.shape for form in forms(pieces, rank)] == [d.shape for d in descriptors]
    back = decode_low_rank(descriptors, bytearray().join(payload), size, pieces, rank)
    for cut in pieces:
        if not cut.rows:
            place = slice(cut.start, cut.stop)
            assert torch.allclose(back[place], row[place], atol=float(row.abs().max()) / 250)


@given(st.integers(1, 3), st.integers(0, WHOLE), st.integers(0, WHOLE), st.integers(0, 99))
def test_what_has_that_rank_arrives_wherever_it_is_cut(
    rank: int, first: int, second: int, seed: int
) -> None:
    row = of_rank(rank, seed)
    start, stop = sorted((first, second))
    values = arrived(row[start:stop], start, rank)
    assert torch.linalg.vector_norm(values - row[start:stop]) <= 0.03 * torch.linalg.vector_norm(
        row
    )


@given(st.integers(0, WHOLE + 9))
def test_a_row_of_a_matrix_begins_where_it_does(place: int) -> None:
    firsts, first = [0], 0
    for shape in MODEL:
        firsts += range(first, first + math.prod(shape), math.prod(shape[1:]))
        first += math.prod(shape)
    firsts += range(first, first + 10)
    assert row_start(MODEL, place) == max(of for of in firsts if of <= place)


def test_what_has_more_comes_about_as_near_as_that_rank_can() -> None:
    sides = [torch.linalg.qr(drawn(side * 24, side).view(side, 24)).Q for side in (40, 24)]
    values = 0.8 ** torch.arange(24.0)
    row = (sides[0] * values @ sides[1].T).flatten()
    for rank in (1, 2, 4, 8):
        left = torch.linalg.vector_norm(arrived(row, 0, rank) - row)
        best = torch.linalg.vector_norm(values[rank:])
        assert best * 0.99 <= left <= best * 1.25


def test_products_are_added_in_one_order_so_that_all_devices_have_the_same_bits() -> None:
    some = cuts(MODEL, 4, 0, 960)
    descriptors, payload = encode_low_rank(drawn(960), some, 4)
    raw = bytearray().join(payload)
    factors = decode(descriptors, raw)[0].numpy()
    p, q = factors[:160].reshape(4, 40), factors[160:].reshape(4, 24)
    expected = np.outer(p[0], q[0])
    for number in range(1, 4):
        expected = expected + np.outer(p[number], q[number])
    values = decode_low_rank(descriptors, raw, 960, some, 4)
    assert np.array_equal(values.view(40, 24).numpy(), expected)


def test_rank_four_of_a_thousand_by_a_thousand_is_five_hundred_times_less() -> None:
    sent = encoded_bytes(((1024, 1024),), 4, ((0, 1 << 20),))
    assert 4 * (1 << 20) / sent == pytest.approx(504, abs=1)


def test_nothing_stays_nothing() -> None:
    assert not arrived(torch.zeros(WHOLE), 0, 4).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [7, 965])
def test_what_is_not_finite_arrives_so(bad: float, where: int) -> None:
    row = drawn(WHOLE)
    row[where] = bad
    assert not torch.isfinite(arrived(row, 0, 4)).all()


def test_what_is_of_another_rank_or_place_is_refused() -> None:
    descriptors, payload = encode_low_rank(drawn(900), cuts(MODEL, 4, 0, 900), 4)
    raw = bytearray().join(payload)
    for rank, start in ((3, 0), (4, 300)):
        with pytest.raises(WireError, match="is due"):
            decode_low_rank(descriptors, raw, 900, cuts(MODEL, rank, start, 900), rank)

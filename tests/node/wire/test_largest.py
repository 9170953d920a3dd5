from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.wire.frames import WireError
from planaria.node.wire.largest import count_of, forms, pack, places_size, row_bytes, unpack
from planaria.node.wire.tensors import (
    decode_largest,
    decode_sum,
    encode,
    encode_largest,
    encode_sum,
)

SHARES = st.floats(0.001, 0.5)


@given(st.integers(1, 5000), st.data())
def test_places_come_as_they_went(size: int, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, size - 1), max_size=200))
    places = np.array(sorted(chosen), np.int64)
    packed = pack(places, size)
    assert packed.shape == (places_size(len(places), size),)
    assert np.array_equal(unpack(packed, len(places), size), places)


@given(st.integers(1, 40), st.integers(0, 40), st.binary(max_size=30))
def test_what_comes_rises_and_lies_in_the_row_or_is_refused(
    size: int, count: int, packed: bytes
) -> None:
    """And each choice of places has one form."""
    count = min(count, size)
    raw = np.frombuffer(packed, np.uint8)
    try:
        places = unpack(raw, count, size)
    except WireError:
        return
    assert sorted({*places.tolist()} & {*range(size)}) == places.tolist()
    assert len(places) == count
    assert np.array_equal(pack(places, size), raw)


@pytest.mark.parametrize(("size", "count"), [(9, 3), (16, 4), (7, 7), (10, 1)])
def test_every_string_of_that_length_is_a_choice_or_refused(size: int, count: int) -> None:
    length = places_size(count, size)
    assert length <= 2
    found = set()
    for number in range(256**length):
        raw = np.frombuffer(number.to_bytes(length, "little"), np.uint8)
        try:
            found.add(tuple(unpack(raw, count, size).tolist()))
        except WireError:
            continue
    assert found == {*combinations(range(size), count)}


@pytest.mark.parametrize("share", [0.1, 0.03, 0.01])
def test_a_place_takes_hardly_more_bits_than_any_code_needs(share: float) -> None:
    size = 1 << 20
    count = count_of(size, share)
    entropy = size * (-share * math.log2(share) - (1 - share) * math.log2(1 - share))
    assert entropy < 8 * places_size(count, size) < entropy + 0.65 * count


def test_a_hundredth_is_two_hundred_times_less() -> None:
    assert 4 * (1 << 20) / row_bytes(1 << 20, "topk", 0.01) > 190
    assert row_bytes(1000, "none", 0.01) == 4000


@given(st.integers(0, 700), SHARES, st.integers(0, 2**32))
def test_the_largest_travel_and_the_rest_is_zero(size: int, share: float, seed: int) -> None:
    row = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    descriptors, payload = encode_largest(row, share)
    assert sum(part.nbytes for part in payload) == row_bytes(size, "topk", share)
    found = decode_largest(descriptors, bytearray().join(payload), size, share)
    sent = row.abs().topk(count_of(size, share)).indices
    away = torch.ones(size, dtype=torch.bool)
    away[sent] = False
    assert (found[away] == 0).all()
    assert torch.allclose(found[sent], row[sent], atol=float(row.abs().max()) / 250 if size else 0)


@given(st.integers(0, 600), st.floats(0, 0.4), st.integers(0, 2**32))
def test_sums_come_bit_by_bit_and_sparse_ones_in_fewer_bytes(
    size: int, share: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(size, generator=generator) * (torch.rand(size, generator=generator) < share)
    descriptors, payload = encode_sum(row)
    found = decode_sum(descriptors, bytearray().join(payload), size)
    assert torch.equal(found.view(torch.int32), row.view(torch.int32))
    few = 8 * int(row.view(torch.int32).count_nonzero()) <= size - 8
    assert sum(part.nbytes for part in payload) <= (2.5 * size if few else 4 * size)


def test_a_sum_with_more_values_than_it_should_have_is_refused() -> None:
    row = torch.ones(80)
    places = torch.from_numpy(pack(np.arange(80), 80))
    descriptors, payload = encode([places, row], "none")
    with pytest.raises(WireError, match="is due"):
        decode_sum(descriptors, bytearray().join(payload), 80)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_among_them(bad: float) -> None:
    row = torch.randn(300)
    row[7] = bad
    descriptors, payload = encode_largest(row, 0.01)
    assert not torch.isfinite(decode_largest(descriptors, payload, 300, 0.01)[7])


def test_what_is_of_another_share_or_length_is_refused() -> None:
    descriptors, payload = encode_largest(torch.randn(300), 0.1)
    for size, share in ((300, 0.2), (310, 0.1)):
        with pytest.raises(WireError, match="is due"):
            decode_largest(descriptors, payload, size, share)
    assert [form.shape for form in forms(300, 0.1)] == [d.shape for d in descriptors]

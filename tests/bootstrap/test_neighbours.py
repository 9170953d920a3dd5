from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap.neighbours import ALL, partners, rows


def named(count: int) -> list[str]:
    return [f"n{number:04}" for number in range(count)]


@given(st.integers(1, 1000))
def test_rows_are_all_replicas_in_their_order_and_as_long_as_each_other(count: int) -> None:
    ids = named(count)
    found = rows(ids[::-1])
    assert [one for row in found for one in row] == ids
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert len(found) <= max(map(len, found))
    if count <= ALL:
        assert found == [ids]
    else:
        assert min(map(len, found)) >= 3


@given(st.integers(1, 1000), st.data())
def test_partners_are_few_and_each_others(count: int, data: st.DataObject) -> None:
    ids = named(count)
    node = data.draw(st.sampled_from(ids))
    found = partners(node, ids)
    assert node not in found
    assert all(node in partners(other, ids) for other in found)
    if count <= ALL:
        assert found == [one for one in ids if one != node]
    assert len(found) <= max(ALL - 1, 2 * math.sqrt(count))


def test_a_hundred_have_eighteen_each() -> None:
    ids = named(100)
    assert {len(partners(node, ids)) for node in ids} == {18}
    assert partners("n0023", ids) == [
        *("n0003", "n0013", "n0020", "n0021", "n0022", "n0024", "n0025", "n0026", "n0027"),
        *("n0028", "n0029", "n0033", "n0043", "n0053", "n0063", "n0073", "n0083", "n0093"),
    ]


def test_the_last_of_a_longer_row_has_its_row_only() -> None:
    assert rows("abcdefghij") == [[*"abc"], [*"def"], [*"ghij"]]
    assert partners("j", "abcdefghij") == [*"ghi"]
    assert partners("i", "abcdefghij") == [*"cfghj"]

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria_lab.spare.golomb import OPTIMAL, is_golomb, place, ruler


def test_the_table_holds_golomb_rulers_of_1_to_28_marks() -> None:
    assert sorted(OPTIMAL) == list(range(1, 29))
    for marks in OPTIMAL.values():
        differences = [b - a for a, b in combinations(marks, 2)]
        assert marks[0] == 0
        assert list(marks) == sorted(marks)
        assert len(set(differences)) == len(differences)


def test_the_table_has_the_known_shortest_lengths() -> None:
    lengths = [marks[-1] for _, marks in sorted(OPTIMAL.items())]
    assert lengths == [0, 1, 3, 6, 11, 17, 25, 34, 44, 55, 72, 85, 106, 127, 151, 177, 199, 216,
                       246, 283, 333, 356, 372, 425, 480, 492, 553, 585]  # fmt: skip


@pytest.mark.parametrize("redundancy", sorted(OPTIMAL))
def test_a_ruler_serves_from_twice_its_length_on(redundancy: int) -> None:
    length = OPTIMAL[redundancy][-1]
    for groups in (2 * length + 1, 2 * length + 2, 5 * length + 7):
        assert is_golomb(ruler(groups, redundancy), groups)


@given(st.integers(1, 400), st.integers(1, 14))
def test_no_two_types_share_two_groups_and_groups_host_alike(groups: int, redundancy: int) -> None:
    try:
        hosts = place(groups, redundancy)
    except ValueError:
        return
    hosting = np.zeros((groups, groups), dtype=int)
    hosting[np.arange(groups)[:, None], hosts] = 1
    shared = hosting @ hosting.T
    assert (hosting.sum(axis=0) == redundancy).all()
    assert (np.diag(shared) == redundancy).all()
    assert (shared - np.diag(np.diag(shared)) <= 1).all()


@given(st.integers(1, 400), st.integers(1, 14))
def test_the_error_names_what_works(groups: int, redundancy: int) -> None:
    try:
        ruler(groups, redundancy)
    except ValueError as error:
        words = str(error).split()
        enough, fewer = int(words[words.index("needs") + 1]), int(words[words.index("works") - 1])
        assert is_golomb(ruler(enough, redundancy), enough)
        assert not any(is_golomb(OPTIMAL[redundancy], n) for n in range(groups, enough))
        assert is_golomb(ruler(groups, fewer), groups)


def test_the_papers_tables_end_where_the_rulers_do() -> None:
    for groups, largest in ((200, 12), (600, 20), (1000, 26)):
        place(groups, largest)
        with pytest.raises(ValueError, match=f"redundancy {largest} works with {groups} groups"):
            place(groups, largest + 1)


@pytest.mark.parametrize(("groups", "redundancy"), [(0, 1), (10, 0), (5000, 29)])
def test_nonsense_is_refused(groups: int, redundancy: int) -> None:
    with pytest.raises(ValueError, match=r"at least one|known for 1 to 28"):
        ruler(groups, redundancy)

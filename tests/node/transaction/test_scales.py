"""Factors of a commit are told once where all stages have the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.node.transaction.scales import collapsed, has_for, of_stage


@given(st.lists(st.sampled_from([0.5, 1.0, 1.1]), min_size=2, max_size=12))
def test_each_stage_finds_its_own(by_stage: list[float]) -> None:
    told = collapsed(by_stage)
    assert len(told) == (1 if len(set(by_stage)) == 1 else len(by_stage))
    assert [of_stage(told, stage) for stage in range(len(by_stage))] == by_stage
    assert all(has_for(told, stage) for stage in range(len(by_stage)))


def test_a_stage_may_have_none() -> None:
    for scales, stage in (([], 0), ([1.0, 1.1], 2)):
        assert not has_for(scales, stage)
        with pytest.raises(IndexError):
            of_stage(scales, stage)

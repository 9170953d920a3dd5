"""Tests of the commit watermark: the newest committed step that the registry believes."""

from __future__ import annotations

import pytest

from planaria.bootstrap.commit_watermark import CommitWatermark


def test_who_drives_may_be_behind() -> None:
    progress = CommitWatermark(steps=0)
    for age, newest in (((2, 50), (2, 50)), ((1, 80), (2, 50)), ((3, 20), (3, 20))):
        progress.reach(age)
        assert progress.newest == newest


@pytest.mark.parametrize(
    ("steps", "committed", "wrong"), [(9, 9, False), (9, 10, True), (0, 10, False)]
)
def test_no_more_steps_than_the_run_has(steps: int, committed: int, wrong: bool) -> None:
    assert bool(CommitWatermark(steps).impossible(committed)) is wrong

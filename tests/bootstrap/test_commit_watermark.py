"""What a registry believes of a run's progress."""

from __future__ import annotations

import pytest

from planaria.bootstrap.commit_watermark import Age, CommitWatermark


def nobody() -> Age:
    return 0, 0


def test_a_driver_is_believed_as_far_as_time_allows() -> None:
    progress = CommitWatermark(steps=10**9, patience=5)
    assert progress.driven((0, 1000), nobody, 10) == ""
    assert progress.newest == (0, 1000)
    progress.driven((0, 3001), nobody, 11)
    assert progress.newest == (0, 1000), "a step too many"
    progress.driven((0, 3000), nobody, 11)
    assert progress.newest == (0, 3000)
    progress.driven((1, 20), nobody, 12)
    assert progress.newest == (1, 20), "it went back to files"
    progress.driven((9, 20), nobody, 13)
    assert progress.newest == (1, 20), "not so often"


def test_what_is_ahead_of_all_is_said_when_others_had_the_time_to_say_the_same() -> None:
    progress = CommitWatermark(steps=0, patience=5)
    for now in (0, 1, 4.9):
        assert progress.driven((0, 10**6), nobody, now) == ""
    problem = progress.driven((0, 10**6), nobody, 5)
    assert "step 1000000 of lineage 0 is too far ahead of step" in problem
    assert progress.driven((0, 10), nobody, 6) == ""
    assert progress.driven((0, 10**6), nobody, 7) == "", "it begins anew"
    assert progress.newest == (0, 10)


def test_what_all_stages_say_needs_no_time() -> None:
    progress = CommitWatermark(steps=0, patience=5)
    assert progress.driven((4, 10**6 + 3), lambda: (4, 10**6), 0) == ""
    assert progress.newest == (4, 10**6 + 3)


def test_who_drives_may_be_behind() -> None:
    progress = CommitWatermark(steps=0, patience=5)
    progress.restore((2, 50), 0)
    assert progress.driven((1, 80), nobody, 1) == ""
    assert progress.newest == (2, 50)


@pytest.mark.parametrize(
    ("steps", "committed", "wrong"), [(9, 9, False), (9, 10, True), (0, 10, False)]
)
def test_no_more_steps_than_the_run_has(steps: int, committed: int, wrong: bool) -> None:
    assert bool(CommitWatermark(steps, 5).impossible(committed)) is wrong

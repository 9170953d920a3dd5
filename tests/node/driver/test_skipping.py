"""Which steps are skipped, and what norms are usual."""

from __future__ import annotations

import math

import pytest

from planaria.node.driver.skipping import (
    BELIEVED,
    FOLLOWS,
    TIMES,
    usual_norms,
    why_paused,
    why_skipped,
)
from planaria.node.wire import stage_pb2 as pb

LAST = pb.Commit(usual_norms=[1.0, 2.0])


def after(norms: list[float], last: pb.Commit) -> pb.Commit:
    skips = last.skips + 1 if why_skipped(norms, last) else 0
    return pb.Commit(skips=skips, usual_norms=usual_norms(norms, last))


@pytest.mark.parametrize(
    ("norms", "last", "why"),
    [
        ([TIMES, 2 * TIMES], LAST, ""),
        ([1.0, 600.0], LAST, "the gradient of stage 1 was 300 times as long as usual"),
        ([math.nan, 1e9], LAST, "the gradient of stage 0 was not finite"),
        ([math.nan, 1e9], pb.Commit(skips=1000), "the gradient of stage 0 was not finite"),
        ([1e9, 1e9], pb.Commit(), ""),
        ([1e9, 1.0], pb.Commit(usual_norms=[0.0, 1.0]), ""),
        ([1e9, 1e9], pb.Commit(usual_norms=[1.0, 1.0, 1.0]), ""),
        ([0.0, 0.0], LAST, ""),
    ],
    ids=["long", "too long", "not finite", "always", "first", "none yet", "other model", "zero"],
)
def test_a_step_is_skipped_whose_gradient_is_unusable(
    norms: list[float], last: pb.Commit, why: str
) -> None:
    assert why_skipped(norms, last) == why


@pytest.mark.parametrize(
    ("norm", "usual"),
    [(2.2, 2.2), (100.0, 2 * FOLLOWS), (1e-6, 2 / FOLLOWS), (0.0, 2.0), (2 * TIMES + 1, 2.0)],
    ids=["near", "above", "below", "zero", "skipped"],
)
def test_a_usual_norm_follows_slowly(norm: float, usual: float) -> None:
    assert usual_norms([1.0, norm], LAST) == pytest.approx([1.0, usual])


def test_a_norm_that_stays_is_believed_and_then_usual() -> None:
    last = LAST
    for skips in range(1, BELIEVED + 1):
        last = after([1.0, 1e9], last)
        assert (last.skips, list(last.usual_norms)) == (skips, [1.0, 2.0])
    last = after([1.0, 1e9], last)
    assert (last.skips, list(last.usual_norms)) == (0, [1.0, 1e9])
    assert after([1.0, 1.1e9], last).skips == 0


def test_only_a_gradient_that_is_not_finite_pauses_the_run() -> None:
    bad = [1.0, math.nan]
    assert not why_paused(pb.Commit(skips=2, gradient_norm=math.nan), bad)
    assert "of stage 1 was not finite" in why_paused(
        pb.Commit(skips=3, gradient_norm=math.nan), bad
    )
    assert not why_paused(pb.Commit(skips=9, gradient_norm=1e9), [1.0, 1e9])

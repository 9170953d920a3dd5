from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from planaria.node.local.loss_schedule import TraceRow
from planaria_lab.convergence.schedule import Losses, ScheduleError, from_trace, schedule


def test_listed_losses_fall_together_where_they_are_listed_together() -> None:
    losses = Losses(at=["3@7", "2@20", "1@7", "3@7"])
    assert schedule(losses, seed=0, iterations=100, stages=4) == {7: (1, 3), 20: (2,)}


@pytest.mark.parametrize("entry", ["3", "@4", "x@4", "3@0", "3@-1", "3@x"])
def test_what_is_no_loss_is_refused(entry: str) -> None:
    with pytest.raises(ScheduleError, match="is not STAGE@ITERATION"):
        schedule(Losses(at=[entry]), 0, 100, 4)


def test_a_stage_that_is_not_there_cannot_be_lost() -> None:
    with pytest.raises(ScheduleError, match="stages 0 to 4"):
        schedule(Losses(at=["5@3"]), 0, 100, 4)


def test_only_one_source_of_losses() -> None:
    with pytest.raises(ValidationError, match="one of rate, at and trace"):
        Losses(rate=0.1, at=["1@2"])
    with pytest.raises(ValidationError, match="iteration_seconds"):
        Losses(trace="x.csv")


@given(
    seed=st.integers(0, 2**32),
    rate=st.floats(0.01, 0.5),
    stages=st.integers(3, 8),
    which=st.sampled_from(["inner", "body", "all"]),
)
def test_losses_at_a_rate_hit_only_who_may_be_lost(
    seed: int, rate: float, stages: int, which: str
) -> None:
    losses = Losses(rate=rate, stages=which, after=5)
    losses_at = schedule(losses, seed, 60, stages)
    first, last = {"inner": (2, stages - 1), "body": (1, stages), "all": (0, stages)}[which]
    for iteration, lost in losses_at.items():
        assert 5 < iteration <= 60
        assert all(first <= stage <= last for stage in lost)
        assert all(stage + 1 not in lost for stage in lost)
    assert losses_at == schedule(losses, seed, 60, stages)
    longer = schedule(losses, seed, 90, stages)
    assert losses_at == {at: lost for at, lost in longer.items() if at <= 60}


def test_a_rate_is_a_probability() -> None:
    losses_at = schedule(Losses(rate=0.01, apart=False), 1, 20_000, 5)
    count = sum(len(lost) for lost in losses_at.values())
    assert 850 < count < 1150  # 1,000 +- 5 standard deviations


def test_a_trace_loses_a_stage_with_its_last_node() -> None:
    rows = [
        TraceRow(0.0, True, "a"),  # stage 0
        TraceRow(0.0, True, "b"),  # stage 1
        TraceRow(0.0, False, "b"),  # not all stages have a node yet
        TraceRow(1.0, True, "c"),  # stage 1
        TraceRow(2.0, True, "d"),  # stage 2: training begins
        TraceRow(12.0, True, "e"),  # stage 0 again
        TraceRow(22.0, False, "a"),  # stage 0 still has e
        TraceRow(32.0, False, "c"),  # stage 1 is lost, and waits for f
        TraceRow(92.0, True, "f"),
        TraceRow(102.0, False, "f"),  # 10 s later, stage 1 is lost again
    ]
    assert from_trace(rows, 2.0, 1000, 2) == {15: (1,), 20: (1,)}
    assert from_trace(rows, 2.0, 16, 2) == {15: (1,)}


def test_a_stage_that_can_spare_a_node_lets_no_time_pass() -> None:
    rows = [TraceRow(0.0, True, name) for name in "abcdef"]  # two nodes per stage
    rows += [TraceRow(10.0, False, "b"), TraceRow(20.0, False, "e"), TraceRow(30.0, False, "c")]
    assert from_trace(rows, 1.0, 1000, 2) == {20: (1,)}


def test_a_damaged_trace_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "spot.csv"
    path.write_text("0,add,a\n1,moved,a\n")
    with pytest.raises(ScheduleError, match="line 2: '1,moved,a' is not"):
        schedule(Losses(trace=str(path), iteration_seconds=1), 0, 10, 1)
    with pytest.raises(ScheduleError, match="can't read the trace"):
        schedule(Losses(trace="nowhere.csv", iteration_seconds=1), 0, 10, 4)

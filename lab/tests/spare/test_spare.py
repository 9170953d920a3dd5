from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from planaria_lab.spare.command import app
from planaria_lab.spare.events import (
    DAY,
    Spare,
    System,
    replicate,
    replicate_in_sets,
    train,
)
from planaria_lab.spare.golomb import place
from planaria_lab.spare.masking import shallowest, stack
from planaria_lab.spare.published import MONTE_CARLO
from planaria_lab.spare.tables import depths, first_wipe_out, mape, monte_carlo, patches

QUICK = System(23, mtbf=600.0, horizon=DAY / 8)
CALM = replace(QUICK, mtbf=1e12, jitter=0.0)


@given(st.permutations(range(23)), st.integers(1, 5))
def test_the_first_wipe_out_is_when_the_first_type_has_no_host(
    order: list[int], redundancy: int
) -> None:
    hosts = place(23, redundancy)
    failures = first_wipe_out(hosts, np.array(order))
    stacks = stack(hosts)
    assert stacks.without(order[: failures - 1]).hosted().all()
    assert not stacks.without(order[:failures]).hosted().all()


@settings(deadline=None, max_examples=30)
@given(st.permutations(range(23)), st.integers(2, 5), st.integers(1, 4))
def test_depths_are_the_smallest_at_every_number_of_failures(
    order: list[int], redundancy: int, parts: int
) -> None:
    hosts = place(23, redundancy)
    failures = first_wipe_out(hosts, np.array(order))
    start = stack(hosts, parts)
    assert depths(start, np.array(order), failures).tolist() == [
        shallowest(start.without(order[:lost])) for lost in range(failures)
    ]


def test_every_failure_but_the_last_is_patched_or_needs_no_patch() -> None:
    order = np.random.default_rng(5).permutation(200)
    hosts = place(200, 9)
    more = patches(stack(hosts), order)
    assert len(more) == first_wipe_out(hosts, order) - 1
    assert more[0] == 1  # nothing is computed twice at the start
    assert 0 in more


@pytest.mark.parametrize("redundancy", [2, 5, 9, 12])
def test_monte_carlo_finds_what_was_published(redundancy: int) -> None:
    published = MONTE_CARLO[200, redundancy]
    ours = monte_carlo(200, redundancy, trials=20, patched=0, seed=1)
    assert ours.failures == pytest.approx(published.failures, rel=0.03)
    assert ours.stacks == pytest.approx(published.stacks, rel=0.03)


def test_mape() -> None:
    assert mape([11.0, 20.0], [10.0, 20.0]) == pytest.approx(5.0)


def test_without_failures_there_are_only_steps_and_saves() -> None:
    outcome = train(CALM, replicate(23, 3), trail=0)
    step = 3 * CALM.compute + CALM.reduce
    assert (outcome.failures, outcome.restarts) == (0, 0)
    assert outcome.steps == CALM.steps
    assert outcome.wall == pytest.approx(CALM.steps * step)  # less than a save period
    assert outcome.availability == pytest.approx(1.0)
    assert set(outcome.stacks) == {3.0}


def test_spare_computes_each_type_once_until_a_group_is_lost() -> None:
    assert train(CALM, Spare(23, 3), trail=0).wall == pytest.approx(
        CALM.steps * (CALM.compute + CALM.reduce)
    )


def test_saves_take_their_share() -> None:
    system = replace(CALM, save=120.0)
    scheme = replicate(23, 1)
    scheme.endures = 1e-15  # saved after each step
    outcome = train(system, scheme, trail=0)
    assert outcome.wall - outcome.kept == pytest.approx(system.steps * system.save)


@pytest.mark.parametrize("clocks", ["groups", "system"])
def test_wall_time_is_accounted_for(clocks: str) -> None:
    system = replace(QUICK, clocks=clocks)
    outcome = train(system, Spare(23, 3), trail=2)
    assert outcome.steps == system.steps
    assert outcome.restarts > 0
    assert outcome.failures >= outcome.restarts
    assert outcome.restarting == pytest.approx(outcome.restarts * system.restart, rel=0.1)
    assert outcome.kept + outcome.restarting < outcome.wall
    assert 0 < outcome.availability < outcome.up < 1


def test_a_trail_is_the_same_every_time_and_trails_differ() -> None:
    walls = [train(QUICK, Spare(23, 3), trail).wall for trail in (1, 1, 2)]
    assert walls[0] == walls[1] != walls[2]


@pytest.mark.parametrize("clocks", ["groups", "system"])
def test_failures_come_at_the_given_rate(clocks: str) -> None:
    """Half of the groups are lost at the time that exponential clocks predict, for both kinds."""
    system = replace(QUICK, groups=2000, clocks=clocks, shape=1.0, horizon=1e9)
    scheme = replicate(2000, 1)
    scheme.lose = lambda groups: 0.0  # type: ignore[method-assign]
    half = system.mtbf * system.groups * np.log(2)
    outcome = train(system, scheme, trail=0, limit=half)
    assert outcome.failures == pytest.approx(1000, rel=0.1)


def test_replication_in_sets_restarts_when_a_whole_set_is_lost() -> None:
    scheme = replicate_in_sets(7, 3)  # 0, 2, 4, 6 and 1, 3, 5
    assert scheme.lose([0, 1, 3, 4, 6]) == 0.0
    assert scheme.lose([5]) is None
    scheme.reset()
    assert scheme.lose([0, 2, 4]) == 0.0
    assert scheme.lose([6]) is None


def test_masking_beats_replication_and_checkpoints_alone() -> None:
    system = replace(System(200), horizon=DAY / 4)
    days = {
        scheme: train(system, made, trail=0, limit=10 * DAY).wall
        for scheme, made in {
            "spare": Spare(200, 9),
            "microbatches": Spare(200, 9, parts=4),
            "replication": replicate(200, 3),
            "alone": replicate(200, 1),
        }.items()
    }
    assert sorted(days, key=days.__getitem__) == ["microbatches", "spare", "replication", "alone"]


def test_tables_are_written(tmp_path: Path) -> None:
    arguments = ["tables", "--groups", "200", "--trials", "1", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    table = (tmp_path / "tables-200.md").read_text()
    assert "| 9 | 105.1 | 106.9 |" in table
    assert "Mean absolute percentage error of stacks" in table


def test_unpublished_sizes_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tables", "--groups", "7", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert not list(tmp_path.iterdir())

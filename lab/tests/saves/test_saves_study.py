"""Tests of the study of saves: the arithmetic of its outcomes, its rows and its table."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import pytest

from planaria.node.run_file import ModelSection, RunFile, loads
from planaria_lab.saves.study import (
    KILLED_AT,
    NONE,
    PAIRS,
    PARTS,
    RUN,
    SUITES,
    VARIANTS,
    Suite,
    Turn,
    compared,
    plot,
    table,
    turns,
)
from planaria_lab.saves.swarm import FIRST, Measured, SavesError, Saving, of_lines


def commit(step: int, time: float) -> dict[str, Any]:
    return {"step": step, "time": time, "loss": 7.0 - step / 10}


def save(stage: int, step: int, **seconds: float) -> dict[str, Any]:
    return {"stage": stage, "step": step, **seconds}


def test_where_the_time_went():
    """The run is killed at 15.2 s after step 6, with step 4 on disk; it repeats steps 5 and 6."""
    before = [commit(step, 10.0 + step - 1) for step in range(1, 7)]
    after = [commit(step, 18.0 + step - 5) for step in range(5, 9)]
    timed = [
        save(1, 2, critical=9.0, waited=9.0),  # before step FIRST
        save(1, 4, critical=0.5, waited=0.2),
        save(2, 4, critical=0.4, waited=0.3),
        save(1, 4, write=1.0),
        save(2, 4, write=2.0),
        save(1, 6, critical=0.1, waited=0.0),
        save(1, 6, critical=0.2, waited=0.0),  # of the repeated step
    ]
    outcome = of_lines(before, after, timed, killed=15.2, goodput=0.8)
    assert outcome.wall == pytest.approx(21.0 - 12.0)
    assert (outcome.steps, outcome.lost, outcome.saves) == (8 - FIRST, 2, 2)
    assert (outcome.down, outcome.again) == (pytest.approx(2.8), pytest.approx(1.0))
    assert outcome.blocked == pytest.approx(0.3)
    assert outcome.copied == pytest.approx(0.5 + 0.1 + 0.2 - 0.3)
    assert outcome.written == pytest.approx(2.0)
    assert outcome.losses == [7.0 - step / 10 for step in range(1, 9)]


def test_without_a_kill_nothing_is_made_again():
    outcome = of_lines([], [commit(step, float(step)) for step in range(1, 9)], [], 0.0, 1.0)
    assert (outcome.down, outcome.again, outcome.lost, outcome.wall) == (0.0, 0.0, 0, 5.0)


def test_every_swarm_has_its_turn_in_each_block_and_is_beside_those_it_is_compared_with():
    order = list(turns(2))
    assert Counter(order).most_common(1)[0][1] == 1
    assert {(t.block, t.suite, t.variant) for t in order} == {
        (block, suite, variant) for block in range(2) for suite in SUITES for variant in VARIANTS
    }
    for start in range(0, len(order), len(VARIANTS)):
        assert len({turn[:2] for turn in order[start : start + len(VARIANTS)]}) == 1
    first, second = ([t.variant for t in order if t.block == block] for block in range(2))
    assert first[: len(VARIANTS)] == second[: len(VARIANTS)][::-1]


def test_a_turn_says_how_its_swarm_saves():
    turn = Turn(0, Suite(20.0, 8), "overlapped, 4, killed")
    assert turn.saving == Saving("overlapped", 8, 4, 20.0, KILLED_AT)
    assert turn.saving.arguments == ["--storage", "20"]
    assert replace(turn.saving, mode="blocking", storage=0.0).arguments == ["--blocking"]
    run = turn.saving.of(RunFile(model=ModelSection(stages=2)))
    assert (run.saves.every, run.saves.in_flight, run.saves.keep) == (8, 4, 6)


def test_a_row_is_of_its_turn_and_run_alone():
    run = loads(RUN)
    every = list(turns(2))
    assert len({turn.key(run) for turn in every}) == len(every)
    other = run.model_copy(update={"steps": 41})
    assert every[0].key(run) != every[0].key(other)


def row(block: int, variant: str, wall: float, **changed: Any) -> dict[str, Any]:
    measured = Measured(
        wall=wall,
        steps=10,
        copied=0.0,
        blocked=0.0,
        written=0.0,
        saves=0,
        down=0.0,
        again=0.0,
        lost=0,
        goodput=10 / wall,
        losses=[7.0, 6.5],
    )
    fields = {**asdict(measured), **changed}
    suite = SUITES[0]._asdict()
    return {
        "block": block,
        "suite": suite,
        "variant": variant,
        "load": 1.0,
        "machine": "m",
    } | fields


ROWS = [
    row(0, NONE, 10.0),
    row(0, "blocking", 20.0, blocked=8.0, copied=1.0),
    row(0, "overlapped, 1", 12.5),
    row(1, NONE, 30.0),
    row(1, "blocking", 40.0, blocked=6.0, losses=[7.0, 6.75]),
    row(1, "overlapped, 1", 30.0),
]


def test_a_swarm_is_compared_with_that_of_its_block_that_never_saves():
    none, blocking, overlapped = compared(ROWS)
    assert none.goodput == [1.0, 1.0]
    assert blocking.goodput == [0.5, 0.75]
    assert overlapped.goodput == [0.8, 1.0]
    assert blocking.parts["blocked"] == pytest.approx([0.4, 0.15])
    assert [sum(shares) for shares in zip(*blocking.parts.values(), strict=True)] == [1.0, 1.0]
    assert [*blocking.parts] == [*PARTS]
    assert (none.equal, blocking.equal, blocking.apart) == (2, 1, 0.25)
    with pytest.raises(SavesError, match="no swarm without saves"):
        compared(ROWS[1:3])


def test_the_table_has_them_and_the_pairs(tmp_path):
    text = table(ROWS)
    assert "| own disk, every 2 steps | blocking | 0.625 (0.500 to 0.750) |" in text
    assert "| 1 of 2, others 2e-01 at most |" in text
    first = next(
        line for line in text.splitlines() if line.startswith("| own disk, every 2 steps | 1")
    )
    assert first.startswith("| own disk, every 2 steps | 1.467 (1.333 to 1.600) | - | - |")
    assert all(f"{a} / {b}" in text for a, b in PAIRS)
    *rows, last = ROWS
    assert table([*rows[:1], last, *rows[1:]]) == text  # pairs are from one block
    plot(ROWS, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000

"""Tests of which settings of a living run may change, and of the resulting run file."""

from __future__ import annotations

import pytest

from planaria.bootstrap.registry_pb2 import Change
from planaria.node.launch.settings import with_changes
from planaria.node.run_file import ChangeSection, RunFileError, dumps, loads

RUN = loads("steps = 50\n[model]\nstages = 2\nlayers = 4\n[training]\nbatch = 8\nmicrobatch = 2")


def change(number: int, *settings: str, step: int = 9, pending: bool = False) -> Change:
    return Change(number=number, settings=settings, step=step, pending=pending)


def test_a_run_file_gets_the_changes_that_it_lacks_and_that_hold() -> None:
    first = change(1, "training.batch=6", "training.microbatch=3", step=4)
    later = change(2, "steps=70", step=30)
    once = with_changes(RUN, [first])
    assert once == with_changes(once, [first]), "it has that one already"
    twice = with_changes(once, [first, later, change(3, "steps=80", pending=True)])
    assert twice == with_changes(RUN, [first, later])
    assert (twice.steps, twice.changed_at) == (70, 30)
    assert twice.changes[1] == ChangeSection(step=30, was=["steps=50"])
    assert [twice.batches.at_step(step).samples for step in (4, 5, 31)] == [8, 6, 6]
    assert twice.original == RUN


def test_a_setting_that_there_was_none_of_can_be_changed_and_removed() -> None:
    changed = with_changes(RUN, [change(1, "recovery.wait_for_saves=30")])
    assert changed.recovery.wait_for_saves == 30
    assert loads(dumps(changed)) == changed
    assert changed.original == RUN
    removed = with_changes(changed, [change(2, "recovery.wait_for_saves=", step=20)])
    assert removed.recovery == RUN.recovery


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("model.stages=4", "when it is resumed: planaria stop, then planaria up --resume"),
        ("data.path=elsewhere", "^data.path = elsewhere, and the run has data/prose: "),
        ("seed=1", "A new run can begin from its model"),
        ("training.batch=7", "is not a multiple of microbatch = 2"),
        ("recovery.policy=checkfree+", "needs 4 of them"),
        ("recovery.policy=checkpoint", r"needs recovery.checkpoint.dir"),
        ("training.lrr=1", "did you mean lr"),
        ("steps", "'steps' is no setting: write KEY=VALUE"),
        ("steps.of=1", "steps.of is no key"),
        ("notify.command=sh", "^notify: nobody can change that from elsewhere"),
        ("notify={command='sh'}", "^notify: nobody can change that from elsewhere"),
    ],
)
def test_what_can_not_be_changed_is_said(setting: str, why: str) -> None:
    with pytest.raises(RunFileError, match=why):
        with_changes(RUN, [change(1, setting)])

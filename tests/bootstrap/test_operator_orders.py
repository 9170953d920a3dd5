"""What a run's operator orders: pause, go, stop, end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from planaria.bootstrap.effects import Effect, Refused
from planaria.bootstrap.membership import Membership
from planaria.bootstrap.registry_pb2 import (
    PAUSE,
    STOP,
    STOPPED,
    TRAIN,
    Renewal,
    Report,
    SeatReport,
)
from planaria.bootstrap.rules import MembershipRules
from tests.bootstrap.conftest import joining
from tests.membership import join, validate_state

RULES = MembershipRules(run="r", stages=1, lease=10)


class Run:
    """A registry with a node of each of two stages."""

    def __init__(self) -> None:
        self.machine, self.now = Membership(RULES), 0.0
        for stage, name in enumerate("ab"):
            join(self.machine, joining(name, f"{name}:1", stage=stage), self.now)

    def order(self, word: str, why: str = "") -> str:
        changed, _ = self.machine.command(word, why, self.now)
        validate_state(self.machine)
        return changed

    def report(self, node: str, *seats: SeatReport) -> Sequence[Effect]:
        renewal = Renewal(node=node, report=Report(seats=seats))
        return self.machine.renewed(renewal, self.now)

    def saves(self, node: str, stage: int, saved: int) -> None:
        self.report(node, SeatReport(stage=stage, committed=7, saved=saved, finished=True))


def test_a_pause_is_in_the_views_until_the_run_may_go_on() -> None:
    run = Run()
    assert run.order("pause", "over night") == "the operator pauses the run: over night"
    assert (run.machine.view.order, run.machine.view.ordered) == (PAUSE, "over night")
    assert run.order("pause", "again") == ""
    join(run.machine, joining("c", "c:1"), run.now)
    assert run.machine.view.order == PAUSE, "whoever joins is told"
    assert run.order("go") == "the operator lets the run go on"
    assert (run.machine.view.order, run.machine.view.ordered) == (TRAIN, "")


def test_a_registry_that_is_started_again_keeps_the_order() -> None:
    run = Run()
    run.order("pause", "over night")
    again = Membership(RULES, run.machine.key)
    again.restore(run.machine.view, 0.0)
    again.evict("b", "by hand", 60.0)
    assert (again.view.order, again.view.ordered) == (PAUSE, "over night")


def test_a_run_is_stopped_once_each_stage_has_saved_its_step() -> None:
    run = Run()
    run.order("pause")
    assert run.order("stop") == "the operator stops the run, once each stage has saved its step"
    run.saves("a", 0, saved=7)
    run.saves("b", 1, saved=4)
    assert run.machine.view.order == STOP
    for word in ("go", "pause"):
        with pytest.raises(Refused, match="is being stopped"):
            run.order(word)
    join(run.machine, joining("c", "c:1", stage=1), run.now)
    run.saves("c", 1, saved=7)
    assert run.machine.view.order == STOPPED
    assert "each stage has saved step 7: the run is stopped" in run.machine.view.reason


def test_a_run_that_has_finished_and_is_saved_is_stopped_at_once() -> None:
    run = Run()
    run.saves("a", 0, saved=7)
    run.saves("b", 1, saved=7)
    run.order("stop")
    assert run.machine.view.order == STOPPED


def test_nobody_joins_a_run_that_is_stopped_until_it_is_opened_again() -> None:
    run = Run()
    assert run.order("end", "it costs too much") == "the operator ends the run: it costs too much"
    for node in "ab":
        run.machine.leave(node, "the run is stopped", run.now)
    with pytest.raises(Refused, match="the run was stopped by its operator; `planaria go` opens"):
        join(run.machine, joining("c", "c:1"), run.now)
    assert run.order("stop") == ""
    with pytest.raises(Refused, match="was stopped"):
        run.order("pause")
    run.order("go")
    assert join(run.machine, joining("c", "c:1"), run.now)[0].HasField("view")


def test_an_order_that_makes_no_sense_is_refused_and_its_reason_is_made_readable() -> None:
    run = Run()
    with pytest.raises(Refused, match=r"'hurry': there are pause, go, stop, end"):
        run.order("hurry")
    run.order("pause", "\x1b[2J" + 300 * "x")
    assert run.machine.view.ordered.isprintable()
    assert len(run.machine.view.ordered) == 200

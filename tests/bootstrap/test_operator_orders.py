"""Tests of the orders of a run's operator: pause, go, change, back, stop, end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from planaria.bootstrap.awaited_saves import CRASHED
from planaria.bootstrap.effects import Effect, Refused
from planaria.bootstrap.membership import Membership
from planaria.bootstrap.operator_orders import last_step
from planaria.bootstrap.registry_pb2 import (
    PAUSE,
    STOP,
    STOPPED,
    TRAIN,
    Change,
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

    def change(self, *settings: str, at: int = 0, back: int = 0) -> str:
        number = len(self.machine.view.changes) + 1
        undone = self.machine.view.number if back else 0
        change = Change(
            number=number, settings=settings, step=at or back, undone=undone, pending=True
        )
        self.machine.change(change, self.now)
        validate_state(self.machine)
        return self.machine.view.reason

    def report(self, node: str, *seats: SeatReport) -> Sequence[Effect]:
        renewal = Renewal(node=node, report=Report(seats=seats))
        return self.machine.lease_renewed(renewal, self.now)

    def both(self, *steps: int, **more: bool) -> None:
        """Let both nodes report saves of these steps."""
        for stage, node in enumerate("ab"):
            self.report(node, saved(stage, *steps, **more))

    def saves(self, node: str, stage: int, saved: int) -> None:
        self.report(node, SeatReport(stage=stage, committed=7, saved=saved, finished=True))


def test_a_pause_is_in_the_views_until_the_run_may_go_on() -> None:
    run = Run()
    assert run.order("pause", "over night") == "the operator pauses the run: over night"
    assert (run.machine.view.order, run.machine.view.ordered) == (PAUSE, "over night")
    assert run.order("pause", "again") == ""
    join(run.machine, joining("c", "c:1"), run.now)
    assert run.machine.view.order == PAUSE, "whoever joins is told"
    again = Membership(RULES, run.machine.key)
    again.restore(run.machine.view, 0.0)
    again.evict("b", "by hand", 60.0)
    assert (again.view.order, again.view.ordered) == (PAUSE, "over night"), "after a restart, too"
    assert run.order("go") == "the operator lets the run go on"
    assert (run.machine.view.order, run.machine.view.ordered) == (TRAIN, "")


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
    run.order("go")
    run.order("stop")
    assert run.machine.view.order == STOPPED, "at once, since it is saved"


def test_a_seat_without_state_saves_nothing_and_its_stage_is_lost_if_nobody_has_it() -> None:
    for others in (SeatReport(stage=1, committed=7, saved=4, finished=True), None):
        run = Run()
        run.order("stop")
        run.saves("a", 0, saved=7)
        if others:
            run.report("b", others)
            join(run.machine, joining("c", "c:1", stage=1), run.now)
        run.report("c" if others else "b", SeatReport(stage=1, phase="syncing", finished=True))
        assert run.machine.view.order == (STOP if others else STOPPED)
    lost = "no node is left with step 7 of stage 1, others have saved it: the run is stopped"
    assert lost in run.machine.view.reason


@pytest.mark.parametrize("word", ["stop", "change"])
def test_a_stage_that_has_lost_its_last_node_keeps_nobody_waiting(word: str) -> None:
    run = Run()
    run.order("stop") if word == "stop" else run.change("steps=9")
    run.saves("a", 0, saved=7)
    run.saves("b", 1, saved=4)
    run.machine.evict("b", "by hand", run.now)
    view = run.machine.view
    done = "no node is left with step 7 of stage 1, others have saved it: "
    assert done + ("the run is stopped" if word == "stop" else "steps=9") in view.reason
    assert view.order == (STOPPED if word == "stop" else TRAIN)


def test_a_standby_takes_and_saves_a_stage_that_has_lost_its_last_node() -> None:
    run = Run()
    join(run.machine, joining("c", "c:1", standby=True), run.now)
    run.order("stop")
    run.saves("a", 0, saved=7)
    run.saves("b", 1, saved=4)
    run.machine.evict("b", "by hand", run.now)
    assert [seat.stage for seat in run.machine.view.members[-1].seats] == [1]
    assert run.machine.view.order == STOP
    run.saves("c", 1, saved=7)
    assert "each stage has saved step 7: the run is stopped" in run.machine.view.reason


def test_a_lost_node_that_may_come_back_with_its_save_is_waited_for_when_a_run_is_stopped() -> None:
    run = Run()
    run.order("stop")
    run.report("b", SeatReport(stage=1, committed=7, saved=7, saves=[7], finished=True))
    run.machine.leave("b", f"{CRASHED}no memory", run.now)
    run.saves("a", 0, saved=7)
    assert run.machine.view.order == STOP
    run.now += RULES.wait_for_saves
    run.saves("a", 0, saved=7)
    run.machine.tick(run.now)
    assert run.machine.view.order == STOPPED


def test_a_run_whose_nodes_have_all_left_is_stopped_and_may_be_opened_again() -> None:
    run = Run()
    run.order("stop")
    for node in "ab":
        run.machine.leave(node, "stopped by its owner", run.now)
    assert "no node is left: the run is stopped" in run.machine.view.reason
    assert run.order("go") == "the operator lets the run go on"


@pytest.mark.parametrize("before", ["go", "pause"])
def test_settings_change_once_each_stage_has_saved_and_all_join_again(before: str) -> None:
    run = Run()
    run.order(before)
    wanted = "steps=9", "training.lr=1e-4"
    decision = "the operator orders: steps=9, training.lr=1e-4"
    assert run.change(*wanted) == decision
    assert [*run.machine.view.changes] == [Change(number=1, settings=wanted, pending=True)]
    with pytest.raises(Refused, match="settings are being changed"):
        run.change("steps=10")
    run.saves("a", 0, saved=7)
    run.saves("b", 1, saved=4)
    assert len(run.machine.view.members) == 2
    run.saves("b", 1, saved=7)
    view = run.machine.view
    assert not view.members
    assert [*view.changes] == [Change(number=1, settings=wanted, step=7)]
    assert view.order == {"go": TRAIN, "pause": PAUSE}[before]
    assert "each stage has saved step 7: steps=9, training.lr=1e-4; " in view.reason
    again = Membership(RULES, run.machine.key)
    again.restore(view, 0.0)
    join(again, joining("c", "c:1"), 0.0)
    assert again.view.changes == view.changes


def saved(stage: int, *steps: int, **more: bool) -> SeatReport:
    return SeatReport(stage=stage, committed=9, saved=max(steps), saves=steps, **more)


@pytest.mark.parametrize("before", ["go", "pause"])
def test_a_run_goes_back_to_a_step_once_each_stage_rests_and_has_it(before: str) -> None:
    run = Run()
    run.order(before)
    run.report("a", saved(0, 8, 6, 4))
    with pytest.raises(Refused, match=r"not each stage has saved step 6; steps .* each has: none"):
        run.change(back=6)
    run.report("b", saved(1, 6, 4, 2))
    for step in (8, 2, 5, 9):
        with pytest.raises(Refused, match=f"saved step {step}; steps that each has: 4, 6"):
            run.change(back=step)
    reason = run.change("steps=12", back=6)
    expected = "the operator orders: back to step 6, steps=12"
    assert reason == expected
    run.report("a", saved(0, 9, 8, 6, finished=True))
    run.report("b", saved(1, 6, 4, 2))
    number, members = run.machine.view.number, run.machine.view.members
    assert len(members) == 2
    run.report("b", saved(1, 9, 6, 4, finished=True))
    view = run.machine.view
    assert not view.members
    assert view.reason.startswith("each stage has saved step 9: back to step 6, steps=12;")
    assert [*view.changes] == [Change(number=1, settings=["steps=12"], step=6, undone=number)]
    assert view.order == {"go": TRAIN, "pause": PAUSE}[before]
    join(run.machine, joining("c", "c:1", stage=0), run.now)
    assert run.machine.view.number > number, "so its commits count"


def test_a_run_goes_on_with_what_it_has_if_the_step_is_gone_when_all_rest() -> None:
    run = Run()
    run.both(8, 6)
    run.change("steps=12", back=6)
    run.report("a", saved(0, 9, 8, finished=True))
    run.report("b", saved(1, 9, 8, 6, finished=True))
    view = run.machine.view
    assert not view.members
    assert view.reason.startswith("not each stage has step 6 any more: the run goes on from step 9")
    assert not view.changes


def test_settings_change_after_a_step_that_is_to_come() -> None:
    run = Run()
    run.both(9)
    assert run.change("steps=12", at=11) == "the operator orders: steps=12, after step 11"
    view = run.machine.view
    assert [last_step(view, committed, 20) for committed in (9, 10, 11)] == [11, 11, 11]
    with pytest.raises(Refused, match="are being changed after step 11"):
        run.change("steps=13")
    run.order("pause")
    for node, stage in (("a", 0), ("b", 1)):
        run.report(node, SeatReport(stage=stage, committed=11, saved=11, finished=True))
    assert [*run.machine.view.changes] == [Change(number=1, settings=["steps=12"], step=11)]


def test_a_run_that_can_not_go_on_goes_back_at_once() -> None:
    run = Run()
    run.both(8, 6, stopped=True)
    run.change(back=6)
    assert run.machine.view.changes[0].undone
    assert not run.machine.view.members


@pytest.mark.parametrize("word", ["stop", "change"])
def test_a_run_that_can_not_go_on_is_stopped_or_changed_once_it_is_saved(word: str) -> None:
    run = Run()
    run.both(8, stopped=True)
    run.order("stop") if word == "stop" else run.change("steps=12")
    assert len(run.machine.view.members) == 2
    run.both(9, stopped=True)
    view = run.machine.view
    assert "each stage has saved step 9" in view.reason
    assert view.order == STOPPED if word == "stop" else not view.members


def test_a_change_after_a_step_that_is_to_come_waits_for_it_in_a_run_that_can_not_go_on() -> None:
    run = Run()
    run.both(9, stopped=True)
    run.change("steps=12", at=11)
    run.both(9, stopped=True)
    assert run.machine.view.changes[0].pending


def test_a_run_that_is_stopped_has_its_settings_until_it_is_opened() -> None:
    run = Run()
    run.order("stop")
    with pytest.raises(Refused, match="is being stopped"):
        run.change("steps=9")
    run.order("end")
    with pytest.raises(Refused, match="was stopped"):
        run.change("steps=9")
    run.order("go")
    run.change("steps=9")
    assert run.order("end") == "the operator ends the run", "which waits for nobody"
    assert not run.machine.view.changes, "one that doesn't hold yet is withdrawn"


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
    with pytest.raises(Refused, match=r"'hurry': there are pause, go, stop, end, change, back"):
        run.order("hurry")
    run.order("pause", "\x1b[2J" + 300 * "x")
    assert run.machine.view.ordered.isprintable()
    assert len(run.machine.view.ordered) == 200

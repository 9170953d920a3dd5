"""What the run's operator has ordered: views carry it to all nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from planaria.bootstrap import registry_pb2 as pb
from planaria.bootstrap.effects import Refused
from planaria.bootstrap.escaping import readable

BY_WORD: Final = {"pause": pb.PAUSE, "go": pb.TRAIN, "stop": pb.STOP, "end": pb.STOPPED}
CHANGE: Final = "change"
BACK: Final = "back"
LONGEST_WHY: Final = 200  # characters
MOST_CHANGES: Final = 1000


class Orders:
    """The order in force, and all changes of settings. `pause` holds until `go`. `stop` ends the
    run once each stage has saved its step, `end` at once; then `go` lets nodes join again. `change`
    has all nodes join again with other settings, once each stage has saved its step, `back` from
    an earlier save."""

    def __init__(self) -> None:
        self.order: pb.Order = pb.TRAIN
        self.why = ""
        self.changes: list[pb.Change] = []

    def restore(self, view: pb.View) -> None:
        self.order, self.why = view.order, view.ordered
        self.changes = list(view.changes)

    @property
    def awaits_saves(self) -> bool:
        return self.order == pb.STOP or self._pending

    @property
    def _pending(self) -> bool:
        return bool(self.changes) and self.changes[-1].pending

    def give(self, word: str, why: str) -> str:
        """Gives an operator's order. Returns what it changes; empty: nothing. Raises Refused."""
        if (order := BY_WORD.get(word)) is None:
            words = ", ".join([*BY_WORD, CHANGE, BACK])
            raise Refused("INVALID_ARGUMENT", f"{readable(word)!r}: there are {words}")
        if order in (pb.TRAIN, pb.PAUSE):
            self._check_not_stopping()
        if self.order == pb.STOPPED and order == pb.PAUSE:
            raise Refused("FAILED_PRECONDITION", stopped_at(0))
        if order == self.order or (self.order, order) == (pb.STOPPED, pb.STOP):
            return ""
        self.order, self.why = order, readable(why)[:LONGEST_WHY]
        if order in (pb.STOP, pb.STOPPED) and self._pending:
            self.changes.pop()
        does = {
            pb.PAUSE: "pauses the run",
            pb.TRAIN: "lets the run go on",
            pb.STOP: "stops the run, once each stage has saved its step",
            pb.STOPPED: "ends the run",
        }
        return f"the operator {does[order]}{f': {self.why}' if self.why else ''}"

    def change(self, change: pb.Change, seats: Iterable[pb.SeatReport], stages: int) -> str:
        """Orders a change of settings that fit the run, once `change.step` is committed; or, with
        `undone`, that the run goes back to it, of which each of stages 0 to `stages` must have a
        save. Returns a sentence. Raises Refused."""
        self._check_not_stopping()
        if self._pending:
            at = f" after step {step}" if (step := self.changes[-1].step) else ""
            reason = f"the run's settings are being changed{at}; try again when nodes have joined"
            raise Refused("FAILED_PRECONDITION", reason)
        if self.order == pb.STOPPED:
            raise Refused("FAILED_PRECONDITION", stopped_at(0))
        if len(self.changes) == MOST_CHANGES:
            reason = f"the run's settings were changed {MOST_CHANGES} times; resume it anew"
            raise Refused("RESOURCE_EXHAUSTED", reason)
        if change.undone and change.step not in (steps := saved(seats, stages)):
            listed = ", ".join(map(str, sorted(steps))) or "none"
            raise Refused(
                "FAILED_PRECONDITION",
                f"not each stage has saved step {change.step}; steps that each has: {listed}",
            )
        self.changes.append(change)
        return f"the operator orders: {in_short(change)}"

    def _check_not_stopping(self) -> None:
        if self.order == pb.STOP:
            raise Refused(
                "FAILED_PRECONDITION",
                "the run is being stopped; when its nodes have ended, `planaria go` opens it again",
            )

    def review(
        self,
        seats: Iterable[pb.SeatReport],
        vacant: Collection[int],
        awaited: Collection[int],
        stages: int,
        view: int,
    ) -> str:
        """Whether each of stages 0 to `stages` has saved the step at which a run is stopped, or its
        settings are changed; then that is done, as the returned sentence says. A stage of which no
        seat has that step keeps nobody waiting, nor does one of the `vacant`, unless a lost node
        with a save of it is `awaited`. In a run that can't go on, that is the step at which it has
        halted; it goes back without a save of that. `view`: the newest view's number."""
        if not self.awaits_saves:
            return ""
        back = self.changes[-1].step if self._pending and self.changes[-1].undone else 0
        seats = list(seats)
        due = max(1, self.changes[-1].step) if self._pending and not back else 0
        halted = max((seat.committed for seat in seats if seat.stopped), default=0) >= due
        resting = [seat for seat in seats if seat.finished or (halted and seat.stopped)]
        step = max((seat.committed for seat in resting), default=0)
        safe = {seat.stage for seat in resting if (back and seat.stopped) or seat.saved >= step}
        moving = (seat.stage for seat in seats if not (seat.finished or seat.stopped))
        kept = {seat.stage for seat in seats if seat.committed >= step}.union(moving)
        lost = ({seat.stage for seat in resting} - safe - kept).union(vacant).difference(awaited)
        if len(safe | lost) <= stages or not (safe or self.order == pb.STOP):
            return ""
        done = f"each stage has saved step {step}" if safe else "no node is left"
        if safe and lost:
            named = ", ".join(map(str, sorted(lost)))
            done = f"no node is left with step {step} of stage {named}, others have saved it"
        if self.order == pb.STOP:
            self.order = pb.STOPPED
            return f"{done}: the run is stopped"
        change = self.changes.pop()
        if back and back not in saved(resting, stages):
            return f"not each stage has step {back} any more: the run goes on from step {step}"
        holds = pb.Change(number=change.number, settings=change.settings, step=back or step)
        holds.undone = view if back else 0
        self.changes.append(holds)
        return f"{done}: {in_short(holds)}"


def saved(seats: Iterable[pb.SeatReport], stages: int) -> set[int]:
    """The steps of which each of stages 0 to `stages` has reported a save."""
    saves = [(seat.stage, {*seat.saves}) for seat in seats]
    by_stage = (set().union(*(s for of, s in saves if of == stage)) for stage in range(stages + 1))
    return set.intersection(*by_stage)


def in_short(change: pb.Change) -> str:
    """What a change of settings changes, and when, for people."""
    settings = ", ".join(change.settings)
    if change.undone:
        return ", ".join(filter(None, (f"back to step {change.step}", settings)))
    return f"{settings}, after step {change.step}" if change.pending and change.step else settings


def last_step(view: pb.View, committed: int, steps: int) -> int:
    """The last step for these nodes of a run of so many steps: the one that it has, if it is to be
    stopped; the last one under its present settings, if they are to change."""
    if view.order in (pb.STOP, pb.STOPPED):
        return committed
    pending = [min(change.step, steps) for change in view.changes if change.pending]
    return max(committed, *pending) if pending else steps


def changes_in_force(view: pb.View) -> list[pb.Change]:
    """The changes of settings that hold in a view."""
    return [change for change in view.changes if not change.pending]


def order_in_words(view: pb.View) -> str:
    """The order in a view, for people; empty: the run trains."""
    why = f": {view.ordered}" if view.ordered else ""
    if view.order == pb.TRAIN and view.changes and view.changes[-1].pending:
        return f"ordered: {in_short(view.changes[-1])}"
    by = f"by the run's operator{why}"
    return {
        pb.TRAIN: "",
        pb.PAUSE: f"paused {by}",
        pb.STOP: f"stopped {by}; nodes end once each stage has saved its step",
        pb.STOPPED: stopped_at(view.committed),
    }[view.order]


def stopped_at(step: int) -> str:
    """Why nobody can join a stopped run."""
    at = f" at step {step}" if step else ""
    return f"the run was stopped by its operator{at}; `planaria go` opens it again"

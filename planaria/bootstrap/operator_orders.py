"""What the run's operator has ordered: views carry it to all nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from planaria.bootstrap.effects import Refused
from planaria.bootstrap.registry_pb2 import (
    PAUSE,
    STOP,
    STOPPED,
    TRAIN,
    Change,
    Order,
    SeatReport,
    View,
)
from planaria.bootstrap.spelling import readable

BY_WORD: Final = {"pause": PAUSE, "go": TRAIN, "stop": STOP, "end": STOPPED}
CHANGE: Final = "change"
LONGEST_WHY: Final = 200  # characters
MOST_CHANGES: Final = 1000


class Orders:
    """The order in force, and all changes of settings. `pause` holds until `go`. `stop` ends the
    run once each stage has saved its step, `end` at once; then `go` lets nodes join again. `change`
    has all nodes join again with other settings, once each stage has saved its step, `back` from
    an earlier save."""

    def __init__(self) -> None:
        self.order: Order = TRAIN
        self.why = ""
        self.changes: list[Change] = []

    def restore(self, view: View) -> None:
        self.order, self.why = view.order, view.ordered
        self.changes = list(view.changes)

    @property
    def awaits_saves(self) -> bool:
        return self.order == STOP or self._pending

    @property
    def _pending(self) -> bool:
        return bool(self.changes) and self.changes[-1].pending

    def give(self, word: str, why: str) -> str:
        """Gives an order. Returns what it changes, a sentence; empty: nothing. Raises Refused."""
        if (order := BY_WORD.get(word)) is None:
            words = ", ".join([*BY_WORD, CHANGE])
            raise Refused("INVALID_ARGUMENT", f"{readable(word)!r}: there are {words}")
        if order != STOPPED:
            self._check_free(order in (TRAIN, PAUSE))
        if self.order == STOPPED and order == PAUSE:
            raise Refused("FAILED_PRECONDITION", stopped_at(0))
        if order == self.order or (self.order, order) == (STOPPED, STOP):
            return ""
        self.order, self.why = order, readable(why)[:LONGEST_WHY]
        does = {
            PAUSE: "pauses the run",
            TRAIN: "lets the run go on",
            STOP: "stops the run, once each stage has saved its step",
            STOPPED: "ends the run",
        }
        return f"the operator {does[order]}{f': {self.why}' if self.why else ''}"

    def change(self, change: Change, seats: Iterable[SeatReport], stages: int) -> str:
        """Orders a change of settings that fit the run, or its return to a step that each of stages
        0 to `stages` has saved. Returns a sentence. Raises Refused."""
        self._check_free(stopping=True)
        if self.order == STOPPED:
            raise Refused("FAILED_PRECONDITION", stopped_at(0))
        if len(self.changes) == MOST_CHANGES:
            reason = f"the run's settings were changed {MOST_CHANGES} times; resume it anew"
            raise Refused("RESOURCE_EXHAUSTED", reason)
        if change.step and change.step not in (steps := saved_by_all(seats, stages)):
            listed = ", ".join(map(str, sorted(steps))) or "none"
            raise Refused(
                "FAILED_PRECONDITION",
                f"not each stage has saved step {change.step}; steps that each has: {listed}",
            )
        self.changes.append(change)
        return f"the operator orders: {in_short(change)}, once each stage has saved its step"

    def _check_free(self, stopping: bool) -> None:
        """Raises Refused while nodes are about to end, or, if `stopping` counts, to stop."""
        if self.order == STOP and stopping:
            raise Refused(
                "FAILED_PRECONDITION",
                "the run is being stopped; when its nodes have ended, `planaria go` opens it again",
            )
        if self._pending:
            reason = "the run's settings are being changed; try again when its nodes have joined"
            raise Refused("FAILED_PRECONDITION", reason)

    def review(self, seats: Iterable[SeatReport], stages: int, view: int) -> str:
        """Whether each of stages 0 to `stages` has saved the step at which a run is stopped, or its
        settings are changed; then that is done, as the returned sentence says. A run that can't go
        on goes back without that. `view`: the newest view's number."""
        if not self.awaits_saves:
            return ""
        back = self._pending and self.changes[-1].step
        resting = [
            seat
            for seat in seats
            if (seat.finished and seat.saved >= seat.committed) or (back and seat.stopped)
        ]
        if len({seat.stage for seat in resting}) <= stages:
            return ""
        step = max(seat.committed for seat in resting)
        if self.order == STOP:
            self.order = STOPPED
            return f"each stage has saved step {step}: the run is stopped"
        change = self.changes.pop()
        if back and back not in saved_by_all(resting, stages):
            return f"not each stage has step {back} any more: the run goes on from step {step}"
        self.changes.append(
            Change(
                number=change.number,
                settings=change.settings,
                step=back or step,
                undone=view if back else 0,
            )
        )
        return f"each stage has saved step {step}: {in_short(change)}"


def saved_by_all(seats: Iterable[SeatReport], stages: int) -> set[int]:
    """The steps of which each of stages 0 to `stages` has reported a save."""
    saves = [(seat.stage, {*seat.saves}) for seat in seats]
    by_stage = (set().union(*(s for of, s in saves if of == stage)) for stage in range(stages + 1))
    return set.intersection(*by_stage)


def in_short(change: Change) -> str:
    """What a pending change changes."""
    back = [f"back to step {change.step}"] * (change.step > 0)
    return ", ".join([*back, *change.settings])


def ends(view: View) -> bool:
    """Whether the run is over, for these nodes, with the step that it has."""
    return view.order in (STOP, STOPPED) or any(change.pending for change in view.changes)


def changes_in_force(view: View) -> list[Change]:
    """The changes of settings that hold."""
    return [change for change in view.changes if not change.pending]


def problem_with_changes(changes: Sequence[Change]) -> str:
    """Why these can't be a run's changes; empty: they can."""
    numbers = [change.number for change in changes]
    if len(changes) > MOST_CHANGES or numbers != sorted(set(numbers)) or not all(numbers):
        return "its changes of settings are not in order, or too many"
    if any(change.pending for change in changes[:-1]):
        return "a change of settings is pending before another"
    if any(not (change.settings or change.step) for change in changes):
        return "a change of settings changes none"
    return ""


def in_words(view: View) -> str:
    """The order in a view, for people; empty: the run trains."""
    why = f": {view.ordered}" if view.ordered else ""
    if view.order == TRAIN and ends(view):
        return f"ordered: {in_short(view.changes[-1])}, once each stage has saved its step"
    return {
        TRAIN: "",
        PAUSE: f"paused by the run's operator{why}",
        STOP: f"stopped by the run's operator{why}; nodes end once each stage has saved its step",
        STOPPED: stopped_at(view.committed),
    }[view.order]


def stopped_at(step: int) -> str:
    """Why nobody can join."""
    at = f" at step {step}" if step else ""
    return f"the run was stopped by its operator{at}; `planaria go` opens it again"

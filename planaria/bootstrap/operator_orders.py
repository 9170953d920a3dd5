"""What the run's operator has ordered: views carry it to all nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from planaria.bootstrap.effects import Refused
from planaria.bootstrap.registry_pb2 import PAUSE, STOP, STOPPED, TRAIN, Order, SeatReport, View
from planaria.bootstrap.spelling import readable

BY_WORD: Final = {"pause": PAUSE, "go": TRAIN, "stop": STOP, "end": STOPPED}
LONGEST_WHY: Final = 200  # characters


class Orders:
    """The order in force. `pause` holds until `go`. `stop` ends the run once each stage has saved
    its step, `end` at once; then `go` lets nodes join again."""

    def __init__(self) -> None:
        self.order: Order = TRAIN
        self.why = ""

    def restore(self, view: View) -> None:
        self.order, self.why = view.order, view.ordered

    def give(self, word: str, why: str) -> str:
        """Gives an order. Returns what it changes, a sentence; empty: nothing. Raises Refused."""
        if (order := BY_WORD.get(word)) is None:
            raise Refused("INVALID_ARGUMENT", f"{readable(word)!r}: there are {', '.join(BY_WORD)}")
        if self.order == STOP and order in (TRAIN, PAUSE):
            raise Refused(
                "FAILED_PRECONDITION",
                "the run is being stopped; when its nodes have ended, `planaria go` opens it again",
            )
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

    def review(self, seats: Iterable[SeatReport], stages: int) -> str:
        """Whether each of stages 0 to `stages` has saved the step at which a run is stopped; then
        it is over, as the returned sentence says."""
        saved = {
            seat.stage: seat.committed
            for seat in seats
            if seat.finished and seat.saved >= seat.committed
        }
        if self.order != STOP or len(saved) <= stages:
            return ""
        self.order = STOPPED
        return f"each stage has saved step {max(saved.values())}: the run is stopped"


def in_words(view: View) -> str:
    """The order in a view, for people; empty: the run trains."""
    why = f": {view.ordered}" if view.ordered else ""
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

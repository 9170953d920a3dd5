"""Of which events somebody should hear, wherever they are: pure decisions."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from planaria.bootstrap.escaping import readable
from planaria.bootstrap.neighbours import stages_of
from planaria.bootstrap.operator_orders import order_in_words
from planaria.bootstrap.registry_pb2 import PAUSE, STOPPED, SeatReport
from planaria.node.report.events import Severity
from planaria.node.report.history import LONGEST_SENTENCE, History
from planaria.node.report.run_state import RunState
from planaria.node.report.unsaved import stage_names
from planaria.node.run_file import RunFile

BETWEEN: Final = 600.0
"""Seconds between two notifications of a kind."""
VACANT: Final = 60.0
"""Seconds that a stage waits for a node before that is told."""
SKIPPED: Final = 3
"""Skipped steps in a row that are told."""


class Notification(NamedTuple):
    """What the command of [notify] gets, as JSON."""

    run: str  # id
    kind: str
    severity: str
    sentence: str
    step: int  # the newest committed one
    time: float  # Unix seconds

    def as_json(self) -> bytes:
        return json.dumps(self._asdict()).encode() + b"\n"


class Condition(NamedTuple):
    """A condition of the run that somebody should hear of. It is told again when it is about
    something new."""

    kind: str
    severity: Severity
    sentence: str
    about: frozenset[str | int] = frozenset([""])  # stages, nodes


class Notifier:
    """Tells each condition when it begins, but only one of a kind within BETWEEN seconds: one that
    lasts longer is told then. The next one says how many were left out."""

    def __init__(self) -> None:
        self._known: dict[str, frozenset[str | int]] = {}  # kind -> what its condition is about
        self._told: dict[str, frozenset[str | int]] = {}  # kind -> what of it was told
        self._told_at: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()
        self._vacant_since: dict[int, float] = {}

    def due(
        self, state: RunState, history: History, run: RunFile, now: float
    ) -> list[Notification]:
        """The notifications to send now, in Unix seconds; `run` is resolved."""
        notifications, conditions = [], list(self._conditions(state, history, run, now))
        for kind, severity, sentence, about in conditions:
            if about <= self._told.get(kind, frozenset()):
                continue
            is_known = about <= self._known.get(kind, frozenset())
            if now - self._told_at.get(kind, -math.inf) < BETWEEN:
                self._left_out[kind] += not is_known
                continue
            self._told_at[kind], self._told[kind] = now, about
            more = self._left_out.pop(kind, 0) - is_known
            sentence = readable(sentence)[:LONGEST_SENTENCE]
            sentence += f" ({more} more since the last notification of this kind)" if more else ""
            word, run_id = severity.name.lower(), state.description.run
            step = state.driving.committed if state.driving else state.description.view.committed
            notifications.append(Notification(run_id, kind, word, sentence, step, now))
        self._known = {condition.kind: condition.about for condition in conditions}
        self._told = {
            kind: self._told[kind] & self._known[kind] for kind in self._told if kind in self._known
        }
        return notifications

    def _conditions(
        self, state: RunState, history: History, run: RunFile, now: float
    ) -> Iterator[Condition]:
        """The run's conditions that somebody should hear of, at most one of a kind. About the whole
        run only registry and driver are believed."""
        view, story = state.description.view, history.story
        driving = state.driving or SeatReport()
        if view.order == PAUSE:
            yield Condition("paused", Severity.NOTICE, f"the run is {order_in_words(view)}")
        elif history.paused:
            yield Condition("paused", Severity.ERROR, f"the run pauses: {history.paused}")
        if view.order == STOPPED:
            yield Condition("stopped", Severity.NOTICE, order_in_words(view))
        elif driving.stopped:
            yield Condition("stopped", Severity.ERROR, f"the run is stopped: {driving.message}")
        elif story.stopped is not None and state.driving is None:
            yield Condition("stopped", Severity.ERROR, story.stopped.sentence(None))
        is_finished = driving.finished and driving.committed >= run.steps
        is_finished |= story.finished is not None  # its nodes may have left since
        if is_finished:
            yield Condition("finished", Severity.INFO, f"all {run.steps} steps are committed")
        if not (is_finished or view.order == STOPPED) and (late := self._vacant(state, run, now)):
            sentence = f"no node has served {stage_names(late)} for more than {VACANT:.0f} s"
            yield Condition("waiting", Severity.WARNING, sentence, frozenset(late))
        if history.skipped >= SKIPPED:
            sentence = (
                f"the last {history.skipped} steps were skipped: nothing is learned from them"
            )
            yield Condition("skipped", Severity.WARNING, sentence)
        if troubles := "; ".join(state.troubles()):
            members = state.description.members
            nodes = frozenset(each.member.node for each in members if each.report.trouble)
            registry = ["the registry"] if state.description.trouble else []
            yield Condition("trouble", Severity.ERROR, troubles, nodes.union(registry))

    def _vacant(self, state: RunState, run: RunFile, now: float) -> list[int]:
        """The stages that no node has served for too long."""
        served = {stage for member in state.description.view.members for stage in stages_of(member)}
        vacant = set(range(run.model.body_stages + 1)) - served
        since = {stage: self._vacant_since.get(stage, now) for stage in sorted(vacant)}
        self._vacant_since = since
        return [stage for stage, began in since.items() if now - began > VACANT]

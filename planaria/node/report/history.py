"""History of a run for its page: built of events, of bounded size, pure."""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import replace
from typing import NamedTuple

from planaria.node.report import events
from planaria.node.report.ledger import Line
from planaria.node.report.live_view import RunStory
from planaria.node.wire.seat_names import node_of
from planaria.recovery.facts import COPIED

OF_THE_DRIVER = (
    events.Committed,
    events.Validated,
    events.Sampled,
    events.StepSkipped,
    events.Paused,
    events.Stopped,
    events.Finished,
)
"""Events about the whole run. Only the driver reports them."""
MOST_POINTS = 1000
"""Limit of a curve's points: at this number, every other one is dropped."""
MOST_NEWS = 300
MOST_MARKS = 200
MOST_SAMPLES = 40
MOST_METHODS = 100
MOST_NODES = 10_000
LONGEST_SENTENCE = 600
"""Limit of a sentence in characters; the rest is cut off."""
LONGEST_TEXT = 4000
"""Limit of a sample in characters."""
SKEW = 60.0
"""Seconds of clock error before the registry's clock replaces a node's."""
RATE_OVER = 50
"""Commits that the pace is averaged over."""


class NewsItem(NamedTuple):
    """A piece of news on the run's page."""

    time: float  # Unix seconds
    severity: events.Severity
    sentence: str


class Mark(NamedTuple):
    """An annotation of the loss curve."""

    step: int
    time: float  # Unix seconds
    kind: str  # lost, rebuilt or back
    sentence: str


class Curve:
    """Points over steps, thinned beyond the limit; None is a gap, where steps go back."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float] | None] = []
        self._last: float = 0  # newest step; infinite after it was undone

    def go_back(self, step: int) -> None:
        """Undo later steps: their repetitions are new points, behind a gap."""
        if step < self._last:
            self._last = math.inf

    def add(self, step: int, value: float) -> None:
        if not math.isfinite(value):
            return
        if self.points and step <= self._last:
            if step == self._last:
                return
            self.points.append(None)
        self._last = step
        self.points.append((step, value))
        if len(self.points) > MOST_POINTS:
            gaps = [at for at, point in enumerate(self.points) if point is None]
            last = len(self.points) - 1
            kept = {*range(0, last, 2), *gaps[-MOST_POINTS // 4 :], last}
            self.points = [point for at, point in enumerate(self.points) if at in kept]


class History:
    """State and history of a run from its events, with the node-seconds so far."""

    def __init__(self, steps: int) -> None:
        self.story = RunStory(steps)
        self.loss, self.validation = Curve(), Curve()
        self.news: deque[NewsItem] = deque(maxlen=MOST_NEWS)
        self.marks: deque[Mark] = deque(maxlen=MOST_MARKS)
        self.samples: deque[events.Sampled] = deque(maxlen=MOST_SAMPLES)
        self.rebuilt: dict[tuple[int, str], int] = {}  # stage, method -> how often
        self.node_seconds = 0.0
        self.paused = ""  # why no step has begun since the last one
        self.skipped = 0  # last steps that were all skipped
        self._last_skipped = 0
        self._commits: deque[tuple[float, int]] = deque(maxlen=RATE_OVER)  # time, step
        self._looked: float | None = None

    def hear_from(self, node: str, text: str, stages: int, now: float, driver: str) -> None:
        """Handle a line of a member's event log; `now` in Unix seconds. The content is untrusted:
        an invalid entry is dropped."""
        try:
            line = json.loads(text)
            json.dumps(line, ensure_ascii=False).encode()  # ValueError for half a surrogate pair
            entry = events.parse(line) if isinstance(line, dict) else None
        except (ValueError, RecursionError):
            return
        if entry is None or not events.is_for_all(entry.event):
            return
        if self._may_say(node, entry, driver) and self._is_ours(entry, stages):
            when = entry.time if abs(entry.time - now) < SKEW else now
            self.hear(events.Entry(when, entry.node, entry.event))
            self.story.forget(MOST_NODES)

    @staticmethod
    def _may_say(node: str, entry: events.Entry, driver: str) -> bool:
        """Whether the member may report it: its own events, or events that name a node."""
        own = node_of(str(entry.node)) == node
        if isinstance(entry.event, OF_THE_DRIVER):
            return own and node == driver
        return own or (hasattr(entry.event, "node") and isinstance(entry.node, str))

    def _is_ours(self, entry: events.Entry, stages: int) -> bool:
        step, stage = (getattr(entry.event, name, 0) for name in ("step", "stage"))
        return 0 <= step <= self.story.steps and 0 <= (stage or 0) <= stages

    def hear(self, entry: events.Entry) -> None:
        """Take an event into the curves, news, marks and counts."""
        before = self.story.committed
        self._count_skipped(entry.event)
        news = self.story.hear(entry)
        match entry.event:
            case events.Committed(step=step, loss=loss) if step == self.story.committed > 0:
                self.loss.add(step, loss)
                if step > before:
                    self._commits.append((entry.time, step))
            case events.Validated(step=step, loss=loss):
                self.validation.add(step, loss)
            case events.Sampled(prompt=prompt, text=text) as sample:
                prompt, text = prompt[:LONGEST_TEXT], text[:LONGEST_TEXT]
                self.samples.append(replace(sample, prompt=prompt, text=text))
            case events.RolledBack(step=step) | events.Resuming(step=step):
                self._commits.clear()
                self.loss.go_back(step)
                self.validation.go_back(step)
            case events.StageRebuilt(stage=stage, method=method) if news is not None:
                at = stage, method[:40]
                if at in self.rebuilt or len(self.rebuilt) < MOST_METHODS:
                    self.rebuilt[at] = self.rebuilt.get(at, 0) + 1
        if news is not None:
            sentence = news.sentence[:LONGEST_SENTENCE]
            self.news.append(NewsItem(entry.time, news.severity, sentence))
            if kind := _mark_kind(entry):
                self.marks.append(Mark(self.story.committed, entry.time, kind, sentence))

    def _count_skipped(self, event: events.Event) -> None:
        """Count skipped steps in `skipped`, and update `paused`."""
        match event:
            case events.StepSkipped(step=step) if step != self._last_skipped:
                self.skipped, self._last_skipped = self.skipped + 1, step
            case events.Committed(step=step):
                self.skipped = self.skipped if step == self._last_skipped else 0
                self.paused = ""
            case events.Paused(reason=reason):
                self.paused = reason

    def record(self, line: Line) -> None:
        """Take in a committed step's ledger line."""
        self.story.record({**line})
        if line["loss"] is not None:
            self.loss.add(line["step"], line["loss"])

    def count_node_seconds(self, nodes: int, now: float) -> None:
        """Count the node-seconds since the last call; `nodes`: present number."""
        if self._looked is not None:
            self.node_seconds += nodes * max(0.0, now - self._looked)
        self._looked = now

    @property
    def seconds_a_step(self) -> float:
        """Mean seconds per step over the last commits, pauses included; 0: unknown."""
        if len(self._commits) < 2:
            return 0.0
        (since, first), (to, last) = self._commits[0], self._commits[-1]
        return max(0.0, to - since) / (last - first)


def _mark_kind(entry: events.Entry) -> str:
    """Kind of mark that the event is on the loss curve; empty: none."""
    match entry.event:
        case events.StageRebuilt(method=method):
            return "" if method in (*COPIED, "twin") else "rebuilt"
        case events.SeatTaken():
            return "rebuilt"
        case events.RolledBack() | events.Resuming():
            return "back"
        case events.NodeLost() | events.Killed():
            return "lost"
        case events.Exited(stage=stage):
            return "" if stage is None else "lost"
    return ""

"""Display of `planaria up`: a live page on a terminal, lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from planaria.bootstrap.registry_pb2 import Description
from planaria.node.report import events
from planaria.node.report.run_state import RunState, SeatState
from planaria.node.report.summary import noticed_at, stall_seconds
from planaria.node.wire.seat_names import node_of
from planaria.recovery.facts import COPIED, ORIGIN

NEWS_SHOWN = 12
LINES_A_RUN = 20
"""Number of progress lines without a terminal."""
RATE_OVER = 10
"""Steps that tokens/s is averaged over."""
SHOWN_OF_SAMPLE = 400
"""Limit of a sample in characters."""
REDRAW = 0.1
"""Minimum seconds between two drawings of the page."""


class News(NamedTuple):
    """A message that deserves a person's attention."""

    sentence: str
    severity: events.Severity = events.Severity.NOTICE


@dataclass
class RebuildProgress:
    """A rebuild in progress."""

    stage: int
    method: str
    sources: Sequence[str]  # nodes
    ordered: bool  # alone, not in a rollback of all
    since: float  # Unix seconds
    fetching: events.Fetching | None = None  # the newest event
    tell_at: float = 1.0  # seconds of fetching
    round: int = 0  # of relearning
    residual: tuple[float, float] | None = None  # first, latest


class RunStory:
    """State of a run, from events and ledger lines in the order of their arrival."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.committed = 0  # newest step
        self.resumed = 0  # step from which it last went on from files
        self.loss = math.nan
        self._finished: events.Finished | None = None  # the newest
        self.stopped: events.Stopped | None = None  # since the last step
        self.rebuilds: dict[str, RebuildProgress] = {}  # by seat
        self.samples: dict[str, events.Sampled] = {}  # the newest, by prompt
        self._steps_held: dict[str | None, int] = {}  # seat -> newest step in its weights
        self._serving: set[str | None] = set()  # seats
        self._nodes: dict[int, str] = {}  # process id -> its newest node
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=RATE_OVER)
        self._losses: list[events.Entry] = []  # for `noticed_at`
        self._rebuilt_at: dict[str, float] = {}  # node -> time of its last rebuild, Unix seconds
        self._lost: set[str] = set()  # lost nodes reported since the last commit
        self._noticed: float | None = None  # time of the first loss since the last commit
        self._rolled_back_at = 0.0  # time of the last rollback, Unix seconds
        self._rolling_back = False
        self._unsaved: set[tuple[str | None, str]] = set()  # whose last save of a kind failed

    @property
    def finished(self) -> events.Finished | None:
        """The end of the run; it goes on if its operator wants more steps."""
        over = self._finished is not None and self._finished.step >= self.steps
        return self._finished if over else None

    def hear(self, entry: events.Entry) -> News | None:
        """Take in an event; returns news for the terminal, if it is any."""
        if isinstance(entry.event, _TO_FIND_LOSSES):
            self._losses.append(entry)
        match entry.event:
            case events.Joined(pid=pid) if entry.node is not None:
                self._drop_rebuilds(self._nodes.get(pid))
                self._nodes[pid] = entry.node
            case events.Serving():
                self._serving.add(entry.node)
            case events.GivenBack():
                self._serving.discard(entry.node)
                self._steps_held.pop(entry.node, None)
                self.rebuilds.pop(entry.node or "", None)
            case events.Applied(step=step):
                self._steps_held[entry.node] = step
            case events.Committed() as committed:
                return self._committed(committed, entry.time)
            case events.NodeLost(node=node):
                self.rebuilds.pop(node, None)
                if node in self._lost:
                    return None
                self._lost.add(node)
            case events.Killed() | events.Exited():
                self._drop_rebuilds(entry.node)
            case events.RebuildFailed():
                self.rebuilds.pop(entry.node or "", None)
            case events.RebuildOrdered() as order:
                self.rebuilds[order.node] = RebuildProgress(
                    order.stage, order.method, order.sources, True, entry.time
                )
            case events.Fetching() | events.RelearningRound():
                return self._rebuild_goes_on(entry)
            case events.StageRebuilt() as rebuilt:
                return self._rebuilt(rebuilt, entry)
            case events.RolledBack(step=step) | events.Resuming(step=step):
                self.committed = self.resumed = step
                self.loss, self.stopped = math.nan, None
                self._rolled_back_at, self._rolling_back = entry.time, True
                self._recent.clear()
                self.rebuilds.clear()
            case events.Sampled() as sample:
                self.samples[sample.prompt] = sample
            case events.Saved(holding=holding):
                self._unsaved.discard((entry.node, holding))
            case events.SaveFailed(holding=holding) if (entry.node, holding) in self._unsaved:
                return None  # the disk is still full
            case events.SaveFailed(holding=holding):
                self._unsaved.add((entry.node, holding))
            case events.Finished() as finished:
                self._finished = finished
            case events.Stopped() if self.stopped is not None:
                return None
            case events.Stopped() as stopped:
                self.stopped = stopped
        return _news(entry)

    def _committed(self, commit: events.Committed, at: float) -> News | None:
        if at < self._rolled_back_at:
            return None
        self.committed = max(self.committed, commit.step)
        self.loss = commit.loss
        if self.stopped is not None and commit.step > self.stopped.step:
            self.stopped = None  # it goes on
        self._lost.clear()
        noticed, self._noticed = self._noticed, None
        if noticed is None:
            return None
        return News(f"step {commit.step} committed {at - noticed:.1f} s after the loss was noticed")

    def _rebuild_goes_on(self, entry: events.Entry) -> News | None:
        """Update a rebuild. A transfer is news after a second, then at doubling intervals."""
        node, event = entry.node or "", entry.event
        if entry.time <= self._rebuilt_at.get(node, 0.0):
            return None  # late, from another file
        match event:
            case events.Fetching(method="twin"):
                return None  # redundant state, not trained
            case events.Fetching():
                sources = [source.node for source in event.sources]
                begun = RebuildProgress(event.stage, event.method, sources, False, entry.time)
                rebuild = self.rebuilds.setdefault(node, begun)
                rebuild.fetching = event
                if event.seconds < rebuild.tell_at:
                    return None
                rebuild.tell_at = 2 * event.seconds
                return News(entry.sentence)
            case events.RelearningRound(residual=residual):
                begun = RebuildProgress(event.stage, "", (), False, entry.time)
                rebuild = self.rebuilds.setdefault(node, begun)
                if math.isnan(residual):
                    return None
                before, rebuild.round = rebuild.residual, event.round
                rebuild.residual = (before[0] if before else residual), residual
                return None if before else News(entry.sentence)
        return None

    def _rebuilt(self, rebuilt: events.StageRebuilt, entry: events.Entry) -> News | None:
        node, method = rebuilt.node, rebuilt.method
        self._steps_held[node] = rebuilt.step
        self._rebuilt_at[node] = entry.time
        rebuild = self.rebuilds.pop(node, None)
        if method in (*COPIED, ORIGIN):
            return _news(entry)
        losses = sorted(self._losses, key=lambda entry: entry.time)
        stall = stall_seconds(rebuilt, entry.time, losses)
        ordered = rebuild is not None and rebuild.ordered
        if ordered or not rebuilt.is_own:  # else it is the start of the run
            noticed = noticed_at(rebuilt, entry.time, losses)
            self._noticed = noticed if self._noticed is None else min(self._noticed, noticed)
        if ordered or not (rebuilt.is_own or method == "checkpoint"):
            return _news(replace(entry, event=replace(rebuilt, stall_seconds=stall)))
        first, self._rolling_back = self._rolling_back, False
        sentence = f"all stages are at step {rebuilt.step}, stalled {stall:.1f} s"
        return News(sentence) if first else None

    def record(self, line: Mapping[str, Any]) -> None:
        """Take in a step's ledger line, unless another stage-0 node has already reported it."""
        if line["time"] < self._rolled_back_at:
            return
        if not self._recent or line["step"] > self._recent[-1]["step"]:
            self._recent.append(line)
        self.committed = max(self.committed, line["step"])

    def _drop_rebuilds(self, node: str | None) -> None:
        self.rebuilds = {seat: at for seat, at in self.rebuilds.items() if node_of(seat) != node}

    def forget(self, most: int) -> None:
        """Limit each table of per-node state to the newest `most` entries."""
        tables: list[dict[Any, Any]] = [
            *(self._steps_held, self._rebuilt_at, self.rebuilds),
            self.samples,
        ]
        for table in tables:
            while len(table) > most:
                del table[next(iter(table))]
        for nodes in (self._lost, self._unsaved, self._serving):
            if len(nodes) > most:
                nodes.clear()
        del self._losses[:-most]

    def serves(self, pid: int) -> bool:
        """Whether the swarm's process has a seat."""
        return any(node_of(seat or "") == self.node_of(pid) for seat in self._serving)

    def held_by(self, pid: int) -> set[int]:
        """The newest steps in the weights of the process's seats."""
        node = self.node_of(pid)
        return {step for seat, step in self._steps_held.items() if node_of(seat or "") == node}

    def node_of(self, pid: int) -> str | None:
        """The newest node of a swarm's process."""
        return self._nodes.get(pid)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over the last steps, pauses included."""
        if not self._recent:
            return 0.0
        first, last = self._recent[0], self._recent[-1]
        seconds = last["time"] - first["time"] + first["seconds"]
        tokens = sum(line["tokens"] for line in self._recent)
        return float(tokens / max(seconds, 1e-9))


_TO_FIND_LOSSES = (
    *(events.Started, events.Joined, events.Serving, events.GivenBack, events.Killed),
    *(events.Exited, events.LinkLost, events.NodeLost, events.RebuildOrdered, events.StageRebuilt),
)


def _news(entry: events.Entry) -> News | None:
    """News of an entry; None: its severity is below NOTICE."""
    severity = entry.event.severity
    return News(entry.sentence, severity) if severity >= events.Severity.NOTICE else None


def stage_table(description: Description, stages: int) -> Table:
    """Table of the stages 0..`stages`, with a row for standbys, if any."""
    table = Table(
        *(Column(name, justify="right") for name in ("stage", "nodes")),
        Column("state", min_width=14),
        *(
            Column(name, justify="right")
            for name in ("committed", "microbatches", "bytes in", "bytes out")
        ),
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    state = RunState(description)
    occupied = {seat.stage for seat in state.seats if seat.stage is not None}
    standbys = [None] if state.at(None) else []
    for at in [*sorted({*range(stages + 1), *occupied}), *standbys]:
        seats = state.at(at)
        table.add_row(
            "standby" if at is None else str(at),
            str(len(seats)),
            state_words(seats),
            _lowest_to_highest([seat.report.committed for seat in seats]),
            f"{sum(seat.report.microbatches for seat in seats):,}",
            decimal(sum(seat.entry.report.bytes_in for seat in seats)),
            decimal(sum(seat.entry.report.bytes_out for seat in seats)),
        )
    return table


def state_words(seats: Iterable[SeatState]) -> Text:
    """The states of a stage's seats, counted."""
    states = Counter(seat.state for seat in seats)
    if not states:
        return Text("vacant", style="bold red")
    parts = [
        Text(word if len(states) == 1 else f"{count} {word}", style=_STATE_STYLES.get(word, ""))
        for word, count in sorted(states.items())
    ]
    return Text(", ").join(parts)


_STATE_STYLES = {
    **dict.fromkeys(("suspected", "not heard"), "yellow"),
    **dict.fromkeys(("running", "averaging", "ready"), "green"),
    **{"hangs": "bold red", "joining": "cyan", "rebuilding": "magenta", "halted": "dim"},
}


def _lowest_to_highest(figures: list[int]) -> str:
    if not figures:
        return "-"
    low, high = min(figures), max(figures)
    return str(low) if low == high else f"{low}-{high}"


def progress_line(committed: int, steps: int, loss: float, rate: float) -> RenderableType:
    """The terminal's line of progress: step, bar, loss, tokens/s."""
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=steps, completed=committed, width=30)
    figures = f"loss {events.figure(loss)}", f"{rate:,.0f} tokens/s"
    grid.add_row(Text(f"step {committed} of {steps}", style="bold"), bar, *figures)
    return grid


def rebuild_lines(story: RunStory, now: float) -> RenderableType:
    """A line for each rebuild: stage, method, sources, progress; `now` in Unix seconds. The total
    is unknown, so the bar only moves."""
    grid = Table.grid(padding=(0, 2))
    for rebuild in story.rebuilds.values():
        title = f"rebuilding stage {rebuild.stage} by {rebuild.method}"
        if rebuild.sources:
            title += f" from {', '.join(rebuild.sources)}"
        progress = [f"{max(0.0, now - rebuild.since):.1f} s"]
        if rebuild.residual is not None:
            first, last = rebuild.residual
            now_at = f" -> {last:.3g} in round {rebuild.round}" if last != first else " at first"
            progress.append(f"relearning: residual {first:.3g}{now_at}")
        elif rebuild.fetching is not None and rebuild.fetching.bytes:
            progress.append(rebuild.fetching.so_far)
        grid.add_row(Text(title, "magenta"), ProgressBar(pulse=True, width=20), "; ".join(progress))
    return grid


def sample_lines(samples: Iterable[tuple[int, str, str]]) -> list[Text]:
    """A line for each (step, prompt, text)."""
    return [
        Text.assemble(
            (f"{step:>6}  ", "dim"),
            (events.shown(prompt), "bold"),
            " " * text[:1].isspace(),
            events.shown(text, SHOWN_OF_SAMPLE),
            no_wrap=True,
            overflow="ellipsis",
        )
        for step, prompt, text in samples
    ]


def styled(text: str, severity: events.Severity) -> Text:
    """Text in the colour of its severity; coloured text isn't truncated."""
    if style := _STYLES.get(severity):
        return Text(text, style=style)
    return Text(text, no_wrap=True, overflow="ellipsis")


_STYLES = {
    events.Severity.GOOD: "green",
    events.Severity.WARNING: "yellow",
    events.Severity.ERROR: "bold red",
}


class LiveScreen:
    """Display of `planaria up`. A terminal that was closed raises nothing: the run's results are
    still to be written."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.interactive = console.is_terminal
        self._began = time.monotonic()
        self._news: deque[Text] = deque(maxlen=NEWS_SHOWN)
        self._lines_shown = 0  # progress lines shown
        self._samples: dict[str, events.Sampled] = {}  # shown so far
        self._drawn = 0.0
        self._page: RenderableType = Text()
        self._per_line = -(-steps // LINES_A_RUN)
        self._live = Live(console=console, auto_refresh=False) if self.interactive else None

    def __enter__(self) -> LiveScreen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.update(self._page, refresh=True)
            with suppress(OSError):
                self._live.stop()

    def say(self, text: str, severity: events.Severity = events.Severity.NOTICE) -> None:
        line = styled(f"{time.monotonic() - self._began:6.1f} s  {text}", severity)
        self._news.append(line)
        if self._live is None:
            self.console.print(line, soft_wrap=True)

    def show(self, story: RunStory, description: Description | None, stages: int) -> None:
        now = time.monotonic()
        if self._live is not None:
            self._page = self._draw(story, description, stages)
            if now - self._drawn >= REDRAW:
                self._drawn = math.inf  # if the terminal is gone
                with suppress(OSError):
                    self._live.update(self._page, refresh=True)
                    self._drawn = now
            return
        for prompt, sample in story.samples.items():
            if self._samples.get(prompt) != sample:
                self._samples[prompt] = sample
                self.say(sample.sentence(None))
        share = story.committed // self._per_line
        shown_before, self._lines_shown = self._lines_shown, share
        if share > shown_before:
            self.say(
                f"step {story.committed} of {story.steps}, loss {events.figure(story.loss)}, "
                f"{story.tokens_per_second:,.0f} tokens/s"
            )

    def _draw(
        self, story: RunStory, description: Description | None, stages: int
    ) -> RenderableType:
        return Group(
            stage_table(description or Description(), stages),
            Text(),
            progress_line(story.committed, story.steps, story.loss, story.tokens_per_second),
            *([rebuild_lines(story, time.time())] if story.rebuilds else []),
            Text(),
            *sample_lines(
                (sample.step, sample.prompt, sample.text) for sample in story.samples.values()
            ),
            *([Text()] if story.samples else []),
            *self._news,
        )

"""What `planaria up` shows while it runs: a live page on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from bootstrap.registry_pb2 import Description, MemberDescription

Event = Mapping[str, Any]

NEWS_SHOWN = 8
LINES_A_RUN = 20
"""Progress lines, where there is no terminal."""
RATE_OVER = 10
"""Steps that tokens/s is taken over."""
REDRAW = 0.1
"""Seconds between two pictures of the page at least."""


class Story:
    """What has happened so far, from events and ledger lines in the order of their arrival."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.committed = 0  # newest step
        self.loss: float | None = None
        self.finished: Event | None = None
        self.stopped: Event | None = None
        self.holds: dict[str | None, int] = {}  # node -> newest step in its weights
        self.serving: set[str] = set()  # nodes
        self._slots: dict[int, str] = {}  # process id -> slot
        self._nodes: dict[int, str] = {}  # process id -> its newest node
        self._processes: dict[str, int] = {}  # node -> process id
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=RATE_OVER)

    def hear(self, event: Event) -> str | None:
        """Take note. Returns a sentence if it is worth a person's attention."""
        match event["kind"]:
            case "started":
                self._slots[event["pid"]] = event["slot"]
            case "joined":
                self._nodes[event["pid"]] = event["node"]
                self._processes[event["node"]] = event["pid"]
            case "serving":
                self.serving.add(event["node"])
            case "applied" | "rebuilt":
                self.holds[event["node"]] = event["step"]
            case "committed":
                self.committed = max(self.committed, event["step"])
                self.loss = event["loss"]
            case "finished":
                self.finished = self.finished or event
            case "stopped" if self.stopped is None:
                self.stopped = event
                return self._with_names(
                    f"the run is stopped at step {event['step']}: {event['reason']}"
                )
        return self._with_names(news(event))

    def record(self, line: Mapping[str, Any]) -> None:
        """A step's line of a ledger; other stage-0 nodes may have told the same."""
        if not self._recent or line["step"] > self._recent[-1]["step"]:
            self._recent.append(line)
        self.committed = max(self.committed, line["step"])

    def _with_names(self, sentence: str | None) -> str | None:
        """`node-2.0` for a node that this swarm has started."""
        for node, process in self._processes.items():
            if sentence is not None and process in self._slots:
                sentence = sentence.replace(node, f"node-{self._slots[process]}")
        return sentence

    def node_of(self, pid: int) -> str | None:
        """The newest node that the process has been."""
        return self._nodes.get(pid)

    @property
    def tokens_per_second(self) -> float:
        """Over the last steps, with what went by between them."""
        if not self._recent:
            return 0.0
        first, last = self._recent[0], self._recent[-1]
        seconds = last["time"] - first["time"] + first["seconds"]
        tokens = sum(line["tokens"] for line in self._recent)
        return float(tokens / max(seconds, 1e-9))


def news(event: Event) -> str | None:
    """An event in a sentence; None for everyday ones."""
    match event:
        case {"kind": "killed", "slot": slot, "stage": stage, "step": step, "left": left}:
            rest = f"{_nodes(left)} of stage {stage} left" if left else f"stage {stage} is lost"
            return f"node-{slot} killed during step {step}; {rest}"
        case {"kind": "exited", "slot": "registry", "how": how}:
            return f"the registry {how}; training goes on, a new one starts from its journal"
        case {"kind": "exited", "slot": slot, "how": how, "left": left, "stage": stage}:
            rest = f"{_nodes(left)} of stage {stage} left" if left else f"stage {stage} is lost"
            return f"node-{slot} {how}; {rest}"
        case {"kind": "aborted", "step": step, "reason": reason}:
            return f"an attempt at step {step} is aborted: {reason}"
        case {"kind": "rebuilding", "stage": stage, "method": method, "sources": sources}:
            return f"rebuilding stage {stage} by {method} from {', '.join(sources)}"
        case {"kind": "rebuilt"}:
            return (
                f"rebuilt: stage {event['stage']} by {event['method']} at step {event['step']}, "
                f"{decimal(event['bytes'])} in {event['rebuild_seconds']:.1f} s, "
                f"stalled {event['stall_seconds']:.1f} s"
            )
        case {"kind": "rebuild failed", "reason": reason}:
            return f"a rebuild failed and is tried again: {reason}"
        case {"kind": "validated", "step": step, "loss": loss}:
            return f"validation loss {_figure(loss)} at step {step}"
        case {"kind": "diverged", "stage": stage, "step": step}:
            return f"replicas of stage {stage} differ after step {step}"
    return None


def _nodes(count: int) -> str:
    return f"{count} node{'s' if count != 1 else ''}"


def _figure(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def stage_table(description: Description, stages: int) -> Table:
    """A row for each of the stages 0..`stages`, and one for spares if there are any."""
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
    rows: dict[int | str, list[MemberDescription]] = {stage: [] for stage in range(stages + 1)}
    for one in description.members:
        rows.setdefault("spare" if one.member.spare else one.member.stage, []).append(one)
    for stage, members in rows.items():
        reports = [one.report for one in members]
        table.add_row(
            str(stage),
            str(len(members)),
            state(members),
            _span([report.committed for report in reports]),
            f"{sum(report.microbatches for report in reports):,}",
            decimal(sum(report.bytes_in for report in reports)),
            decimal(sum(report.bytes_out for report in reports)),
        )
    return table


def state(members: Iterable[MemberDescription]) -> Text:
    """The states of a stage's nodes, counted."""
    states = Counter(
        ("suspected", "yellow") if one.suspected else _PHASES.get(one.report.phase, _JOINED)
        for one in members
    )
    if not states:
        return Text("vacant", style="bold red")
    parts = [
        Text(word if len(states) == 1 else f"{count} {word}", style=style)
        for (word, style), count in sorted(states.items())
    ]
    return Text(", ").join(parts)


_JOINED = ("joining", "cyan")
_PHASES = {
    "idle": ("idle", ""),
    "syncing": ("rebuilding", "magenta"),
    "following": ("joining", "cyan"),
    "running": ("running", "green"),
    "reducing": ("averaging", "green"),
    "ready": ("ready", "green"),
    "halted": ("halted", "dim"),
}


def _span(figures: list[int]) -> str:
    if not figures:
        return "-"
    low, high = min(figures), max(figures)
    return str(low) if low == high else f"{low}-{high}"


def progress(committed: int, steps: int, loss: float | None, rate: float) -> RenderableType:
    """One line: step, bar, loss, tokens/s."""
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=steps, completed=committed, width=30)
    figures = f"loss {_figure(loss)}", f"{rate:,.0f} tokens/s"
    grid.add_row(Text(f"step {committed} of {steps}", style="bold"), bar, *figures)
    return grid


class Screen:
    """Where `planaria up` shows itself."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.interactive = console.is_terminal
        self._began = time.monotonic()
        self._news: deque[str] = deque(maxlen=NEWS_SHOWN)
        self._told = 0  # progress lines
        self._drawn = 0.0
        self._page: RenderableType = Text()
        self._per_line = -(-steps // LINES_A_RUN)
        self._live = Live(console=console, auto_refresh=False) if self.interactive else None

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(self._page, refresh=True)
            self._live.stop()

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:6.1f} s  {text}"
        self._news.append(line)
        if self._live is None:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, story: Story, description: Description | None, stages: int) -> None:
        now = time.monotonic()
        if self._live is not None:
            self._page = self._draw(story, description, stages)
            if now - self._drawn >= REDRAW:
                self._drawn = now
                self._live.update(self._page, refresh=True)
        elif story.committed // self._per_line > self._told:
            self._told = story.committed // self._per_line
            self.say(
                f"step {story.committed} of {story.steps}, loss {_figure(story.loss)}, "
                f"{story.tokens_per_second:,.0f} tokens/s"
            )

    def _draw(self, story: Story, description: Description | None, stages: int) -> RenderableType:
        lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in self._news]
        return Group(
            stage_table(description or Description(), stages),
            Text(),
            progress(story.committed, story.steps, story.loss, story.tokens_per_second),
            Text(),
            *lines,
        )

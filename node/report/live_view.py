"""What `planaria up` shows while it runs: a live page on a terminal, lines elsewhere."""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from planaria.bootstrap.registry_pb2 import Description, MemberDescription
from planaria.node.report.summary import noticed_at, quality, stall_seconds

Event = Mapping[str, Any]

NEWS_SHOWN = 12
LINES_A_RUN = 20
"""Progress lines, where there is no terminal."""
RATE_OVER = 10
"""Steps that tokens/s is taken over."""
REDRAW = 0.1
"""Seconds between two pictures of the page at least."""


@dataclass
class Rebuilding:
    """A rebuild under way."""

    stage: int
    method: str
    sources: Sequence[str]  # nodes
    ordered: bool  # for this node alone, not with all others that go back
    since: float  # Unix seconds
    bytes: int = 0
    seconds: float = 0.0  # of fetching
    tell_at: float = 1.0  # of these
    round: int = 0  # of relearning
    residual: tuple[float, float] | None = None  # at first, now

    @property
    def fetched(self) -> str:
        rate = decimal(round(self.bytes / max(self.seconds, 1e-3)))
        return f"{decimal(self.bytes)} in {self.seconds:.1f} s, {rate}/s"


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
        self.rebuilds: dict[str, Rebuilding] = {}  # node -> what it is at
        self._slots: dict[int, str] = {}  # process id -> slot
        self._nodes: dict[int, str] = {}  # process id -> its newest node
        self._processes: dict[str, int] = {}  # node -> process id
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=RATE_OVER)
        self._losses: list[Event] = []  # what `noticed_at` looks at
        self._in_place: dict[str, float] = {}  # node -> when it was last rebuilt, Unix seconds
        self._noticed: float | None = None  # the loss after which nothing is committed yet
        self._went_back = 0.0  # when all stages did, Unix seconds
        self._going_back = False
        self._unsaved: set[str] = set()  # nodes whose last save failed

    def hear(self, event: Event) -> str | None:
        """Take note. Returns a sentence if it is worth a person's attention."""
        return self.with_names(self._take_note(event))

    def _take_note(self, event: Event) -> str | None:
        if event["kind"] in _TO_FIND_LOSSES:
            self._losses.append(event)
        match event["kind"]:
            case "started":
                self._slots[event["pid"]] = event["slot"]
            case "joined":
                self.rebuilds.pop(self._nodes.get(event["pid"], ""), None)
                self._nodes[event["pid"]] = event["node"]
                self._processes[event["node"]] = event["pid"]
            case "serving":
                self.serving.add(event["node"])
            case "applied":
                self.holds[event["node"]] = event["step"]
            case "committed":
                return self._committed(event)
            case "killed" | "exited" | "lost" | "rebuild failed":
                self.rebuilds.pop(event["node"], None)
            case "rebuilding":
                stage, method, sources = event["stage"], event["method"], event["sources"]
                rebuild = Rebuilding(stage, method, sources, True, event["time"])
                self.rebuilds[event["node"]] = rebuild
            case "fetching" | "relearning":
                return self._rebuild_goes_on(event)
            case "rebuilt":
                return self._rebuilt(event)
            case "rolled back" | "resuming":
                self.committed, self.loss = event["step"], None
                self._went_back, self._going_back = event["time"], True
                self._recent.clear()
                self.rebuilds.clear()
            case "saved":
                self._unsaved.discard(event["node"])
            case "save failed" if event["node"] in self._unsaved:
                return None  # the disk is as full as before
            case "save failed":
                self._unsaved.add(event["node"])
            case "finished":
                self.finished = self.finished or event
            case "stopped" if self.stopped is None:
                self.stopped = event
                return f"the run is stopped at step {event['step']}: {event['reason']}"
        return news(event)

    def _committed(self, event: Event) -> str | None:
        if event["time"] < self._went_back:
            return None
        self.committed = max(self.committed, event["step"])
        self.loss = event["loss"]
        noticed, self._noticed = self._noticed, None
        if noticed is None:
            return None
        seconds = event["time"] - noticed
        return f"step {event['step']} committed {seconds:.1f} s after the loss was noticed"

    def _rebuild_goes_on(self, event: Event) -> str | None:
        """Fetching is told when it takes long enough to wait for, then ever more seldom."""
        node = event["node"]
        late = event["time"] <= self._in_place.get(node, 0.0)  # from another file
        if late or event.get("method") == "twin":  # which belongs to what is held, not trained
            return None
        if node not in self.rebuilds:
            sources = [source["node"] for source in event.get("sources", ())]
            method = event.get("method", "")
            rebuild = Rebuilding(event["stage"], method, sources, False, event["time"])
            self.rebuilds[node] = rebuild
        rebuild = self.rebuilds[node]
        if event["kind"] == "fetching":
            rebuild.bytes, rebuild.seconds = event["bytes"], event["seconds"]
            if rebuild.seconds < rebuild.tell_at:
                return None
            rebuild.tell_at = 2 * rebuild.seconds
            whom = ", ".join(rebuild.sources)
            return f"stage {rebuild.stage} fetches from {whom}: {rebuild.fetched}"
        if event["residual"] is None:
            return None
        first = rebuild.residual[0] if rebuild.residual else event["residual"]
        told = rebuild.residual is not None
        rebuild.round, rebuild.residual = event["round"], (first, event["residual"])
        return None if told else f"stage {rebuild.stage} relearns, residual {first:.3g} at first"

    def _rebuilt(self, event: Event) -> str | None:
        node = event["node"]
        self.holds[node] = event["step"]
        self._in_place[node] = event["time"]
        rebuild = self.rebuilds.pop(node, None)
        if event["method"] == "replica":
            return news(event)
        losses = sorted(self._losses, key=lambda event: float(event["time"]))
        stall = stall_seconds(event, losses)
        alone = rebuild is not None and rebuild.ordered
        if alone or event["method"] != "save":  # else the run has begun with it
            noticed = noticed_at(event, losses)
            self._noticed = noticed if self._noticed is None else min(self._noticed, noticed)
        if alone or event["method"] not in ("checkpoint", "save"):
            return news({**event, "stall_seconds": stall})
        first, self._going_back = self._going_back, False
        return f"all stages are at step {event['step']}, stalled {stall:.1f} s" if first else None

    def record(self, line: Mapping[str, Any]) -> None:
        """A step's line of a ledger; other stage-0 nodes may have told the same."""
        if line["time"] < self._went_back:
            return
        if not self._recent or line["step"] > self._recent[-1]["step"]:
            self._recent.append(line)
        self.committed = max(self.committed, line["step"])

    def with_names(self, sentence: str | None) -> str | None:
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


_TO_FIND_LOSSES = ("started", "joined", "killed", "exited", "link lost", "lost", "rebuilding")


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
        case {"kind": "masked", "step": step, "nodes": nodes, "microbatches": count}:
            others = f"others redo {count} microbatches" if count else "nothing was its own"
            return f"step {step} goes on without {', '.join(nodes)}: {others}"
        case {"kind": "lost", "node": node, "stage": stage}:
            return f"noticed: no link to {node} of stage {stage} any more"
        case {"kind": "waiting", "stages": stages}:
            return f"waiting for a node to join stage {', '.join(map(str, stages))}"
        case {"kind": "rebuilding", "stage": stage, "method": method, "sources": sources}:
            sentence = f"rebuilding stage {stage} by {method} from {', '.join(sources)}"
            fallback = event.get("fallback", False)
            return f"fallback: {sentence}: {event['reason']}" if fallback else sentence
        case {"kind": "rebuilt"}:
            return (
                f"rebuilt: stage {event['stage']} by {event['method']} at step {event['step']}, "
                f"{decimal(event['bytes'])} in {event['rebuild_seconds']:.1f} s, "
                f"stalled {event['stall_seconds']:.1f} s{quality(event)}"
            )
        case {"kind": "rolled back", "from": lost, "step": step, "reason": reason}:
            return f"rolled back from step {lost} to {step}: {reason}"
        case {"kind": "resuming", "step": step, "reason": reason}:
            how = "" if event["exact"] else "fallback: "
            return f"{how}resuming at step {step}: {reason}"
        case {"kind": "save failed", "node": node, "reason": reason}:
            return f"save failed at {node}, training goes on: {reason}"
        case {"kind": "preempted", "node": node, "grace": grace}:
            return f"{node} has to end within {grace:g} s: it saves and hands over its state"
        case {"kind": "handed over", "node": node, "to": to}:
            return f"{node} has handed its state over to {to}"
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


def under_way(story: Story, now: float) -> RenderableType:
    """A line for each rebuild: stage, method, from whom, how far; `now` in Unix seconds. How much
    there will be is not known, so the bar only moves."""
    grid = Table.grid(padding=(0, 2))
    for rebuild in story.rebuilds.values():
        sources = story.with_names(", ".join(rebuild.sources))
        what = f"rebuilding stage {rebuild.stage} by {rebuild.method} from {sources}"
        far = [f"{max(0.0, now - rebuild.since):.1f} s"]
        if rebuild.residual is not None:
            first, last = rebuild.residual
            now_at = f" -> {last:.3g} in round {rebuild.round}" if last != first else " at first"
            far.append(f"relearning: residual {first:.3g}{now_at}")
        elif rebuild.bytes:
            far.append(rebuild.fetched)
        grid.add_row(Text(what, "magenta"), ProgressBar(pulse=True, width=20), "; ".join(far))
    return grid


def styled(text: str) -> Text:
    """A piece of news, with the colour of its weight; those that have one are shown whole."""
    for style, pattern in _WEIGHTS:
        if pattern.search(text):
            return Text(text, style=style)
    return Text(text, no_wrap=True, overflow="ellipsis")


_WEIGHTS = (
    ("bold red", re.compile(r"save failed|saving step|is stopped|differ after")),
    ("yellow", re.compile(r"fallback|rolled back|is lost|has to end")),
    ("green", re.compile(r"rebuilt: ")),
)


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
            self.console.print(styled(line), soft_wrap=True)

    def show(self, story: Story, description: Description | None, stages: int) -> None:
        now = time.monotonic()
        if self._live is not None:
            self._page = self._draw(story, description, stages)
            if now - self._drawn >= REDRAW:
                self._drawn = now
                self._live.update(self._page, refresh=True)
            return
        share = story.committed // self._per_line
        told, self._told = self._told, share
        if share > told:
            self.say(
                f"step {story.committed} of {story.steps}, loss {_figure(story.loss)}, "
                f"{story.tokens_per_second:,.0f} tokens/s"
            )

    def _draw(self, story: Story, description: Description | None, stages: int) -> RenderableType:
        return Group(
            stage_table(description or Description(), stages),
            Text(),
            progress(story.committed, story.steps, story.loss, story.tokens_per_second),
            *([under_way(story, time.time())] if story.rebuilds else []),
            Text(),
            *map(styled, self._news),
        )

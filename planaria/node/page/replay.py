"""Replay of a run from its files: the page as a live registry would have shown it at any moment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planaria.bootstrap import registry_pb2 as pb
from planaria.bootstrap.errors import UserError
from planaria.node.page.app import PageSource
from planaria.node.page.state import Moment, page_state
from planaria.node.report import events
from planaria.node.report.event_log import LineReader
from planaria.node.report.history import History
from planaria.node.report.ledger import MERGED, Line, merge
from planaria.node.run_file import RunFile, load
from planaria.node.wire.seat_names import node_of

RUN_FILE = "run.toml"


_AT_THE_END = (events.Committed, events.Validated, events.Finished)
"""Events that still count while a swarm is being ended; exits of its processes are no losses."""


class Replay(PageSource):
    """Source of the page of a run's folder, at any moment of its `span` in Unix seconds."""

    span: tuple[float, float]

    def __init__(
        self,
        run: RunFile,
        records: Sequence[Mapping[str, Any]],
        lines: Sequence[Line],
        name: str,
        price: float | None = None,
    ) -> None:
        """`events` from logs, `lines` from ledgers, both by time; `price` of a node hour. Raises
        UserError for a run without any."""
        self.run, self.name, self.price = run, name, price
        timed = [(float(record["time"]), record) for record in (*records, *lines)]
        self._all = sorted(timed, key=lambda pair: pair[0])
        if not self._all:
            raise UserError(f"{name} has no records yet: neither an event nor a committed step")
        self.span = self._all[0][0], self._all[-1][0]
        own = [(node_of(str(line.get("node"))), time, line) for time, line in self._all]
        told = {node for node, _, line in own if line.get("kind") == events.Preempted.kind}
        self._ends = {node: time for node, time, _ in own if node in told}
        self._begin()

    def _begin(self) -> None:
        self._next, self._shown = 0, -math.inf
        self._scene = Scene(self.run, self._ends)

    def now(self) -> dict[str, Any]:
        return self.at(self.span[1])

    def at(self, moment: float) -> dict[str, Any]:
        """The page's state at that moment; see `page_state`."""
        if moment < self._shown:
            self._begin()
        self._shown = moment
        while self._next < len(self._all) and self._all[self._next][0] <= moment:
            self._scene.play(self._all[self._next][1])
            self._next += 1
        history = self._scene.history
        self._scene.count_node_seconds(moment)
        rate = history.story.tokens_per_second
        began, ended = self.span
        when = Moment(moment, began, ended if moment >= ended else None, rate, self.price)
        return page_state(self._scene.describe(self.name), history, self.run, when)


class Scene:
    """A replayed run's members and their steps, from events."""

    def __init__(self, run: RunFile, ends: Mapping[str, float]) -> None:
        """`ends`: when nodes that were told to leave wrote their last event."""
        self.history, self._ends = History(run.steps), ends
        self._exited = False  # the registry, with no start since
        self._begin_part()

    def _begin_part(self) -> None:
        """Begin a start of the swarm, as `parts_of_run` does: no node is left of the one before."""
        self.nodes: dict[str, pb.Member] = {}
        self._steps: dict[str, int] = {}  # seat -> newest step in its weights
        self._seats: dict[str, int] = {}  # seat -> stage
        self._processes: dict[tuple[str, int], str] = {}  # host, process id -> its newest node
        self._driver = ""
        self._ending = False

    def play(self, line: Mapping[str, Any]) -> None:
        """Apply an event or a ledger line."""
        entry = events.parse(line) if "kind" in line else None
        match entry and entry.event:
            case events.Started(slot="registry"):
                if not self._exited:
                    self._begin_part()
                self._exited = False
            case events.Exited(slot=slot):
                self._exited = slot == "registry"
        self.count_node_seconds(float(line["time"]))
        if "kind" not in line:
            self.history.record(Line(**line))  # type: ignore[typeddict-item]
        elif entry is not None:
            self._hear(entry)
            if not self._ending or isinstance(entry.event, _AT_THE_END):
                self.history.hear(entry)

    def count_node_seconds(self, now: float) -> None:
        """Count the node-seconds since the last call, until the swarm is being ended."""
        self.history.count_node_seconds(0 if self._ending else len(self.nodes), now)

    def _hear(self, entry: events.Entry) -> None:
        node = node_of(entry.node or "")
        match entry.event:
            case events.Joined(pid=pid, host=host) if entry.node is not None:
                self._drop(self._processes.get((host, pid), ""))
                self._processes[host, pid] = node
                self.nodes[node] = pb.Member(node=node, host=host)
            case events.Serving(stage=stage, device=device) if node in self.nodes:
                self.nodes[node].device = device or ""
                self._seats[entry.node or ""] = stage
            case events.GivenBack():
                self._seats.pop(entry.node or "", None)
            case events.Applied(step=step):
                self._steps[entry.node or ""] = step
            case events.Committed():
                self._driver = node
            case (
                events.Killed(node=str(lost))
                | events.Exited(node=str(lost))
                | events.NodeLost(node=lost)
            ):
                if not self._ending:
                    self._drop(node_of(lost))
            case events.SwarmEnding():
                self._ending = True
        if not self._ending and self._ends.get(node, math.inf) <= entry.time:
            self._drop(node)

    def _drop(self, node: str) -> None:
        self.nodes.pop(node, None)
        for table in (self._seats, self._steps):
            for seat in [seat for seat in table if node_of(seat) == node]:
                del table[seat]

    def _phase(self, seat: str, rebuilding: bool) -> str:
        """The seat's phase as a node would report it."""
        story = self.history.story
        if story.finished is not None:
            return "halted"
        if rebuilding:
            return "syncing"
        if not story.committed:
            return "idle"
        return "running" if seat in self._steps else "following"

    def describe(self, run: str) -> pb.Description:
        """The description that a registry would have given."""
        story = self.history.story
        rebuilt = {
            seat for seat, order in story.rebuilds.items() if order.stage == self._seats.get(seat)
        }
        members = []
        for name, node in self.nodes.items():
            own = {seat: stage for seat, stage in self._seats.items() if node_of(seat) == name}
            member = pb.Member(node=name, host=node.host, device=node.device)
            member.seats.extend(pb.Seat(stage=stage) for stage in sorted(set(own.values())))
            reports = [
                pb.SeatReport(
                    stage=stage,
                    committed=self._steps.get(seat, 0),
                    phase=self._phase(seat, seat in rebuilt),
                )
                for seat, stage in own.items()
            ]
            members.append(pb.MemberDescription(member=member, report=pb.Report(seats=reports)))
        return pb.Description(
            run=run,
            view=pb.View(run=run, driver=self._driver, committed=story.committed),
            members=members,
        )


def replay_of(folder: Path, price: float | None = None) -> Replay:
    """Replay of the run that wrote `folder`: the --out of `planaria up`, also during the run, or
    out/RUN of nodes. Raises UserError, RunFileError, LedgerError, OSError."""
    present = [path for path in (folder / RUN_FILE, folder / "saves" / RUN_FILE) if path.is_file()]
    if not present:
        raise UserError(
            f"there is no run in {folder}: it has no {RUN_FILE}. Name the folder that "
            "`planaria up` wrote (--out), or out/RUN of a machine's nodes"
        )
    files = _files(folder, "events-*.jsonl", "events.jsonl")
    ledgers = [path for path in _files(folder, "ledger-*.jsonl", MERGED) if path.stat().st_size]
    try:
        records = [line for path in files for line in LineReader(path).lines() if _is_event(line)]
        events.entries(records)
    except ValueError as error:
        raise UserError(f"an event log in {folder} is damaged: {error}") from error
    lines = merge(ledgers).lines if ledgers else []
    return Replay(load(present[0]), records, lines, folder.resolve().name, price)


def _files(folder: Path, each: str, merged: str) -> list[Path]:
    """Files of each node, or else the merged one of the run's end."""
    for directory, pattern in ((folder / "logs", each), (folder, each), (folder, merged)):
        if files := sorted(directory.glob(pattern)):
            return files
    return []


def _is_event(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("time"), int | float) and "kind" in line

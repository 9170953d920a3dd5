"""`planaria status`: the registry's description, for people or as JSON."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NoReturn

from google.protobuf.json_format import MessageToJson
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.markup import escape
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from planaria.bootstrap.client import RegistryClient, RegistryUnreachable
from planaria.bootstrap.operator_orders import order_in_words
from planaria.bootstrap.registry_pb2 import Description
from planaria.node.report.events import Severity, figure, shown
from planaria.node.report.live_view import (
    progress_line,
    sample_lines,
    stage_table,
    state_words,
    styled,
)
from planaria.node.report.run_state import RunState, SeatState
from planaria.node.run_file import RunFile, RunFileError, loads

PATIENCE = 5.0
"""Seconds to wait for the registry's answer."""
REFRESH = 1.0
"""Seconds between two updates with --watch."""
DECISIONS_SHOWN = 10
EVICTIONS_SHOWN = 5
LONGEST_LINE = 1000
"""Limit of a line in characters with --watch without a terminal."""
STANDING_STILL = frozenset(["idle", "syncing"])
"""Phases of a driver's seat without a step in progress."""


async def status(client: RegistryClient, console: Console, watch: bool, as_json: bool) -> None:
    """Print the status once, or with `watch` until Ctrl-C. A terminal shows a live page; otherwise
    the page is followed by a line for each change; JSON is one object a line. Raises
    RegistryUnreachable, with `watch` only at first, and JoinRefused."""
    description = await client.describe(PATIENCE)
    if as_json:
        console.out(description_json(description, indent=None if watch else 2), highlight=False)
    elif not (watch and console.is_terminal):
        console.print(status_view(description))
    if watch and (as_json or not console.is_terminal):
        await _watch_by_lines(client, console, as_json, description)
    if not watch:
        return
    with Live(status_view(description), console=console, auto_refresh=False, screen=False) as live:
        while True:
            await asyncio.sleep(REFRESH)
            try:
                description = await client.describe(PATIENCE)
                live.update(status_view(description), refresh=True)
            except RegistryUnreachable as error:
                stale = Text(f"last known state; {error}", style="bold red")
                live.update(Group(status_view(description), stale), refresh=True)


async def _watch_by_lines(
    client: RegistryClient, console: Console, as_json: bool, description: Description
) -> NoReturn:
    """Print each change of the status in lines, without a terminal or as JSON."""
    printed, trouble = set(lines_to_watch(description)), ""
    while True:
        await asyncio.sleep(REFRESH)
        try:
            description = await client.describe(PATIENCE)
            lines, trouble = lines_to_watch(description), ""
        except RegistryUnreachable as error:
            lines, trouble = ([] if trouble else [str(error)]), str(error)
        if as_json and not trouble:
            console.out(description_json(description, indent=None), highlight=False)
        elif not as_json:
            for line in lines:
                if line not in printed:
                    console.out(f"{datetime.now():%H:%M:%S}  {line}", highlight=False)
        if not trouble:
            printed = set(lines)


def lines_to_watch(description: Description) -> list[str]:
    """Lines that are printed when they change: decisions, troubles, messages, samples, and
    progress."""
    state, run = RunState(description), _run_file(description)
    lines = [*description.decisions, *state.troubles()]
    messages = (_styled(message, seats, state) for message, seats in _news(state).items())
    lines += [str(text) for text in messages if text.style]  # else progress within a step
    lines += map(str, _samples(description))
    if run is not None and state.newest is not None and state.committed:
        rate, loss = state.tokens_per_second, figure(state.loss)
        lines.append(f"step {state.committed} of {run.steps}, loss {loss}, {rate:,.0f} tokens/s")
    return [shown(line, LONGEST_LINE) for line in lines]


def description_json(description: Description, indent: int | None = 2) -> str:
    """The Describe message as JSON, with the names of the .proto file; without `indent` in one
    line."""
    return MessageToJson(
        description,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
        indent=indent,
    )


def status_view(description: Description) -> RenderableType:
    state, run = RunState(description), _run_file(description)
    stages = max((seat.stage for seat in state.seats if seat.stage is not None), default=0)
    if run is not None:
        stages = run.model.body_stages or stages
    parts: list[RenderableType] = [_head(state)]
    if run is not None:
        parts += [progress_line(state.committed, run.steps, state.loss, state.tokens_per_second)]
    parts += [Rule(style="dim"), stage_table(description, stages)]
    parts += [Rule(style="dim"), _members(state)]
    reasons = [
        Text(f"{seat.place}, {seat.entry.member.node}: {seat.why}")
        for seat in _by_stage(state.seats)
        if seat.why
    ]
    for title, lines in (
        ("samples", _samples(description)),
        ("seats, and why", reasons),
        ("missing links", _cuts(state)),
        ("quarantined", _quarantine(state)),
        ("evicted", _evictions(state)),
    ):
        if lines:
            parts += [Rule(title, style="dim"), *lines]
    parts += [Rule("decisions", style="dim")]
    parts += [
        Text(decision, no_wrap=True, overflow="ellipsis")
        for decision in description.decisions[-DECISIONS_SHOWN:]
    ]
    return Group(*parts)


def _run_file(description: Description) -> RunFile | None:
    try:
        return loads(description.run_file)
    except RunFileError:
        return None  # of a newer planaria; the rest of the page suffices


def _head(state: RunState) -> RenderableType:
    description, view = state.description, state.description.view
    grid = Table.grid(padding=(0, 2))
    rows: list[tuple[str, RenderableType]] = [
        ("run", f"[bold]{escape(description.run)}[/], registry up {_duration(description.uptime)}"),
        ("view", f"{view.number}: {escape(view.reason)}"),
        *([("order", escape(order))] if (order := order_in_words(view)) else []),
        ("driver", escape(view.driver) or "none yet"),
        *([("in flight", flying)] if (flying := _in_flight(state)) else []),
        *([("page", escape(description.page))] if description.page else []),
        *(("trouble", styled(trouble, Severity.ERROR)) for trouble in state.troubles()),
        *(("snapshot", styled(unsent, Severity.NOTICE)) for unsent in state.unsent()),
        *(("omitted", Text(omitted)) for omitted in state.omitted()),
        *(("news", _styled(message, seats, state)) for message, seats in _news(state).items()),
    ]
    for name, text in rows:
        grid.add_row(Text(name, style="dim"), text)
    return grid


def _in_flight(state: RunState) -> str:
    """In-flight windows of the sources, in microbatches; empty: none."""
    windows = sorted(seat.in_flight for seat in state.reports if seat.in_flight)
    if not windows:
        return ""
    count = str(windows[0]) if windows[0] == windows[-1] else f"{windows[0]} to {windows[-1]}"
    each = f" of each of {len(windows)} sources" if len(windows) > 1 else ""
    return f"at most {count} microbatches{each}"


def _news(state: RunState) -> dict[str, list[SeatState]]:
    """The seats' messages, each with the seats that report it."""
    news: dict[str, list[SeatState]] = {}
    for seat in state.seats:
        if seat.report.message:
            news.setdefault(seat.report.message, []).append(seat)
    return dict(sorted(news.items()))


def _styled(message: str, seats: Sequence[SeatState], state: RunState) -> Text:
    """A seat's message in its style. The driver's describes the run, and all report a stop; a
    message of any other seat is an error."""
    if any(seat.report.stopped for seat in seats):
        return styled(message, Severity.ERROR)
    driving = state.driving
    if driving is not None and driving.message == message:
        idle = driving.committed and driving.phase in STANDING_STILL
        return Text(message, styled(message, Severity.WARNING if idle else Severity.NOTICE).style)
    senders = ", ".join(f"{seat.entry.member.node} of stage {seat.stage}" for seat in seats)
    return styled(f"{senders}: {message}", Severity.ERROR)


def _members(state: RunState) -> Table:
    table = Table(
        Column("stage", justify="right", no_wrap=True),
        Column("node", no_wrap=True),
        Column("state", no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in ("step", "silence", "in", "out")),
        Column("address, device", overflow="fold"),
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    for seat in _by_stage(sorted(state.seats, key=lambda seat: seat.entry.member.joined)):
        member, report = seat.entry.member, seat.entry.report
        words = [state_words([seat])]
        words += [Text(f"except by {seat.entry.reached_by}")] if seat.entry.reached_by else []
        words += [Text(f"{report.stalled_seconds:.0f} s")] if report.stalled_seconds else []
        table.add_row(
            "standby" if seat.stage is None else str(seat.stage),
            escape(member.node),
            Text(" ").join(words),
            str(seat.report.committed),
            f"{seat.entry.since_renewal:.1f} s",
            decimal(report.bytes_in, separator="").removesuffix("ytes"),
            decimal(report.bytes_out, separator="").removesuffix("ytes"),
            escape(f"{member.address or 'dials out'}, {member.device} on {member.host}"),
        )
    return table


def _by_stage(seats: Iterable[SeatState]) -> list[SeatState]:
    """Seats sorted by stage, standbys last."""
    return sorted(seats, key=lambda seat: math.inf if seat.stage is None else seat.stage)


def _samples(description: Description) -> list[Text]:
    """The newest sample of each prompt."""
    samples = [sample for entry in description.members for sample in entry.report.samples]
    newest = {sample.prompt: sample for sample in sorted(samples, key=lambda sample: sample.step)}
    return sample_lines((sample.step, sample.prompt, sample.text) for sample in newest.values())


def _cuts(state: RunState) -> list[Text]:
    """A line for each pair that can't reach each other."""
    lines = []
    for cut in state.cuts():
        since = _clock_before(cut.seconds)
        if cut.via:
            sentence = f"{cut.a} reaches {cut.b} through {cut.via}, since {since}"
            lines.append(styled(sentence, Severity.WARNING))
        else:
            lines.append(styled(f"{cut.a} and {cut.b}, since {since}: {cut.state}", Severity.ERROR))
    return lines


def _quarantine(state: RunState) -> list[Text]:
    """A line for each instance that was evicted for cause and is still excluded."""
    lines = []
    for entry in state.quarantined():
        until = (
            "permanently" if entry.seconds == math.inf else f"until {_clock_before(-entry.seconds)}"
        )
        times = "" if entry.times == 1 else f", {entry.times} times"
        lines.append(styled(f"{entry.node}, {until}{times}: {entry.why}", Severity.WARNING))
    return lines


def _evictions(state: RunState) -> list[Text]:
    newest = list(state.evictions())[-EVICTIONS_SHOWN:]
    return [Text(f"{_clock_before(eviction.seconds)} {sentence}") for eviction, sentence in newest]


def _clock_before(seconds: float) -> str:
    """Local time of `seconds` ago."""
    then = datetime.now().astimezone() - timedelta(seconds=seconds)
    return f"{then:%H:%M:%S}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"

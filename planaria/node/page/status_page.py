"""`planaria status`: what the registry knows, for people or as JSON."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
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
from planaria.bootstrap.membership import place_of
from planaria.bootstrap.neighbours import stages_of
from planaria.bootstrap.registry_pb2 import (
    Description,
    Member,
    MemberDescription,
    Report,
    SeatReport,
)
from planaria.bootstrap.truncation import cut_from
from planaria.node.report.events import Severity, figure, shown
from planaria.node.report.live_view import (
    progress,
    sampled,
    seats_of,
    stage_table,
    state,
    styled,
    told_of,
)
from planaria.node.run_file import RunFile, RunFileError, loads
from planaria.node.state.handover import NOTICES, Handover, told

PATIENCE = 5.0
"""Seconds to wait for the registry's answer."""
REFRESH = 1.0
"""Seconds between two looks with --watch."""
DECISIONS_SHOWN = 10
EVICTIONS_SHOWN = 5
LONGEST_LINE = 1000
"""Characters of one with --watch, where no terminal is."""
STANDING_STILL = frozenset(["idle", "syncing"])
"""Phases of a driver's node in which no step is under way."""


async def status(client: RegistryClient, console: Console, watch: bool, as_json: bool) -> None:
    """Prints the status, with `watch` until Ctrl-C, else once: on a terminal a page that changes,
    elsewhere the page and then a line for each change, as JSON an object a line. Raises
    RegistryUnreachable, when watching only if the first look fails, and JoinRefused."""
    description = await client.describe(PATIENCE)
    if as_json:
        console.out(as_text(description, indent=None if watch else 2), highlight=False)
    elif not (watch and console.is_terminal):
        console.print(page(description))
    if watch and (as_json or not console.is_terminal):
        await _watch_by_lines(client, console, as_json, description)
    if not watch:
        return
    with Live(page(description), console=console, auto_refresh=False, screen=False) as live:
        while True:
            await asyncio.sleep(REFRESH)
            try:
                description = await client.describe(PATIENCE)
                live.update(page(description), refresh=True)
            except RegistryUnreachable as error:
                stale = Text(f"as last heard; {error}", style="bold red")
                live.update(Group(page(description), stale), refresh=True)


async def _watch_by_lines(
    client: RegistryClient, console: Console, as_json: bool, description: Description
) -> NoReturn:
    """Where no terminal is, or a program reads."""
    told, away = set(news_of(description)), ""
    while True:
        await asyncio.sleep(REFRESH)
        try:
            description = await client.describe(PATIENCE)
            lines, away = news_of(description), ""
        except RegistryUnreachable as error:
            lines, away = ([] if away else [str(error)]), str(error)
        if as_json and not away:
            console.out(as_text(description, indent=None), highlight=False)
        elif not as_json:
            for line in lines:
                if line not in told:
                    console.out(f"{datetime.now():%H:%M:%S}  {line}", highlight=False)
        if not away:
            told = set(lines)


def news_of(description: Description) -> list[str]:
    """What somebody wants to hear of when it changes, a line each: decisions, troubles, messages,
    samples, and how far the run is."""
    members = description.members
    lines = [*description.decisions]
    lines += [f"the registry: {description.trouble}"] if description.trouble else []
    lines += [f"{_named(m.member)}: {m.report.trouble}" for m in members if m.report.trouble]
    heard = (_told_by(*news, description.view.driver) for news in _news(description).items())
    lines += [str(text) for text in heard if text.style]  # else how far a step is
    lines += map(str, _samples(description))
    run, newest, committed = _run_file(description), _newest(description), _committed(description)
    if run is not None and newest is not None and committed:
        rate = _tokens_per_second(description)
        loss = figure(newest.loss)
        lines.append(f"step {committed} of {run.steps}, loss {loss}, {rate:,.0f} tokens/s")
    return [shown(line, LONGEST_LINE) for line in lines]


def as_text(description: Description, indent: int | None = 2) -> str:
    """The Describe message as JSON, with the names of the .proto file; without `indent` in one
    line."""
    return MessageToJson(
        description,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
        indent=indent,
    )


def page(description: Description) -> RenderableType:
    newest, run = _newest(description), _run_file(description)
    stages = max([s for one in description.members for s in stages_of(one.member)], default=0)
    if run is not None and run.model.stages is not None:
        stages = run.model.stages
    parts: list[RenderableType] = [_head(description)]
    if run is not None:
        loss = newest.loss if newest and newest.committed else math.nan
        rate = _tokens_per_second(description)
        parts += [progress(_committed(description), run.steps, loss, rate)]
    parts += [Rule(style="dim"), stage_table(description, stages)]
    parts += [Rule(style="dim"), _members(description)]
    for title, lines in (
        ("samples", _samples(description)),
        ("when a stage's only node is told to go", _handovers(description, run)),
        ("who sits where, and why", _reasons(description)),
        ("without a link", _cuts(description)),
        ("in quarantine", _quarantine(description)),
        ("evicted", _evictions(description)),
    ):
        if lines:
            parts += [Rule(title, style="dim"), *lines]
    parts += [Rule("decisions", style="dim")]
    parts += [
        Text(decision, no_wrap=True, overflow="ellipsis")
        for decision in description.decisions[-DECISIONS_SHOWN:]
    ]
    return Group(*parts)


def _newest(description: Description) -> SeatReport | None:
    """Of a seat that has the newest step. A run that has gone back to files stands at an older
    step, of a newer lineage."""
    seats = (seat for one in description.members for seat in one.report.seats)
    return max(seats, key=lambda seat: (seat.lineage, seat.committed), default=None)


def _committed(description: Description) -> int:
    view, newest = description.view, _newest(description)
    told = (newest.lineage, newest.committed) if newest else (0, 0)
    return max(told, (view.lineage, view.committed))[1]


def _tokens_per_second(description: Description) -> float:
    seats = (seat for one in description.members for seat in one.report.seats)
    return max((seat.tokens_per_second for seat in seats), default=0.0)


def _run_file(description: Description) -> RunFile | None:
    try:
        return loads(description.run_file)
    except RunFileError:
        return None  # of a newer planaria; the rest of the page says enough


def _head(description: Description) -> RenderableType:
    view = description.view
    grid = Table.grid(padding=(0, 2))
    rows = [
        ("run", f"[bold]{escape(description.run)}[/], registry up {_span(description.uptime)}"),
        ("view", f"{view.number}: {escape(view.reason)}"),
        ("driver", escape(view.driver) or "none yet"),
        *([("in flight", flying)] if (flying := _in_flight(description)) else []),
        *([("page", escape(description.page))] if description.page else []),
    ]
    for name, text in rows:
        grid.add_row(Text(name, style="dim"), text)
    if description.trouble:
        grid.add_row(Text("registry", style="dim"), styled(description.trouble, Severity.ERROR))
    for one in description.members:
        if one.report.trouble:
            trouble = styled(f"{_named(one.member)}: {one.report.trouble}", Severity.ERROR)
            grid.add_row(Text("trouble", style="dim"), trouble)
    for cut in cut_from(description):
        grid.add_row(Text("here", style="dim"), Text(cut))
    for message, members in _news(description).items():
        grid.add_row(Text("news", style="dim"), _told_by(message, members, view.driver))
    return grid


def _in_flight(description: Description) -> str:
    """How many microbatches the sources may have out, as they have found; empty: there are none."""
    seats = (seat for one in description.members for seat in one.report.seats)
    out = sorted(seat.in_flight for seat in seats if seat.in_flight)
    if not out:
        return ""
    count = str(out[0]) if out[0] == out[-1] else f"{out[0]} to {out[-1]}"
    each = f" of each of {len(out)} sources" if len(out) > 1 else ""
    return f"{count} microbatches{each}"


def _news(description: Description) -> dict[str, list[tuple[Member, SeatReport]]]:
    """Messages, with those who say so."""
    news: dict[str, list[tuple[Member, SeatReport]]] = {}
    for one in description.members:
        for seat in one.report.seats:
            if seat.message:
                news.setdefault(seat.message, []).append((one.member, seat))
    return dict(sorted(news.items()))


def _told_by(message: str, seats: Sequence[tuple[Member, SeatReport]], driver: str) -> Text:
    """The driver tells how the run goes, all of them tell that it is stopped; else a node speaks
    when something is wrong with it."""
    if any(seat.stopped for _, seat in seats):
        return styled(message, Severity.ERROR)
    driving = [seat for member, seat in seats if member.node == driver and seat.stage == 0]
    if driving:
        still = any(seat.committed and seat.phase in STANDING_STILL for seat in driving)
        return Text(message, styled(message, Severity.WARNING if still else Severity.NOTICE).style)
    who = ", ".join(f"{member.node} of stage {seat.stage}" for member, seat in seats)
    return styled(f"{who}: {message}", Severity.ERROR)


def _members(description: Description) -> Table:
    table = Table(
        Column("stage", justify="right", no_wrap=True),
        Column("node", no_wrap=True),
        Column("state", no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in ("step", "silence", "in", "out")),
        "address, device",
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    seats: list[tuple[int | None, MemberDescription]] = [
        (stage, one) for one in description.members for stage in seats_of(one.member)
    ]
    seats.sort(key=lambda seat: (math.inf if seat[0] is None else seat[0], seat[1].member.joined))
    for stage, one in seats:
        member, report = one.member, one.report
        table.add_row(
            "standby" if stage is None else str(stage),
            escape(member.node),
            Text(" ").join([state([one], stage), *_reached(one), *_stalled(report)]),
            str(told_of(one, stage).committed),
            f"{one.since_renewal:.1f} s",
            decimal(report.bytes_in, separator="").removesuffix("ytes"),
            decimal(report.bytes_out, separator="").removesuffix("ytes"),
            escape(f"{member.address or 'dials out'}, {member.device} on {member.host}"),
        )
    return table


def _reached(one: MemberDescription) -> list[Text]:
    """Why one that isn't heard is still a member."""
    return [Text(f"but by {one.reached_by}")] if one.reached_by else []


def _reasons(description: Description) -> list[Text]:
    """A line for each seat, and for each standby."""
    seats = [
        (math.inf if stage is None else stage, one.member.node, why)
        for one in description.members
        for stage, why in zip(seats_of(one.member), one.why, strict=False)
    ]
    return [
        Text(f"{'standby' if stage == math.inf else f'stage {stage}'}, {node}: {why}")
        for stage, node, why in sorted(seats, key=lambda seat: seat[0])
    ]


def _stalled(report: Report) -> list[Text]:
    """For how long its compute thread has made no progress."""
    return [Text(f"{report.stalled_seconds:.0f} s")] if report.stalled_seconds else []


def _handovers(description: Description, run: RunFile | None) -> list[Text]:
    """What a notice is good for at the stages of which one node is left, by the links that it has
    measured (`planaria probe`)."""
    if run is None or run.model.vocabulary is None:
        return []
    config = run.config
    rate = _tokens_per_second(description)
    step = run.training.batch * config.context / rate if rate else 0.0
    seats = [(stage, one) for one in description.members for stage in stages_of(one.member)]
    count = Counter(stage for stage, _ in seats)
    heirs = []
    for stage, one in sorted(seats, key=lambda seat: seat[0]):
        links = one.report.links
        if count[stage] == 1 and links:
            parameters = config.trained[min(stage, 1)]
            rtt = max(link.rtt_ms for link in links) / 1e3
            mbps = min(link.mbps for link in links)
            heirs.append(Handover(stage, parameters, step, rtt, mbps))
    return [Text(f"{notice:.0f} s ahead: {told(heirs, notice)}") for notice in NOTICES if heirs]


def _samples(description: Description) -> list[Text]:
    """The newest of each prompt."""
    told = [sample for one in description.members for sample in one.report.samples]
    newest = {one.prompt: one for one in sorted(told, key=lambda one: one.step)}
    return sampled((one.step, one.prompt, one.text) for one in newest.values())


def _cuts(description: Description) -> list[Text]:
    """A line for each two that can't reach each other."""
    names = {one.member.node: _named(one.member) for one in description.members}
    lines = []
    for cut in description.cuts:
        a, b, via = (names.get(node, node) for node in (cut.a, cut.b, cut.via))
        since = _ago(cut.seconds)
        if cut.via and cut.carried:
            way = f"{a} reaches {b} by way of {via}, since {since}"
            lines.append(styled(way, Severity.WARNING))
        else:
            lines.append(styled(f"{a} and {b}, since {since}: {cut.state}", Severity.ERROR))
    return lines


def _quarantine(description: Description) -> list[Text]:
    """A line for each instance that was evicted for cause and is out."""
    lines = []
    for one in description.quarantined:
        until = "for good" if one.seconds == math.inf else f"until {_ago(-one.seconds)}"
        if one.seconds > 0:
            times = "" if one.times == 1 else f", the {one.times}. time"
            lines.append(styled(f"{one.node}, {until}{times}: {one.why}", Severity.WARNING))
    return lines


def _evictions(description: Description) -> list[Text]:
    newest = list(description.evictions)[-EVICTIONS_SHOWN:]
    return [Text(f"{_ago(one.seconds)} {_named(one.member)}: {one.reason}") for one in newest]


def _named(member: Member) -> str:
    return f"{member.node} ({place_of(member)})"


def _ago(seconds: float) -> str:
    """What the clock on the wall showed then."""
    then = datetime.now().astimezone() - timedelta(seconds=seconds)
    return f"{then:%H:%M:%S}"


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"

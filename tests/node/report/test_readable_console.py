"""Text of strangers, which moves no terminal's cursor: in the console, in logs and in status."""

from __future__ import annotations

import io
import json
import logging

import pytest
from rich.live import Live
from rich.table import Table

from planaria.bootstrap.escaping import readable_lines
from planaria.bootstrap.registry_pb2 import (
    Cut,
    Description,
    Eviction,
    Member,
    MemberDescription,
    Quarantined,
    Report,
    Seat,
    SeatReport,
    View,
)
from planaria.node.page.status_page import description_json, lines_to_watch, status_view
from planaria.node.report.log_stream import JsonLines, TextLines
from planaria.node.report.readable_console import ReadableConsole

NASTY = (
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b2J",
    "a\r\nINFO forged",
    "\u202eevil\u2066",
    "\x00\x08\x7f",
    "[red]markup[/] <script>alert(1)</script>",
    "x" * 2000,
)
ALLOWED = "\n\t"


def is_harmless(text: str) -> bool:
    return all(c.isprintable() or c in ALLOWED for c in text)


@pytest.mark.parametrize("nasty", NASTY)
def test_a_console_shows_what_would_move_its_cursor(nasty: str) -> None:
    file = io.StringIO()
    console = ReadableConsole(file=file, force_terminal=True, color_system=None, width=300)
    table = Table("head")
    table.add_row(nasty)
    for print_it in (console.print, console.out):
        print_it(nasty, style="bold")
    console.print(table, nasty, markup=False)
    with_colours = file.getvalue()
    for code in ("\x1b[1m", "\x1b[0m", "\x1b[2m", "\x1b[1;31m", "\x1b[3m"):  # the console's own
        with_colours = with_colours.replace(code, "")
    assert is_harmless(with_colours)


def test_what_the_program_does_with_a_terminal_still_works() -> None:
    file = io.StringIO()
    console = ReadableConsole(file=file, force_terminal=True, width=80)
    with Live("first \x1b[2J", console=console, auto_refresh=False) as live:
        live.update("second", refresh=True)
    console.print("[red]colour[/]\tand\nlines")
    text = file.getvalue()
    assert "\x1b[?25l" in text  # the cursor is hidden meanwhile
    assert "\x1b[31mcolour\x1b[0m" in text
    assert "\x1b[2J" not in text
    assert r"first \x1b" in text


def test_an_address_has_no_emoji() -> None:
    file, url = io.StringIO(), "http://[2001:db8:a:b::5]:7480/"
    console, table = ReadableConsole(file=file, width=80), Table()
    table.add_row(url)
    console.print(url, table, markup=False)
    assert file.getvalue().count(url) == 2


def test_lines_tabs_and_spaces_that_do_not_break_are_left() -> None:
    assert readable_lines("a\n\tb\u00a0c\u202fd") == "a\n\tb\u00a0c\u202fd"
    assert readable_lines("a\rb\x1b\u2028") == r"a\rb\x1b\u2028"


@pytest.mark.parametrize("nasty", NASTY)
def test_a_log_has_a_line_for_what_is_said_and_no_other(nasty: str) -> None:
    record = logging.LogRecord("planaria", logging.INFO, "", 0, "it says: %s", (nasty,), None)
    line = TextLines("%(asctime)s %(levelname)s %(message)s").format(record)
    assert line.isprintable()
    as_json = JsonLines("node").format(record)
    assert as_json.isprintable()
    assert json.loads(as_json)["message"].startswith("it says: ")
    try:
        raise ValueError(nasty)
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    assert is_harmless(TextLines("%(message)s").format(record))
    assert JsonLines("node").format(record).isprintable()


@pytest.mark.parametrize("nasty", NASTY)
def test_status_shows_whatever_a_registry_says(nasty: str) -> None:
    """The registry puts such text into each field."""
    member = Member(node=nasty, address=nasty, host=nasty, device=nasty, seats=[Seat(stage=0)])
    seat = SeatReport(phase=nasty, message=nasty, committed=3)
    report = Report(trouble=nasty, seats=[seat])
    entry = MemberDescription(member=member, report=report, why=[nasty], reached_by=nasty)
    description = Description(
        run=nasty,
        run_file=nasty,
        view=View(driver=nasty, reason=nasty, members=[member]),
        members=[entry, MemberDescription(member=Member(node="standby"), why=[nasty])],
        decisions=[nasty],
        cuts=[Cut(a=nasty, b="nobody", via=nasty, carried=True), Cut(a="x", b="y", state=nasty)],
        quarantined=[Quarantined(instance=nasty, node=nasty, why=nasty, seconds=9)],
        evictions=[Eviction(member=member, reason=nasty)],
        trouble=nasty,
        page=nasty,
    )
    file = io.StringIO()
    console = ReadableConsole(file=file, force_terminal=True, color_system=None, width=200)
    console.print(status_view(description))
    for line in lines_to_watch(description):
        console.out(line, highlight=False)
    console.out(description_json(description), highlight=False)
    shown = file.getvalue()
    for code in ("\x1b[1m", "\x1b[0m", "\x1b[2m", "\x1b[3m", "\x1b[1;2m"):
        shown = shown.replace(code, "")
    assert is_harmless(shown)

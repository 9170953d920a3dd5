"""What others may be called, and what they say as it is fit for a log and a terminal."""

from __future__ import annotations

import re
from typing import Final

from planaria.bootstrap.registry_pb2 import Report

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Node ids stand in logs, files' names and the names of seats."""


def misspelt(what: str, name: str) -> str:
    """What is wrong with a name; empty: nothing."""
    if NAME.fullmatch(name):
        return ""
    return (
        f"the {what} {name[:40]!r} is no name: it may have up to 128 letters, digits, dots, dashes "
        "and underscores of ASCII, and begins with a letter or digit"
    )


def shortened(value: object) -> str:
    """As it is quoted in a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def readable(text: str) -> str:
    """One line, in which what would move a terminal's cursor or change its colours, or the order
    in which text is read, is told instead of done."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def readable_lines(text: str) -> str:
    """As `readable`, of text that may have several lines, tabs and spaces that don't break."""
    if text.isprintable():
        return text
    return "".join(c if c in _SPACES else readable(c) for c in text)


_SPACES: Final = "\n\t\u00a0\u202f"


def make_readable(report: Report) -> None:
    """All that a node says of itself in words, but for samples, which may hold anything."""
    report.trouble = readable(report.trouble)
    for seat in report.seats:
        seat.phase, seat.message = readable(seat.phase), readable(seat.message)
    for link in report.links:
        link.peer = readable(link.peer)
    for complaint in report.complaints:
        complaint.peer = readable(complaint.peer)
    for rebuild in report.rebuilds:
        rebuild.method = readable(rebuild.method)

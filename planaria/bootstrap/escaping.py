"""Valid names, and escaping of foreign text for logs and terminals."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from planaria.bootstrap.address import EVERYWHERE, not_to_dial
from planaria.bootstrap.registry_pb2 import JoinRequest, Member, Report

LONGEST: Final = 128
"""Characters of a name, at most."""
NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST - 1}}}")
"""Node ids occur in logs, file names and seat names."""


def misspelt(kind: str, name: str) -> str:
    """Why a name is invalid; empty: it is valid."""
    if NAME.fullmatch(name):
        return ""
    return (
        f"the {kind} {name[:40]!r} is not a valid name: use up to {LONGEST} ASCII letters, digits, "
        "dots, dashes and underscores, beginning with a letter or digit"
    )


def misspelt_member(member: Member | JoinRequest) -> str:
    """Why a member's address or names are invalid; empty: they are valid."""
    problem = member.address and not_to_dial(member.address, EVERYWHERE)
    problem = problem or misspelt("node id", member.node)
    problem = problem or (member.data and misspelt("content of data", member.data))
    for kind, text in (("host", member.host), ("device", member.device)):
        problem = problem or (
            "" if text.isprintable() else f"the {kind} {text[:40]!r} isn't printable"
        )
    return problem


def first_misspelt(members: Iterable[Member]) -> str:
    """The first invalid name or address among the members, as a sentence; empty: none."""
    return next(filter(None, map(misspelt_member, members)), "")


def shortened(value: object) -> str:
    """A value's repr, shortened to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def readable(text: str) -> str:
    """One line of text, with control characters, such as those that move a terminal's cursor or
    change colours or text direction, escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def readable_lines(text: str) -> str:
    """As `readable`, but keeps line breaks, tabs and no-break spaces."""
    if text.isprintable():
        return text
    return "".join(c if c in _SPACES else readable(c) for c in text)


_SPACES: Final = "\n\t\u00a0\u202f"


def make_readable(report: Report) -> None:
    """Escapes all text in a node's report except samples, which may hold anything."""
    report.trouble = readable(report.trouble)
    for seat in report.seats:
        seat.phase, seat.message = readable(seat.phase), readable(seat.message)
    for link in (*report.links, *report.seen):
        link.peer = readable(link.peer)
    for complaint in report.complaints:
        complaint.peer = readable(complaint.peer)
    for rebuild in report.rebuilds:
        rebuild.method = readable(rebuild.method)

"""Truncation to size limits: of a node's report, and of a registry's description."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import Message

from planaria.bootstrap.escaping import make_readable
from planaria.bootstrap.registry_pb2 import Description, Report

REPORTS_BYTES: Final = 4 * 2**20
"""Limit of all reports in a description."""
DESCRIPTION_BYTES: Final = 15 * 2**20
"""Slightly below gRPC's message limit."""
DECISIONS_BYTES: Final = 2**20
CUTS_LISTED: Final = 1000


def truncated_report(report: Report, most: int) -> Report:
    """Truncates a node's report to `most` bytes. Drops samples and rebuilds, shortens text, then
    drops from the end link speeds, complaints and finally seats. The node's own figures remain."""
    if report.ByteSize() <= most:
        return report
    fits = Report()
    fits.CopyFrom(report)
    del fits.samples[:], fits.rebuilds[:]
    if fits.ByteSize() <= most:
        return fits
    length = max(40, most // 4 // (len(fits.seats) + 1))
    fits.trouble = shorten(fits.trouble, length)
    for seat in fits.seats:
        seat.message, seat.phase = shorten(seat.message, length), shorten(seat.phase, length)
    for speeds in (fits.links, fits.seen):
        _drop_last(fits, speeds, most)
    fits.unlisted += _drop_last(fits, fits.complaints, most)
    if fits.ByteSize() > most:
        _drop_last(fits, fits.seats, most)
        fits.trouble = shorten(fits.trouble, most // 8)  # at most four bytes per character
    return fits


def truncate_description(description: Description) -> None:
    """Escapes the reports of a registry's description and truncates it to `DESCRIPTION_BYTES`;
    counts shortened reports and unlisted members. A large report does not reduce the share of
    others."""
    shortened = _share_out(description)
    for member in description.members:
        make_readable(member.report)
    shortened |= _share_out(description)  # escaping may quadruple the size
    description.shortened = len(shortened)
    room = DECISIONS_BYTES
    for at in range(len(description.decisions) - 1, -1, -1):
        room -= len(description.decisions[at].encode())
        if room < 0:
            del description.decisions[: at + 1]
            break
    del description.cuts[CUTS_LISTED:]
    description.unlisted += _drop_last(description, description.members, DESCRIPTION_BYTES)


def omitted_from(description: Description) -> list[str]:
    """What the registry omitted from a description, one sentence each."""
    shortened, unlisted = description.shortened, description.unlisted
    lines = [f"the reports of {shortened} nodes are truncated: together they are too large"]
    lines += [f"{unlisted} more nodes are not listed: the list would be too large"]
    return [line for line, count in zip(lines, (shortened, unlisted), strict=True) if count]


def shorten_all(message: Message, most: int, but: str = "run_file") -> None:
    """Shortens all strings in a foreign message, except in field `but`."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                shorten_all(inner, most, but)
        elif field.type == field.TYPE_STRING and field.name != but:
            if not field.is_repeated:
                if len(value) > most:
                    setattr(message, field.name, shorten(value, most))
            elif any(len(text) > most for text in value):
                value[:] = [shorten(text, most) for text in value]


def _share_out(description: Description) -> set[int]:
    """Shortens a description's reports above an equal share; returns their indices."""
    sizes = [member.report.ByteSize() for member in description.members]
    if sum(sizes) <= REPORTS_BYTES:
        return set()
    share = REPORTS_BYTES // len(sizes)
    large = {at for at, size in enumerate(sizes) if size > share}
    for at in large:
        report = description.members[at].report
        report.CopyFrom(truncated_report(report, share))
    return large


def shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: max(0, length - 3)]}..."


def _drop_last(whole: Message, listed: Any, most: int) -> int:
    """Drops a list's last items until the whole message fits; returns their number."""
    excess = whole.ByteSize() - most
    count = len(listed)
    while excess > 0 and count:
        count -= 1
        excess -= listed[count].ByteSize() + 1
    dropped = len(listed) - count
    del listed[count:]
    return dropped

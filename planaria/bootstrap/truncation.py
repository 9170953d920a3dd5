"""What a message has room for, where others fill it: of a node's report, and of all that a registry
says of its run."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import Message

from planaria.bootstrap.registry_pb2 import Description, Report
from planaria.bootstrap.spelling import make_readable

REPORTS_BYTES: Final = 4 * 2**20
"""Of all reports that a description has."""
DESCRIPTION_BYTES: Final = 15 * 2**20
"""A bit less than gRPC is told to take."""
DECISIONS_BYTES: Final = 2**20
CUTS_LISTED: Final = 1000


def fitting(report: Report, most: int) -> Report:
    """As much of it as so many bytes have room for: samples and rebuilds are left out first, then
    words are cut short, then what was measured of links is left out, then complaints, last ones
    first, and in the end all but figures that are for the whole node."""
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
    _drop_last(fits, fits.links, most)
    fits.unlisted += _drop_last(fits, fits.complaints, most)
    if fits.ByteSize() > most:
        _drop_last(fits, fits.seats, most)
        fits.trouble = shorten(fits.trouble, most // 8)  # four bytes a character, at most
    return fits


def fit(description: Description) -> None:
    """Makes reports readable, cuts it to `DESCRIPTION_BYTES`, and says of how many reports
    something is left out, and how many members are. Whatever one says, the others have a share."""
    shortened = _share_out(description)
    for one in description.members:
        make_readable(one.report)
    shortened |= _share_out(description)  # what is readable may take four times as much
    description.shortened = len(shortened)
    left = DECISIONS_BYTES
    for at in range(len(description.decisions) - 1, -1, -1):
        left -= len(description.decisions[at].encode())
        if left < 0:
            del description.decisions[: at + 1]
            break
    del description.cuts[CUTS_LISTED:]
    description.unlisted += _drop_last(description, description.members, DESCRIPTION_BYTES)


def cut_from(description: Description) -> list[str]:
    """What the registry had to leave out of its answer, a sentence each."""
    shortened, unlisted = description.shortened, description.unlisted
    told = [f"the reports of {shortened} nodes are cut short: together they are too large"]
    told += [f"{unlisted} nodes more are not listed: together they are too many"]
    return [line for line, count in zip(told, (shortened, unlisted), strict=True) if count]


def shorten_all(said: Message, most: int, but: str = "run_file") -> None:
    """All words in a message from elsewhere, whatever they are, but for those of one field."""
    for field, value in said.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                shorten_all(inner, most, but)
        elif field.type == field.TYPE_STRING and field.name != but:
            if not field.is_repeated:
                if len(value) > most:
                    setattr(said, field.name, shorten(value, most))
            elif any(len(one) > most for one in value):
                value[:] = [shorten(one, most) for one in value]


def _share_out(description: Description) -> set[int]:
    """Room among reports; returns the places of those that had to be cut."""
    sizes = [one.report.ByteSize() for one in description.members]
    if sum(sizes) <= REPORTS_BYTES:
        return set()
    share = REPORTS_BYTES // len(sizes)
    large = {at for at, size in enumerate(sizes) if size > share}
    for at in large:
        report = description.members[at].report
        report.CopyFrom(fitting(report, share))
    return large


def shorten(words: str, length: int) -> str:
    return words if len(words) <= length else f"{words[: max(0, length - 3)]}..."


def _drop_last(whole: Message, listed: Any, most: int) -> int:
    """As many of a list in it as it is too large by. Returns how many."""
    over = whole.ByteSize() - most
    kept = len(listed)
    while over > 0 and kept:
        kept -= 1
        over -= listed[kept].ByteSize() + 1
    dropped = len(listed) - kept
    del listed[kept:]
    return dropped

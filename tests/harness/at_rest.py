"""Counters of what is under way: back at zero when a link, an attempt or a run ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from planaria.node.wire.budget import HeldFrames
from planaria.node.wire.chunks import Inbox, Ordering, Outbox
from planaria.node.wire.outbox import NodeOutbox
from planaria.node.wire.relays import Relays
from planaria.node.wire.session import Session

COUNTERS: Final[Mapping[type, str]] = {
    Outbox: "_started _in_flight _copying _beside unacknowledged frames",
    Ordering: "_early _waiting",
    Inbox: "_ordering _partial",
    Session: "outbox inbox held _sent _waiting _message_bytes",
    HeldFrames: "frames used",
    NodeOutbox: "_waiting",
    Relays: "held",
}
"""Attributes that count or hold something, or have such attributes themselves."""


def left(thing: object, name: str = "") -> Iterator[str]:
    """Each counter of `thing` that isn't zero, and each container that isn't empty."""
    if (names := COUNTERS.get(type(thing))) is None:
        if thing:
            yield f"{name} = {thing}"
        return
    for attribute in names.split():
        yield from left(getattr(thing, attribute), f"{type(thing).__name__}.{attribute}")


def check_at_rest(*things: object) -> None:
    """Raises AssertionError."""
    assert [text for thing in things for text in left(thing)] == []

"""Counters of data in transit, which are back at zero when a link, an attempt or a run ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from planaria.node.averaging.averaging import Averaging
from planaria.node.state.boundary import BoundaryClient
from planaria.node.state.copies import CopySender
from planaria.node.state.relearn import Relearning
from planaria.node.state.transfer import StateClient, StateServer
from planaria.node.state.twin import Twin
from planaria.node.wire.budget import HeldFrames
from planaria.node.wire.chunk_flow import ChunkInbox, ChunkOrder, ChunkOutbox
from planaria.node.wire.exchange import Inboxes
from planaria.node.wire.outbox import NodeOutbox
from planaria.node.wire.relays import Relays
from planaria.node.wire.session import Session

COUNTERS: Final[Mapping[type, str]] = {
    ChunkOutbox: "_started _in_flight _copying _beside unacknowledged frames",
    ChunkOrder: "_early _waiting",
    ChunkInbox: "_ordering _partial",
    Session: "outbox inbox held _sent _waiting _message_bytes",
    HeldFrames: "frames used",
    NodeOutbox: "_waiting",
    Relays: "held",
    Inboxes: "_open",
    **dict.fromkeys((Averaging, BoundaryClient, Relearning, StateClient, Twin), "_inboxes"),
    CopySender: "_outstanding _update",
    StateServer: "_serving",
}
"""By class: attributes that count or hold something, or have such attributes themselves."""


def left(thing: object, name: str = "") -> Iterator[str]:
    """Yields each counter of `thing` that isn't zero, and each container that isn't empty."""
    if (names := COUNTERS.get(type(thing))) is None:
        if +thing if isinstance(thing, Counter) else thing:
            yield f"{name} = {thing}"
        return
    for attribute in names.split():
        yield from left(getattr(thing, attribute), f"{type(thing).__name__}.{attribute}")


def check_at_rest(*things: object) -> None:
    """Raises AssertionError unless all counters are zero. Things without counters are at rest."""
    counting = [thing for thing in things if type(thing) in COUNTERS]
    assert [text for thing in counting for text in left(thing)] == []

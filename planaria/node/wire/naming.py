"""How seats are called.

For the step transaction each seat is a member of its own. `7f3a/2` is the seat of node 7f3a at
stage 2; `7f3a/2.17` is one that the node got in view 17. A seat that was given back and taken
again is another one, which has nothing of what the former had.
"""

from __future__ import annotations

import itertools
import re
import secrets

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.spelling import misspelt


def new_identity(name: str) -> str:
    """What a node is called in all that is said of it: by its owner's `name`, if it has one, and
    what tells it from others of that name, and from itself before it was started anew."""
    return f"{name}-{secrets.token_hex(3)}" if name else secrets.token_hex(6)


def name_of_host(host: str) -> str:
    """A name for a node there; empty: none can be made of it."""
    label = re.sub(r"[^A-Za-z0-9_-]+", "-", host.partition(".")[0]).strip("-_")[:40]
    return "" if misspelt("name", label) else label


def seat_name(seat: registry.Seat) -> str:
    """What tells it from the other seats of its node."""
    return f"{seat.stage}.{seat.since}" if seat.since else f"{seat.stage}"


def seat_id(node: str, name: str) -> str:
    return f"{node}/{name}"


def node_of(seat: str) -> str:
    """The node of a seat; of a node, itself."""
    return seat.partition("/")[0]


def was_added(seat: str) -> bool:
    """The node got it after it had joined."""
    return "." in seat.partition("/")[2]


def seated(view: registry.View) -> registry.View:
    """What the view says to the step transaction: each seat is a member, and one of them drives.
    Two nodes with a relay between them are as far apart in each of their seats."""
    ids = {m.node: [seat_id(m.node, seat_name(seat)) for seat in m.seats] for m in view.members}
    members = [
        registry.Member(
            node=seat,
            seats=[registry.Seat(stage=at.stage)],
            room=member.room,
            leaving=member.leaving,
            key=member.key,
        )
        for member in view.members
        for seat, at in zip(ids[member.node], member.seats, strict=True)
    ]
    standbys = (member for member in view.members if not member.seats)
    members += [registry.Member(node=m.node, leaving=m.leaving) for m in standbys]
    relays = [
        registry.Relay(a=a, b=b, via=relay.via)
        for relay in view.relays
        for a, b in itertools.product(ids[relay.a], ids[relay.b])
    ]
    return registry.View(
        run=view.run,
        number=view.number,
        members=members,
        driver=next(iter(ids.get(view.driver, [])), ""),  # stage 0 is the first
        reason=view.reason,
        committed=view.committed,
        lineage=view.lineage,
        relays=relays,
    )

"""Names of nodes and seats.

In the step transaction each seat is a member of its own. `7f3a/2` is the seat of node 7f3a at
stage 2; `7f3a/2.17` is one that the node got in view 17. A seat that was given back and taken
again is a new seat, without the state of the former one.
"""

from __future__ import annotations

import itertools
import re
import secrets

from planaria.bootstrap import registry_pb2 as registry
from planaria.bootstrap.escaping import LONGEST, misspelt


def new_identity(name: str) -> str:
    """A node's id: its owner's `name`, if given, and a random suffix. The suffix distinguishes it
    from other nodes of that name, and from itself before a restart. A long name is cut, so that the
    id is a valid name, too."""
    suffix = secrets.token_hex(3 if name else 6)
    return f"{name[: LONGEST - len(suffix) - 1]}-{suffix}" if name else suffix


def name_of_host(host: str) -> str:
    """A node name made of its host name; "": none can be made of it."""
    label = re.sub(r"[^A-Za-z0-9_-]+", "-", host.partition(".")[0]).strip("-_")[:40]
    return "" if misspelt("name", label) else label


def seat_name(seat: registry.Seat) -> str:
    """The seat's name among those of its node: the end of its id."""
    return f"{seat.stage}.{seat.since}" if seat.since else f"{seat.stage}"


def seat_id(node: str, name: str) -> str:
    return f"{node}/{name}"


def node_of(seat: str) -> str:
    """The node that a seat's id names; a node's id is returned as it is."""
    return seat.partition("/")[0]


def was_added(seat: str) -> bool:
    """Whether the node got this seat after it had joined."""
    return "." in seat.partition("/")[2]


def seated(view: registry.View) -> registry.View:
    """The view as the step transaction reads it: each seat is a member, and one of them drives.
    A relay between two nodes holds between each pair of their seats."""
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
        order=view.order,
        ordered=view.ordered,
        changes=view.changes,
        awaited=view.awaited,
    )

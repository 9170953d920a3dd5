"""Views that nobody but the registry makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap.registry_pb2 import (
    DIVERGENCE,
    Member,
    Quarantined,
    Relay,
    Seat,
    View,
)
from planaria.bootstrap.views import follows, is_genuine, sign
from tests.bootstrap.conftest import identity

KEY = identity("registry")


def issued(number: int, former: View | None = None, **fields: Any) -> View:
    view = View(run="r", number=number, **fields)
    sign(view, KEY, former or View())
    return view


def whole() -> View:
    """With something in each field."""
    names = ("node", "address", "host", "device", "data", "instance", "block")
    member = Member(joined=1, speed=2.5, room=2, leaving=True, key=b"k", standby=True)
    for name in names:
        setattr(member, name, name)
    member.seats.add(stage=1, since=2)
    banned = Quarantined(
        instance="i", node="n", cause=DIVERGENCE, why="w", times=1, divergences=1, seconds=3.5
    )
    return issued(
        7,
        issued(6),
        members=[member],
        driver="node",
        reason="why",
        committed=5,
        lineage=1,
        relays=[Relay(a="a", b="b", via="c")],
        quarantined=[banned],
        banned=["i"],
    )


def places(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Each field of it, and of what is in it."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for one in value if field.is_repeated else [value]:
                yield from places(one)
        yield message, field


def altered(message: Message, field: FieldDescriptor) -> None:
    """As little as can be."""
    value = getattr(message, field.name)
    if field.is_repeated:
        value.append(value[0])
    elif field.type == FieldDescriptor.TYPE_BYTES:
        setattr(message, field.name, bytes([value[0] ^ 1]) + value[1:])
    elif field.type == FieldDescriptor.TYPE_STRING:
        setattr(message, field.name, value + "x")
    elif field.type == FieldDescriptor.TYPE_BOOL:
        setattr(message, field.name, not value)
    else:
        setattr(message, field.name, value + 1)


def removed(message: Message, field: FieldDescriptor) -> None:
    message.ClearField(field.name)


def copy(view: View) -> View:
    return View.FromString(view.SerializeToString())


def test_who_gets_a_view_knows_that_it_is_the_registrys() -> None:
    assert is_genuine(copy(whole()), KEY.public, "r")
    assert not is_genuine(whole(), KEY.public, "s")
    assert not is_genuine(whole(), identity("somebody").public, "r")
    assert not is_genuine(View(run="r", number=1), KEY.public, "r")
    assert not is_genuine(whole(), b"", "r")


def test_no_field_of_a_view_is_altered_or_removed_without_notice() -> None:
    fields = [(message.DESCRIPTOR.name, field.name) for message, field in places(whole())]
    for kind in (View, Member, Seat, Relay, Quarantined):
        every = {(kind.DESCRIPTOR.name, field.name) for field in kind.DESCRIPTOR.fields}
        assert every <= {*fields}, "there is something in each"
    for at, name in enumerate(fields):
        for alter in (altered, removed):
            changed = whole()
            alter(*list(places(changed))[at])
            assert not is_genuine(changed, KEY.public, "r"), name


def test_nothing_is_added_to_a_view_without_notice() -> None:
    view = whole()
    for more in (b"\xfa\x01\x01x", view.SerializeToString()):  # an unknown field; all fields again
        assert not is_genuine(View.FromString(view.SerializeToString() + more), KEY.public, "r")


@given(st.integers(0), st.integers(0, 7))
def test_no_bit_of_a_view_is_flipped_without_notice(at: int, bit: int) -> None:
    content = bytearray(whole().SerializeToString())
    content[at % len(content)] ^= 1 << bit
    try:
        flipped = View.FromString(bytes(content))
    except (DecodeError, ValueError):
        return
    assert flipped == whole() or not is_genuine(flipped, KEY.public, "r")


def test_views_follow_each_other_by_number_and_by_hash() -> None:
    first = issued(1)
    second, other = issued(2, first), issued(2, first, reason="another history")
    assert follows(second, first)
    assert follows(first, first)
    assert not follows(first, second)
    assert not follows(other, second)
    assert follows(issued(3, second), second)
    assert not follows(issued(3, second), other)
    assert follows(issued(4, issued(3, second)), first)

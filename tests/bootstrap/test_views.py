"""Tests of views: nobody but the registry can make one, and differences between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from planaria.bootstrap import views as module
from planaria.bootstrap.registry_pb2 import (
    DIVERGENCE,
    PAUSE,
    AwaitedSave,
    Change,
    Difference,
    Member,
    NewView,
    Order,
    Quarantined,
    Relay,
    Seat,
    Splice,
    View,
)
from planaria.bootstrap.views import (
    apply,
    difference,
    follows,
    is_genuine,
    pack,
    packed,
    sign,
    unpack,
    unpacked,
    view_in,
)
from tests.bootstrap.conftest import identity

KEY = identity("registry")
FEW = st.sampled_from(["", "a", "b", "c", "d"])
NUMBER = st.integers(0, 2**64 - 1)
SPEED = st.floats()
SEAT = st.builds(Seat, stage=st.integers(0, 2), since=NUMBER, requested=st.booleans())
MEMBERS = st.builds(
    Member,
    node=FEW,
    address=FEW,
    joined=st.integers(0, 5),
    speed=SPEED,
    seats=st.lists(SEAT, max_size=2),
    leaving=st.booleans(),
    key=st.binary(max_size=2),
)
RELAYS = st.builds(Relay, a=FEW, b=FEW, via=FEW)
CHANGES = st.builds(Change, number=st.integers(0, 3), settings=st.lists(FEW, max_size=2))
QUARANTINED = st.builds(Quarantined, instance=FEW, why=FEW, seconds=SPEED)
VIEWS = st.builds(
    View,
    run=FEW,
    number=NUMBER,
    members=st.lists(MEMBERS, max_size=8),
    driver=FEW,
    reason=st.text(max_size=5),
    committed=NUMBER,
    lineage=NUMBER,
    relays=st.lists(RELAYS, max_size=4),
    quarantined=st.lists(QUARANTINED, max_size=4),
    before=st.binary(max_size=3),
    order=st.sampled_from(Order.values()),
    ordered=FEW,
    changes=st.lists(CHANGES, max_size=3),
    signature=st.binary(max_size=3),
    banned=st.lists(FEW, max_size=4),
    awaited=st.lists(st.builds(AwaitedSave, stage=st.integers(0, 3), seconds=SPEED), max_size=3),
)


def issued(number: int, former: View | None = None, **fields: Any) -> View:
    view = View(run="r", number=number, **fields)
    sign(view, KEY, former or View())
    return view


def whole() -> View:
    """Return a view with a value in each field."""
    names = ("node", "address", "host", "device", "data", "block")
    member = Member(joined=1, speed=2.5, room=2, leaving=True, key=b"k", standby=True, owner=True)
    for name in names:
        setattr(member, name, name)
    member.seats.add(stage=1, since=2, requested=True)
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
        order=PAUSE,
        ordered="why",
        changes=[Change(number=1, settings=["steps=9"], pending=True, step=5, undone=4)],
        banned=["i"],
        awaited=[AwaitedSave(stage=1, step=2, node="n", key=b"k", seconds=1.5)],
    )


def places(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Yield each field of the message and of all messages in it, with its owner."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for each in value if field.is_repeated else [value]:
                yield from places(each)
        yield message, field


def altered(message: Message, field: FieldDescriptor) -> None:
    """Change the field by as little as possible."""
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


def serialized(view: View) -> bytes:
    return view.SerializeToString(deterministic=True)


@st.composite
def changes(draw: st.DrawFn) -> tuple[View, View]:
    """Draw a view, and a later one in which few members have come, gone or changed."""
    former = draw(VIEWS)
    later = copy(former)
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(later.members)))
        match draw(st.integers(0, 2)):
            case 0:
                later.members.insert(place, draw(MEMBERS))
            case 1 if place < len(later.members):
                del later.members[place]
            case 2 if place < len(later.members):
                later.members[place].leaving ^= True
    later.number = draw(NUMBER)
    return former, later


def test_a_difference_has_splices_for_each_list_of_a_view() -> None:
    lists = {field.name for field in View.DESCRIPTOR.fields if field.is_repeated}
    assert {field.name for field in Difference.DESCRIPTOR.fields} == lists | {"former", "view"}


@given(st.tuples(VIEWS, VIEWS) | changes())
def test_a_view_and_what_the_next_one_differs_in_give_that_one_to_the_byte(
    views: tuple[View, View],
) -> None:
    former, later = views
    before = serialized(former), serialized(later)
    sent = Difference.FromString(difference(former, later).SerializeToString())
    assert serialized(apply(former, sent)) == serialized(later)
    assert (serialized(former), serialized(later)) == before
    assert serialized(view_in(NewView(difference=sent), former)) == serialized(later)
    assert view_in(NewView(whole=later), former).number == later.number


@given(VIEWS, VIEWS)
def test_what_is_told_comes_out_as_it_was_packed(former: View, later: View) -> None:
    for message in (NewView(whole=later), NewView(difference=difference(former, later))):
        sent = packed(message)
        assert serialized(unpacked(sent)) == serialized(message)
        assert sent.ByteSize() <= message.ByteSize() + 64
        assert unpack(pack(serialized(message))) == serialized(message)


@given(VIEWS, st.integers(0), st.integers(0, 7))
def test_no_bit_of_what_was_packed_is_flipped_without_notice(view: View, at: int, bit: int) -> None:
    damaged = bytearray(pack(serialized(view)))
    damaged[at % len(damaged)] ^= 1 << bit
    with suppress(ValueError):
        assert unpack(bytes(damaged)) == serialized(view)


def test_no_more_comes_of_what_was_packed_than_a_message_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_UNPACKED", 1000)
    assert unpack(pack(bytes(1000))) == bytes(1000)
    for wrong in (pack(bytes(1001)), pack(b"x")[:-1], pack(b"x") + b"x", b"", b"x"):
        with pytest.raises(ValueError, match="packed"):
            unpack(wrong)
    with pytest.raises(ValueError, match="the packed content is no view"):
        unpacked(NewView(packed=pack(b"\xff")))


@given(changes(), st.integers(0), st.integers(0, 7))
def test_no_bit_of_a_difference_is_flipped_without_notice(
    views: tuple[View, View], at: int, bit: int
) -> None:
    former, later = views
    later.run, later.number = "r", max(1, later.number)
    sign(later, KEY, former)
    content = bytearray(difference(former, later).SerializeToString())
    content[at % len(content)] ^= 1 << bit
    try:
        result = apply(former, Difference.FromString(bytes(content)))
    except (DecodeError, ValueError):
        return
    assert serialized(result) == serialized(later) or not is_genuine(result, KEY.public, "r")


@given(VIEWS, st.tuples(VIEWS, VIEWS))
def test_a_difference_from_another_view_gives_no_genuine_one(
    other: View, views: tuple[View, View]
) -> None:
    former, later = views
    later.run = "r"
    other.number = former.number
    sign(later, KEY, former)
    try:
        result = apply(other, difference(former, later))
    except ValueError:
        return
    assert serialized(result) == serialized(later) or not is_genuine(result, KEY.public, "r")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (Difference(former=6), "it is from view 6, not 7"),
        (Difference(former=7, members=[Splice(kept=2)]), "more items than its lists have"),
        (Difference(former=7, members=[Splice(gone=2)]), "more items than its lists have"),
        (Difference(former=7, members=[Splice(added=1)]), "more items than its lists have"),
        (Difference(former=7, view=View(banned=["x", "y"])), "leaves 2 of its new items unused"),
        (Difference(former=7, relays=[Splice(kept=1)] * 2), "more items than its lists have"),
    ],
)
def test_what_is_no_difference_from_a_view_is_refused(wrong: Difference, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        apply(whole(), wrong)


def test_one_join_among_thousands_is_told_in_few_bytes() -> None:
    members = [Member(node=f"node-{n}", joined=n + 1, key=bytes(32)) for n in range(5_000)]
    former = issued(1, members=members)
    later = issued(2, former, members=[*members, Member(node="new", joined=9_999)])
    sent = difference(former, later)
    assert [*sent.members] == [Splice(kept=5_000, added=1)]
    assert sent.ByteSize() < 200 < former.ByteSize() / 1000
    later = issued(2, former, members=[*members[:700], *members[701:]])
    sent = difference(former, later)
    assert [*sent.members] == [Splice(kept=700), Splice(gone=1, kept=4_299)]


def test_members_that_come_in_another_order_stay_in_it() -> None:
    members = [Member(node=name) for name in "abcde"]
    former = View(number=1, members=members)
    later = View(number=2, members=[members[n] for n in (3, 0, 4, 1, 2)])
    assert serialized(apply(former, difference(former, later))) == serialized(later)

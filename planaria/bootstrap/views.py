"""Views: signature by the run's key, hash chain, and encoding as differences.

The run's key is that of its certificate authority, which every registry has, whether it certifies
or not (admission.py). The signature covers the whole view, in field order; state that changes
without a new view, such as leases and reports, is not part of it.

A watcher gets a later view as a difference from the one that it has: a join takes a few hundred
bytes, however many members exist. The result is verified like a whole view, so a difference needs
no signature.

Since many watchers get the same message, whole views and long differences are compressed once for
all of them. Most of the remaining bytes are keys. Pure.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.message import DecodeError

from planaria.bootstrap.effects import Refused
from planaria.bootstrap.identity import Identity, is_message_signed
from planaria.bootstrap.registry_pb2 import Difference, NewView, Renewal, Splice, View

PACKED: Final = 1
"""zlib level: higher ones take a few times as long for a twentieth of the bytes."""
PACKED_FROM: Final = 512
"""Minimum size in bytes of a message that is compressed."""
MOST_UNPACKED: Final = 16 * 2**20
"""Maximum unpacked size in bytes, equal to the message limit."""


def sign(view: View, key: Identity, former: View) -> None:
    """Signs a view as the successor of `former`; it must not change afterwards."""
    view.before = hash_of(former)
    key.sign_message(view, view.run)


def hash_of(view: View) -> bytes:
    """The hash of a view with its signature; empty for a view without a number, never issued."""
    if not view.number:
        return b""
    return hashlib.sha256(view.SerializeToString(deterministic=True)).digest()


def is_genuine(view: View, key: bytes, run: str) -> bool:
    """Whether the run's key has signed the view for this run."""
    return is_message_signed(key, view, run)


def check_shown(renewal: Renewal, newest: int, is_member: bool, key: bytes, run: str) -> None:
    """Checks the view that a node shows to a registry whose newest view has the number `newest`.
    Raises Refused for a forged view, or if the registry lacks the run's key. The node stays a
    member and trains until its registry is back."""
    view = renewal.view
    if renewal.shown > max(view.number, newest):
        raise Refused(
            "OUT_OF_RANGE",
            f"{renewal.node} has view {renewal.shown}, and this registry none after view "
            f"{newest}: call again with the view",
        )
    if view.number <= (newest if is_member else 0) or is_genuine(view, key, run):
        return
    raise Refused(
        "FAILED_PRECONDITION",
        f"{renewal.node} shows view {view.number}, which this registry's key has not signed. "
        "If the registry lacks its former key, start it with the folder of that key "
        "(--authority DIR); if the key is lost, restart all nodes",
    )


def follows(view: View, former: View) -> bool:
    """Whether `view` may succeed `former`, or equals it. With views omitted in between, only the
    numbers are compared."""
    if view.number == former.number + 1:
        return view.before == hash_of(former)
    return view.number > former.number or view == former


# -- encoding ------------------------------------------------------------------------------------


def difference(former: View, view: View) -> Difference:
    """The difference between two views, which `apply` turns into the later one."""
    result = Difference(former=former.number)
    for field in View.DESCRIPTOR.fields:
        if field.is_repeated:
            splices, new = _splices(getattr(former, field.name), getattr(view, field.name))
            getattr(result, field.name).extend(splices)
            getattr(result.view, field.name).extend(new)
        else:
            setattr(result.view, field.name, getattr(view, field.name))
    return result


def apply(former: View, difference: Difference) -> View:
    """Makes the later view of a difference; it is still to be verified. Its lists are no longer
    than those of both inputs together. Raises ValueError if the difference does not fit
    `former`."""
    if difference.former != former.number:
        raise ValueError(f"it is from view {difference.former}, not {former.number}")
    view = View()
    view.CopyFrom(former)
    for field in View.DESCRIPTOR.fields:
        new = getattr(difference.view, field.name)
        if field.is_repeated:
            former_items, splices = getattr(former, field.name), getattr(difference, field.name)
            _splice(getattr(view, field.name), former_items, splices, new)
        else:
            setattr(view, field.name, new)
    return view


def view_in(message: NewView, former: View) -> View:
    """The view in a message to a watcher that has `former`. Raises ValueError as `apply` does."""
    return apply(former, message.difference) if message.HasField("difference") else message.whole


def pack(content: bytes) -> bytes:
    """Compresses with zlib (RFC 1950)."""
    return zlib.compress(content, PACKED)


def unpack(packed: bytes) -> bytes:
    """Decompresses. Raises ValueError for invalid data, or more than `MOST_UNPACKED` bytes."""
    reading = zlib.decompressobj()
    try:
        content = reading.decompress(packed, MOST_UNPACKED)
    except zlib.error as error:
        raise ValueError(f"it isn't valid zlib data: {error}") from error
    if not reading.eof or reading.unused_data:
        raise ValueError(
            f"its {len(packed)} packed bytes aren't a zlib stream of at most {MOST_UNPACKED}"
        )
    return content


def packed(message: NewView) -> NewView:
    """The message to a watcher, compressed if it is long."""
    content = message.SerializeToString()
    return NewView(packed=pack(content)) if len(content) >= PACKED_FROM else message


def unpacked(message: NewView) -> NewView:
    """Reverses `packed`. Raises ValueError for invalid data."""
    if not message.HasField("packed"):
        return message
    try:
        return NewView.FromString(unpack(message.packed))
    except DecodeError as error:
        raise ValueError("the packed content is no view") from error


def _splices(former: Sequence[Any], later: Sequence[Any]) -> tuple[list[Splice], list[Any]]:
    """The splices that turn one list of a view into a later one, and the new items. Fast for few
    changes; short if kept items keep their order, as in views."""
    before, after = _contents(former), _contents(later)
    ends = min(len(before), len(after))
    head = next((i for i in range(ends) if before[i] != after[i]), ends)
    tail = next((i for i in range(ends - head) if before[-1 - i] != after[-1 - i]), ends - head)
    places = {content: i for i, content in enumerate(before[: len(before) - tail])}
    splices, new = [Splice(kept=head)], list[Any]()
    at = head  # index in the former list
    for i in range(head, len(after) - tail):
        place, last = places.get(after[i], -1), splices[-1]
        if place < at:
            new.append(later[i])
            last.added += 1
            continue
        if place > at or last.added:
            splices.append(last := Splice(gone=place - at))
        last.kept += 1
        at = place + 1
    if tail:
        splices.append(Splice(gone=len(before) - tail - at, kept=tail))
    return [splice for splice in splices if splice.gone or splice.kept or splice.added], new


def _contents(listed: Sequence[Any]) -> list[Any]:
    """A list's messages as bytes: equal bytes mean equal content even if floats don't compare."""
    return [item if isinstance(item, str) else item.SerializeToString() for item in listed]


def _splice(
    items: Any, former: Sequence[Any], splices: Sequence[Splice], new: Sequence[Any]
) -> None:
    """Turns `items`, a copy of `former`, into the later list. Keeps its head in place, since
    copying items takes ten times as long. Raises ValueError if the splices exceed a list, or leave
    new items unused."""
    head = splices[0].kept if splices and not splices[0].gone else 0
    rest, at, used = list[Any](), 0, 0
    for splice in splices:
        at += splice.gone
        if at + splice.kept > len(former) or used + splice.added > len(new):
            raise ValueError("it names more items than its lists have")
        rest += former[max(at, head) : at + splice.kept]
        rest += new[used : used + splice.added]
        at, used = at + splice.kept, used + splice.added
    if used < len(new):
        raise ValueError(f"it leaves {len(new) - used} of its new items unused")
    del items[head:]
    items.extend(rest)

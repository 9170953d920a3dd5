"""Views that nobody but the run's registry makes: signed by its key, each with the hash of the one
before.

The run's key is that of its certificate authority, which every registry has, whether it certifies
or not (admission.py). The signature is over the whole view, in the order of its fields; what
changes without a new view, such as leases and reports, isn't in there.

Who has a view is told a later one as what differs between the two: of a join that is a few hundred
bytes, however many members there are. What comes of it is checked as if it had come whole, so a
difference needs no signature of its own.

Many are told the same, and a registry of thousands sends little else: whole views and long
differences are compressed once for all of them. Most of what is left are keys. Pure.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.message import DecodeError

from planaria.bootstrap.identity import Identity, is_message_signed
from planaria.bootstrap.registry_pb2 import Difference, NewView, Splice, View

PACKED: Final = 1
"""Level of compression: higher ones take a few times as long for a twentieth of the bytes."""
PACKED_FROM: Final = 512
"""Bytes of what was told from which it is."""
MOST_UNPACKED: Final = 16 * 2**20
"""Bytes: as many as a message may have."""


def sign(view: View, key: Identity, former: View) -> None:
    """As the one that follows `former`. Nothing may change it afterwards."""
    view.before = hash_of(former)
    key.sign_message(view, view.run)


def hash_of(view: View) -> bytes:
    """Of all of it, the signature too; empty: it has no number, so nobody has issued it."""
    if not view.number:
        return b""
    return hashlib.sha256(view.SerializeToString(deterministic=True)).digest()


def is_genuine(view: View, key: bytes, run: str) -> bool:
    """Whether the holder of this key, and nobody else, has made the view, for this run."""
    return is_message_signed(key, view, run)


def follows(view: View, former: View) -> bool:
    """Whether a view may come after `former`, as far as one can tell who has no other ones: views
    may be left out in between. `former` itself does."""
    if view.number == former.number + 1:
        return view.before == hash_of(former)
    return view.number > former.number or view == former


# -- on their way --------------------------------------------------------------------------------


def difference(former: View, view: View) -> Difference:
    """From which, and `former`, `apply` makes `view`."""
    found = Difference(former=former.number)
    for field in View.DESCRIPTOR.fields:
        if field.is_repeated:
            splices, new = _splices(getattr(former, field.name), getattr(view, field.name))
            getattr(found, field.name).extend(splices)
            getattr(found.view, field.name).extend(new)
        else:
            setattr(found.view, field.name, getattr(view, field.name))
    return found


def apply(former: View, difference: Difference) -> View:
    """The later view, of which it is still to be seen whether it is genuine. Its lists are no
    longer than those of the two together. Raises ValueError for what is no difference from
    `former`."""
    if difference.former != former.number:
        raise ValueError(f"it is from view {difference.former}, not {former.number}")
    view = View()
    view.CopyFrom(former)
    for field in View.DESCRIPTOR.fields:
        new = getattr(difference.view, field.name)
        if field.is_repeated:
            kept, splices = getattr(former, field.name), getattr(difference, field.name)
            _splice(getattr(view, field.name), kept, splices, new)
        else:
            setattr(view, field.name, new)
    return view


def told_view(told: NewView, former: View) -> View:
    """What who was told `former` last is told now. Raises ValueError as `apply` does."""
    return apply(former, told.difference) if told.HasField("difference") else told.whole


def pack(content: bytes) -> bytes:
    """As zlib does (RFC 1950)."""
    return zlib.compress(content, PACKED)


def unpack(packed: bytes) -> bytes:
    """Raises ValueError for what isn't packed, or is more than `MOST_UNPACKED` bytes."""
    reading = zlib.decompressobj()
    try:
        content = reading.decompress(packed, MOST_UNPACKED)
    except zlib.error as error:
        raise ValueError(f"it isn't packed as views are: {error}") from error
    if not reading.eof or reading.unused_data:
        raise ValueError(f"of {len(packed)} packed bytes {len(content)} come, and it isn't the end")
    return content


def packed(told: NewView) -> NewView:
    """As it is sent."""
    content = told.SerializeToString()
    return NewView(packed=pack(content)) if len(content) >= PACKED_FROM else told


def unpacked(told: NewView) -> NewView:
    """As it was before `packed`. Raises ValueError for what can't be that."""
    if not told.HasField("packed"):
        return told
    try:
        return NewView.FromString(unpack(told.packed))
    except DecodeError as error:
        raise ValueError("what was packed is no view") from error


def _splices(former: Sequence[Any], later: Sequence[Any]) -> tuple[list[Splice], list[Any]]:
    """How `later` is made of `former`, and what is new in it. Quick where little has changed, and
    short where what stays has kept its order, as it does in a view's lists."""
    here, there = _contents(former), _contents(later)
    ends = min(len(here), len(there))
    head = next((i for i in range(ends) if here[i] != there[i]), ends)
    tail = next((i for i in range(ends - head) if here[-1 - i] != there[-1 - i]), ends - head)
    places = {content: i for i, content in enumerate(here[: len(here) - tail])}
    splices, new = [Splice(kept=head)], list[Any]()
    at = head  # in the former list
    for i in range(head, len(there) - tail):
        place, last = places.get(there[i], -1), splices[-1]
        if place < at:
            new.append(later[i])
            last.added += 1
            continue
        if place > at or last.added:
            splices.append(last := Splice(gone=place - at))
        last.kept += 1
        at = place + 1
    if tail:
        splices.append(Splice(gone=len(here) - tail - at, kept=tail))
    return [one for one in splices if one.gone or one.kept or one.added], new


def _contents(listed: Sequence[Any]) -> list[Any]:
    """Of messages their bytes: what is equal there is the same, also where numbers aren't."""
    return [one if isinstance(one, str) else one.SerializeToString() for one in listed]


def _splice(
    items: Any, former: Sequence[Any], splices: Sequence[Splice], new: Sequence[Any]
) -> None:
    """`items`: a copy of `former`, to be made the later list. Its first part stays in place, since
    copying it member by member would take ten times as long. Raises ValueError when the splices
    take more of a list than it has, or leave any new ones out."""
    head = splices[0].kept if splices and not splices[0].gone else 0
    rest, at, used = list[Any](), 0, 0
    for splice in splices:
        at += splice.gone
        if at + splice.kept > len(former) or used + splice.added > len(new):
            raise ValueError("it takes more of a list than there is")
        rest += former[max(at, head) : at + splice.kept]
        rest += new[used : used + splice.added]
        at, used = at + splice.kept, used + splice.added
    if used < len(new):
        raise ValueError(f"it leaves out {len(new) - used} of what it brings")
    del items[head:]
    items.extend(rest)

"""Views that nobody but the run's registry makes: signed by its key, each with the hash of the one
before.

The run's key is that of its certificate authority, which every registry has, whether it certifies
or not (admission.py). The signature is over the whole view, in the order of its fields; what
changes without a new view, such as leases and reports, isn't in there.
"""

from __future__ import annotations

import hashlib

from planaria.bootstrap.identity import Identity, is_message_signed
from planaria.bootstrap.registry_pb2 import View


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

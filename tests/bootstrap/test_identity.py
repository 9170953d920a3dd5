"""Keys, and what is signed with them."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from planaria.bootstrap.identity import Identity, instance_of, is_signed


def test_a_signature_is_of_one_purpose_and_of_its_parts_as_they_are() -> None:
    one, other = Identity.generate(), Identity.generate()
    signature = one.sign("leave", b"ab", b"c")
    assert is_signed(one.public, signature, "leave", b"ab", b"c")
    assert not is_signed(other.public, signature, "leave", b"ab", b"c")
    assert not is_signed(one.public, signature, "join", b"ab", b"c")
    assert not is_signed(one.public, signature, "leave", b"a", b"bc")
    assert not is_signed(one.public, signature, "leave", b"abc")
    assert not is_signed(one.public, signature[:-1], "leave", b"ab", b"c")
    assert not is_signed(b"no key", signature, "leave", b"ab", b"c")


def test_an_instance_is_its_keys_hash() -> None:
    one = Identity.generate()
    again = Identity.from_pem(one.to_pem())
    assert again.instance == instance_of(one.public) != Identity.generate().instance
    assert len(one.instance) == 32
    assert set(one.instance) <= set("0123456789abcdef")


def test_a_key_is_not_shown() -> None:
    one = Identity.generate()
    assert one.to_pem().split()[3].decode() not in repr(one)


def test_what_is_no_key_of_this_kind_is_refused() -> None:
    locked = BestAvailableEncryption(b"secret")
    other = ec.generate_private_key(ec.SECP256R1())
    for pem in (
        b"",
        b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        Identity.generate().key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked),
        other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            Identity.from_pem(pem)

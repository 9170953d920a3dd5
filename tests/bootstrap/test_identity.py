"""Tests of keys and signatures."""

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
    identity, other = Identity.generate(), Identity.generate()
    signature = identity.sign("leave", b"ab", b"c")
    assert is_signed(identity.public, signature, "leave", b"ab", b"c")
    assert not is_signed(other.public, signature, "leave", b"ab", b"c")
    assert not is_signed(identity.public, signature, "join", b"ab", b"c")
    assert not is_signed(identity.public, signature, "leave", b"a", b"bc")
    assert not is_signed(identity.public, signature, "leave", b"abc")
    assert not is_signed(identity.public, signature[:-1], "leave", b"ab", b"c")
    assert not is_signed(b"no key", signature, "leave", b"ab", b"c")


def test_an_instance_is_its_keys_hash() -> None:
    identity = Identity.generate()
    again = Identity.from_pem(identity.to_pem())
    assert again.instance == instance_of(identity.public) != Identity.generate().instance
    assert len(identity.instance) == 32
    assert set(identity.instance) <= set("0123456789abcdef")


def test_a_key_is_not_shown() -> None:
    identity = Identity.generate()
    assert identity.to_pem().split()[3].decode() not in repr(identity)


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

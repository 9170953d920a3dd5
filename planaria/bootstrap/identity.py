"""Node identities: Ed25519 keys (RFC 8032) and their signatures.

A signature covers a purpose and length-prefixed parts, so a signature for one purpose can't be
used for another.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InternalError, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from google.protobuf.message import Message

INSTANCE_LETTERS: Final = 32
"""Hex digits of an instance: 128 bits of a hash, which resist a second preimage."""


@dataclass(frozen=True)
class Identity:
    """A node's or registry's private key. Its `repr` hides it."""

    key: Ed25519PrivateKey

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_pem(cls, pem: bytes) -> Identity:
        """Reads an Ed25519 key from PEM without a password. Raises ValueError for any other."""
        try:
            key = load_pem_private_key(pem, password=None)
        except InternalError as error:
            raise ValueError("it is no key for OpenSSL") from error
        except (TypeError, UnsupportedAlgorithm) as error:
            raise ValueError(str(error)) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError(f"a {type(key).__name__}, not an Ed25519 key")
        return cls(key)

    def to_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def public(self) -> bytes:
        return self.key.public_key().public_bytes_raw()

    @property
    def instance(self) -> str:
        return instance_of(self.public)

    def sign(self, purpose: str, *parts: bytes) -> bytes:
        return self.key.sign(_signed(purpose, parts))

    def sign_message(self, message: Message, run: str) -> None:
        """Signs a message in its field `signature`; the message must not change afterwards."""
        message.ClearField("signature")
        purpose, content = message.DESCRIPTOR.full_name, _serialized(message)
        message.signature = self.sign(purpose, run.encode(), content)  # type: ignore[attr-defined]


def instance_of(public: bytes) -> str:
    """A node's permanent id: a hash of its public key."""
    return hashlib.sha256(public).hexdigest()[:INSTANCE_LETTERS]


def is_signed(public: bytes, signature: bytes, purpose: str, *parts: bytes) -> bool:
    """Whether a public key has made this signature of `parts`. False for an invalid key, too."""
    try:
        key = Ed25519PublicKey.from_public_bytes(public)
        key.verify(signature, _signed(purpose, parts))
    except (InvalidSignature, ValueError):
        return False
    return True


def is_message_signed(public: bytes, message: Message, run: str) -> bool:
    """Whether the key has signed this message, unchanged, for this run."""
    unsigned = type(message)()
    unsigned.CopyFrom(message)
    unsigned.ClearField("signature")
    signature: bytes = message.signature  # type: ignore[attr-defined]
    purpose = message.DESCRIPTOR.full_name
    return is_signed(public, signature, purpose, run.encode(), _serialized(unsigned))


def _serialized(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def _signed(purpose: str, parts: tuple[bytes, ...]) -> bytes:
    whole = [b"planaria", purpose.encode(), *parts]
    return b"".join(len(part).to_bytes(8, "little") + part for part in whole)

"""Keys that remember what they have signed. Ed25519 would be the slowest part of handling a message
here."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNED: Final[set[tuple[bytes, bytes, bytes]]] = set()
"""Public key, signature and signed data of each signature made here."""


class PrivateKey:
    """A private key with the methods that `Identity` uses. Its signatures are keyed hashes."""

    def __init__(self, private: bytes) -> None:
        self._private = private
        self._public = Ed25519PrivateKey.from_private_bytes(private).public_key()

    def public_key(self) -> Ed25519PublicKey:
        return self._public

    def sign(self, data: bytes) -> bytes:
        signature = blake2b(data, key=self._private).digest()
        SIGNED.add((self._public.public_bytes_raw(), signature, data))
        return signature


class PublicKey:
    """A public key that looks up signatures made here, and verifies only others."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    @classmethod
    def from_public_bytes(cls, public: bytes) -> PublicKey:
        return cls(public)

    def verify(self, signature: bytes, data: bytes) -> None:
        """Raises InvalidSignature; ValueError for an invalid key."""
        if (self._public, signature, data) not in SIGNED:
            Ed25519PublicKey.from_public_bytes(self._public).verify(signature, data)

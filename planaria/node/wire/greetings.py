"""Signed hellos: they prove that a link's two ends are the nodes that the view names.

The dialling node signs its hello (session.py) for the node that it dials; the answering node signs
both hellos. The signature also covers the run and both ids, so a hello can't be used with another
node. A replayed hello is older than one accepted before, unless the receiver has restarted.

A stream added to a connection (link.py) has its number signed, with both hellos of the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

from planaria.bootstrap.identity import Identity, is_signed
from planaria.node.wire.session import Refused

PROTOCOL: Final = 1
DIAL, ANSWER, ADD = "planaria link dial", "planaria link answer", "planaria link stream"
LONGEST: Final = 1200
"""Characters of a hello with its signature."""


def metadata(run: str, node: str, peer: str) -> tuple[tuple[str, str], ...]:
    """The first metadata of a stream from `node` to `peer`."""
    return (
        ("planaria-run", quote(run)),
        ("planaria-node", node),
        ("planaria-peer", peer),
        ("planaria-protocol", str(PROTOCOL)),
    )


def check_metadata(run: str, node: str, received: Mapping[str, str]) -> None:
    """Check that the dialler wants this node. Raises Refused."""
    protocol = received.get("planaria-protocol", "")
    if protocol != str(PROTOCOL):
        raise Refused(
            "FAILED_PRECONDITION",
            f"{node} speaks protocol {PROTOCOL}, the dialler {protocol or 'none'}; "
            "install the same version of planaria on both",
        )
    if (theirs := unquote(received.get("planaria-run", ""))) != run:
        raise Refused("PERMISSION_DENIED", f"{node} is in run {run}, not {theirs!r}")
    if (peer := received.get("planaria-peer", "")) != node:
        raise Refused("NOT_FOUND", f"this is node {node}, not {peer!r}")


@dataclass(frozen=True)
class Greetings:
    """Signs and verifies hellos of one node in one run; a peer's `key` is the view's for it."""

    run: str
    node: str
    identity: Identity

    def to_dial(self, peer: str, hello: str) -> str:
        return self._signed(DIAL, peer, hello)

    def dialled(self, peer: str, key: bytes, text: str) -> str:
        """The hello of the dialling node. Raises Refused."""
        return self._verified(DIAL, peer, key, text)

    def to_answer(self, peer: str, dialled: str, hello: str) -> str:
        """`dialled`: the peer's hello, with its signature."""
        return self._signed(ANSWER, peer, hello, dialled)

    def answered(self, peer: str, key: bytes, dialled: str, text: str) -> str:
        """The hello of the answering node. Raises Refused."""
        return self._verified(ANSWER, peer, key, text, dialled)

    def to_add(self, peer: str, number: int, dialled: str, answered: str) -> str:
        """`dialled`, `answered`: the connection's first hellos, with signatures."""
        return self._signed(ADD, peer, str(number), dialled, answered)

    def added(self, peer: str, key: bytes, text: str, dialled: str, answered: str) -> str:
        """The stream's number. Raises Refused."""
        return self._verified(ADD, peer, key, text, dialled, answered)

    def _signed(self, purpose: str, peer: str, hello: str, *more: str) -> str:
        signature = self.identity.sign(purpose, *_parts(self.run, self.node, peer, hello, *more))
        return f"{hello} {signature.hex()}"

    def _verified(self, purpose: str, peer: str, key: bytes, text: str, *more: str) -> str:
        hello, _, signature = text[:LONGEST].rpartition(" ")
        try:
            parts = _parts(self.run, peer, self.node, hello, *more)
            genuine = is_signed(key, bytes.fromhex(signature), purpose, *parts)
        except ValueError:
            genuine = False
        if not genuine:
            raise Refused(
                "UNAUTHENTICATED",
                f"a hello in the name of {peer} is not signed by the key that the view names for "
                f"{peer}: a node speaks for itself alone",
            )
        return hello


def _parts(*texts: str) -> tuple[bytes, ...]:
    return tuple(text.encode() for text in texts)

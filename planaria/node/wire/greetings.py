"""Signed hellos: they prove that a link's two ends are the nodes that the view names.

The dialling node signs its hello (session.py) for the node that it dials; the answering node signs
both hellos. The signature also covers the run and both ids, so a hello can't be used with another
node. A replayed hello is older than one accepted before, unless the receiver has restarted.

A stream added to a connection has its number signed, with both hellos of the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

from planaria.bootstrap.identity import Identity, is_signed
from planaria.node.wire.session import DialRefused

PROTOCOL: Final = 1
DIAL, ANSWER, ADD = "planaria link dial", "planaria link answer", "planaria link stream"
"""Purposes: a dial, the answer to it, and the number of a stream that the dialler adds."""
LONGEST: Final = 1200
"""Characters of a hello with its signature."""


def metadata(run: str, node: str, peer: str) -> dict[str, str]:
    """The first metadata of a stream from `node` to `peer`."""
    return {
        "planaria-run": quote(run),
        "planaria-node": node,
        "planaria-peer": peer,
        "planaria-protocol": str(PROTOCOL),
    }


def check_metadata(run: str, node: str, received: Mapping[str, str]) -> None:
    """Check that the dialler wants this node. Raises DialRefused."""
    protocol = received.get("planaria-protocol", "")
    if protocol != str(PROTOCOL):
        raise DialRefused(
            "FAILED_PRECONDITION",
            f"{node} speaks protocol {PROTOCOL}, the dialler {protocol or 'none'}; "
            "install the same version of planaria on both",
        )
    if (theirs := unquote(received.get("planaria-run", ""))) != run:
        raise DialRefused("PERMISSION_DENIED", f"{node} is in run {run}, not {theirs!r}")
    if (peer := received.get("planaria-peer", "")) != node:
        raise DialRefused("NOT_FOUND", f"this is node {node}, not {peer!r}")


@dataclass(frozen=True)
class Greetings:
    """Signs and verifies hellos of one node in one run; a peer's `key` is the view's for it."""

    run: str
    node: str
    identity: Identity

    def sign(self, purpose: str, peer: str, hello: str, *earlier: str) -> str:
        """The hello with its signature. `earlier`: the connection's hellos so far, signed."""
        parts = _parts(self.run, self.node, peer, hello, *earlier)
        return f"{hello} {self.identity.sign(purpose, *parts).hex()}"

    def verify(self, purpose: str, peer: str, key: bytes, text: str, *earlier: str) -> str:
        """The hello of a text that `peer` has signed. Raises DialRefused."""
        hello, _, signature = text[:LONGEST].rpartition(" ")
        try:
            parts = _parts(self.run, peer, self.node, hello, *earlier)
            genuine = is_signed(key, bytes.fromhex(signature), purpose, *parts)
        except ValueError:
            genuine = False
        if not genuine:
            raise DialRefused(
                "UNAUTHENTICATED",
                f"a hello in the name of {peer} is not signed by the key that the view names for "
                f"{peer}: a node speaks for itself alone",
            )
        return hello


def _parts(*texts: str) -> tuple[bytes, ...]:
    return tuple(text.encode() for text in texts)

"""What the membership machine asks its shell to do, and refusals."""

from __future__ import annotations

from dataclasses import dataclass

from planaria.bootstrap.escaping import readable
from planaria.bootstrap.registry_pb2 import View


class Refused(Exception):  # noqa: N818  an answer, not a fault
    """The registry refuses a request. `code`: a gRPC status; `reason`: problem, value, remedy."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True)
class Issue:
    """Write a view to the journal, then send it to all watchers."""

    view: View


@dataclass(frozen=True)
class Probe:
    """Ask a node on its KeepAlive stream for an immediate answer with `number`."""

    node: str
    number: int


@dataclass(frozen=True)
class Evict:
    """Notify a node of its eviction on its KeepAlive stream; close the stream."""

    node: str
    reason: str


@dataclass(frozen=True)
class Dial:
    """Check for `seconds` whether a node answers at HOST:PORT, and call `Membership.dialled`."""

    question: int
    node: str
    address: str
    seconds: float


Effect = Issue | Probe | Evict | Dial


def not_served(run: str, requested: str) -> Refused:
    """The answer to a request that names another run."""
    reason = f"this registry serves run {run}, not {requested}; check the address"
    return Refused("NOT_FOUND", readable(reason))

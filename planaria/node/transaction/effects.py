"""Effects: what the state machines of the step transaction ask the daemon to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from planaria.bootstrap.registry_pb2 import SILENT, Cause
from planaria.node.report.events import Event
from planaria.node.wire import stage_pb2 as pb


class Ballot(NamedTuple):
    """The number of one try of a driver, in one view. Ordered; older ones have no effect."""

    view: int
    attempt: int

    @staticmethod
    def of(message: pb.Ballot) -> Ballot:
        return Ballot(message.view, message.attempt)

    def message(self) -> pb.Ballot:
        return pb.Ballot(view=self.view, attempt=self.attempt)

    def next(self) -> Ballot:
        return Ballot(self.view, self.attempt + 1)

    def says(self, **body: Any) -> pb.Message:
        """A message under this ballot. `body`: one field of `Message`."""
        return pb.Message(ballot=self.message(), **body)

    def send(self, to: str, **body: Any) -> Send:
        return Send(to, self.says(**body))

    def send_all(self, to: Iterable[str], **body: Any) -> list[Send]:
        """Sends the same message to each of these nodes."""
        message = self.says(**body)
        return [Send.copy(node, message) for node in to]


NEVER = Ballot(0, 0)


@dataclass(frozen=True)
class Send:
    """Send a control message to a member, which may be this node itself."""

    to: str
    message: pb.Message

    @classmethod
    def copy(cls, to: str, original: pb.Message) -> Send:
        """Sends a copy of a message to several nodes: each copy will name its receiver."""
        message = pb.Message()
        message.CopyFrom(original)
        return cls(to, message)


@dataclass(frozen=True)
class StartAttempt:
    """Begin an attempt: zero the gradient, drop older work, inject the microbatches that start
    here. Once the gradient has all microbatches that come here, average it with the stage's other
    replicas. `MemberSide.reduced` gets the result."""

    ballot: Ballot
    begin: pb.Begin


@dataclass(frozen=True)
class GoOn:
    """Go on with the attempt by a new plan, without lost nodes; an averaged gradient is void."""

    ballot: Ballot
    begin: pb.Begin


@dataclass(frozen=True)
class DropAttempt:
    """End the attempt without trace: zero the gradient, drop the work."""

    ballot: Ballot


@dataclass(frozen=True)
class AllHome:
    """Limit waits for a gradient from now on: all microbatches of the attempt are home."""

    ballot: Ballot


@dataclass(frozen=True)
class Apply:
    """Apply the optimizer as the commit says; `MemberSide.applied` gets the digest."""

    commit: pb.Commit


@dataclass(frozen=True)
class AuditSum:
    """Collect and examine what replicas show of a sum; `Driver.audit_over` gets the result."""

    ballot: Ballot
    step: int
    numbers: Sequence[int]  # `Commit.audited`
    stages: Mapping[int, Mapping[str, int]]
    """By stage, its replicas, and the tokens that are scored in the microbatches of each."""


@dataclass(frozen=True)
class Note:
    """Store the records of a commit that is applied here."""

    commit: pb.Commit


@dataclass(frozen=True)
class Adopt:
    """Take the gradient that a replica has sent; `MemberSide.reduced` gets the norm."""

    ballot: Ballot


@dataclass(frozen=True)
class Fetch:
    """Get the state that a `Sync` names; then call `MemberSide.arrived` or `failed`."""

    ballot: Ballot
    sync: pb.Sync


@dataclass(frozen=True)
class Suspect:
    """Report a node to the registry: it didn't answer or, for any cause but SILENT, it is faulty
    and must be removed though it lives. `why` is the evidence."""

    node: str
    why: str
    cause: Cause = SILENT


@dataclass(frozen=True)
class Rejoin:
    """Drop everything and join again as a new node: this one is no longer a member."""

    reason: str


@dataclass(frozen=True)
class Halted:
    """Halt, and keep the weights: the run is over, or can't go on."""

    halt: pb.Halt


Effect = (
    Send
    | StartAttempt
    | GoOn
    | DropAttempt
    | AllHome
    | Apply
    | AuditSum
    | Note
    | Adopt
    | Fetch
    | Suspect
    | Rejoin
    | Halted
    | Event  # to be written to the event log
)
